"""Where ranks compute and where they meet: devices, the variables of torchrun, srun and MPI, addresses and ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
from sockets import free_port, listening

from omagd.config.loading import resolve
from omagd.run import topology
from omagd.run.topology import local_rank, make_plan, ranks_here, require_own_gpus
from omagd.utils import dist_utils
from omagd.utils.dist_utils import (
    cleanup_distributed,
    open_rendezvous,
    setup_distributed,
    unwrap_model,
    wrap_model_ddp,
)
from omagd.utils.errors import UserError

NAMES = {name for known in topology.LAUNCHERS for name in (known.size, known.local_rank, *known.here, *known.each)}
NAMES |= {"SLURM_NODEID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
GROUP = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the number of visible GPUs and the launcher's variables."""

    def set_up(gpus: int, **values: object) -> None:
        for name in {*NAMES, "CUDA_VISIBLE_DEVICES"}:
            monkeypatch.delenv(name, raising=False)
        for name, value in (GROUP | values).items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    return set_up


def variables(rank: int, world_size: int, **more: object) -> dict[str, object]:
    return {"RANK": rank, "WORLD_SIZE": world_size, **more}


SRUN = {"SLURM_NTASKS": 8, "SLURM_LOCALID": 2, "SLURM_NODEID": 1}
STARTS = {  # visible GPUs, variables, ranks on this host, rank on this host, GPU
    "torchrun": (4, variables(6, 8, LOCAL_RANK=2, LOCAL_WORLD_SIZE=4), 4, 2, 2),
    "srun, all GPUs visible": (4, variables(6, 8, **SRUN, SLURM_STEP_TASKS_PER_NODE="4(x2)"), 4, 2, 2),
    "srun, one GPU for each task": (1, variables(6, 8, **SRUN, SLURM_TASKS_PER_NODE="4(x2)"), 4, 2, 0),
    "srun, uneven hosts": (3, variables(6, 8, **SRUN, SLURM_TASKS_PER_NODE="5,3"), 3, 2, 2),
    "srun, --ntasks-per-node": (4, variables(6, 8, **SRUN, SLURM_NTASKS_PER_NODE=4), 4, 2, 2),
    "srun without the number of tasks on each host": (4, variables(6, 8, **SRUN), 4, 2, 2),
    "Open MPI": (
        1, variables(5, 8, OMPI_COMM_WORLD_SIZE=8, OMPI_COMM_WORLD_LOCAL_RANK=1, OMPI_COMM_WORLD_LOCAL_SIZE=4), 4, 1, 0,
    ),
    "Intel MPI": (4, variables(5, 8, PMI_SIZE=8, MPI_LOCALRANKID=1, MPI_LOCALNRANKS=4), 4, 1, 1),
    "by hand": (4, variables(6, 8), 4, 2, 2),
    "by hand in a task of srun": (2, variables(1, 2, SLURM_NTASKS=1, SLURM_LOCALID=0), 2, 1, 1),
    "by hand with LOCAL_RANK": (4, variables(6, 8, LOCAL_RANK=3), 4, 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("start", STARTS)
def test_each_rank_knows_its_host_and_its_gpu(start, machine):
    gpus, values, here, place, index = STARTS[start]
    machine(gpus, **values)
    plan = make_plan(resolve("qmix", "skirmish", {"run": "ddp"}))
    assert (plan.world_size, plan.joins, plan.backend) == (values["WORLD_SIZE"], True, "nccl")
    assert (ranks_here(plan.world_size), local_rank(plan.world_size)) == (here, place)
    assert plan.device(place) == torch.device("cuda", index)


LOCAL, TASK = {"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, {"SLURM_NTASKS": 2, "SLURM_LOCALID": 1}
CONTRADICTIONS = {
    "more than the 1 visible GPUs": LOCAL,
    "more than the 1 visible": {**LOCAL, "TORCHELASTIC_RUN_ID": "x", "SLURM_NTASKS": 2},
    "SLURM_LOCALID=x": {**TASK, "SLURM_LOCALID": "x"},
    "SLURM_LOCALID=7": {**TASK, "SLURM_LOCALID": 7},
    "SLURM_TASKS_PER_NODE=2(y3)": {**TASK, "SLURM_TASKS_PER_NODE": "2(y3)"},
    "MPI_LOCALNRANKS=0": {"PMI_SIZE": 2, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 0},
}


@pytest.mark.parametrize("named", CONTRADICTIONS)
def test_contradictions_are_rejected_by_name(named, machine):
    machine(1, **variables(1, 2, **CONTRADICTIONS[named]))
    with pytest.raises(UserError) as error:
        make_plan(resolve("qmix", "skirmish", {"run": "ddp"}))
    assert named in error.value.message


def test_ranks_spawned_within_a_task_of_slurm_are_all_on_this_host(machine):
    machine(0, SLURM_NTASKS=1, SLURM_TASKS_PER_NODE=1, SLURM_LOCALID=0)
    plan = make_plan(resolve("qmix", "skirmish", {"run": "ddp", "world_size": 2}))
    assert plan.spawns and ranks_here(2) == 2


def test_ranks_that_share_a_gpu_are_named():
    require_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    with pytest.raises(UserError, match="ranks 0, 2 on host a have the same GPU: .*--gpus-per-task=1"):
        require_own_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1")])


def test_the_store_listens_on_this_host_only_and_keeps_its_port():
    before = listening([os.getpid()])[os.getpid()]
    store = open_rendezvous(0)
    added = listening([os.getpid()])[os.getpid()] - before
    assert all(address.is_loopback for address in added)
    socket.create_connection(("127.0.0.1", store.port), timeout=5).close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=5):
        pass
    assert open_rendezvous(store.port).port != store.port
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        assert "0.0.0.0" in map(str, listening([os.getpid()])[os.getpid()]), "the check finds open sockets"


def test_an_interface_set_by_the_user_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # restored at the end
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    dist_utils._stay_on_this_host()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth7", "lo")


# A rank of a group that a batch system has started: only the environment variables, no store of an agent.
MEMBER = """
import os
import torch
from sockets import listening
from omagd.utils.dist_utils import Dist, cleanup_distributed, open_board, setup_distributed
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
setup_distributed(rank, 2, "gloo", port, 0.5, attempt=1)
dist, board = Dist(rank, 2), open_board(rank, port, 0.5, hosted=False, attempt=1)
board.set(str(rank), f"here {rank}")
assert board.get(str(1 - rank)) == f"here {1 - rank}".encode()
assert dist.sum(torch.ones(1)).item() == 2
print({str(address) for address in listening([os.getpid()])[os.getpid()]}, flush=True)
dist.sum(torch.ones(1))
cleanup_distributed()
"""


@pytest.mark.processes
def test_without_an_agent_rank_0_holds_the_store_at_the_given_address():
    path = os.pathsep.join(filter(None, (os.path.dirname(__file__), os.environ.get("PYTHONPATH"))))
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, **shared, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", MEMBER]
    for member in [subprocess.Popen(command, env={**env, "RANK": rank}, **pipes) for rank in "01"]:
        out, err = member.communicate(timeout=60)
        assert (member.returncode, out) == (0, "{'127.0.0.1'}\n"), err


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
