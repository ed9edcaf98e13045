"""SMAC's semantics by kernels, for the compiled simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omagd.envs.battle.actions import Geometry
from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.compiled import features, rules, step
from omagd.envs.battle.compiled.observe import Shown, observe
from omagd.envs.battle.compiled.simulator import CompiledSimulator
from omagd.envs.battle.compiled.starts import Starts
from omagd.envs.battle.compiled.tables import Orders, State, Tables
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.protocol import Observation, StepResult
from omagd.utils.compiling import as_kernels_take


class Parts(NamedTuple):
    """What the kernels work on: constants, battles, episodes, orders, what is shown. scale: of new rewards, 0: none."""

    tables: Tables
    starts: Starts
    state: State
    layout: features.Layout
    prices: rules.Prices
    episodes: rules.Episodes
    orders: Orders
    shown: Shown
    scale: float
    move_amount: float


class CompiledSemantics(BattleSemantics):
    """`BattleSemantics` of a compiled simulator; results, observations and snapshots are the reference's, bit for bit.

    Args: as `BattleSemantics`.
    """

    _backend: CompiledSimulator

    def __init__(self, spec: MapSpec, args: BattleArgs, backend: CompiledSimulator, unit_names: Sequence[str]) -> None:
        super().__init__(spec, args, backend, unit_names)
        slots, n = backend.n_slots, spec.n_agents
        self._layout = features.make_layout(spec, args, self._tables, backend.terrain, backend.units)
        self._prices, self._move_amount = rules.make_prices(args), float(args.move_amount)
        self._scale = float(self._ledger.scale(backend.units)[0]) if args.reward_scale else 0.0
        self._orders = Orders(
            np.zeros((slots, n), np.int64), np.zeros((slots, n), np.int64), np.zeros((slots, n, 2), np.float32)
        )
        self._episodes = rules.Episodes(*self._ledger.arrays(), self.steps, self.ended, self._last_action)
        self._shown = Shown(self._avail, self._obs, self._full, self._state)
        self._memory = features.shared_memory()
        self._lost, self._died = np.zeros(2), np.zeros(2, np.int64)
        self._measured = False  # the geometry, which only scripts and pictures need, is current

    def begin(self, which: np.ndarray, seeds: np.ndarray | None = None) -> None:
        """Start episodes in the slots `which` [B] bool, where the back-end has started new battles."""
        begun = as_kernels_take("which", which, bool, self.steps.shape)
        rules.begin(self._layout, self._scale, self._backend.state, self._episodes, begun)
        self._changed()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` [B, n] in the `active` slots [B].

        Errors: ValueError for an action that is not available, or a slot whose episode is over.
        """
        chosen = as_kernels_take("actions", actions, np.int64, self._orders.order.shape)
        playing = as_kernels_take("active", active, bool, self.steps.shape)
        self._refresh()
        backend, results = self._backend, rules.no_results(len(active))
        mistake = step.step(
            backend.tables, self._layout, self._prices, self._move_amount, backend.state, self._episodes,
            backend.memory, self._orders, self._avail, chosen, playing, self._lost, self._died, results, True,
        )  # fmt: skip
        if mistake != step.EVERY_CHOICE_FITS:
            self._require_playable(actions, active)
        self._changed()
        won, _, draw, limit, over = results.flags
        return self._result(results.reward, over, won, draw, limit, results.dead)

    def observe(self, full: bool = False) -> Observation:
        """Return the current observations; the arrays are overwritten by the next call."""
        self._look(full)
        return Observation(self._obs, self._state, self._avail, self._full if full else None)

    def parts(self) -> Parts:
        """Return the arrays that the kernels work on, for battles on other devices."""
        backend = self._backend
        return Parts(
            backend.tables, backend.starts, backend.state, self._layout, self._prices, self._episodes, self._orders,
            self._shown, self._scale, self._move_amount,
        )  # fmt: skip

    def geometry(self) -> Geometry:
        """Return the current distances and directions."""
        if not self._measured:
            self._geometry.refresh(self._backend.units)
            self._measured = True
        return self._geometry

    def state_parts(self) -> dict[str, np.ndarray]:
        """Return copies of the state's parts by name, from the reference."""
        self.geometry()
        super().observe()
        return self._writer.state_parts()

    def _look(self, full: bool) -> None:
        observe(self._layout, self._backend.state, self._episodes, self._memory, self._shown, full)
        self._stale = False

    def _changed(self) -> None:
        super()._changed()
        self._measured = False

    def _refresh(self) -> None:
        if self._stale:
            self._look(False)
