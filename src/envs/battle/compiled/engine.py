"""Battles of `skirmish`, played and judged by kernels, which are compiled or loaded once per process."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from omagd.envs.battle.actions import Geometry
from omagd.envs.battle.args import BattleArgs, SkirmishArgs
from omagd.envs.battle.backend import Units
from omagd.envs.battle.compiled import compiler, features, play, rules, starts
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.features import Layout
from omagd.envs.battle.compiled.rules import Prices
from omagd.envs.battle.compiled.starts import Starts
from omagd.envs.battle.compiled.tables import Episodes, Orders, State, Tables, make_tables, shared_memory
from omagd.envs.battle.maps import MapSpec, build_terrain, get_map
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.protocol import Observation, Seen, StepResult
from omagd.utils.compiling import as_kernels_take

SIGHT = {"1": 6.0, "2": 6.5, "3": 7.0, "4": 7.5, "5": 8.0, "6": 8.5, "7": 9.0, "8": 9.0, "9": 9.0, "A": 9.0}


class Simulator:
    """The state of the battles of `skirmish`, which `CompiledSemantics.step` plays.

    It is not StarCraft II (docs/skirmish.md). A slot's battle is a function of its seed and its orders, bit for bit.

    Args:
        map_spec: the map. n_slots: B.
        difficulty: the game's difficulty ("1" to "9", "A"). Here: the distance at which the enemy looks for targets, 6
            cells at "1", 9 from "7" on.

    Attributes:
        units: views of the state, which change with each step.
    """

    def __init__(self, map_spec: MapSpec, n_slots: int, *, difficulty: str = "7") -> None:
        self.n_slots, self.terrain = n_slots, build_terrain(map_spec)
        self.tables = make_tables(map_spec, self.terrain, SIGHT[difficulty])
        self.starts = starts.make_starts(map_spec)
        self.memory = shared_memory()
        # A battle's numbers lie side by side, so that one is played within the processor's nearest memory.
        lanes, total = int(self.tables.fact[row.LANES]), int(self.tables.fact[row.UNITS])
        self.state = State(
            np.zeros((n_slots, len(row.FLOATS), lanes), np.float32),
            np.zeros((n_slots, len(row.INTS), lanes), np.int32),
            np.zeros((n_slots, lanes), np.float32),
            np.zeros((n_slots, lanes), bool),
        )
        self._floats, self._ints = (np.moveaxis(array[..., :total], 0, -1) for array in self.state[:2])
        self._ints[row.TARGET] = -1
        constant = *self.tables.unit[[row.HEALTH_MAX, row.SHIELD_MAX], :total], np.array(map_spec.unit_ids(), np.int16)
        health_max, shield_max, kind = (np.broadcast_to(column, (n_slots, total)) for column in constant)
        x, y, health, shield, energy = (values.T for values in self._floats[: row.TIMER])
        cooldown, alive = (array[:, :total] for array in self.state[2:])
        self.units = Units(x, y, health, health_max, shield, shield_max, energy, cooldown, kind, alive)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in the slots `which` ([B] bool), slot b from `seeds[b]`."""
        begun = as_kernels_take("which", which, bool, (self.n_slots,))
        numbers = as_kernels_take("seeds", seeds, np.int64, (self.n_slots,))
        starts.reset(self.tables, self.starts, self.state, begun, numbers)

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Raise NotImplementedError: `CompiledSemantics.step` gives orders and plays in one kernel."""
        raise NotImplementedError

    def targets(self, slot: int) -> np.ndarray:
        """Return [U], the index of the unit in reach that each unit attacks or heals; -1 for none."""
        target = self._ints[row.TARGET, :, slot]
        at, units = np.maximum(target, 0), self.units
        x, y, alive = units.x[slot], units.y[slot], units.alive[slot]
        near = np.hypot(x[at] - x, y[at] - y) <= self.tables.pair[row.REACH, np.arange(len(at)), at]
        return np.where((target >= 0) & alive & alive[at] & near, target, -1)

    def snapshot(self) -> dict[str, Any]:
        """Return the complete state as arrays, [9, U, B] and [3, U, B]."""
        return {"floats": self._floats.copy(), "ints": self._ints.copy()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot of a simulator with the same map and number of slots. Errors: ValueError."""
        saved, own = snapshot["floats"].shape, self._floats.shape
        if saved != own:
            raise ValueError(f"the snapshot is of {saved[1]} units in {saved[2]} slots, not {own[1]} in {own[2]}")
        self._floats[...], self._ints[...] = snapshot["floats"], snapshot["ints"]
        self.state.cooldown[...] = np.maximum(self.state.floats[:, row.TIMER], 0)
        self.state.alive[...] = self.state.ints[:, row.ALIVE] > 0


