"""One rank of a process group: join it, notice hanging ranks, check the shared folder, close within a time limit.

A watchdog looks at this rank's own progress; heartbeats name a rank that misses an exchange. Both are threads that
share no lock with the main thread, so they work wherever it blocks: in an environment, an all-reduce, a backward pass
or on a GPU stream.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import torch

from omagd.config.schema import Config
from omagd.run.launchers import Plan, require_own_gpus
from omagd.run.signals import CLOSING_SECONDS, Stopped, ending, raise_in_main_thread, stop_requested
from omagd.run.training.stages.base import BUILDING, CLOSING, COUNTING
from omagd.utils.compiling import under_way
from omagd.utils.dist_utils import Dist, Store, abort_distributed, cleanup_distributed, open_board, setup_distributed
from omagd.utils.errors import USER_ERROR_EXIT_CODE, RankFailed, UserError
from omagd.utils.waits import broken_exchange

LOG = logging.getLogger("omagd")
WATCHED = frozenset({BUILDING, CLOSING, COUNTING, "collect", "update", "sample", "replay", "test"})
"""Phases in which no progress means a hang. Reading and writing files may take as long as the disk needs."""

Hung = Callable[[str, str], None]
"""Called with one line that names the hanging rank, and the Python stack of its main thread (empty if unknown)."""


class Watch(threading.Thread):
    """A thread that checks every few seconds within a `with` block whether a rank hangs.

    Args:
        dist: this rank. timeout: seconds, without the time in which this process was stopped (as by Ctrl-Z).
        hung: called once, in this thread.
    """

    def __init__(self, dist: Dist, timeout: float, hung: Hung) -> None:
        super().__init__(name=type(self).__name__.lower(), daemon=True)
        self.dist, self.timeout, self.hung = dist, timeout, hung
        self.interval = min(5.0, max(0.05, timeout / 16))
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(max(1.0, 2 * self.interval))

    def run(self) -> None:
        """Check until the end of the block or the first hang."""
        at = time.perf_counter()
        while not self._ended.wait(self.interval):
            now = time.perf_counter()
            passed, at = min(now - at, 2 * self.interval), now
            if found := self.check(passed):
                self.hung(*found)
                return

    def check(self, passed: float) -> tuple[str, str] | None:
        """Return the line and the stack for `hung`, None if nothing hangs; `passed`: seconds since the last check."""
        raise NotImplementedError


class Heartbeat(Watch):
    """Writes this rank's heartbeat every few seconds, and reads those of the others when an exchange is late.

    Args:
        board: store of texts by key, shared by all ranks. Its calls may block, so only this thread uses it.
        timeout: seconds that an exchange may take; the thread waits a little longer, so that a hanging rank can report
            itself. hung: gets a line that names the ranks that the others wait for.
    """

    def __init__(self, dist: Dist, board: Store, timeout: float, hung: Hung) -> None:
        super().__init__(dist, timeout, hung)
        self.board = board
        self._beat = 0
        self._seen: dict[int, tuple[int, float]] = {}  # last heartbeat read from a rank, and when it was first seen
        self._entered, self._late = -1, 0.0

    def run(self) -> None:
        """Beat until the end of the block, or until the process that holds the store has ended."""
        try:
            self._write(left=False)
            super().run()
            self._write(left=True)
        except (RuntimeError, OSError):
            return  # the main thread's connections break as well and report the cause

    def check(self, passed: float) -> tuple[str, str] | None:
        """Beat, and look at the other ranks."""
        entered = self.dist.waits.entered
        self._late = self._late + passed if entered == self._entered else 0.0
        self._entered = entered
        self._write(left=False)
        if ending() or not (line := self._look()):
            return None
        self._write(left=True)  # this rank's end must not look like the cause
        return line, ""

    def _write(self, left: bool) -> None:
        if ending():  # the store may be gone; torch would print its C++ stack
            return
        self._beat += 1
        waits, now = self.dist.waits, time.perf_counter()
        stage, phase, since = waits.place()
        pulse = {
            "rank": self.dist.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "beat": self._beat,
            "entered": waits.entered,
            "place": _place(stage, phase),
            "seconds": now - since,
            "left": left,
        }
        self.board.set(str(self.dist.rank), json.dumps(pulse))

    def _look(self) -> str:
        """Return a line that names the ranks that this one waits for too long, else an empty one."""
        late = self._late
        if late < self.timeout / 2:
            self._seen.clear()
            return ""
        others = [str(rank) for rank in range(self.dist.world_size) if rank != self.dist.rank]
        present = [pulse for key in others if not (pulse := json.loads(self.board.get(key)))["left"]]
        silent = {pulse["rank"]: quiet for pulse in present if (quiet := self._quiet(pulse)) > self.timeout / 3}
        if late < self.timeout + min(15.0, self.timeout / 4):
            return ""
        behind = [pulse for pulse in present if pulse["entered"] < self.dist.waits.entered]
        return "; ".join(_describe(pulse, silent) for pulse in behind or present if behind or pulse["rank"] in silent)

    def _quiet(self, pulse: dict[str, Any]) -> float:
        """Return the seconds since a rank's last new heartbeat; does not use the clocks of other hosts."""
        now = time.perf_counter()
        beat, since = self._seen.get(pulse["rank"], (-1, now))
        if beat != pulse["beat"]:
            self._seen[pulse["rank"]] = pulse["beat"], now
            return 0.0
        return now - since


