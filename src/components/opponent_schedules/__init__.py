"""Schedules of opponents over the progress of training; `REGISTRY` maps names to schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.components.opponent_schedules.schedules import OpponentSchedule

REGISTRY: Registry[type[OpponentSchedule]] = Registry(
    "opponent_difficulty_strategy",
    "omagd.opponent_schedules",
    lazy={
        "none": "omagd.components.opponent_schedules.schedules:Unchanged",
        "linear": "omagd.components.opponent_schedules.schedules:Linear",
        "exponential": "omagd.components.opponent_schedules.schedules:Exponential",
        "curriculum": "omagd.components.opponent_schedules.schedules:Curriculum",
        "self_play": "omagd.components.opponent_schedules.schedules:SelfPlay",
    },
)
