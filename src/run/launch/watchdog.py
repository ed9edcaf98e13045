"""Hangs: a watchdog on this rank's own progress, and signs of life by which ranks name who holds up an exchange.

Both are threads that need nothing of what hangs, so they work where it blocks the main thread: in an environment, in a
sum, in a backward pass, on a GPU's stream.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np

from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RankFailed
from omagd.utils.signals import CLOSING_SECONDS, ending, raise_in_main_thread

LOG = logging.getLogger("omagd")
BUILDING = "building the environment"
CLOSING = "closing the environment"
COUNTING = "asking the environment for its counters"
WATCHED = frozenset({BUILDING, CLOSING, COUNTING, "collect", "update", "sample", "replay", "test", "opponents"})
"""Phases in which standing still is a hang. Reading and writing files may take as long as the disk needs."""

Hung = Callable[[str, str], None]
"""Called with one line that names who hangs, and the Python stack of the thread that does, empty where unknown."""


class KeyValueStore(Protocol):
    """Where ranks leave texts for each other; it may block, so that it is used by the pulse's thread alone."""

    def set(self, key: str, value: str) -> None:
        """Leave a text."""

    def get(self, key: str) -> bytes:
        """Return a text, waiting for it to be there."""


@dataclass
class Seen:
    """What was last read of a rank. since: moment (of this process) at which its pulse was first seen at `beat`."""

    beat: int
    since: float


class Heartbeat(threading.Thread):
    """Leaves this rank's sign of life on the board, every few seconds; looks at the others' once an exchange is late.

    Args:
        dist: this rank. board: shared by all ranks. timeout: seconds that an exchange may take; a little longer is
            waited, for a rank that hangs to say so itself. hung: called once, in this thread, with one line that names
            the ranks that hold the others up.
    """

    def __init__(self, dist: Dist, board: KeyValueStore, timeout: float, hung: Hung) -> None:
        super().__init__(name="pulse", daemon=True)
        self.dist, self.board, self.timeout, self.hung = dist, board, timeout, hung
        self.interval = min(5.0, max(0.1, timeout / 16))
        self._ended = threading.Event()
        self._beat = 0
        self._seen: dict[int, Seen] = {}
        self._entered, self._late = -1, 0.0
        self._last: dict[int, dict[str, Any]] = {}
        self._unreadable: set[int] = set()

    def run(self) -> None:
        """Beat until `stop`, or until the board has gone with the process that holds it."""
        try:
            self._tell(left=False)
            at = time.perf_counter()
            while not self._ended.wait(self.interval):
                now = time.perf_counter()
                # Not the time in which this whole process was stopped, as by Ctrl-Z.
                self._late = self._late + min(now - at, 3 * self.interval)
                at = now
                if self._entered != self.dist.waits.entered:
                    self._entered, self._late = self.dist.waits.entered, 0.0
                self._tell(left=False)
                if line := "" if ending() else self._look():
                    self._tell(left=True)  # so that nobody takes this rank's end for the cause
                    self.hung(line, "")
                    return
            self._tell(left=True)
        except (RuntimeError, OSError):
            return  # the ranks' own connections break as well, and what they say counts

    def stop(self) -> None:
        """Say that this rank has left, and end."""
        self._ended.set()
        self.join(2 * self.interval)

    def _tell(self, left: bool) -> None:
        if ending():  # who holds the board may be gone already, of which torch would write its C++ frames to stderr
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
            "place": f"{stage} ({phase})" if stage else phase,
            "seconds": now - since,
            "left": left,
        }
        self.board.set(str(self.dist.rank), json.dumps(pulse))

    def _look(self) -> str:
        """Return a line that names who holds this rank up, empty while nobody does."""
        late = self._late
        if late < self.timeout / 2:
            self._seen.clear()
            return ""
        others = [self._read(rank) for rank in self._others()]
        present = [pulse for pulse in others if not pulse["left"]]
        silent = {pulse["rank"]: quiet for pulse in present if (quiet := self._quiet(pulse)) > self.timeout / 3}
        if late < self.timeout + min(15.0, self.timeout / 4):
            return ""
        behind = [pulse for pulse in present if pulse["entered"] < self.dist.waits.entered]
        return "; ".join(_describe(pulse, silent) for pulse in behind or present if behind or pulse["rank"] in silent)

    def _read(self, rank: int) -> dict[str, Any]:
        """Return what a rank says; what cannot be read is no sign of life, so the last one that could be counts."""
        try:
            pulse = json.loads(self.board.get(str(rank)))
            kinds = {name: type(value) for name, value in pulse.items()}
            if kinds != KINDS or pulse["rank"] != rank:
                raise ValueError(f"not a sign of life: {pulse!r}"[:200])
            self._last[rank] = pulse
        except (ValueError, AttributeError, RecursionError) as problem:
            if rank not in self._unreadable:
                self._unreadable.add(rank)
                LOG.warning("the sign of life of rank %d cannot be read: %r", rank, problem)
        nothing = {"beat": 0, "entered": 0, "place": "an unknown phase", "seconds": 0.0, "left": False}
        return self._last.get(rank, {"rank": rank, "host": "unknown", "pid": 0, **nothing})

    def _others(self) -> list[int]:
        return [rank for rank in range(self.dist.world_size) if rank != self.dist.rank]

    def _quiet(self, pulse: dict[str, Any]) -> float:
        """Return for how many seconds a rank has given no sign; clocks of other hosts do not matter."""
        now, seen = time.perf_counter(), self._seen.get(pulse["rank"])
        if seen is None or seen.beat != pulse["beat"]:
            seen = self._seen[pulse["rank"]] = Seen(pulse["beat"], now)
        return now - seen.since


