"""Launch a run: in this process, in one spawned process per device, or as a rank of a group that torchrun started.

Also what spawned ranks tell their launcher, and the verdict on a failed attempt: which rank caused it, and why.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omagd.config.schema import Config
from omagd.run.checkpoint.resuming import RunLock, locked_folder
from omagd.run.checkpoint.store import SAVED
from omagd.run.launch import watchdog
from omagd.run.launch.processes import Ranks, end_with_launcher, end_with_parent
from omagd.run.launchers import Plan, is_main, local_rank, make_plan
from omagd.run.reporting.card import read_card
from omagd.run.run_folder import RUN_FILE, RunFolder, keep_json, read_entry
from omagd.run.signals import SIGNALS, Stopped, stop_requested, stoppable, uninterrupted
from omagd.run.training.experiment import first_summary, run_experiment
from omagd.utils.dist_utils import Dist, open_rendezvous
from omagd.utils.errors import USER_ERROR_EXIT_CODE, RankFailed, RunFailed, UserError, drop_lost_output, exit_line
from omagd.utils.logging import append_to_log, setup_logging
from omagd.utils.registry import explained
from omagd.utils.storage import STORAGE, FolderGone, hold, require_held
from omagd.utils.waits import broken_exchange

ENDED = "all ranks have been ended"
OUT_OF_MEMORY = " (the system does that when memory runs out: lower buffer_size, batch_size_run or world_size)"
CONSEQUENCES = frozenset({-signal.SIGABRT, 128 + signal.SIGINT})
"""Exit codes that the failure of another rank can cause."""


def launch(
    config: Config, token: str, sacred: Any = None, started: Callable[[str], None] = lambda folder: None
) -> dict[str, Any]:
    """Run an experiment to its end and return its summary.

    Args:
        config: resolved. token: name of the run's folder. sacred: the Sacred run, or None.
        started: called with the run's folder before training, except under torchrun.
    Errors: UserError; RankFailed with the traceback of the failed rank; Stopped by SIGINT, SIGTERM or SIGHUP.
    """
    plan = make_plan(config)
    try:
        with stoppable():
            if plan.joins:
                return _join_group(config, plan, token, sacred)
            with locked_folder(config, token) as lock, _resume_hint(config, lock.path):
                started(lock.path)
                if plan.spawns:
                    return _spawn(lock, plan, sacred)
                return _run_alone(lock.config, plan, lock.path, sacred)
    except SystemExit as error:  # of an environment: its exit code may be 0
        raise RankFailed(exit_line(error)) from error


def _run_alone(config: Config, plan: Plan, path: str, sacred: Any) -> dict[str, Any]:
    """Run one rank in this process."""
    dist = Dist(device=plan.device(0))
    finish = partial(_ensure_summary, config, plan, path, time.time(), "failed", 0)
    with watchdog.ended_if_hung(dist, 60 * config.dist_timeout_minutes, finish):
        return run_experiment(config, dist, path, sacred)


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
            again = f"the same command{'' if config.auto_resume else ' and auto_resume=True'}"
            saved = read_entry(RunFolder(path).path / SAVED).get("iteration")
            if not config.enable_checkpointing:
                stop.where += "; it has no checkpoints (enable_checkpointing=False)"
            elif not isinstance(saved, int) or saved == 0:
                stop.where += f"; no checkpoint yet, {again} starts from scratch"
            else:
                stop.where += f"; the newest checkpoint is of iteration {saved}; continue with {again}"
        if is_main():
            append_to_log(RunFolder(path).log(0), stop.render())
        raise


def _join_group(config: Config, plan: Plan, token: str, sacred: Any) -> dict[str, Any]:
    """Run as one rank of a group that torchrun, srun or MPI has started."""
    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    port = int(os.environ["MASTER_PORT"])
    if attempt > 0 and config.enable_checkpointing:  # torchrun has restarted this run
        config = config.model_copy(update={"auto_resume": True})
    end_with_launcher()
    group = watchdog.joined_group(rank, plan, local_rank(plan.world_size), port, config, attempt, watchdog.leave_hung)
    with watchdog.naming_a_lost_rank(rank), group as dist, ExitStack() as held:
        _require_one_configuration(config, dist)
        lock = _lock_together(config, token, dist, held)
        held.enter_context(_resume_hint(config, lock.path))
        watchdog.require_shared_folder(dist, lock.path)
        return run_experiment(lock.config, dist, lock.path, sacred if rank == 0 else None, attempt=attempt)


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


def worker(rank: int, lock: RunLock, plan: Plan, port: int, attempt: int, connection: Any) -> None:
    """Run one spawned rank and exit: 0, 1 for an error, 2 for a user error, 128 + n after signal n."""
    end_with_parent()
    try:
        hold(Path(lock.path), lock.identity, RUN_FILE)
        code = _work(Notes(rank, connection), lock.config, plan, lock.path, port, attempt)
    except (FolderGone, OSError):  # or the launcher is gone
        code = USER_ERROR_EXIT_CODE
    STORAGE.close()
    drop_lost_output()
    # Skip Python's finalization: threads of collectives that outlive it can abort a rank that has finished its work
    # ("terminate called without an active exception"). Everything is written and closed by now.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(notes: Notes, config: Config, plan: Plan, path: str, port: int, attempt: int) -> int:
    """Run the experiment as one rank and send its summary or its error to the launcher; return the exit code."""
    rank = notes.rank

    def hung(line: str, stack: str) -> None:
        notes.hung(line, stack)
        os._exit(1)

    try:
        joined = watchdog.joined_group(rank, plan, rank, port, config, attempt, hung, notes.error)
        with stoppable(), joined as dist:
            summary = run_experiment(config, dist, path, notes if rank == 0 else None, attempt=attempt)
        notes.done(summary)
    except Stopped as stop:
        if rank == 0 and stop.cause:  # the launcher is gone and cannot log it
            append_to_log(RunFolder(path).log(0), stop.render())
        return stop.exit_code
    except BaseException as error:  # noqa: BLE001 (the parent reports it)
        if stop_requested():  # ranks that stop first break the exchanges of the others
            return 128 + signal.SIGTERM
        notes.error(error)
        return watchdog.exit_code(error)
    return 0


def _spawn(lock: RunLock, plan: Plan, sacred: Any) -> dict[str, Any]:
    """Run all ranks on this host, restart them after one was killed, and return the summary."""
    config, path = lock.config, lock.path
    started, exit_state, attempt = time.time(), "failed", 0
    allowed = config.max_restarts if config.enable_checkpointing else 0
    rendezvous = open_rendezvous(config.ddp_port)
    if rendezvous.port != config.ddp_port:
        setup_logging(None).info(f"ddp_port={config.ddp_port} is taken; using {rendezvous.port}")
    try:
        while True:
            ended = _attempt(lock, plan, rendezvous.port, sacred, attempt)
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


def _attempt(lock: RunLock, plan: Plan, port: int, sacred: Any, attempt: int) -> dict[str, Any] | Verdict:
    """Start all ranks and wait for them; return the summary, or the verdict on a failure."""
    ranks = Ranks(lock.config.enable_checkpointing, sacred)
    try:
        with uninterrupted():
            ranks.start(worker, (lock, plan, port, attempt), plan.world_size)
        failed = ranks.watch()
        require_held(Path(lock.path))
    except Stopped as stop:
        ranks.forward(stop.number)
        raise
    finally:
        ranks.end()
    failed = {**ranks.without_result(), **failed}
    return verdict(failed, ranks.errors(), plan.world_size) if failed else ranks.summary()


def _ensure_summary(config: Config, plan: Plan, path: str, started: float, exit_state: str, restarts: int) -> None:
    """Write `summary.json` if rank 0 was killed before it could."""
    folder = RunFolder(path)
    if not folder.summary_json.exists():
        summary = first_summary(config, plan.world_size, folder, started, read_card(path))
        found = {"exit_state": exit_state, "restarts": restarts, "artifacts": folder.artifacts()}
        keep_json(folder.summary_json, {**summary, **found})


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended.

    Attributes:
        error: to be raised. killed: "rank 1 was killed by SIGKILL" if a signal was the cause, when a restart may help;
            else empty.
    """

    error: BaseException
    killed: str = ""


