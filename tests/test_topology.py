"""Where each rank computes, by the variables of torchrun, srun and MPI, on made-up GPUs."""

from __future__ import annotations

import pytest
import torch

from omagd.config.loading import resolve
from omagd.run import topology as planning
from omagd.run.topology import local_rank, make_plan, ranks_here, require_own_gpus
from omagd.utils.errors import UserError

NAMES = {name for known in planning.LAUNCHERS for name in (known.size, known.local_rank, *known.here, *known.each)}
GROUP = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def machine(monkeypatch):
    """Return what sets the number of visible GPUs and the launcher's variables."""

    def set_up(gpus: int, **variables: str) -> None:
        for name in {*NAMES, "SLURM_NODEID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name, value in (GROUP | variables).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    return set_up


def group(rank: int, world_size: int, **more: object) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size), **{name: str(value) for name, value in more.items()}}


SRUN = {"SLURM_NTASKS": 8, "SLURM_LOCALID": 2, "SLURM_NODEID": 1}
STARTS = {
    "torchrun": (4, group(6, 8, LOCAL_RANK=2, LOCAL_WORLD_SIZE=4), 4, 2, 2),
    "srun, all GPUs visible": (4, group(6, 8, **SRUN, SLURM_STEP_TASKS_PER_NODE="4(x2)"), 4, 2, 2),
    "srun, one GPU for each task": (1, group(6, 8, **SRUN, SLURM_TASKS_PER_NODE="4(x2)"), 4, 2, 0),
    "srun, uneven hosts": (3, group(6, 8, **SRUN, SLURM_TASKS_PER_NODE="5,3"), 3, 2, 2),
    "srun, --ntasks-per-node": (4, group(6, 8, **SRUN, SLURM_NTASKS_PER_NODE=4), 4, 2, 2),
    "srun that says nothing of hosts": (4, group(6, 8, **SRUN), 4, 2, 2),
    "Open MPI": (
        1, group(5, 8, OMPI_COMM_WORLD_SIZE=8, OMPI_COMM_WORLD_LOCAL_RANK=1, OMPI_COMM_WORLD_LOCAL_SIZE=4), 4, 1, 0,
    ),
    "Intel MPI": (4, group(5, 8, PMI_SIZE=8, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=4), 4, 1, 1),
    "by hand": (4, group(6, 8), 4, 2, 2),
    "by hand in a task of srun": (2, group(1, 2, SLURM_NTASKS=1, SLURM_LOCALID=0), 2, 1, 1),
    "by hand with LOCAL_RANK": (4, group(6, 8, LOCAL_RANK=3), 4, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_each_rank_knows_its_host_and_its_gpu(start, machine):
    gpus, variables, here, place, index = STARTS[start]
    machine(gpus, **variables)
    plan = make_plan(resolve("qmix", "skirmish", {"run": "ddp"}))
    assert (plan.world_size, plan.joins, plan.backend) == (int(variables["WORLD_SIZE"]), True, "nccl")
    assert (ranks_here(plan.world_size), local_rank(plan.world_size)) == (here, place)
    assert plan.device(place) == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        (group(1, 2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2), "more than the 1 visible GPUs"),
        (group(1, 2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2, TORCHELASTIC_RUN_ID="x", SLURM_NTASKS=2), "more than the 1"),
        (group(1, 2, SLURM_NTASKS=2, SLURM_LOCALID="x"), "SLURM_LOCALID=x"),
        (group(1, 2, SLURM_NTASKS=2, SLURM_LOCALID=7), "SLURM_LOCALID=7"),
        (group(1, 2, SLURM_NTASKS=2, SLURM_LOCALID=1, SLURM_TASKS_PER_NODE="2(y3)"), "SLURM_TASKS_PER_NODE=2(y3)"),
        (group(1, 2, PMI_SIZE=2, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=0), "MPI_LOCALNRANKS=0"),
    ],
)
def test_contradictions_are_rejected_by_name(variables, word, machine):
    machine(1, **variables)
    with pytest.raises(UserError) as error:
        make_plan(resolve("qmix", "skirmish", {"run": "ddp"}))
    assert word in error.value.message


def test_a_spawned_run_in_a_job_of_slurm_is_not_taken_for_a_task(machine):
    machine(0, SLURM_NTASKS="1", SLURM_TASKS_PER_NODE="1", SLURM_LOCALID="0")
    plan = make_plan(resolve("qmix", "skirmish", {"run": "ddp", "world_size": 2}))
    assert plan.spawns and ranks_here(2) == 2


def test_ranks_that_share_a_gpu_are_named():
    require_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    with pytest.raises(UserError, match="ranks 0, 2 on host a have the same GPU: .*--gpus-per-task=1"):
        require_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1")])
