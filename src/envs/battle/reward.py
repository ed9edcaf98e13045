"""SMAC's reward and end of episode, with the bookkeeping they need.

Shapes: B slots, n agents, U = n + m units. Sums run in double precision and in a fixed order, so that a slot's reward
does not depend on the slots beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.backend import Units


@dataclass
class Ending:
    """How the step ended the episodes, each [B] bool; `over` is any of won, lost, draw (both sides dead), limit."""

    won: np.ndarray
    lost: np.ndarray
    draw: np.ndarray
    limit: np.ndarray
    over: np.ndarray


class RewardLedger:
    """Remembers what each unit had before the step and pays for the difference.

    Args:
        args: the reward keys. n_slots, n_agents, n_enemies: sizes.
    """

    def __init__(self, args: BattleArgs, n_slots: int, n_agents: int, n_enemies: int) -> None:
        self._args, self._n, self._m = args, n_agents, n_enemies
        self._points = np.zeros((n_slots, n_agents + n_enemies))
        self._counted_dead = np.zeros((n_slots, n_agents + n_enemies), bool)
        self._scale = np.ones(n_slots)

    def reset(self, which: np.ndarray, units: Units) -> None:
        """Open the books of the slots `which` [B] bool for the units that stand there now."""
        self._points[which] = _points(units)[which]
        self._counted_dead[which] = ~units.alive[which]
        if self._args.reward_scale:
            full = (units.health_max.astype(np.float64) + units.shield_max)[which, self._n :]
            best = self._m * self._args.reward_death_value + self._args.reward_win + _ordered_sum(full)
            self._scale[which] = best / self._args.reward_scale_rate

    def settle(self, units: Units, ending: Ending) -> np.ndarray:
        """Return the reward [B] float64 of the step that led to `units`, and book it."""
        args, n = self._args, self._n
        if args.reward_sparse:
            reward = ending.won.astype(np.float64) - ending.lost
        else:
            lost_points, new_dead = self._losses(units)
            delta_enemy = _ordered_sum(lost_points[:, n:])
            delta_deaths = args.reward_death_value * new_dead[:, n:].sum(axis=1)
            if args.reward_only_positive:
                reward = delta_enemy + delta_deaths
                reward = np.maximum(reward, 0.0) if args.reward_shield_fix else np.abs(reward)
            else:
                delta_deaths = delta_deaths - (
                    args.reward_death_value * args.reward_negative_scale * new_dead[:, :n].sum(axis=1)
                )
                delta_ally = _ordered_sum(lost_points[:, :n] * args.reward_negative_scale)
                reward = delta_enemy + delta_deaths - delta_ally
            reward = reward + args.reward_win * ending.won + args.reward_defeat * ending.lost
        self._points = _points(units)
        self._counted_dead |= ~units.alive
        return reward / self._scale

    def _losses(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return the points each unit lost [B, U], and which units died in this step; a death is counted once."""
        living = ~self._counted_dead
        new_dead = living & ~units.alive
        left = np.where(units.alive, (self._points - units.health) - units.shield, self._points)
        return np.where(living, left, 0.0), new_dead

    def snapshot(self) -> dict[str, Any]:
        """Return the open books."""
        return {"points": self._points.copy(), "dead": self._counted_dead.copy(), "scale": self._scale.copy()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`."""
        self._points, self._counted_dead = snapshot["points"].copy(), snapshot["dead"].copy()
        self._scale = snapshot["scale"].copy()


def judge(units: Units, n_agents: int, medivac: np.ndarray | None, at_limit: np.ndarray) -> Ending:
    """Return who has won.

    `medivac` [B, U] on maps of type MMM, else None: there a side left with medivacs only has lost; for the enemy this
    holds, as published, for exactly one medivac. `at_limit`: [B] bool, the step limit is reached.
    """
    ally, enemy = units.alive[:, :n_agents], units.alive[:, n_agents:]
    n_ally, n_enemy = ally.sum(axis=1), enemy.sum(axis=1)
    lost = (n_ally == 0) & (n_enemy > 0)
    won = (n_ally > 0) & (n_enemy == 0)
    if medivac is not None:
        lost |= ~(ally & ~medivac[:, :n_agents]).any(axis=1)
        won |= (n_enemy == 1) & (enemy & medivac[:, n_agents:]).any(axis=1)
        won &= ~lost
    draw = (n_ally == 0) & (n_enemy == 0) & ~lost
    over = won | lost | draw
    limit = at_limit & ~over
    return Ending(won, lost, draw, limit, over | limit)


def _points(units: Units) -> np.ndarray:
    return units.health.astype(np.float64) + units.shield


def _ordered_sum(values: np.ndarray) -> np.ndarray:
    """Sum [B, K] over K from left to right."""
    return np.cumsum(values, axis=1)[:, -1]
