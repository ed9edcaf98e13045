"""A sign of life of every rank, and who is missing when an exchange between the ranks does not come about.

It needs nothing of the exchange itself, so it works where that blocks the whole process: in a sum, in a backward pass,
on a GPU's stream.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from omagd.utils.dist_utils import Dist


class Board(Protocol):
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


class Pulse(threading.Thread):
    """Leaves this rank's sign of life on the board, every few seconds; looks at the others' once an exchange is late.

    Args:
        dist: this rank. board: shared by all ranks. timeout: seconds that an exchange may take. hung: called once, in
            this thread, with one line that names the ranks that hold the others up.
    """

    def __init__(self, dist: Dist, board: Board, timeout: float, hung: Callable[[str], None]) -> None:
        super().__init__(name="pulse", daemon=True)
        self.dist, self.board, self.timeout, self.hung = dist, board, timeout, hung
        self.interval = min(5.0, max(0.1, timeout / 16))
        self._ended = threading.Event()
        self._beat = 0
        self._seen: dict[int, Seen] = {}

    def run(self) -> None:
        """Beat until `stop`, or until the board has gone with the process that holds it."""
        try:
            self._tell(left=False)
            while not self._ended.wait(self.interval):
                self._tell(left=False)
                if line := self._look():
                    self._tell(left=True)  # so that nobody takes this rank's end for the cause
                    self.hung(line)
                    return
            self._tell(left=True)
        except (RuntimeError, OSError):
            return  # the ranks' own connections break as well, and what they say counts

    def stop(self) -> None:
        """Say that this rank has left, and end."""
        self._ended.set()
        self.join(2 * self.interval)

    def _tell(self, left: bool) -> None:
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
        late = time.perf_counter() - self.dist.waits.entered_at
        if late < self.timeout / 2:
            self._seen.clear()
            return ""
        others = [json.loads(self.board.get(str(rank))) for rank in self._others()]
        present = [pulse for pulse in others if not pulse["left"]]
        silent = {pulse["rank"]: quiet for pulse in present if (quiet := self._quiet(pulse)) > self.timeout / 3}
        if late < self.timeout:
            return ""
        behind = [pulse for pulse in present if pulse["entered"] < self.dist.waits.entered]
        return "; ".join(_describe(pulse, silent) for pulse in behind or present if behind or pulse["rank"] in silent)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.dist.world_size) if rank != self.dist.rank]

    def _quiet(self, pulse: dict[str, Any]) -> float:
        """Return for how many seconds a rank has given no sign; clocks of other hosts do not matter."""
        now, seen = time.perf_counter(), self._seen.get(pulse["rank"])
        if seen is None or seen.beat != pulse["beat"]:
            seen = self._seen[pulse["rank"]] = Seen(pulse["beat"], now)
        return now - seen.since


@contextmanager
def beating(dist: Dist, board: Board, timeout: float, hung: Callable[[str], None]) -> Iterator[None]:
    """Within, this rank gives signs of life and watches the others'; see `Pulse`."""
    pulse = Pulse(dist, board, timeout, hung)
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
