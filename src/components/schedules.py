"""Schedules of numbers over the global clock."""

from __future__ import annotations

from dataclasses import dataclass

from omagd.config.schema import Config


@dataclass(frozen=True)
class LinearSchedule:
    """Linear from `start` to `finish` over the first `duration` steps, then constant.

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


@dataclass(frozen=True)
class FactorSchedule:
    """Exponential decay from `start`, by `speed` at each step, bounded below by `finish`.

    Args:
        start, finish: values at its ends. speed: factor for one environment step over all ranks, in (0, 1].
    """

    start: float
    finish: float
    speed: float

    def value(self, t: int) -> float:
        """Return the value at clock `t` ≥ 0."""
        return max(self.finish, self.start * self.speed**t)


def epsilon_schedule(config: Config) -> LinearSchedule | FactorSchedule:
    """Return the schedule of epsilon: exponential if `epsilon_speed` is given, else linear."""
    if config.epsilon_speed is not None:
        return FactorSchedule(config.epsilon_start, config.epsilon_finish, config.epsilon_speed)
    return LinearSchedule(config.epsilon_start, config.epsilon_finish, config.epsilon_anneal_time)
