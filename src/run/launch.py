"""Starting a run: in this process, in one worker per device, or as a rank of a group that torchrun made."""

from __future__ import annotations

import json
import logging
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from omagd.config.schema import Config
from omagd.run.plan import Plan, make_plan
from omagd.run.prestart import end_with_parent, start_method
from omagd.utils.dist_utils import Dist, cleanup_distributed, open_rendezvous, setup_distributed
from omagd.utils.errors import USER_ERROR_EXIT_CODE, RankFailed, UserError
from omagd.utils.logging import setup_logging
from omagd.utils.run_folder import RunFolder, write_json
from omagd.utils.signals import Stopped, stop_requested, stoppable, unhurried

GRACE_SECONDS = 5.0
"""How long ranks may take to notice that one has failed, or that all are to stop, before they are ended."""


def launch(config: Config, token: str, channel: Any = None) -> dict[str, Any]:
    """Run an experiment to its end and return its summary.

    Args:
        config: resolved. token: name of the run's folder. channel: takes what Sacred records, or None.
    Errors: UserError; RankFailed with the failing rank's own traceback; Stopped by SIGINT or SIGTERM.
    """
    from omagd.run.experiment import new_folder, run_experiment

    plan = make_plan(config)
    with stoppable():
        if plan.joins:
            return _join_group(config, plan, token, channel)
        path = new_folder(config, token)
        if plan.spawns:
            return _spawn(config, plan, path, channel)
        return run_experiment(config, Dist(device=plan.device(0)), path, channel)


def _join_group(config: Config, plan: Plan, token: str, channel: Any) -> dict[str, Any]:
    from omagd.run.experiment import new_folder, run_experiment

    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    with _group(rank, plan, local_rank, int(os.environ["MASTER_PORT"]), config) as dist:
        config, path = dist.broadcast((config, new_folder(config, token) if dist.is_main else ""))
        return run_experiment(config, dist, path, channel if rank == 0 else None)


@contextmanager
def _group(rank: int, plan: Plan, local_rank: int, port: int, config: Config) -> Iterator[Dist]:
    device = plan.device(local_rank)
    if plan.cuda:
        torch.cuda.set_device(device)
    hosted = not plan.joins
    setup_distributed(rank, plan.world_size, plan.backend, port, config.dist_timeout_minutes, hosted=hosted)
    try:
        yield Dist(rank, plan.world_size, device)
    finally:
        cleanup_distributed()


def worker(rank: int, config: Config, plan: Plan, path: str, port: int, channel: Any, notes: str) -> None:
    """Be one spawned rank, then end the process: 0, 1, 2 for a user's mistake, 128 + the signal that asked for it."""
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGINT))
    code = _work(rank, config, plan, path, port, channel, notes)
    # All that matters is written and closed. Threads of the collectives that outlived Python's finalization could
    # abort a rank that has done its work ("terminate called without an active exception"), so there is none.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(rank: int, config: Config, plan: Plan, path: str, port: int, channel: Any, notes: str) -> int:
    """Run the experiment as `rank`; note the summary or the error in the folder `notes`, for the parent."""
    from omagd.run.experiment import run_experiment

    try:
        with stoppable(), _group(rank, plan, rank, port, config) as dist, _noting(rank, notes):
            summary = run_experiment(config, dist, path, channel if rank == 0 else None)
        if rank == 0:
            _note(notes, "summary", summary)
    except Stopped as stop:
        return stop.exit_code
    except BaseException as error:  # noqa: BLE001 (whatever it is, the parent must be able to tell it)
        _note_error(rank, notes, error)
        return USER_ERROR_EXIT_CODE if isinstance(error, UserError) else 1
    return 0


@contextmanager
def _noting(rank: int, notes: str) -> Iterator[None]:
    """Note an error before the group is left: leaving it makes the other ranks fail too."""
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        if stop_requested():  # the connection broke because the other ranks were told to stop a moment earlier
            raise Stopped(signal.SIGTERM) from error
        _note_error(rank, notes, error)
        raise


def _note_error(rank: int, notes: str, error: BaseException) -> None:
    name = f"rank_{rank}"
    if (Path(notes) / f"{name}.json").exists():
        return
    note: dict[str, Any] = {"time": time.time(), "rank": rank}
    if isinstance(error, UserError):
        note["user"] = [error.message, *error.help_lines]
    else:
        note["trace"] = "".join(traceback.format_exception(error))
    _note(notes, name, note)