class Notes:
    """Sends what a rank has to tell to the launcher.

    Args:
        rank: this rank. connection: has `send`; the launcher receives at the other end.
    """

    def __init__(self, rank: int, connection: Any) -> None:
        self.rank, self._connection = rank, connection
        self._failed, self._lock = False, threading.Lock()

    def error(self, error: BaseException) -> None:
        """Send the error of this rank; only its first error counts."""
        error = explained(error) or error
        if isinstance(error, UserError):
            self._fail(UserError(*error.messages))
        elif isinstance(error, RunFailed):
            self._fail(RunFailed(str(error)))
        elif isinstance(error, SystemExit):
            self._fail(RankFailed(f"rank {self.rank}: {exit_line(error)}; {ENDED}"))
        else:
            trace = "".join(traceback.format_exception(error))
            failed = RankFailed(f"rank {self.rank} failed; {ENDED}\n{trace}")
            self._fail(failed, exchange=broken_exchange(error) is not None)

    def hung(self, line: str, stack: str) -> None:
        """Name a hanging rank. stack: of this rank, if it is the one that hangs."""
        self._fail(RankFailed(f"{line}; {ENDED}\n{stack}".rstrip()), hung=True)

    def done(self, summary: Mapping[str, Any]) -> None:
        """Tell that this rank has finished its work, with the summary of the run."""
        self._send(done=True, summary=dict(summary) if self.rank == 0 else {})

    def log_scalar(self, name: str, value: float, t: int) -> None:
        """Pass a value on to the Sacred run, which is in the launcher's process."""
        self._send(scalar=(name, value, t))

    def _fail(self, error: BaseException, exchange: bool = False, hung: bool = False) -> None:
        if not self._failed:
            self._failed = True
            self._send(error=error, exchange=exchange, hung=hung)

    def _send(self, **content: Any) -> None:
        # The watchdog is a thread. Where the launcher is gone, a signal stops its ranks: they need not fail here.
        with self._lock, suppress(OSError):
            self._connection.send({"time": time.time(), "rank": self.rank, **content})


