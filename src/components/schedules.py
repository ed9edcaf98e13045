"""Numbers that follow the global clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearSchedule:
    """From `start` to `finish` in a straight line over the first `duration` steps, then flat.

    Args:
        start, finish: values at its ends. duration: environment steps over all ranks, ≥ 1.
    """

    start: float
    finish: float
    duration: int

    def value(self, t: int) -> float:
        """Return the value at clock `t` ≥ 0."""
        passed = min(t / self.duration, 1.0)
        return self.start + (self.finish - self.start) * passed
