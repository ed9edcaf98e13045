"""SMAC's reward and episode end.

Source: oxwhirl/smac, starcraft2.py, `reward_battle`, `step` and `update_units`. The dense reward of a step is

    Δenemy + Δdeaths                 with reward_only_positive (default); SMAC takes its absolute value
    Δenemy + Δdeaths - Δally         otherwise

where Δenemy is the health and shield that enemies lost, Δdeaths is `reward_death_value` per enemy that died (less
`reward_negative_scale` times that per ally), and Δally is the allies' loss times `reward_negative_scale`. The end of an
episode adds `reward_win` or `reward_defeat`. All is divided by (best possible return / `reward_scale_rate`).

Sums are in double precision and in a fixed order: a slot's reward does not depend on other slots.
Shapes: B slots, n agents, U = n + m units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.backend import Units


@dataclass
class Ending:
    """How episodes ended, each [B] bool; `over` is any of won, lost, draw (both sides dead), limit.

    `left` is [B, 2] int64, the numbers of living allies and enemies.
    """

    won: np.ndarray
    lost: np.ndarray
    draw: np.ndarray
    limit: np.ndarray
    over: np.ndarray
    left: np.ndarray

    def among(self, active: np.ndarray) -> Ending:
        """Return a copy that is False outside of `active` [B] bool."""
        won, lost, draw = self.won & active, self.lost & active, self.draw & active
        return Ending(won, lost, draw, self.limit & active, self.over & active, self.left)


class RewardLedger:
    """Keeps each unit's health and shield before the step and computes rewards from the differences.

    Attributes:
        keep_scale: SMACv2's quirk: the enemies of the first battle determine the scale of all later ones.
    """

    def __init__(self, args: BattleArgs, n_slots: int, n_agents: int, n_enemies: int) -> None:
        self._args, self._n, self._m = args, n_agents, n_enemies
        self._points = np.zeros((n_slots, n_agents + n_enemies))
        self._living = np.ones((n_slots, n_agents + n_enemies), bool)
        self._scale = np.ones(n_slots)
        self._scaled = np.zeros(n_slots, bool)
        self.keep_scale = False

    def reset(self, which: np.ndarray, units: Units) -> None:
        """Start episodes in the slots `which` [B] bool with the current units."""
        self._living[which] = units.alive[which]
        self._points[which] = (_points(units) * units.alive)[which]
        if self._args.reward_scale:
            fresh = which & ~self._scaled if self.keep_scale else which
            self._scale[fresh] = self.scale(units)[fresh]
            self._scaled |= fresh

    def scale(self, units: Units) -> np.ndarray:
        """Return [B] float64, the best possible return of a battle over `reward_scale_rate`."""
        full = (units.health_max.astype(np.float64) + units.shield_max)[:, self._n :]
        best = self._m * self._args.reward_death_value + self._args.reward_win + _ordered_sum(full)
        return best / self._args.reward_scale_rate

    def step(self, units: Units, ending: Ending) -> np.ndarray:
        """Return the reward [B] float64 of the step that led to `units`."""
        args, n, before, living = self._args, self._n, self._points.copy(), self._living.copy()
        self._living &= units.alive  # a death is counted once
        np.multiply(_points(units), self._living, out=self._points)
        if args.reward_sparse:
            reward = ending.won.astype(np.float64) - ending.lost
        else:
            delta_enemy = _ordered_sum(before[:, n:] - self._points[:, n:])
            new_dead = np.greater(living, self._living)
            delta_deaths = args.reward_death_value * _count(new_dead[:, n:])
            if args.reward_only_positive:
                reward = delta_enemy + delta_deaths
                # SMAC's abs() pays for enemy shields that regenerate; docs/skirmish.md, `reward_shield_fix`.
                reward = np.maximum(reward, 0.0) if args.reward_shield_fix else np.abs(reward)
            else:
                delta_deaths = delta_deaths - (
                    args.reward_death_value * args.reward_negative_scale * _count(new_dead[:, :n])
                )
                delta_ally = _ordered_sum((before[:, :n] - self._points[:, :n]) * args.reward_negative_scale)
                reward = delta_enemy + delta_deaths - delta_ally
            reward += args.reward_win * ending.won
            reward += args.reward_defeat * ending.lost
        return reward / self._scale

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return what kernels change: health with shield and who lives [B, U] before the next step, the scale of the
        reward [B] and whether it is set [B].
        """
        return self._points, self._living, self._scale, self._scaled

    def snapshot(self) -> dict[str, Any]:
        """Return the state as arrays."""
        units = {"points": self._points.copy(), "dead": ~self._living}
        return {**units, "scale": self._scale.copy(), "scaled": self._scaled.copy()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`."""
        saved = snapshot["points"], ~snapshot["dead"], snapshot["scale"], snapshot["scaled"]
        for own, values in zip(self.arrays(), saved, strict=True):
            own[...] = values


def judge(
    units: Units, n_agents: int, medivac: np.ndarray | None, at_limit: np.ndarray, any_medivacs: bool = False
) -> Ending:
    """Return which episodes have ended and how, as SMAC's `update_units`.

    A side has lost when none of its units is listed. A unit listed with health 0 counts as dead for `left` and for the
    rule below, but the battle continues. Where medivacs heal, a side with medivacs only has lost: for the enemies only
    if it is exactly one (SMAC), or any number (SMACv2, `any_medivacs`).

    Args:
        medivac: [B, U] bool; None on maps without the rule. at_limit: [B] bool, the step limit is reached.
    """
    left = _count_sides(units.alive, n_agents)
    listed = left if units.listed is units.alive else _count_sides(units.listed, n_agents)
    allies, enemies = (listed > 0).T
    lost, won, draw = np.greater(enemies, allies), np.greater(allies, enemies), ~(allies | enemies)
    if medivac is not None:
        ally, enemy = units.alive[:, :n_agents], units.alive[:, n_agents:]
        lost |= ~(ally & ~medivac[:, :n_agents]).any(axis=1)
        if any_medivacs:
            won |= ~(enemy & ~medivac[:, n_agents:]).any(axis=1)
        else:
            won |= (left[:, 1] == 1) & (enemy & medivac[:, n_agents:]).any(axis=1)
        won &= ~lost
        draw &= ~lost
    over = won | lost
    over |= draw
    limit = np.greater(at_limit, over)
    return Ending(won, lost, draw, limit, over | limit, left)


def _count_sides(flags: np.ndarray, n_agents: int) -> np.ndarray:
    """Return [B, 2], the numbers of allies and enemies whose flag in [B, U] is set."""
    return np.add.reduceat(flags, (0, n_agents), axis=1, dtype=np.int64)


def _points(units: Units) -> np.ndarray:
    return np.add(units.health, units.shield, dtype=np.float64)


def _count(flags: np.ndarray) -> np.ndarray:
    """Return [B], the number of flags [B, K] set in each row."""
    return np.add.reduce(flags, axis=1, dtype=np.int64)


def _ordered_sum(values: np.ndarray) -> np.ndarray:
    """Sum [B, K] over K from left to right."""
    return np.add.accumulate(values, axis=1)[:, -1]