class Parts(NamedTuple):
    """What the kernels work on: constants, battles, episodes, orders, what is shown. scale: of new rewards, 0: none."""

    tables: Tables
    starts: Starts
    state: State
    layout: Layout
    prices: Prices
    episodes: Episodes
    orders: Orders
    shown: Seen
    scale: float
    move_amount: float


class CompiledSemantics(BattleSemantics):
    """`BattleSemantics` of a compiled simulator; results and observations are the same, bit for bit.

    Args: as `BattleSemantics`.

    Attributes:
        parts: what the kernels work on.
    """

    _backend: Simulator

    def __init__(self, spec: MapSpec, args: BattleArgs, backend: Simulator) -> None:
        super().__init__(spec, args, backend)
        slots, n = backend.n_slots, spec.n_agents
        orders = Orders(
            np.zeros((slots, n), np.int64), np.zeros((slots, n), np.int64), np.zeros((slots, n, 2), np.float32)
        )
        self.parts = Parts(
            backend.tables, backend.starts, backend.state,
            features.make_layout(spec, args, self._tables, backend.terrain, backend.units), rules.make_prices(args),
            Episodes(*self._ledger.arrays(), self.steps, self.ended, self._last_action), orders,
            Seen(self._avail, self._obs, self._full, self._state),
            float(self._ledger.scale(backend.units)[0]) if args.reward_scale else 0.0, float(args.move_amount),
        )  # fmt: skip
        self._memory = features.shared_memory()
        self._lost, self._died = np.zeros(2), np.zeros(2, np.int64)

    def begin(self, which: np.ndarray, seeds: np.ndarray | None = None) -> None:
        """Start episodes in the slots `which` [B] bool, where the back-end has started new battles."""
        begun = as_kernels_take("which", which, bool, self.steps.shape)
        parts = self.parts
        rules.begin(parts.layout, parts.scale, parts.state, parts.episodes, begun)
        self._stale = True

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` [B, n] in the `active` slots [B].

        Errors: ValueError for an action that is not available, or a slot whose episode is over.
        """
        chosen = as_kernels_take("actions", actions, np.int64, self.parts.orders.order.shape)
        playing = as_kernels_take("active", active, bool, self.steps.shape)
        self._refresh()
        parts, results = self.parts, rules.no_results(len(active))
        mistake = play.step(
            parts.tables, parts.layout, parts.prices, parts.move_amount, parts.state, parts.episodes,
            self._backend.memory, parts.orders, self._avail, chosen, playing, self._lost, self._died, results, True,
        )  # fmt: skip
        if mistake != play.EVERY_CHOICE_FITS:
            self._require_playable(actions, active)
        self._stale = True
        won, _, draw, limit, over = results.flags
        return self._result(results.reward, over, won, draw, limit, results.dead)

    def observe(self, full: bool = False) -> Observation:
        """Return the current observations; the arrays are overwritten by the next call."""
        self._look(full)
        return Observation(self._obs, self._state, self._avail, self._full if full else None)

    def geometry(self) -> Geometry:
        """Return the current distances and directions, which only scripts and SMAC's methods need."""
        self._geometry.refresh(self._backend.units)
        return self._geometry

    def state_parts(self) -> dict[str, np.ndarray]:
        """Return copies of the state's parts by name, as the base computes them."""
        self.geometry()
        super().observe()
        return self._writer.state_parts()

    def _look(self, full: bool) -> None:
        parts = self.parts
        features.observe(parts.layout, parts.state, parts.episodes, self._memory, parts.shown, full)
        self._stale = False

    def _refresh(self) -> None:
        if self._stale:
            self._look(False)


@lru_cache(maxsize=1)
def compiled() -> tuple[type[Simulator], type[CompiledSemantics]]:
    """Return the compiled simulator and semantics, ready to play any map."""
    compiler.prepare(_play_one_step)
    return Simulator, CompiledSemantics


def _play_one_step() -> None:
    """Call every kernel, with the types that it has on all maps and with all flags."""
    spec, one = get_map("3m"), np.ones(1, bool)
    simulator = Simulator(spec, 1)
    semantics = CompiledSemantics(spec, SkirmishArgs(map_name="3m"), simulator)
    simulator.reset(one, np.zeros(1, np.int64))
    semantics.begin(one)
    semantics.observe(full=True)
    semantics.step(np.ones((1, spec.n_agents), np.int64), one)