def _note(folder: str, name: str, content: Any) -> None:
    temporary = Path(folder) / f".{name}"
    temporary.write_text(json.dumps(content))
    temporary.rename(Path(folder) / f"{name}.json")


def _spawn(config: Config, plan: Plan, path: str, channel: Any) -> dict[str, Any]:
    from omagd.run.run_ddp import ddp_worker

    started, exit_state = time.time(), "failed"
    rendezvous = open_rendezvous(config.ddp_port)
    if rendezvous.port != config.ddp_port:
        setup_logging(None).info(f"ddp_port={config.ddp_port} is taken; using {rendezvous.port}")
    with tempfile.TemporaryDirectory(prefix="omagd_") as notes:
        arguments = (config, plan, path, rendezvous.port, channel, notes)
        processes: list[Any] = []
        try:
            with unhurried():
                how = start_method()
                context = mp.start_processes(
                    ddp_worker, args=arguments, nprocs=plan.world_size, join=False, start_method=how
                )
                processes += context.processes
            failed = _watch(processes)
        except Stopped as stop:
            exit_state = "interrupted"
            _tell(processes, stop.number)
            raise
        finally:
            _end(processes)
            _close_books(config, plan, path, started, exit_state)
        if failed:
            raise _explain(failed, Path(notes))
        return dict(json.loads((Path(notes) / "summary.json").read_text()))


def _close_books(config: Config, plan: Plan, path: str, started: float, exit_state: str) -> None:
    """Write the summary where rank 0 was killed before it could."""
    from omagd.run.card import read_card
    from omagd.run.experiment import first_summary

    folder = RunFolder(path)
    if not folder.summary_json.exists():
        summary = first_summary(config, plan.world_size, folder, started, read_card(path))
        write_json(folder.summary_json, {**summary, "exit_state": exit_state, "artifacts": folder.artifacts()})


def _watch(processes: list[Any]) -> dict[int, int]:
    """Wait for all ranks; once one has failed, only as long as the others may take to notice.

    Returns exit codes by rank of those that failed, the first first.
    """
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    failed: dict[int, int] = {}
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for sentinel in multiprocessing.connection.wait(list(running), timeout):
            rank = running.pop(sentinel)  # type: ignore[index]
            processes[rank].join()
            if processes[rank].exitcode != 0:
                failed[rank] = processes[rank].exitcode
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return failed


def _tell(processes: list[Any], number: int) -> None:
    """Hand a signal on to all ranks and let them end by themselves."""
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, number)
    _join(processes)


def _end(processes: list[Any]) -> None:
    for stop in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, stop)
        _join(processes)


def _join(processes: list[Any]) -> None:
    until = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))


def _explain(failed: Mapping[int, int], notes: Path) -> BaseException:
    """Return the error that came first: a rank killed from outside, one that ended without a word, the earliest note.

    Args:
        failed: exit code by rank. notes: what the ranks wrote down.
    """
    found = sorted((json.loads(path.read_text()) for path in notes.glob("rank_*.json")), key=lambda note: note["time"])
    # Without a note, a rank that another one's end has torn along is not the cause: it aborts, or is told to end.
    consequence = {-signal.SIGABRT, 128 + signal.SIGINT, 128 + signal.SIGTERM}
    silent = {rank: code for rank, code in failed.items() if rank not in {note["rank"] for note in found}}
    causes = {rank: code for rank, code in silent.items() if code not in consequence} or ({} if found else silent)
    for rank, code in causes.items():
        if code == 128 + signal.SIGINT:
            return Stopped(signal.SIGINT)
        return RankFailed(f"rank {rank} {_ending(code)}; all ranks have been ended")
    if "user" in found[0]:
        return UserError(*found[0]["user"])
    return RankFailed(f"rank {found[0]['rank']} failed; all ranks have been ended\n{found[0]['trace']}")


def _ending(code: int) -> str:
    """Say how a process ended that left no note."""
    number = -code if code < 0 else code - 128 if code == 128 + signal.SIGTERM else 0
    if not number:
        return f"ended with exit code {code} and said nothing"
    mend = "lower buffer_size, batch_size_run or world_size"
    why = f" (the system does that when memory runs out: {mend})" if number == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(number).name}{why}"
