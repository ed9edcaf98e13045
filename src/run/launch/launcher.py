"""Starting a run: in this process, in one worker per device, or as a rank of a group that torchrun made."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from omagd.config.schema import Config
from omagd.run.checkpoint.resuming import RunLock, claimed_folder
from omagd.run.checkpoint.set_aside import SAVED
from omagd.run.launch.failures import (
    Verdict,
    hang_noted,
    naming_a_lost_rank,
    note,
    note_error,
    note_hung,
    notes_folder,
    notes_of,
    summary_in,
    verdict,
    without_result,
)
from omagd.run.launch.preload import end_with_launcher, end_with_parent
from omagd.run.launch.processes import Ranks
from omagd.run.launch.shared_folder import require_shared_folder
from omagd.run.launch.watchdog import Hung, beating, ended_if_hung, leave_hung, watching
from omagd.run.topology import Plan, is_main, local_rank, make_plan, require_own_gpus
from omagd.utils.dist_utils import (
    Dist,
    abort_distributed,
    cleanup_distributed,
    open_board,
    open_rendezvous,
    setup_distributed,
)
from omagd.utils.errors import USER_ERROR_EXIT_CODE, RankFailed, UserError, exit_line
from omagd.utils.logging import append_to_log, setup_logging
from omagd.utils.owned_folder import read_entry
from omagd.utils.run_folder import RunFolder, keep_json
from omagd.utils.signals import CLOSING_SECONDS, Stopped, stop_requested, stoppable, unhurried
from omagd.utils.writing import STORAGE, drop_lost_output


def launch(
    config: Config, token: str, channel: Any = None, begun: Callable[[str], None] = lambda folder: None
) -> dict[str, Any]:
    """Run an experiment to its end and return its summary.

    Args:
        config: resolved. token: name of the run's folder. channel: takes what Sacred records, or None.
        begun: called with the run's folder before it trains, except under torchrun.
    Errors: UserError; RankFailed with the failing rank's own traceback; Stopped by SIGINT, SIGTERM or SIGHUP.
    """
    plan = make_plan(config)
    with stoppable(), _no_silent_exit():
        if plan.joins:
            return _join_group(config, plan, token, channel)
        with claimed_folder(config, token) as claim, _saying_how_to_continue(config, claim.path):
            begun(claim.path)
            if plan.spawns:
                return _spawn(claim.config, plan, claim.path, channel)
            return _run_alone(claim.config, plan, claim.path, channel)


def _run_alone(config: Config, plan: Plan, path: str, channel: Any) -> dict[str, Any]:
    """Run in this process."""
    from omagd.run.training.experiment import run_experiment

    dist = Dist(device=plan.device(0))
    finish = partial(_close_books, config, plan, path, time.time(), "failed", 0)
    with ended_if_hung(dist, 60 * config.dist_timeout_minutes, finish):
        return run_experiment(config, dist, path, channel)


@contextmanager
def _saying_how_to_continue(config: Config, path: str) -> Iterator[None]:
    """Tell a stop which run it has interrupted, what of it is saved, and how to continue it; log that too.

    The terminal may be gone, as after SIGHUP.
    """
    try:
        yield
    except Stopped as stop:
        stop.where = f": {path}"
        if not config.evaluate:
            saved = read_entry(RunFolder(path).path / SAVED).get("iteration")
            if not config.enable_checkpointing:
                stop.where += "; it has no checkpoints (enable_checkpointing=False)"
            elif not isinstance(saved, int) or saved == 0:
                stop.where += "; no checkpoint yet, the same command starts from scratch"
            else:
                how = "" if config.auto_resume else " and auto_resume=True"
                stop.where += f"; the newest checkpoint is of iteration {saved}; continue with the same command{how}"
        if is_main():
            append_to_log(RunFolder(path).log(0), stop.render())
        raise


@contextmanager
def _no_silent_exit() -> Iterator[None]:
    """Turn a `sys.exit` of an environment, which could end the program with exit code 0, into an error."""
    try:
        yield
    except SystemExit as error:
        raise RankFailed(exit_line(error)) from error


def _join_group(config: Config, plan: Plan, token: str, channel: Any) -> dict[str, Any]:
    from omagd.run.training.experiment import run_experiment

    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    port = int(os.environ["MASTER_PORT"])
    if attempt > 0 and config.enable_checkpointing:  # the run that torchrun has started again is the one to continue
        config = config.model_copy(update={"auto_resume": True})
    end_with_launcher()
    with (
        naming_a_lost_rank(rank),
        _group(rank, plan, local_rank(plan.world_size), port, config, attempt, leave_hung) as dist,
        ExitStack() as held,
    ):
        claim = _claim_together(config, token, dist, held)
        held.enter_context(_saying_how_to_continue(config, claim.path))
        require_shared_folder(dist, claim.path)
        return run_experiment(claim.config, dist, claim.path, channel if rank == 0 else None, attempt=attempt)


def _claim_together(config: Config, token: str, dist: Dist, held: ExitStack) -> RunLock:
    """Return the folder that rank 0 has claimed, on every rank; while it waits for one, all do. Errors: UserError."""
    claim: RunLock | UserError | None
    if dist.is_main:
        try:
            claim = held.enter_context(claimed_folder(config, token, waits=lambda: dist.broadcast(None)))
        except UserError as error:
            claim = error
        dist.broadcast(claim)
    else:
        while (claim := dist.broadcast(None)) is None:
            pass
    if isinstance(claim, UserError):
        raise claim.on_all_ranks()
    return claim


@contextmanager
def _group(
    rank: int,
    plan: Plan,
    place: int,
    port: int,
    config: Config,
    attempt: int,
    hung: Hung,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> Iterator[Dist]:
    """Be one of the ranks.

    After an error the group is not left in an orderly way, which can wait for the other ranks for ever: a spawned rank
    keeps it until its process ends, which is next; under torchrun the exchanges are aborted first.

    Args:
        place: of the rank on this host.
        hung: called, in a thread, where this rank stands still, or another one does not come to an exchange in time.
        failed: called with the error that ends the run, before anything is closed.
    """
    device = plan.device(place)
    if plan.cuda:
        torch.cuda.set_device(device)
    hosted, minutes = not plan.joins, config.dist_timeout_minutes
    # The pulse says who is missing once the time is over; the backend, which cannot tell, comes a little later.
    later = minutes + min(1.0, minutes)
    setup_distributed(rank, plan.world_size, plan.backend, port, later, hosted=hosted, attempt=attempt)
    with _closing_in_time(failed) as on_error:
        try:
            dist = Dist(rank, plan.world_size, device)
            dist.waits.on_error = on_error
            board = open_board(rank, port, minutes, hosted=hosted, attempt=attempt)
            with beating(dist, board, 60 * minutes, hung), watching(dist, 60 * minutes, hung):
                if plan.joins and plan.backend == "nccl":
                    gpu = str(torch.cuda.get_device_properties(device).uuid)
                    require_own_gpus(dist.gather((socket.gethostname(), gpu)))
                yield dist
        except BaseException as error:
            on_error(error)
            if plan.joins:
                abort_distributed()
                cleanup_distributed()
            raise
        cleanup_distributed()


@contextmanager
def _closing_in_time(failed: Callable[[BaseException], None]) -> Iterator[Callable[[BaseException], None]]:
    """Give what to call with an error, before anything is closed: from then on the block has `CLOSING_SECONDS`.

    What is closed may wait for other ranks, a GPU or a disk that never answers; then the process ends without it.
    """
    timers: list[threading.Timer] = []

    def on_error(error: BaseException) -> None:
        if timers or isinstance(error, Stopped) or stop_requested():
            return
        failed(error)

        def end() -> None:
            sys.stderr.write(f"error: {error or type(error).__name__} (and closing the run did not come to an end)\n")
            sys.stderr.flush()
            os._exit(_exit_code(error))

        timers.append(threading.Timer(CLOSING_SECONDS, end))
        timers[0].daemon = True
        timers[0].start()

    try:
        yield on_error
    finally:
        for timer in timers:
            timer.cancel()


def worker(rank: int, config: Config, plan: Plan, path: str, port: int, channel: Any, attempt: int) -> None:
    """Be one spawned rank, then end the process: 0, 1, 2 for a user's mistake, 128 + the signal that asked for it."""
    end_with_parent()
    code = _work(rank, config, plan, path, port, channel, attempt)
    STORAGE.close()
    drop_lost_output()
    # All that matters is written and closed. Threads of the collectives that outlived Python's finalization could
    # abort a rank that has done its work ("terminate called without an active exception"), so there is none.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(rank: int, config: Config, plan: Plan, path: str, port: int, channel: Any, attempt: int) -> int:
    """Run the experiment as `rank`; note the summary or the error for the parent."""
    from omagd.run.training.experiment import run_experiment

    notes = notes_folder(path, attempt)

    def hung(line: str, stack: str) -> None:
        note_hung(rank, notes, line, stack)
        os._exit(1)

    def failed(error: BaseException) -> None:
        note_error(rank, notes, error)

    try:
        with stoppable(), _stopped_together(), _group(rank, plan, rank, port, config, attempt, hung, failed) as dist:
            summary = run_experiment(config, dist, path, channel if rank == 0 else None, attempt=attempt)
        note(notes, f"done_{rank}", True)
        if rank == 0:
            note(notes, "summary", summary)
    except Stopped as stop:
        if rank == 0 and stop.cause:  # the launcher, which says so otherwise, is gone
            append_to_log(RunFolder(path).log(0), stop.render())
        return stop.exit_code
    except BaseException as error:  # noqa: BLE001 (whatever it is, the parent must be able to tell it)
        note_error(rank, notes, error)
        return _exit_code(error)
    return 0