class Watchdog(Watch):
    """Detects that this rank makes no progress. The thread that calls the constructor is watched.

    Progress is a tick of the environments, another slot, a backward pass, an exchange or another phase. While a rank
    waits in an exchange, `Heartbeat` is responsible: it can name the rank that is missing. Kernels that are compiled,
    in one call of many seconds, are progress as well.
    """

    def __init__(self, dist: Dist, timeout: float, hung: Hung) -> None:
        super().__init__(dist, timeout, hung)
        self.watched = threading.get_ident()
        self._quiet = 0.0
        self._mark: object = None

    def check(self, passed: float) -> tuple[str, str] | None:
        """Compare the progress with that of the last check."""
        waits = self.dist.waits
        stage, phase, since = waits.place()
        mark = (waits.ticks, waits.entered, stage, phase, since, self._slots())
        busy = (waits.playing or phase in WATCHED) and not waits.inside and not under_way()
        self._quiet = self._quiet + passed if mark == self._mark and busy else 0.0
        self._mark = mark
        return (self._line(_place(stage, phase)), self._stack()) if self._quiet >= self.timeout else None

    def _slots(self) -> tuple[tuple[int, int], ...]:
        """Return busy slots with their seeds: those that the environment names, else all that were requested."""
        try:
            named, asked = self.dist.waits.slots(), self.dist.waits.asked
        except Exception:  # noqa: BLE001 (an environment that is being closed)
            return ()
        if named or asked is None:
            return tuple(named.items())
        return tuple((slot, int(asked[1][slot])) for slot in np.flatnonzero(asked[0]).tolist())

    def _line(self, place: str) -> str:
        slots = self._slots()
        where = ", ".join(f"slot {slot} from seed {seed}" for slot, seed in slots[:4]) + ", …" * (len(slots) > 4)
        who = f"rank {self.dist.rank} (host {socket.gethostname()}, process {os.getpid()})"
        return f"{who} hangs: in {place} for {self._quiet:.0f} s" + f", in {where}" * bool(where)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self.watched)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


