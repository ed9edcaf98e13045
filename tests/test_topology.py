"""Where ranks compute and where they meet: devices, the variables of torchrun, srun and MPI, addresses and ports."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, Started, run_folders, summary_of
from sockets import free_port

from omagd.config.loading import resolve
from omagd.run.cli.main import main
from omagd.run.launch.launcher import _require_one_configuration
from omagd.run.launchers import (
    is_main,
    join_tasks,
    local_rank,
    make_plan,
    ranks_here,
    require_one_task,
    require_own_gpus,
    without_tasks,
)
from omagd.utils import dist_utils
from omagd.utils.dist_utils import cleanup_distributed, setup_distributed, unwrap_model, wrap_model_ddp
from omagd.utils.errors import UserError

NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES"}
PREFIXES = ("SLURM_", "OMPI_", "MV2_", "PMI_", "PMIX_", "PALS_", "MPI_")
GROUP = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def task(monkeypatch):
    """Return a function that sets a launcher's variables, and nothing else that describes a group."""

    def set_up(**values: object) -> None:
        for name in NAMES.union(GROUP, (each for each in os.environ if each.startswith(PREFIXES))):
            monkeypatch.setenv(name, "")  # whatever is set later is restored at the end
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_up


@pytest.fixture
def machine(monkeypatch, task):
    """Return a function that sets the number of visible GPUs and the launcher's variables."""

    def set_up(gpus: int, **values: object) -> None:
        task(**GROUP | values)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    return set_up