def verdict(failed: Mapping[int, int], found: list[dict[str, Any]], world_size: int) -> Verdict:
    """Return the first cause: a rank killed from outside, a rank that ended without a note, or the earliest note.

    Args:
        failed: exit code by rank, in order of time. found: `Ranks.errors`. world_size: number of ranks.
    """
    codes = set(failed.values())
    if len(failed) == world_size > 1 and codes <= {128 + number for number in SIGNALS}:
        return Verdict(Stopped(min(codes) - 128))  # one received a signal and all stopped together
    if found and found[0]["hung"]:
        return Verdict(found[0]["error"])
    for rank, code in _silent_causes(failed, found).items():
        if code == 128 + signal.SIGINT:
            return Verdict(Stopped(signal.SIGINT))
        number = -code if code < 0 else code - 128 if code - 128 in SIGNALS else 0
        if not number:
            return Verdict(RankFailed(f"rank {rank} ended with exit code {code} without an error message; {ENDED}"))
        killed = f"rank {rank} was killed by {signal.Signals(number).name}"
        return Verdict(RankFailed(f"{killed}{OUT_OF_MEMORY * (number == signal.SIGKILL)}; {ENDED}"), killed)
    return Verdict(found[0]["error"])


def _silent_causes(failed: Mapping[int, int], found: list[dict[str, Any]]) -> dict[int, int]:
    """Return the exit codes by rank of ranks that left no note and are the cause; none if the first note is the cause.

    The end of one rank can abort another one. So SIGABRT is the cause only if the first note reports a broken exchange,
    which is what other ranks see when a rank is gone. SIGTERM always comes from outside: before the verdict the
    launcher sends none.
    """
    silent = {rank: code for rank, code in failed.items() if rank not in {note["rank"] for note in found}}
    causes = {rank: code for rank, code in silent.items() if code not in CONSEQUENCES}
    if causes or not found:
        return causes or silent
    aborted = {rank: code for rank, code in silent.items() if code == -signal.SIGABRT}
    return aborted if found[0]["exchange"] else {}
