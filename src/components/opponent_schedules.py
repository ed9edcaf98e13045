"""Schedules of opponents: levels as functions of the training progress, which is the same on all ranks.

A level is an index into the environment's ladder of opponents; 0 is the weakest. An index beyond the end is the last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from typing import ClassVar

from omagd.utils.registry import Registry

LEVELS = 4
"""Number of levels of the published schedules; the last one is reached at the end of training."""

THRESHOLDS = (0.10, 0.30, 0.60, 0.85)
"""Progress at which the published curriculum begins levels 1 to 4."""


class OpponentSchedule(ABC):
    """Maps training progress to a level.

    Attributes:
        selves: whether opponents are frozen earlier policies instead.
    """

    selves: ClassVar[bool] = False

    @abstractmethod
    def level(self, share: float) -> int | None:
        """Return the level at progress `share` ≥ 0; None where the ladder is not used."""


REGISTRY: Registry[type[OpponentSchedule]] = Registry(
    "opponent_difficulty_strategy",
    "omagd.opponent_schedules",
    protocol="omagd.components.opponent_schedules:OpponentSchedule",
)


@REGISTRY.register("none")
class Unchanged(OpponentSchedule):
    """The opponents of `env_args`, always."""

    def level(self, share: float) -> int | None:
        """Return None."""
        return None


@REGISTRY.register("linear")
class Linear(OpponentSchedule):
    """Equally long levels; the last one begins at the end of training."""

    def level(self, share: float) -> int | None:
        """Return floor(4 p)."""
        return math.floor(LEVELS * share)


@REGISTRY.register("exponential")
class Exponential(OpponentSchedule):
    """Longer easy levels; the published schedule of this name."""

    def level(self, share: float) -> int | None:
        """Return floor(4 p^1.5)."""
        return math.floor(LEVELS * share**1.5)


@REGISTRY.register("curriculum")
class Curriculum(OpponentSchedule):
    """Levels that begin at fixed progress."""

    def level(self, share: float) -> int | None:
        """Return the number of `THRESHOLDS` reached."""
        return bisect_right(THRESHOLDS, share)


@REGISTRY.register("self_play")
class SelfPlay(Unchanged):
    """Frozen earlier policies, all equally often."""

    selves: ClassVar[bool] = True
