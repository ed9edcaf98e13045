"""Starting a run: in this process, in one worker per device, or as a rank of a group that torchrun made."""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from omagd.config.schema import Config
from omagd.utils.dist_utils import Dist, choose_port, cleanup_distributed, setup_distributed
from omagd.utils.errors import USER_ERROR_EXIT_CODE, UserError
from omagd.utils.logging import setup_logging

GRACE_SECONDS = 5.0
"""How long other ranks may take to notice that one has failed before they are ended."""


@dataclass(frozen=True)
class Plan:
    """How many ranks, on what, speaking through what. `joins` means that torchrun has started the ranks."""

    world_size: int
    backend: str
    cuda: bool
    joins: bool

    def device(self, local_rank: int) -> torch.device:
        """Return where a rank of this host computes; gloo lets several ranks share a card."""
        if not self.cuda:
            return torch.device("cpu")
        return torch.device("cuda", local_rank % torch.cuda.device_count())


def make_plan(config: Config) -> Plan:
    """Decide from configuration, devices and torchrun's environment. Errors: UserError for too many ranks."""
    cuda = config.use_cuda and torch.cuda.is_available()
    joins = "RANK" in os.environ and "WORLD_SIZE" in os.environ and config.run == "ddp"
    cards = torch.cuda.device_count() if cuda else 0
    if joins:
        world_size = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    else:
        world_size = local = (config.world_size or max(1, cards)) if config.run == "ddp" and config.use_ddp else 1
    backend = config.dist_backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        raise UserError("dist_backend=nccl needs a GPU and use_cuda=True; leave it out, or use dist_backend=gloo")
    if cuda and local > cards and backend == "nccl":
        raise UserError(
            f"world_size={world_size} is more than the {cards} visible GPUs of this machine:"
            " give at most that many, or dist_backend=gloo to let ranks share cards"
        )
    return Plan(world_size, backend, cuda, joins)


def launch(config: Config, token: str, channel: Any = None) -> dict[str, Any]:
    """Run an experiment to its end and return its summary.

    Args:
        config: resolved. token: name of the run's folder. channel: queue for what Sacred records, or None.
    Errors: UserError; RuntimeError with the failing rank's own traceback.
    """
    from omagd.run.experiment import run_experiment

    plan = make_plan(config)
    if plan.joins:
        return _join_group(config, plan, token)
    if plan.world_size == 1:
        return run_experiment(config, Dist(device=plan.device(0)), token, channel)
    port = choose_port(config.ddp_port)
    if port != config.ddp_port:
        setup_logging(None).info(f"ddp_port={config.ddp_port} is taken; using {port}")
    return _spawn(config, plan, token, port, channel)


def _join_group(config: Config, plan: Plan, token: str) -> dict[str, Any]:
    from omagd.run.experiment import run_experiment

    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    with _group(rank, plan, local_rank, int(os.environ["MASTER_PORT"]), config) as dist:
        config, token = dist.broadcast((config, token))
        return run_experiment(config, dist, token, None)


@contextmanager
def _group(rank: int, plan: Plan, local_rank: int, port: int, config: Config) -> Iterator[Dist]:
    device = plan.device(local_rank)
    if plan.cuda:
        torch.cuda.set_device(device)
    setup_distributed(rank, plan.world_size, plan.backend, port, config.dist_timeout_minutes)
    try:
        yield Dist(rank, plan.world_size, device)
    finally:
        cleanup_distributed()


def worker(rank: int, config: Config, plan: Plan, token: str, port: int, channel: Any, notes: str) -> None:
    """Body of one spawned rank. What goes wrong is noted in the folder `notes` for the parent; exit code 1 or 2."""
    from omagd.run.experiment import run_experiment

    try:
        with _group(rank, plan, rank, port, config) as dist:
            summary = run_experiment(config, dist, token, channel if rank == 0 else None)
        if rank == 0:
            _note(notes, "summary", summary)
    except UserError as error:
        _note(notes, f"rank_{rank}", {"time": time.time(), "rank": rank, "user": [error.message, *error.help_lines]})
        raise SystemExit(USER_ERROR_EXIT_CODE) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except BaseException:
        _note(notes, f"rank_{rank}", {"time": time.time(), "rank": rank, "trace": traceback.format_exc()})
        raise SystemExit(1) from None


def _note(folder: str, name: str, content: Any) -> None:
    temporary = Path(folder) / f".{name}"
    temporary.write_text(json.dumps(content))
    temporary.rename(Path(folder) / f"{name}.json")


def _spawn(config: Config, plan: Plan, token: str, port: int, channel: Any) -> dict[str, Any]:
    from omagd.run.run_ddp import ddp_worker

    with tempfile.TemporaryDirectory(prefix="omagd_") as notes:
        arguments = (config, plan, token, port, channel, notes)
        context = mp.spawn(ddp_worker, args=arguments, nprocs=plan.world_size, join=False)
        try:
            failed = _watch(context.processes)
        finally:
            _end(context.processes)
        if failed:
            raise _explain(context.processes, Path(notes))
        return dict(json.loads((Path(notes) / "summary.json").read_text()))


def _watch(processes: list[Any]) -> bool:
    """Wait for all ranks; return True as soon as one has failed and the others had time to notice."""
    running = {process.sentinel: process for process in processes}
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for sentinel in multiprocessing.connection.wait(list(running), timeout):
            process = running.pop(sentinel)  # type: ignore[index]
            process.join()
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return deadline != float("inf")


def _end(processes: list[Any]) -> None:
    for stop in ("terminate", "kill"):
        for process in processes:
            if process.is_alive():
                getattr(process, stop)()
        until = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))


def _explain(processes: list[Any], notes: Path) -> Exception:
    """Return the error that came first: a rank killed by a signal, else the earliest note of a rank."""
    for rank, process in enumerate(processes):
        if process.exitcode is not None and process.exitcode < 0 and -process.exitcode != signal.SIGTERM:
            name = signal.Signals(-process.exitcode).name
            return RuntimeError(f"rank {rank} was killed by {name}; all ranks have been ended")
    found = sorted((json.loads(path.read_text()) for path in notes.glob("rank_*.json")), key=lambda note: note["time"])
    if not found:
        return KeyboardInterrupt() if any(p.exitcode == 130 for p in processes) else RuntimeError("a rank ended early")  # type: ignore[return-value]
    first = found[0]
    if "user" in first:
        return UserError(*first["user"])
    return RuntimeError(f"rank {first['rank']} failed; all ranks have been ended\n{first['trace']}")
