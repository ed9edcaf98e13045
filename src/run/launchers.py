"""Who started this process, the number of ranks and their devices.

torchrun sets variables of its own; srun and MPI get those that torchrun would set. Imports no package that may be
missing: the command line reads it first.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from omagd.utils.errors import UserError

if TYPE_CHECKING:
    import torch

    from omagd.config.schema import Config

TORCHRUN = "torchrun"
PLACE = {"MASTER_ADDR": "<host of task 0>", "MASTER_PORT": "<a free port on the host of task 0>"}
PORTS = range(10000, 30000)
"""Ports for ranks to meet on; below those that systems give to outgoing connections."""


class Launcher(NamedTuple):
    """Environment variables by which a launcher describes its tasks; of several names the first one that is set counts.

    Attributes:
        name: for messages. rank: index of the task. size: number of tasks; "" if the launcher does not tell.
        local_rank: index of the task on this host. here: number of tasks on this host.
        job: equal in all tasks of a group, and different in another group on the same host.
    """

    name: str
    rank: str
    size: str = ""
    local_rank: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    job: tuple[str, ...] = ()


LAUNCHERS = (
    Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE",),
    ),
    Launcher(
        "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        "MPI", "PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PALS_APID",),
    ),
    SRUN := Launcher(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",), (), ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    Launcher("PMIx", "PMIX_RANK"),
)  # fmt: skip
"""Inner ones first: MPI may start its helpers by srun, whose variables its tasks then have as well."""

WATCHED = frozenset({"TORCHELASTIC_RUN_ID", *(launcher.rank for launcher in LAUNCHERS)})
"""Variables that show that a launcher has started this process."""


def in_group() -> bool:
    """Return whether this process is one of several ranks; RANK alone, as some containers set it, is not enough."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def is_main() -> bool:
    """Return whether this process writes to the terminal: rank 0, or not part of a group."""
    return not in_group() or os.environ["RANK"] == "0"


def join_tasks() -> None:
    """Set the variables of torchrun that are missing, if a launcher has started this process as one of several tasks.

    Errors: UserError where the number of tasks is unknown, or a variable is not as the launcher sets it.
    """
    if (found := _group()) is None:
        return
    for name, number in zip(("RANK", "WORLD_SIZE"), found, strict=False):
        os.environ.setdefault(name, str(number))
    size = number_of("WORLD_SIZE", 1, 10**6)
    for name, value in _place(_of_size(size), size).items():
        os.environ.setdefault(name, value)


def require_place(size: int) -> None:
    """Check that the ranks of a group know where they meet. Errors: UserError."""
    lacking = [name for name in PLACE if not os.environ.get(name)]
    if lacking:
        fix = ", ".join(f"{name}={PLACE[name]}" for name in lacking)
        raise UserError(
            f"{' and '.join(lacking)}: not set, and this is task {os.environ['RANK']} of {size} of"
            f" {launcher_of(size)}, which must meet. For all tasks set {fix}"
        )


def require_one_task(command: str) -> None:
    """Reject a command that each of several tasks would repeat. Errors: UserError."""
    if (found := _group()) is not None and found[1] > 1:
        rank, size, name = found
        raise UserError(f"omagd {command}: this is task {rank} of {size} of {name}; start it as one task")


