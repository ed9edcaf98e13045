"""Launch a run: in this process, in one spawned process per device, or as a rank of a group that torchrun started."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omagd.config.schema import Config
from omagd.run.checkpoint.resuming import RunLock, locked_folder
from omagd.run.checkpoint.store import SAVED
from omagd.run.launch.failures import Notes, Verdict, verdict
from omagd.run.launch.group import exit_code, joined_group, naming_a_lost_rank, require_shared_folder
from omagd.run.launch.processes import Ranks, end_with_launcher, end_with_parent
from omagd.run.launch.watchdog import ended_if_hung, leave_hung
from omagd.run.launchers import is_main, local_rank
from omagd.run.reporting.card import read_card
from omagd.run.topology import Plan, make_plan
from omagd.run.training.experiment import run_experiment
from omagd.run.training.records import first_summary
from omagd.utils.dist_utils import Dist, open_rendezvous
from omagd.utils.errors import USER_ERROR_EXIT_CODE, RankFailed, UserError, exit_line
from omagd.utils.logging import append_to_log, setup_logging
from omagd.utils.run_folder import RUN_FILE, RunFolder, keep_json
from omagd.utils.signals import Stopped, stop_requested, stoppable, uninterrupted
from omagd.utils.storage import FolderGone, hold, read_entry, require_held
from omagd.utils.writing import STORAGE, drop_lost_output


def launch(
    config: Config, token: str, channel: Any = None, started: Callable[[str], None] = lambda folder: None
) -> dict[str, Any]:
    """Run an experiment to its end and return its summary.

    Args:
        config: resolved. token: name of the run's folder. channel: receives Sacred's scalars, or None.
        started: called with the run's folder before training, except under torchrun.
    Errors: UserError; RankFailed with the traceback of the failed rank; Stopped by SIGINT, SIGTERM or SIGHUP.
    """
    plan = make_plan(config)
    with stoppable(), _no_silent_exit():
        if plan.joins:
            return _join_group(config, plan, token, channel)
        with locked_folder(config, token) as lock, _resume_hint(config, lock.path):
            started(lock.path)
            if plan.spawns:
                return _spawn(lock, plan, channel)
            return _run_alone(lock.config, plan, lock.path, channel)


def _run_alone(config: Config, plan: Plan, path: str, channel: Any) -> dict[str, Any]:
    """Run one rank in this process."""
    dist = Dist(device=plan.device(0))
    finish = partial(_ensure_summary, config, plan, path, time.time(), "failed", 0)
    with ended_if_hung(dist, 60 * config.dist_timeout_minutes, finish):
        return run_experiment(config, dist, path, channel)


@contextmanager
def _resume_hint(config: Config, path: str) -> Iterator[None]:
    """Add to a `Stopped` the run's folder, the newest checkpoint and how to resume; write that to the log as well.

    After SIGHUP there is no terminal to read it.
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
    """Turn `sys.exit` of an environment into an error: its exit code may be 0."""
    try:
        yield
    except SystemExit as error:
        raise RankFailed(exit_line(error)) from error


def _join_group(config: Config, plan: Plan, token: str, channel: Any) -> dict[str, Any]:
    """Run as one rank of a group that torchrun, srun or MPI has started."""
    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    port = int(os.environ["MASTER_PORT"])
    if attempt > 0 and config.enable_checkpointing:  # torchrun has restarted this run
        config = config.model_copy(update={"auto_resume": True})
    end_with_launcher()
    with (
        naming_a_lost_rank(rank),
        joined_group(rank, plan, local_rank(plan.world_size), port, config, attempt, leave_hung) as dist,
        ExitStack() as held,
    ):
        _require_one_configuration(config, dist)
        lock = _lock_together(config, token, dist, held)
        held.enter_context(_resume_hint(config, lock.path))
        require_shared_folder(dist, lock.path)
        return run_experiment(lock.config, dist, lock.path, channel if rank == 0 else None, attempt=attempt)


def _require_one_configuration(config: Config, dist: Dist) -> None:
    """Reject ranks with other keys than rank 0, as by `seed=$SLURM_PROCID`: they would have no effect."""
    given = [json.loads(text) for text in dist.gather(config.model_dump_json())]
    if differ := [key for key in given[0] if any(each[key] != given[0][key] for each in given)]:
        found = "; ".join(f"{key}={', '.join(str(each[key]) for each in given)}" for key in differ)
        raise UserError(
            f"{found}: the tasks of one group must have the same keys. For separate runs unset the variable of the"
            " launcher that numbers its tasks, such as SLURM_PROCID"
        ).on_all_ranks()