STEP = {"SLURM_PROCID": 5, "SLURM_STEP_NUM_TASKS": 8, "SLURM_JOB_ID": 77, "SLURM_STEP_ID": 0}
NODES = {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": 1, "SLURM_NODEID": 1}
ONE_HOST = {**STEP, "SLURM_LOCALID": 5, "SLURM_STEP_TASKS_PER_NODE": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": 1, "PMIX_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "PMIX_NAMESPACE": "prterun-host-11390@1",
}  # fmt: skip
MPICH = {"PMI_RANK": 1, "PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}
TASKS = {  # variables; rank, number of ranks, rank on this host, ranks there, address
    "srun, two hosts": ({**STEP, **NODES, "SLURM_STEP_NODELIST": "gpu[017-18,20],x"}, 5, 8, 1, 4, "gpu017"),
    "srun, a host without number": (
        {**STEP, **NODES, "SLURM_STEP_TASKS_PER_NODE": "4,3,1", "SLURM_STEP_NODELIST": "a1,b[2-3]"}, 5, 8, 1, 3, "a1"),
    "srun, two brackets": ({**STEP, **NODES, "SLURM_STEP_NODELIST": "r[1-2]n[07,09].x"}, 5, 8, 1, 4, "r1n07.x"),
    "srun, one host": (ONE_HOST, 5, 8, 5, 8, "127.0.0.1"),
    "srun, with PMI": ({**ONE_HOST, "PMI_RANK": 5, "PMI_SIZE": 8}, 5, 8, 5, 8, "127.0.0.1"),
    "Open MPI": (OPEN_MPI, 1, 2, 1, 2, "127.0.0.1"),
    "Open MPI whose helpers srun started": ({**ONE_HOST, **OPEN_MPI}, 1, 2, 1, 2, "127.0.0.1"),
    "MPICH with an address": ({**MPICH, "MASTER_ADDR": "h", "MASTER_PORT": 29500}, 1, 2, 1, 2, "h"),
    "the number of tasks by hand": ({**STEP, **NODES, "WORLD_SIZE": 8, "MASTER_ADDR": "h"}, 5, 8, 1, 4, "h"),
}  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_tasks_of_srun_and_mpi_become_ranks(name, task):
    values, rank, size, place, here, address = TASKS[name]
    task(**values)
    join_tasks()
    plan = make_plan(resolve("qmix", "skirmish", {"run": "ddp", "use_cuda": False}))
    assert (plan.joins, plan.world_size, local_rank(size), ranks_here(size)) == (True, size, place, here)
    assert (os.environ["RANK"], os.environ["MASTER_ADDR"]) == (str(rank), address)
    assert 1024 < int(os.environ["MASTER_PORT"]) < 32768
    with pytest.raises(UserError, match=f"omagd study: .*task {rank} of {size}"):
        require_one_task("study")
    for name in without_tasks(os.environ).keys() ^ os.environ.keys():
        os.environ.pop(name)
    require_one_task("study")


def test_two_steps_of_a_job_meet_on_different_ports_and_all_tasks_of_one_on_the_same(task):
    ports = []
    for rank, step in ((0, 0), (1, 0), (0, 1)):
        task(**STEP | {"SLURM_PROCID": rank, "SLURM_STEP_ID": step, "SLURM_STEP_TASKS_PER_NODE": "8"})
        join_tasks()
        ports.append(os.environ["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]


ALONE = {
    "sbatch --ntasks=4 without srun": {"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 77, "SLURM_LOCALID": 0},
    "a step of one task": {"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_NUM_TASKS": 1, "PMIX_RANK": 0},
    "mpirun -n 1": {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1, "PMIX_RANK": 0},
    "a task that says it is alone": {**STEP, "RANK": 0, "WORLD_SIZE": 1},
    "RANK alone, as some containers set it": {"RANK": 3},
}


@pytest.mark.parametrize("name", ALONE)
def test_a_single_task_runs_alone(name, task):
    task(**ALONE[name])
    before = dict(os.environ)
    join_tasks()
    require_one_task("study")
    assert os.environ == before and is_main()


HOMELESS = {
    "MASTER_ADDR: ": {**STEP},
    "MASTER_ADDR and MASTER_PORT: ": {"PMI_RANK": 1, "PMI_SIZE": 2},
    "MASTER_PORT: ": MPICH, "run=default: this is task 1 of 2 of MPI": MPICH, "PMIX_RANK=1: ": {"PMIX_RANK": 1},
    "SLURM_PROCID=8: ": {**STEP, "SLURM_PROCID": 8},
    "SLURM_STEP_NUM_TASKS=x: ": {**STEP, "SLURM_STEP_NUM_TASKS": "x"},
    "run=default: this is task 5 of 8 of srun": ONE_HOST,
}  # fmt: skip


@pytest.mark.parametrize("error", HOMELESS)
def test_tasks_that_cannot_train_together_end_with_one_line(error, task, capsys, tmp_path):
    task(**HOMELESS[error])
    run = "run=default" if "run=default" in error else "run=ddp"
    assert main(["--config=qmix", "with", run, f"local_results_path={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {error}") and err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.processes
def test_two_tasks_of_srun_are_one_run(tmp_path):
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }  # fmt: skip
    words = ("-u", "--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, "run=ddp", "t_max=20")
    command = [PYTHON, MAIN, *words, "use_cuda=False"]
    started = [Started(command, tmp_path, **step, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]
    ended = [one.wait() for one in started]
    assert [one.code for one in ended] == [0, 0], ended
    (folder,) = run_folders(tmp_path)
    assert summary_of(folder)["world_size"] == 2


def test_tasks_with_different_keys_are_rejected():
    one, other = (resolve("qmix", "skirmish", {"seed": seed}) for seed in (1, 2))
    _require_one_configuration(one, SimpleNamespace(gather=lambda text: [text, text]))
    with pytest.raises(UserError, match=r"seed=1, 2: .*SLURM_PROCID"):
        _require_one_configuration(other, SimpleNamespace(gather=lambda text: [one.model_dump_json(), text]))


def variables(rank: int, world_size: int, **more: object) -> dict[str, object]:
    return {"RANK": rank, "WORLD_SIZE": world_size, **more}


SRUN = {"SLURM_STEP_NUM_TASKS": 8, "SLURM_LOCALID": 2, "SLURM_NODEID": 1}
STARTS = {  # visible GPUs, variables, ranks on this host, rank on this host, GPU
    "torchrun": (4, variables(6, 8, LOCAL_RANK=2, LOCAL_WORLD_SIZE=4), 4, 2, 2),
    "srun, one GPU for each task": (1, variables(6, 8, **SRUN, SLURM_STEP_TASKS_PER_NODE="4(x2)"), 4, 2, 0),
    "by hand": (4, variables(6, 8), 4, 2, 2),
    "by hand in a task of srun": (2, variables(1, 2, SLURM_STEP_NUM_TASKS=1, SLURM_LOCALID=0), 2, 1, 1),
    "by hand with LOCAL_RANK": (4, variables(6, 8, LOCAL_RANK=3), 4, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_each_rank_knows_its_host_and_its_gpu(start, machine):
    gpus, values, here, place, index = STARTS[start]
    machine(gpus, **values)
    join_tasks()
    plan = make_plan(resolve("qmix", "skirmish", {"run": "ddp"}))
    assert (plan.world_size, plan.joins, plan.backend) == (values["WORLD_SIZE"], True, "nccl")
    assert (ranks_here(plan.world_size), local_rank(plan.world_size)) == (here, place)
    assert plan.device(place) == torch.device("cuda", index)


LOCAL, TASK = {"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, {"SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 1}
CONTRADICTIONS = {
    "more than the 1 visible GPUs": LOCAL,
    "more than the 1 visible": {**LOCAL, "TORCHELASTIC_RUN_ID": "x", "SLURM_STEP_NUM_TASKS": 2},
    "SLURM_LOCALID=x": {**TASK, "SLURM_LOCALID": "x"}, "SLURM_LOCALID=7": {**TASK, "SLURM_LOCALID": 7},
    "SLURM_STEP_TASKS_PER_NODE=2(y3)": {**TASK, "SLURM_STEP_TASKS_PER_NODE": "2(y3)"},
    "MPI_LOCALNRANKS=0": {"PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 0},
}  # fmt: skip


@pytest.mark.parametrize("named", CONTRADICTIONS)
def test_contradictions_are_rejected_by_name(named, machine):
    machine(1, **variables(1, 2, **CONTRADICTIONS[named]))
    with pytest.raises(UserError) as error:
        join_tasks()
        make_plan(resolve("qmix", "skirmish", {"run": "ddp"}))
    assert named in error.value.message


def test_ranks_spawned_within_a_task_of_slurm_are_all_on_this_host(machine):
    machine(0, SLURM_STEP_NUM_TASKS=1, SLURM_STEP_TASKS_PER_NODE=1, SLURM_LOCALID=0)
    plan = make_plan(resolve("qmix", "skirmish", {"run": "ddp", "world_size": 2}))
    assert plan.spawns and ranks_here(2) == 2


def test_ranks_that_share_a_gpu_are_named():
    require_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    with pytest.raises(UserError, match="ranks 0, 2 on host a have the same GPU: .*--gpus-per-task=1"):
        require_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1")])


def test_an_interface_set_by_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # restored at the end
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    dist_utils._stay_on_this_host()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")


class Branches(torch.nn.Module):
    """A module that does not use one of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).sum()


def test_the_documented_functions_work_without_a_gpu_by_their_defaults(machine, monkeypatch):
    machine(0)
    for name in GROUP:
        monkeypatch.delenv(name)
    setup_distributed(0, 1, port=str(free_port()))
    try:
        assert torch.distributed.get_backend() == "gloo"
        wrapped = wrap_model_ddp(Branches(), 0)
        for _ in range(2):  # without `find_unused_parameters` the second forward fails
            wrapped(torch.ones(3, 2)).backward()
        assert unwrap_model(wrapped).used.weight.grad.tolist() == [[6.0, 6.0]]
        assert wrapped.find_unused_parameters
    finally:
        cleanup_distributed()