def without_tasks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that is no task of the launcher of this one."""
    own = WATCHED | {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in environment.items() if name not in own}


def launcher_of(world_size: int) -> str:
    """Return the name of the launcher of a group; `TORCHRUN` also where variables are set by hand."""
    return next((launcher.name for launcher in _of_size(world_size)), TORCHRUN)


def ranks_here(world_size: int) -> int:
    """Return how many of the ranks run on this host.

    Read from LOCAL_WORLD_SIZE, else one rank per visible GPU; without a launcher all ranks.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return min(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    if not in_group():
        return world_size
    import torch

    return min(world_size, torch.cuda.device_count() or world_size)


def local_rank(world_size: int) -> int:
    """Return this rank's index on this host: from LOCAL_RANK, else from its rank."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    return int(os.environ["RANK"]) % ranks_here(world_size)


def _several() -> Launcher | None:
    """Return the launcher that started this process as one of several tasks, or of an unknown number of tasks."""
    found = [launcher for launcher in LAUNCHERS if launcher.rank in os.environ]
    # A batch script that is no task has the rank of srun as well, but no size.
    told = [launcher for launcher in found if launcher.size in os.environ]
    several = [launcher for launcher in told if os.environ[launcher.size] != "1"]
    return next(iter(several or [launcher for launcher in found if not told and launcher is not SRUN]), None)


def _group() -> tuple[int, int, str] | None:
    """Return the index of this task, the number of tasks and their launcher's name; None for a single process.

    Errors: UserError.
    """
    if in_group():
        size = number_of("WORLD_SIZE", 1, 10**6)
        return number_of("RANK", 0, 10**6), size, launcher_of(size)
    if (launcher := _several()) is None:
        return None
    if launcher.size not in os.environ:
        raise UserError(
            f"{launcher.rank}={os.environ[launcher.rank]}: {launcher.name} does not tell how many tasks it has started."
            f" Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each, or unset {launcher.rank}"
        )
    size = number_of(launcher.size, 1, 10**6)
    return number_of(launcher.rank, 0, size - 1), size, launcher.name


def _of_size(world_size: int) -> list[Launcher]:
    """Return the launchers that started this rank as one of `world_size` tasks; none for torchrun."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return []
    return [known for known in LAUNCHERS if os.environ.get(known.size) == str(world_size)]


def _place(launchers: Sequence[Launcher], size: int) -> dict[str, str]:
    """Return the place on this host, and where tasks can meet, as far as their launchers tell. Errors: UserError."""
    found = {}
    if name := _first(launcher.local_rank for launcher in launchers):
        found["LOCAL_RANK"] = str(number_of(name, 0, size - 1))
    if name := _first(launcher.here for launcher in launchers):
        here = number_of(name, 1, 10**6)
    else:
        here = _tasks_of_srun() if SRUN in launchers else 0
    if here:
        found["LOCAL_WORLD_SIZE"] = str(min(size, here))
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", os.environ.get("SLURM_STEP_NODELIST", "") if SRUN in launchers else "")
    if here == size:
        found["MASTER_ADDR"] = "127.0.0.1"
    elif first:  # "gpu[17-18],login"
        found["MASTER_ADDR"] = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])
    jobs = [job for launcher in launchers if (job := [os.environ.get(name, "") for name in launcher.job]) and job[0]]
    if jobs:
        found["MASTER_PORT"] = str(PORTS[zlib.crc32(f"{os.getuid()} {jobs[0]}".encode()) % len(PORTS)])
    return found


def _first(names: Iterable[Iterable[str]]) -> str:
    """Return the first of the variables that is set, else an empty string."""
    return next((name for group in names for name in group if os.environ.get(name)), "")


def _tasks_of_srun() -> int:
    """Return how many tasks srun has started on this host, 0 if unknown. Errors: UserError."""
    text, node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("SLURM_NODEID", "0")
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if found is None:
            raise UserError(f"SLURM_STEP_TASKS_PER_NODE={text}: must be as SLURM sets it, such as 4(x2),3. Unset it")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 0


def number_of(name: str, least: int, most: int, default: str | None = None) -> int:
    """Return an environment variable as an integer. Errors: UserError."""
    text = os.environ[name] if default is None else os.environ.get(name, default)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        takes = f"a whole number from {least}" + (f" to {most}" if most < 10**6 else "")
        raise UserError(f"{name}={text}: must be {takes}, as its launcher sets it. Correct or unset it")
    return int(text)


