"""Where the time of a run goes: seconds by phase, each second counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

Pairs = dict[str, tuple[float, float]]
"""(sum, count) by name, as `Metrics.add` takes them."""

OTHER = "other"


class Phases:
    """Timers by name. A phase inside another one interrupts it, so that all phases and `other` add up to the wall.

    What has a clock of its own (the ranks' waiting, the reconstructor) is told by `watch`: the seconds that it counts
    within a phase are taken from that phase.

    Args:
        synchronise: called before every reading of the clock, to wait for a device that works asynchronously; None
            leaves the order of work as it is.
        mark: opens a named context around every phase, such as a profiler's annotation; None for nothing.
    """

    def __init__(
        self,
        synchronise: Callable[[], None] | None = None,
        mark: Callable[[str], object] | None = None,
    ) -> None:
        self.synchronise = synchronise
        self.mark = mark
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._open: list[str] = []
        self._watched: dict[str, tuple[Callable[[], float], float]] = {}
        self._at = self._turned = time.perf_counter()

    @property
    def current(self) -> tuple[str, float]:
        """The phase that runs, and the moment (of `time.perf_counter`) at which it began or was taken up again."""
        return (self._open[-1] if self._open else OTHER), self._turned

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of a block as `name`."""
        self._turn()
        self._open.append(name)
        self._turned = time.perf_counter()
        self.calls[name] = self.calls.get(name, 0) + 1
        try:
            with self.mark(name) if self.mark is not None else nullcontext():  # type: ignore[attr-defined]
                yield
        finally:
            self._turn()
            self._open.pop()
            self._turned = time.perf_counter()

    def watch(self, name: str, seconds: Callable[[], float]) -> None:
        """From now on count as `name` what a running total, in seconds, grows by; a second call replaces the first."""
        self._turn()
        self._watched[name] = (seconds, seconds())

    def totals(self) -> dict[str, float]:
        """Return the seconds of every phase since the beginning, up to this moment."""
        self._turn()
        return dict(self.seconds)

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of every phase since `before`, which `totals` gave."""
        return {name: value - before.get(name, 0.0) for name, value in self.totals().items()}

    def _turn(self) -> None:
        """Give the time since the last reading to whose it was."""
        if self.synchronise is not None:
            self.synchronise()
        now = time.perf_counter()
        passed, self._at = now - self._at, now
        for name, (read, before) in self._watched.items():
            after = read()
            apart = min(max(after - before, 0.0), passed)  # a clock that ran in a thread of its own cannot take more
            self._watched[name] = (read, after)
            passed -= apart
            self._add(name, apart)
        self._add(self._open[-1] if self._open else OTHER, passed)

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def shares(seconds: Mapping[str, float]) -> Pairs:
    """Return `time/<phase>` as pairs whose quotient is the phase's share of the wall, a mean over ranks."""
    wall = sum(seconds.values())
    return {f"time/{name}": (value, wall) for name, value in seconds.items() if name != OTHER or value > 0}
