"""Battles for tests: the simulator's kernels under orders given by hand, and SMAC's rules in NumPy on top of them."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.backend import Order
from omagd.envs.battle.compiled import engine, play, rules
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.skirmish_env import SkirmishEnv


class Simulator(engine.Simulator):
    """The simulator of `skirmish` as a back-end that takes orders, as the game does."""

    def __init__(self, map_spec: MapSpec, n_slots: int, *, difficulty: str = "7") -> None:
        _, semantics = engine.compiled()
        super().__init__(map_spec, n_slots, difficulty=difficulty)
        self._parts = semantics(map_spec, SkirmishArgs(), self).parts

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Give orders ([B, n] `Order`, [B, n], [B, n, 2]) to the allies of the active slots and play 8 game loops.

        An order that the game would refuse changes nothing.
        """
        parts, able, (n, total) = self._parts, self.tables.able, self.tables.fact[: row.SHIELDS]
        agent, aimed = np.arange(n), np.clip(target, 0, total - 1)
        taken = np.asarray(active)[:, None] & (order != Order.NONE)
        taken &= (order != Order.ATTACK) | able[row.CAN_HIT, agent, aimed]
        taken &= (order != Order.HEAL) | able[row.HEALABLE, agent, aimed]
        walks = taken & (order == Order.MOVE)
        for kept, values, where in (
            (self._ints[row.ORDER], order, taken),
            (self._ints[row.TARGET], np.where(np.asarray(order) >= Order.ATTACK, aimed, -1), taken),
            (self._floats[row.GOAL_X], dest[..., 0], walks),
            (self._floats[row.GOAL_Y], dest[..., 1], walks),
        ):
            np.copyto(kept[:n].T, values, where=where, casting="same_kind")
        nothing = np.zeros((self.n_slots, n), np.int64)  # actions that change no order
        play.step(
            parts.tables, parts.layout, parts.prices, parts.move_amount, parts.state, parts.episodes, self.memory,
            parts.orders, parts.shown.avail, nothing, np.array(active, bool), np.zeros(2), np.zeros(2, np.int64),
            rules.no_results(self.n_slots), False,
        )  # fmt: skip

    def kill(self, columns: list[int]) -> None:
        """Let units of the first battle die."""
        state = self.snapshot()
        state["floats"][row.HEALTH, columns, 0] = state["ints"][row.ALIVE, columns, 0] = 0
        self.restore(state)

    def place(self, x: np.ndarray, y: np.ndarray) -> None:
        """Put the units of the first battle at these places ([U])."""
        state = self.snapshot()
        state["floats"][row.X, :, 0], state["floats"][row.Y, :, 0] = x, y
        self.restore(state)


class JudgedByNumPy(SkirmishEnv):
    """`skirmish` with masks, orders, observations, rewards and ends by NumPy, as for the real game."""

    @staticmethod
    def engine():
        return Simulator, BattleSemantics