def _exit_code(error: BaseException) -> int:
    return USER_ERROR_EXIT_CODE if isinstance(error, UserError) else 1


@contextmanager
def _stopped_together() -> Iterator[None]:
    """Take an error for the stop that was asked for: other ranks, which stopped a moment earlier, have caused it."""
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        if stop_requested():
            raise Stopped(signal.SIGTERM) from error
        raise


def _spawn(config: Config, plan: Plan, path: str, channel: Any) -> dict[str, Any]:
    """Run all ranks here, again after one was killed; return the summary."""
    started, exit_state, attempt = time.time(), "failed", 0
    allowed = config.max_restarts if config.enable_checkpointing else 0
    rendezvous = open_rendezvous(config.ddp_port)
    if rendezvous.port != config.ddp_port:
        setup_logging(None).info(f"ddp_port={config.ddp_port} is taken; using {rendezvous.port}")
    try:
        while True:
            ended = _attempt(config, plan, path, rendezvous.port, channel, attempt)
            if not isinstance(ended, Verdict):
                return ended
            if not ended.killed or attempt == allowed:
                raise ended.error
            attempt += 1
            again = f"restarting all ranks from the newest checkpoint ({attempt} of {allowed})"
            setup_logging(None).warning(f"{ended.killed}: {again}")
            RunFolder(path).summary_json.unlink(missing_ok=True)
    except Stopped:
        exit_state = "interrupted"
        raise
    finally:
        _close_books(config, plan, path, started, exit_state, attempt)