@dataclass(frozen=True)
class Plan:
    """Number of ranks, backend and device type. joins: a launcher has started the ranks."""

    world_size: int
    backend: str
    cuda: bool
    joins: bool

    @property
    def spawns(self) -> bool:
        """Whether this process starts the ranks."""
        return self.world_size > 1 and not self.joins

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a rank on this host; with gloo several ranks may share a GPU."""
        import torch

        return torch.device("cuda", local_rank % torch.cuda.device_count()) if self.cuda else torch.device("cpu")


def make_plan(config: Config) -> Plan:
    """Derive the plan from the configuration, the devices and the variables of torchrun (those of `join_tasks`, too).

    Errors: UserError for more ranks than devices, and for keys that contradict torchrun's group.
    """
    _check_tasks(config)
    joins = config.run == "ddp" and in_group()
    if joins:
        world_size = number_of("WORLD_SIZE", 1, 10**6)
        number_of("RANK", 0, world_size - 1)
        here = number_of("LOCAL_WORLD_SIZE", 1, world_size, str(world_size))
        number_of("LOCAL_RANK", 0, here - 1, "0")
        require_place(world_size)
        number_of("MASTER_PORT", 1, 65535)
    import torch

    cards = torch.cuda.device_count() if config.use_cuda and torch.cuda.is_available() else 0
    if config.use_cuda:
        _check_subset(cards)
    cuda = cards > 0
    if joins:
        local = ranks_here(world_size)
    else:
        world_size = local = (config.world_size or max(1, cards)) if config.run == "ddp" and config.use_ddp else 1
    backend = config.dist_backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        raise UserError("dist_backend=nccl needs a GPU and use_cuda=True; leave it out, or use dist_backend=gloo")
    # Tasks of srun and MPI may each see other GPUs; `require_own_gpus` checks that later.
    if cuda and local > cards and backend == "nccl" and not (joins and launcher_of(world_size) != TORCHRUN):
        raise UserError(
            f"world_size={world_size} is more than the {cards} visible GPUs of this machine:"
            " give at most that many, or dist_backend=gloo to let ranks share GPUs"
        )
    return Plan(world_size, backend, cuda, joins)


def require_own_gpus(places: Sequence[tuple[str, str]]) -> None:
    """Reject ranks that share a GPU under NCCL, which would hang. Errors: UserError.

    places: host and GPU id of every rank.
    """
    for place in dict.fromkeys(places):
        ranks = [rank for rank, found in enumerate(places) if found == place]
        if len(ranks) > 1:
            raise UserError(
                f"ranks {', '.join(map(str, ranks))} on host {place[0]} have the same GPU: give each task one of its"
                " own (srun --gpus-per-task=1), set LOCAL_RANK, or use dist_backend=gloo to let ranks share GPUs"
            )


def _check_tasks(config: Config) -> None:
    """Reject keys that contradict the group of torchrun, srun or MPI. Errors: UserError."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    launcher = launcher_of(number_of("WORLD_SIZE", 1, 10**6, "1"))
    if config.run == "default" and ranks != "1":
        rank = os.environ.get("RANK", "0")
        raise UserError(f"run=default: this is task {rank} of {ranks} of {launcher}. Use run=ddp, or start one task")
    if in_group() and config.world_size is not None and str(config.world_size) != ranks:
        fix = f"Start {config.world_size}, or give world_size={ranks}"
        raise UserError(f"world_size={config.world_size}: {launcher} started {ranks} tasks. {fix}").on_all_ranks()
    if in_group() and len(config.seeds) > 1:
        seeds = ",".join(map(str, config.seeds))
        raise UserError(
            f"seeds={seeds}: the tasks of {launcher} train one seed together. Start them once for each, with seed=…"
        ).on_all_ranks()


def _check_subset(cards: int) -> None:
    """Reject missing GPUs in CUDA_VISIBLE_DEVICES: CUDA ignores them and all that follow. Errors: UserError.

    cards: number of GPUs that CUDA shows. On a machine without GPUs the variable is ignored.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    wanted = {name.strip() for name in named.split(",")} - {"", "-1", "NoDevFiles"}
    if cards < len(wanted) and has_gpus():
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={named}: only {cards} of these {len(wanted)} GPUs can be used on this machine."
            " Name others, or give use_cuda=False"
        )


def has_gpus(folder: str = "/dev") -> bool:
    """Return whether the system has NVIDIA GPUs."""
    return any(name.removeprefix("nvidia").isdigit() for name in os.listdir(folder) if name.startswith("nvidia"))