def _lock_together(config: Config, token: str, dist: Dist, held: ExitStack) -> RunLock:
    """Return rank 0's lock of the run's folder on every rank; all ranks wait with rank 0. Errors: UserError."""
    lock: RunLock | UserError | None
    if dist.is_main:
        try:
            lock = held.enter_context(locked_folder(config, token, waits=lambda: dist.broadcast(None)))
        except UserError as error:
            lock = error
        dist.broadcast(lock)
    else:
        while (lock := dist.broadcast(None)) is None:
            pass
    if isinstance(lock, UserError):
        raise lock.on_all_ranks()
    return lock


def worker(rank: int, lock: RunLock, plan: Plan, port: int, channel: Any, attempt: int) -> None:
    """Run one spawned rank and exit: 0, 1 for an error, 2 for a user error, 128 + n after signal n."""
    end_with_parent()
    try:
        hold(Path(lock.path), lock.identity, RUN_FILE)
        code = _work(rank, lock.config, plan, lock.path, port, channel, attempt)
    except (FolderGone, OSError):  # notes are in the folder, too; the launcher finds out itself
        code = USER_ERROR_EXIT_CODE
    STORAGE.close()
    drop_lost_output()
    # Skip Python's finalization: threads of collectives that outlive it can abort a rank that has finished its work
    # ("terminate called without an active exception"). Everything is written and closed by now.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(rank: int, config: Config, plan: Plan, path: str, port: int, channel: Any, attempt: int) -> int:
    """Run the experiment as `rank` and write its summary or its error for the parent; return the exit code."""
    notes = Notes(path, attempt)

    def hung(line: str, stack: str) -> None:
        notes.hung(rank, line, stack)
        os._exit(1)

    try:
        joined = joined_group(rank, plan, rank, port, config, attempt, hung, partial(notes.error, rank))
        with stoppable(), _stopped_together(), joined as dist:
            summary = run_experiment(config, dist, path, channel if rank == 0 else None, attempt=attempt)
        notes.write(f"done_{rank}", True)
        if rank == 0:
            notes.write("summary", summary)
    except Stopped as stop:
        if rank == 0 and stop.cause:  # the launcher is gone and cannot log it
            append_to_log(RunFolder(path).log(0), stop.render())
        return stop.exit_code
    except BaseException as error:  # noqa: BLE001 (the parent reports it)
        notes.error(rank, error)
        return exit_code(error)
    return 0


@contextmanager
def _stopped_together() -> Iterator[None]:
    """Turn an error after a stop request into `Stopped`: ranks that stop first break the exchanges of the others."""
    try:
        yield
    except Stopped:
        raise
    except BaseException as error:
        if stop_requested():
            raise Stopped(signal.SIGTERM) from error
        raise


def _spawn(lock: RunLock, plan: Plan, channel: Any) -> dict[str, Any]:
    """Run all ranks on this host, restart them after one was killed, and return the summary."""
    config, path = lock.config, lock.path
    started, exit_state, attempt = time.time(), "failed", 0
    allowed = config.max_restarts if config.enable_checkpointing else 0
    rendezvous = open_rendezvous(config.ddp_port)
    if rendezvous.port != config.ddp_port:
        setup_logging(None).info(f"ddp_port={config.ddp_port} is taken; using {rendezvous.port}")
    try:
        while True:
            ended = _attempt(lock, plan, rendezvous.port, channel, attempt)
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
        _ensure_summary(config, plan, path, started, exit_state, attempt)


def _attempt(lock: RunLock, plan: Plan, port: int, channel: Any, attempt: int) -> dict[str, Any] | Verdict:
    """Start all ranks and wait for them; return the summary, or the verdict on a failure."""
    ranks, notes, hung = Ranks(saves=lock.config.enable_checkpointing), Notes(lock.path, attempt), False
    with notes.opened():
        try:
            with uninterrupted():
                ranks.start(worker, (lock, plan, port, channel, attempt), plan.world_size)
            failed = ranks.watch(hopeless=notes.name_a_hang)
            require_held(Path(lock.path))
            hung = notes.name_a_hang()
        except Stopped as stop:
            ranks.forward(stop.number)
            raise
        finally:
            ranks.end(at_once=hung)
        failed = {**notes.without_result(ranks.exit_codes()), **failed}
        return verdict(failed, notes.errors(), plan.world_size) if failed else notes.summary()


def _ensure_summary(config: Config, plan: Plan, path: str, started: float, exit_state: str, restarts: int) -> None:
    """Write `summary.json` if rank 0 was killed before it could."""
    folder = RunFolder(path)
    if not folder.summary_json.exists():
        summary = first_summary(config, plan.world_size, folder, started, read_card(path))
        found = {"exit_state": exit_state, "restarts": restarts, "artifacts": folder.artifacts()}
        keep_json(folder.summary_json, {**summary, **found})