KINDS = {
    "rank": int, "host": str, "pid": int, "beat": int, "entered": int, "place": str, "seconds": float, "left": bool,
}  # fmt: skip
"""Types of what a sign of life says."""


class Watchdog(threading.Thread):
    """Notices that this rank stands still, though no other one may wait for it.

    Progress is a tick of the environments, another slot, a backward pass, an exchange, another phase. A rank that waits
    in an exchange is left to `Heartbeat`, which can name the one that it waits for.

    Args:
        dist: this rank; the thread that makes this is the one that is watched. timeout: seconds without progress, not
            counting those in which the whole process was stopped. hung: called once, in this thread.
    """

    def __init__(self, dist: Dist, timeout: float, hung: Hung) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.dist, self.timeout, self.hung = dist, timeout, hung
        self.watched = threading.get_ident()
        self.interval = min(5.0, max(0.05, timeout / 16))
        self._ended = threading.Event()

    def run(self) -> None:
        """Look every few seconds until `stop`."""
        waits, last, quiet, at = self.dist.waits, None, 0.0, time.perf_counter()
        while not self._ended.wait(self.interval):
            now = time.perf_counter()
            passed, at = min(now - at, 2 * self.interval), now
            stage, phase, since = waits.place()
            mark = (waits.ticks, waits.entered, stage, phase, since, self._slots())
            busy = waits.playing or phase in WATCHED
            quiet = quiet + passed if mark == last and busy and not waits.inside else 0.0
            last = mark
            if quiet >= self.timeout:
                self.hung(self._line(quiet, f"{stage} ({phase})" if stage else phase), self._stack())
                return

    def stop(self) -> None:
        """Watch no longer; return once no more errors can arrive from here."""
        self._ended.set()
        self.join(1.0)

    def _slots(self) -> tuple[tuple[int, int], ...]:
        """Return slots at work with their seeds: those that the environment names, else all that it is asked for."""
        try:
            named, asked = self.dist.waits.slots(), self.dist.waits.asked
        except Exception:  # noqa: BLE001 (an environment that is being closed; the watch goes on)
            return ()
        if named or asked is None:
            return tuple(named.items())
        return tuple((slot, int(asked[1][slot])) for slot in np.flatnonzero(asked[0]).tolist())

    def _line(self, quiet: float, place: str) -> str:
        slots = self._slots()
        where = ", ".join(f"slot {slot} from seed {seed}" for slot, seed in slots[:4]) + ", …" * (len(slots) > 4)
        who = f"rank {self.dist.rank} (host {socket.gethostname()}, process {os.getpid()})"
        return f"{who} hangs: in {place} for {quiet:.0f} s" + f", in {where}" * bool(where)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self.watched)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


@contextmanager
def watching(dist: Dist, timeout: float, hung: Hung) -> Iterator[None]:
    """Within, this rank's progress is watched; see `Watchdog`."""
    watchdog = Watchdog(dist, timeout, hung)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def leave_hung(line: str, stack: str) -> NoReturn:
    """End this process, whose main thread hangs or waits in vain for another rank; torchrun ends the others."""
    sys.stderr.write(f"error: {line}\n{stack}")
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def ended_if_hung(dist: Dist, timeout: float, finish: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within, and within `stoppable`, a hang of this process raises RankFailed in its main thread.

    The process ends with exit code 1 where that changes nothing. timeout: as in `Watchdog`. finish: called before it
    ends in that way.
    """
    over = threading.Event()

    def hung(line: str, stack: str) -> None:
        LOG.error("%s\n%s", line, stack.rstrip())
        raise_in_main_thread(RankFailed(line))
        if not over.wait(CLOSING_SECONDS):
            finish()
            leave_hung(line, "")

    with watching(dist, timeout, hung):
        try:
            yield
        finally:
            over.set()


@contextmanager
def beating(dist: Dist, board: KeyValueStore, timeout: float, hung: Hung) -> Iterator[None]:
    """Within, this rank gives signs of life and watches the others'; see `Heartbeat`."""
    pulse = Heartbeat(dist, board, timeout, hung)
    pulse.start()
    try:
        yield
    finally:
        pulse.stop()


def _describe(pulse: dict[str, Any], silent: dict[int, float]) -> str:
    who = f"rank {pulse['rank']} (host {pulse['host']}, process {pulse['pid']})"
    if pulse["rank"] in silent:
        return f"{who} hangs: no sign of life for {silent[pulse['rank']]:.0f} s, last seen in {pulse['place']}"
    return f"{who} hangs: in {pulse['place']} for {pulse['seconds']:.0f} s, while the others wait for it"
