"""Number of ranks, their devices and who starts them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omagd.config.schema import Config
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Launcher:
    """Environment variables by which a launcher describes its tasks.

    Attributes:
        size: number of tasks; the launcher is used only if this equals the number of ranks.
        local_rank: index of the task on this host. here: number of tasks on this host.
        each: numbers of tasks on all hosts, as SLURM writes them: "4(x2),3". node: index of this host.
    """

    size: str
    local_rank: str
    here: tuple[str, ...]
    each: tuple[str, ...] = ()
    node: str = ""


LAUNCHERS = (
    Launcher(
        "SLURM_NTASKS", "SLURM_LOCALID", ("SLURM_NTASKS_PER_NODE",),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "SLURM_NODEID",
    ),
    Launcher("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    Launcher("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", ("MV2_COMM_WORLD_LOCAL_SIZE",)),
    Launcher("PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
)  # fmt: skip
"""srun, Open MPI, MVAPICH, Intel MPI and MPICH."""


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
    """Derive the plan from the configuration, the devices and the variables that torchrun sets.

    Errors: UserError for more ranks than devices, and for keys that contradict torchrun's group.
    """
    _check_torchrun(config)
    joins = config.run == "ddp" and {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    if joins:
        _check_group()
    import torch

    cards = torch.cuda.device_count() if config.use_cuda and torch.cuda.is_available() else 0
    if config.use_cuda:
        _check_subset(cards)
    cuda = cards > 0
    if joins:
        world_size = int(os.environ["WORLD_SIZE"])
        local = ranks_here(world_size)
    else:
        world_size = local = (config.world_size or max(1, cards)) if config.run == "ddp" and config.use_ddp else 1
    backend = config.dist_backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        raise UserError("dist_backend=nccl needs a GPU and use_cuda=True; leave it out, or use dist_backend=gloo")
    # Tasks of srun and MPI may each see other GPUs; `require_own_gpus` checks that later.
    if cuda and local > cards and backend == "nccl" and not (joins and _launcher(world_size)):
        raise UserError(
            f"world_size={world_size} is more than the {cards} visible GPUs of this machine:"
            " give at most that many, or dist_backend=gloo to let ranks share GPUs"
        )
    return Plan(world_size, backend, cuda, joins)


def ranks_here(world_size: int) -> int:
    """Return how many of the ranks run on this host.

    Read from LOCAL_WORLD_SIZE, else from srun or MPI, else one rank per visible GPU; without a launcher all ranks.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return min(world_size, int(os.environ["LOCAL_WORLD_SIZE"]))
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return world_size
    launcher = _launcher(world_size)
    if count := _tasks_here(launcher) if launcher is not None else 0:
        return min(world_size, count)
    import torch

    return min(world_size, torch.cuda.device_count() or world_size)


def local_rank(world_size: int) -> int:
    """Return this rank's index on this host: from LOCAL_RANK, srun or MPI, else from its rank."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    launcher = _launcher(world_size)
    if launcher is not None and launcher.local_rank in os.environ:
        return _number(launcher.local_rank, 0, world_size - 1)
    return int(os.environ["RANK"]) % ranks_here(world_size)


def _launcher(world_size: int) -> Launcher | None:
    """Return the launcher that started this rank as one of `world_size` tasks; None for torchrun or if unknown."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    return next((known for known in LAUNCHERS if os.environ.get(known.size) == str(world_size)), None)


def _tasks_here(launcher: Launcher) -> int:
    """Return how many tasks a launcher has started on this host, 0 if unknown. Errors: UserError."""
    for name in launcher.each:
        counts: list[int] = []
        for part in filter(None, os.environ.get(name, "").split(",")):
            found = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
            if found is None:
                raise UserError(f"{name}={os.environ[name]}: must be as SLURM sets it, such as 4(x2),3. Unset it")
            counts += [int(found[1])] * int(found[2] or 1)
        node = int(os.environ.get(launcher.node, "0")) if os.environ.get(launcher.node, "0").isdigit() else 0
        if node < len(counts):
            return counts[node]
    return next((_number(name, 1, 10**6) for name in launcher.here if name in os.environ), 0)


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


def is_main() -> bool:
    """Return whether this process writes to the terminal: rank 0, or not part of a group."""
    return os.environ.get("RANK", "0") == "0"


def _check_torchrun(config: Config) -> None:
    """Reject keys that contradict torchrun's group. Errors: UserError."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if config.run == "default" and ranks != "1":
        raise UserError(f"run=default: this process is one of {ranks} (WORLD_SIZE={ranks}). Use run=ddp")
    if "RANK" in os.environ and config.world_size is not None and str(config.world_size) != ranks:
        fix = f"Start {config.world_size} (--nproc_per_node), or give world_size={ranks}"
        raise UserError(f"world_size={config.world_size}: torchrun started {ranks} processes. {fix}").on_all_ranks()
    if "RANK" in os.environ and len(config.seeds) > 1:
        seeds = ",".join(map(str, config.seeds))
        raise UserError(
            f"seeds={seeds}: torchrun's group runs one seed. Start torchrun once for each, with seed=…"
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


def _check_group() -> None:
    """Reject invalid or contradicting variables of torchrun. Errors: UserError."""
    world_size = _number("WORLD_SIZE", 1, 10**6)
    _number("RANK", 0, world_size - 1)
    here = _number("LOCAL_WORLD_SIZE", 1, world_size, str(world_size))
    _number("LOCAL_RANK", 0, here - 1, "0")
    local_rank(world_size)
    _number("MASTER_PORT", 1, 65535)
    if not os.environ.get("MASTER_ADDR"):
        raise UserError("MASTER_ADDR: is not set, though RANK and WORLD_SIZE are. Start with torchrun, or unset them")


def _number(name: str, least: int, most: int, default: str | None = None) -> int:
    """Return an environment variable as an integer. Errors: UserError."""
    text = os.environ.get(name, default)
    if text is None:
        raise UserError(f"{name}: is not set, though RANK and WORLD_SIZE are. Start with torchrun, or unset them")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        takes = f"a whole number from {least}" + (f" to {most}" if most < 10**6 else "")
        raise UserError(f"{name}={text}: must be {takes}, as torchrun sets it. Start with torchrun, or unset RANK")
    return int(text)