def leave_hung(line: str, stack: str, code: int = 1) -> NoReturn:
    """End this process, whose main thread hangs or waits for a lost rank; torchrun ends the others."""
    sys.stderr.write(f"error: {line}\n{stack}")
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def ended_if_hung(dist: Dist, timeout: float, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within the block and `stoppable`, a hang raises RankFailed in the main thread.

    If the main thread does not end within `CLOSING_SECONDS`, `finish` is called and the process exits with code 1.
    timeout: as in `Watchdog`.
    """
    over = threading.Event()

    def hung(line: str, stack: str) -> None:
        LOG.error("%s\n%s", line, stack.rstrip())
        raise_in_main_thread(RankFailed(line))
        if not over.wait(CLOSING_SECONDS):
            finish()
            leave_hung(line, "")

    with Watchdog(dist, timeout, hung):
        try:
            yield
        finally:
            over.set()


def _place(stage: str, phase: str) -> str:
    return f"{stage} ({phase})" if stage else phase


def _describe(pulse: dict[str, Any], silent: dict[int, float]) -> str:
    who = f"rank {pulse['rank']} (host {pulse['host']}, process {pulse['pid']})"
    if pulse["rank"] in silent:
        return f"{who} hangs: no heartbeat for {silent[pulse['rank']]:.0f} s, last seen in {pulse['place']}"
    return f"{who} hangs: in {pulse['place']} for {pulse['seconds']:.0f} s, while the others wait for it"


LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "communicator was aborted",
)
"""Messages of gloo and NCCL after the other rank of an exchange has ended."""

WAITS = (0.2, 0.5, 1.0, 2.0, 0.0)
"""Seconds after each attempt to find a file: a network file system may show new files late."""


@contextmanager
def joined_group(
    rank: int,
    plan: Plan,
    place: int,
    port: int,
    config: Config,
    attempt: int,
    hung: Hung,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> Iterator[Dist]:
    """Join the process group for the duration of a block, with heartbeat and watchdog.

    After an error the group is not left in the normal way, which can wait for other ranks forever: a spawned rank keeps
    it until its process ends; under torchrun pending exchanges are aborted first.

    Args:
        place: rank on this host.
        hung: called in a thread if this rank hangs, or if another one misses an exchange.
        failed: called with the error that ends the run, before anything is closed.
    """
    device = plan.device(place)
    if plan.cuda:
        torch.cuda.set_device(device)
    hosted, minutes = not plan.joins, config.dist_timeout_minutes
    # The heartbeat names the missing rank at the timeout; the backend, which cannot, times out a little later.
    later = minutes + min(1.0, minutes)
    setup_distributed(rank, plan.world_size, plan.backend, port, later, hosted=hosted, attempt=attempt)
    with _closing_in_time(failed) as on_error:
        try:
            dist = Dist(rank, plan.world_size, device)
            dist.waits.on_error = on_error
            board = open_board(rank, port, minutes, hosted=hosted, attempt=attempt)
            with Heartbeat(dist, board, 60 * minutes, hung), Watchdog(dist, 60 * minutes, hung):
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
    """Yield a function to call with an error before anything is closed; the process then has `CLOSING_SECONDS`.

    Closing may wait for other ranks, a GPU or a disk that never answers; after that time the process exits.
    """
    timers: list[threading.Timer] = []

    def on_error(error: BaseException) -> None:
        if timers or isinstance(error, Stopped) or stop_requested():
            return
        failed(error)
        line = f"{error or type(error).__name__} (and closing the run did not finish)"
        timers.append(threading.Timer(CLOSING_SECONDS, leave_hung, (line, "", exit_code(error))))
        timers[0].daemon = True
        timers[0].start()

    try:
        yield on_error
    finally:
        for timer in timers:
            timer.cancel()


def exit_code(error: BaseException) -> int:
    """Return the exit code of a rank that ended with `error`."""
    return USER_ERROR_EXIT_CODE if isinstance(error, UserError) else 1


@contextmanager
def naming_a_lost_rank(rank: int) -> Iterator[None]:
    """Reduce an exchange that broke because another rank ended to one line; the report of that rank says why."""
    try:
        yield
    except (UserError, RankFailed):
        raise
    except Exception as error:
        text = str(broken_exchange(error) or "")
        words = next((words for words in LOST_CONNECTION if words in text), "")
        if not words:
            raise
        line = f"rank {rank}: the connection to another rank broke ({words}): that rank has ended"
        raise RankFailed(f"{line}; its own report, above or below, says why") from error


def require_shared_folder(dist: Dist, path: str | Path) -> None:
    """Check that every rank sees the files of rank 0 in the folder `path` and can write there. A collective.

    Errors: UserError, the same on all ranks, naming the hosts that see another folder or may not write.
    """
    if dist.world_size == 1:
        return
    folder, host = Path(path), socket.gethostname()
    mark = dist.broadcast(f".shared_{secrets.token_hex(32)}")
    if dist.is_main:
        with suppress(OSError):  # every rank, this one too, reports what it finds
            (folder / mark).touch()
    dist.all(True)  # from here on the file is there
    trouble = _trouble(folder, mark, dist.rank)
    found = {where: what for where, what in reversed(dist.gather((host, trouble))) if what}
    if dist.is_main:
        with suppress(OSError):
            (folder / mark).unlink(missing_ok=True)
    if found:
        where = ", ".join(f"{what} on host {name}" for name, what in sorted(found.items()))
        fix = "give a folder of a file system that all hosts share (NFS, Lustre, …), under the same name everywhere"
        shown = dist.broadcast(str(folder))
        raise UserError(f"local_results_path: the run's folder {shown} {where}; {fix}")


def _trouble(folder: Path, name: str, rank: int) -> str:
    """Return what is wrong with the folder on this rank; empty if it is rank 0's and can be written."""
    for seconds in WAITS:
        if rank == 0 or os.path.exists(folder / name):
            break
        time.sleep(seconds)
        with suppress(OSError):
            list(folder.iterdir())  # makes NFS ask its server again
    else:
        return "is not rank 0's"
    own = folder / f"{name}_{rank}"
    try:
        own.touch()
        own.unlink()
    except OSError as problem:
        return f"cannot be written ({problem.strerror})"
    return ""
