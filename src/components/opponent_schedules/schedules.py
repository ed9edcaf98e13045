"""Functions of the share of training that is done, on the global clock: the same on all ranks, however many there are.

A level is a place on the environment's ladder of opponents, from 0, the weakest; beyond its end it is the last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import ClassVar

LEVELS = 4
"""Of the published schedules; the last of them comes when training is done."""

THRESHOLDS = (0.10, 0.30, 0.60, 0.85)
"""Of the published curriculum: shares of training from which levels 1 to 4 are played."""


class OpponentSchedule(ABC):
    """Levels by the share of training done.

    Attributes:
        selves: whether opponents are frozen earlier selves instead.
    """

    selves: ClassVar[bool] = False

    @abstractmethod
    def level(self, share: float) -> int | None:
        """Return the level at `share` ≥ 0 of the training; None where the ladder is not used."""


class Unchanged(OpponentSchedule):
    """Opponents are those of `env_args` throughout."""

    def level(self, share: float) -> int | None:
        """Return None."""
        return None


class Linear(OpponentSchedule):
    """Equal parts of the training for all levels but the last."""

    def level(self, share: float) -> int | None:
        """Return floor(4 p)."""
        return math.floor(LEVELS * share)


class Exponential(OpponentSchedule):
    """As published under this name: easy levels last longer."""

    def level(self, share: float) -> int | None:
        """Return floor(4 p^1.5)."""
        return math.floor(LEVELS * share**1.5)


class Curriculum(OpponentSchedule):
    """Levels from fixed shares of the training on."""

    def level(self, share: float) -> int | None:
        """Return how many of `THRESHOLDS` have been reached."""
        return bisect_right(THRESHOLDS, share)


class SelfPlay(OpponentSchedule):
    """Frozen earlier selves, each as often as the others."""

    selves: ClassVar[bool] = True

    def level(self, share: float) -> int | None:
        """Return None."""
        return None
