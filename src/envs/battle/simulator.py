"""The built-in battle simulator: a batch of small battles in NumPy, with the same interface as the real game.

It is not StarCraft II (docs/skirmish.md). One agent step is 8 game loops, played as 4 substeps of 2. In a substep,
units choose targets (every other substep), ready weapons fire simultaneously, units walk and push each other apart.
Idle allies (STOP) fire at enemies in their weapon's reach and do not move. A chasing unit stands still for a moment
after each shot; there is no turning and no acceleration.

A slot's battle is a function of its seed and its orders, bit for bit: all operations are elementwise over slots, sums
over units have a fixed order, and no function is used whose last bit depends on the position in a SIMD vector.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from omagd.envs.battle.backend import Order, Units
from omagd.envs.battle.combat import acquire, heal, regenerate, shoot, take_orders
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.physics import Movement, Pairs, build_terrain, memory_size
from omagd.envs.battle.roster import Battle, Roster
from omagd.envs.battle.starts import start_positions

LOOPS_PER_STEP, LOOPS_PER_SUBSTEP = 8, 2
SUBSTEPS = LOOPS_PER_STEP // LOOPS_PER_SUBSTEP
SLOTS_AT_ONCE, PAIRS_AT_ONCE = 64, 262144  # computed together, to stay within the processor's cache
SIGHT = {"1": 6.0, "2": 6.5, "3": 7.0, "4": 7.5, "5": 8.0, "6": 8.5, "7": 9.0, "8": 9.0, "9": 9.0, "A": 9.0}


class Simulator:
    """`BattleBackend` of `skirmish`. The arrays in `units` are views that change with each step.

    Args:
        map_spec: the map. n_slots: B.
        difficulty: the game's difficulty ("1" to "9", "A"). Here: the distance at which the enemy looks for targets, 6
            cells at "1", 9 from "7" on.
    """

    def __init__(self, map_spec: MapSpec, n_slots: int, *, difficulty: str = "7") -> None:
        self.n_slots, self._spec, self._sight = n_slots, map_spec, SIGHT[difficulty]
        self.terrain = build_terrain(map_spec)
        self._roster = Roster(map_spec)
        self._movement = Movement(map_spec, self._roster, self.terrain)
        self._battle = Battle.empty(self._roster.total, n_slots)
        self._cooldown = np.zeros((self._roster.total, n_slots), np.float32)
        self._alive = np.zeros((self._roster.total, n_slots), bool)
        units = self._roster.total
        self._at_once = min(n_slots, max(SLOTS_AT_ONCE, PAIRS_AT_ONCE // units**2))
        self._memory = np.empty(memory_size(units, self._at_once), np.float32)
        self._pairs: dict[int, Pairs] = {}  # by number of slots; all share the memory
        self.units = self._views()

    def _views(self) -> Units:
        battle, roster, shape = self._battle, self._roster, (self._roster.total, self.n_slots)
        health_max, shield_max, kind = (
            np.broadcast_to(values, shape) for values in (roster.health_max, roster.shield_max, roster.type_id)
        )
        points = battle.health, health_max, battle.shield, shield_max
        arrays = battle.x, battle.y, *points, battle.energy, self._cooldown, kind, self._alive
        return Units(*(values.T for values in arrays))

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in the slots `which` ([B] bool), slot b from `seeds[b]`."""
        slots = np.flatnonzero(which)
        roster, n = self._roster, self._roster.n
        battle = Battle.empty(roster.total, slots.size)
        position, goals = start_positions(self._spec, np.asarray(seeds)[slots])
        battle.x[...], battle.y[...] = position
        battle.goal_x[...], battle.goal_y[...] = goals
        if self._spec.enemy_waits:
            battle.goal_x[n:], battle.goal_y[n:] = battle.x[n:], battle.y[n:]
        battle.health[...], battle.shield[...], battle.energy[...] = roster.health_max, roster.shield_max, roster.energy
        battle.alive[...] = 1
        battle.order[:n] = Order.STOP
        battle.order[n:] = Order.ATTACK
        self._battle.put(slots, battle)
        self._publish()

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Give orders ([B, n] `Order`, [B, n], [B, n, 2]) to the allies of the active slots and play 8 game loops."""
        if active.all() and self.n_slots <= self._at_once:
            self._play(self._battle, order.T, target.T, dest.swapaxes(0, 1))
        elif active.any():
            playing = np.flatnonzero(active)
            for slots in np.array_split(playing, math.ceil(playing.size / self._at_once)):
                part = self._battle.take(slots)
                self._play(part, order[slots].T, target[slots].T, dest[slots].swapaxes(0, 1))
                self._battle.put(slots, part)
        self._publish()

    def _play(self, battle: Battle, order: np.ndarray, target: np.ndarray, dest: np.ndarray) -> None:
        take_orders(self._roster, battle, order, target, dest)
        slots = battle.slots.size
        if slots not in self._pairs:
            self._pairs[slots] = Pairs(self._roster, slots, self._memory)
        for substep in range(SUBSTEPS):
            self._substep(battle, self._pairs[slots], choose=substep % 2 == 0)
        regenerate(self._roster, battle, LOOPS_PER_STEP)

    def _substep(self, battle: Battle, pairs: Pairs, choose: bool) -> None:
        roster = self._roster
        pairs.measure(battle)
        if choose:
            acquire(roster, battle, pairs, self._sight)
        aiming = (battle.target >= 0) & (battle.of_target(battle.alive) > 0)
        dx, dy = battle.of_target(pairs.x) - pairs.x, battle.of_target(pairs.y) - pairs.y
        in_reach = aiming & (np.sqrt(dx * dx + dy * dy) <= roster.reach_of(battle.target))
        shoot(roster, battle, in_reach)
        if roster.healers:
            heal(roster, battle, in_reach, LOOPS_PER_SUBSTEP)
        np.greater(battle.health, 0, out=battle.alive, casting="unsafe")
        self._movement.walk(battle, pairs, aiming, in_reach, LOOPS_PER_SUBSTEP)
        battle.timer -= LOOPS_PER_SUBSTEP
        # A delay of less than a substep counts towards the next shot, so that the average rate of fire is right.
        np.copyto(battle.timer, 0, where=battle.timer <= -LOOPS_PER_SUBSTEP)

    def _publish(self) -> None:
        np.maximum(self._battle.timer, 0, out=self._cooldown)
        np.greater(self._battle.alive, 0, out=self._alive)

    def targets(self, slot: int) -> np.ndarray:
        """Return [U], the index of the unit in reach that each unit attacks or heals; -1 for none."""
        battle, roster = self._battle, self._roster
        target = battle.target[:, slot]
        at, everyone = np.maximum(target, 0), np.arange(roster.total)
        x, y, alive = battle.x[:, slot], battle.y[:, slot], battle.alive[:, slot] > 0
        near = np.hypot(x[at] - x, y[at] - y) <= roster.reach[everyone, at]
        return np.where((target >= 0) & alive & alive[at] & near, target, -1)

    def snapshot(self) -> dict[str, Any]:
        """Return the complete state as arrays."""
        return {"floats": self._battle.floats.copy(), "ints": self._battle.ints.copy()}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot of a simulator with the same map and number of slots. Errors: ValueError."""
        saved, own = snapshot["floats"].shape, self._battle.floats.shape
        if saved != own:
            raise ValueError(f"the snapshot is of {saved[1]} units in {saved[2]} slots, not {own[1]} in {own[2]}")
        np.copyto(self._battle.floats, snapshot["floats"])
        np.copyto(self._battle.ints, snapshot["ints"])
        self._publish()
