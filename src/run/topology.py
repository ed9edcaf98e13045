"""Number of ranks, their devices and who starts them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omagd.config.schema import Config
from omagd.run.launchers import TORCHRUN, in_group, launcher_of, local_rank, number_of, ranks_here, require_place
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    import torch


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


def _check_group() -> None:
    """Reject invalid or contradicting variables of torchrun. Errors: UserError."""
    world_size = number_of("WORLD_SIZE", 1, 10**6)
    number_of("RANK", 0, world_size - 1)
    here = number_of("LOCAL_WORLD_SIZE", 1, world_size, str(world_size))
    number_of("LOCAL_RANK", 0, here - 1, "0")
    local_rank(world_size)
    require_place(world_size)
    number_of("MASTER_PORT", 1, 65535)