def _attempt(config: Config, plan: Plan, path: str, port: int, channel: Any, attempt: int) -> dict[str, Any] | Verdict:
    """Start all ranks and wait for their end; return the summary, or why there is none."""
    from omagd.run.run_ddp import ddp_worker

    ranks, hung = Ranks(saves=config.enable_checkpointing), False
    with notes_of(path, attempt) as notes:
        try:
            with unhurried():
                ranks.start(ddp_worker, (config, plan, path, port, channel, attempt), plan.world_size)
            failed = ranks.watch(hopeless=lambda: hang_noted(notes))
            hung = hang_noted(notes)
        except Stopped as stop:
            ranks.tell(stop.number)
            raise
        finally:
            ranks.end(at_once=hung)
        failed = {**without_result(ranks.exit_codes(), notes), **failed}
        return verdict(failed, notes, plan.world_size) if failed else summary_in(notes)


def _close_books(config: Config, plan: Plan, path: str, started: float, exit_state: str, restarts: int) -> None:
    """Write the summary where rank 0 was killed before it could."""
    from omagd.run.reporting.card import read_card
    from omagd.run.training.records import first_summary

    folder = RunFolder(path)
    if not folder.summary_json.exists():
        summary = first_summary(config, plan.world_size, folder, started, read_card(path))
        found = {"exit_state": exit_state, "restarts": restarts, "artifacts": folder.artifacts()}
        keep_json(folder.summary_json, {**summary, **found})
