"""SMACv2's semantics: unit types change from battle to battle, and agents may have a limited field of view.

Source: oxwhirl/smacv2, starcraft2.py. Differences from SMAC: actions that turn the view, sight and attack range by unit
type, which enemies an agent knows of (`EnemyVisibility`); own position and view direction in the observation; allies
win when the enemy has medivacs only, and no reward for regenerating shields. Shapes: as in `semantics`.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.actions import NORTH, SHOOT_RANGE, WEST, Geometry
from omagd.envs.battle.args import N_NORMAL_ACTIONS, SmacV2Args
from omagd.envs.battle.backend import BattleBackend, Order, Units
from omagd.envs.battle.maps import SIGHT_RANGE, MapSpec
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.units import UNIT_ID
from omagd.envs.protocol import StepResult
from omagd.utils.seeding import generator

# (sight, attack range) in cells. Source: oxwhirl/smacv2, starcraft2.py (`unit_sight_range`, `unit_shoot_range`).
RANGES: dict[str, tuple[float, float]] = {
    "marine": (9, 5), "marauder": (10, 6), "medivac": (11, 4), "stalker": (10, 6), "zealot": (9, 0.1),
    "colossus": (10, 7), "zergling": (8, 0.1), "hydralisk": (9, 5), "baneling": (8, 0.25),
}  # fmt: skip
MOVE_SECTORS = (1, 3, 0, 2)  # the sectors north, south, east, west of four
_TINY = 1e-7


class Vision:
    """Sight range, attack range and view direction of all agents.

    Attributes:
        sight, reach: [B, n, 1] float64, cells. direction: [B, n, 2] float64, unit vectors.
    """

    def __init__(self, args: SmacV2Args, n_slots: int, n_agents: int) -> None:
        self._args, self._n = args, n_agents
        ranges = np.array([RANGES.get(name, (SIGHT_RANGE, SHOOT_RANGE)) for name in UNIT_ID], np.float64)
        self._sight_of, self._reach_of = ranges[:, 0], np.maximum(ranges[:, 1], args.min_attack_range)
        self.sight = np.full((n_slots, n_agents, 1), SIGHT_RANGE)
        self.reach = np.full((n_slots, n_agents, 1), SHOOT_RANGE)
        self.direction = np.zeros((n_slots, n_agents, 2))
        angles = [2 * np.pi * (sector / args.n_sectors) for sector in range(args.n_sectors)]
        self._sectors = np.array([(np.cos(angle), np.sin(angle)) for angle in angles])

    def begin(self, which: np.ndarray, units: Units) -> None:
        """Set the ranges of the units in the slots `which` [B] bool; all agents look east."""
        self.direction[which] = 1.0, 0.0
        if self._args.use_unit_ranges:
            kind = units.type_id[which, : self._n, None]
            self.sight[which], self.reach[which] = self._sight_of.take(kind), self._reach_of.take(kind)

    def turn(self, actions: np.ndarray, active: np.ndarray) -> None:
        """Apply the turns in `actions` [B, n] to the agents of the `active` slots [B]."""
        if not self._args.conic_fov:
            return
        if self._args.change_fov_with_move:
            turns = (actions >= NORTH) & (actions <= WEST)
            sector = np.take(MOVE_SECTORS, actions - NORTH, mode="clip")
        else:
            sector = actions - N_NORMAL_ACTIONS
            turns = (sector >= 0) & (sector < len(self._sectors))
        turns &= active[:, None]
        self.direction[turns] = self._sectors[sector[turns]]

    def in_sight(self, geometry: Geometry) -> np.ndarray:
        """Return [B, n, U] bool: the unit, dead or alive, is within sight range (and sector) of the agent."""
        if self._args.conic_fov:
            return (geometry.place[0] <= self.sight) & self._in_sector(geometry)
        return geometry.place[0] < self.sight

    def in_reach(self, geometry: Geometry) -> np.ndarray:
        """Return [B, n, U] bool, the same for attacks and healing."""
        near = geometry.place[0] <= self.reach
        return near & self._in_sector(geometry) if self._args.conic_fov else near

    def _in_sector(self, geometry: Geometry) -> np.ndarray:
        """Return [B, n, U] bool: the angle to the unit differs by less than half a sector from the view direction.

        As SMACv2's `is_position_in_cone`: the angles are arctangents of slopes, without the sign of dx, so an agent
        that looks east sees to the west, too.
        """
        dx, dy = geometry.place[1], geometry.place[2]
        right = dx > 0
        dx = np.where(right, np.maximum(dx, _TINY), np.minimum(dx, -_TINY))
        view_x, view_y = self.direction[..., :1], self.direction[..., 1:]
        view_x = np.where(right, np.maximum(view_x, _TINY), np.minimum(view_x, -_TINY))
        return np.abs(np.arctan(dy / dx) - np.arctan(view_y / view_x)) < (2 * np.pi) / len(self._sectors) / 2


class EnemyVisibility:
    """SMACv2's rule by which agents know of enemies; it depends on the order in which agents observe.

    The first observing agent with an enemy in sight (alive or dead) finds it, and each other agent learns of it with a
    given probability. An enemy that an agent does not know hides itself and all enemies before it from that agent. The
    enemy is forgotten when it or its finder dies.

    Args:
        share: probability that another agent learns of a found enemy. n_slots, n_agents, n_enemies: sizes.
    """

    def __init__(self, share: float, n_slots: int, n_agents: int, n_enemies: int) -> None:
        self._share, self._n = share, n_agents
        self._known = np.zeros((n_slots, n_agents, n_enemies), bool)
        self._finder = np.full((n_slots, n_enemies), -1)
        self._rng = [np.random.default_rng(0) for _ in range(n_slots)]
        self._numbers = np.arange(n_enemies)

    def begin(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start episodes in the slots `which` [B] bool; their random orders follow from `seeds` [B]."""
        self._known[which], self._finder[which] = False, -1
        for slot in np.flatnonzero(which):
            self._rng[slot] = generator(int(seeds[slot]), "look")

    def order(self, slot: int) -> np.ndarray:
        """Return [n], the next random order of a slot's agents."""
        return self._rng[slot].permutation(self._n)

    def look(self, which: np.ndarray, in_sight: np.ndarray, living: np.ndarray) -> np.ndarray:
        """Let all agents observe once; return [B, n, m] bool: enemies that an agent sees if they are in sight.

        which: [B] bool, the slots; other rows are False. in_sight: [B, n, m] bool, dead enemies included.
        living: [B, n] bool, the agents.
        """
        clear = np.zeros_like(self._known)
        for slot in np.flatnonzero(which):
            known, finder = self._known[slot], self._finder[slot]
            for agent in self.order(int(slot)):
                if not living[slot, agent]:
                    continue
                found = in_sight[slot, agent] & (finder < 0)
                if found.any():
                    finder[found] = agent
                    known[:, found] |= self._rng[slot].random((self._n, int(found.sum()))) < self._share
                    known[agent, found] = True
                unknown = np.flatnonzero(~known[agent])
                clear[slot, agent] = self._numbers > (unknown[-1] if len(unknown) else -1)
        return clear

    def forget_dead(self, which: np.ndarray, alive: np.ndarray) -> None:
        """Forget dead units, `alive` [B, n + m] bool, and enemies they had found, in the slots `which` [B] bool."""
        for slot in np.flatnonzero(which):
            known, finder = self._known[slot], self._finder[slot]
            for agent in np.flatnonzero(~alive[slot, : self._n]):
                orphaned = finder == agent
                if orphaned.any():
                    known[:, orphaned], known[agent], finder[orphaned] = False, False, -1
            dead = ~alive[slot, self._n :]
            known[:, dead], finder[dead] = False, -1


class V2Semantics(BattleSemantics):
    """`BattleSemantics` with SMACv2's rules. Observations follow from the seed, however often they are read."""

    def __init__(self, spec: MapSpec, args: SmacV2Args, backend: BattleBackend) -> None:
        super().__init__(spec, args, backend)
        sizes = backend.n_slots, spec.n_agents, spec.n_enemies
        self._vision = Vision(args, *sizes[:2])
        self._sight, self._writer.direction = self._vision.sight, self._vision.direction
        self._ledger.keep_scale = not args.reward_scale_fix
        self._visibility = None if args.obs_order_fix else EnemyVisibility(args.prob_obs_enemy, *sizes)
        self._any_medivacs, self._hides, self._masks_reach = True, not args.fully_observable, args.action_mask
        self._scripted = args.heuristic_ai  # the script never turns the view
        if not args.action_mask:
            self._within_reach = np.zeros_like(self._avail)
        self._shown = np.zeros((*sizes[:2], sum(sizes[1:])), bool)

    def begin(self, which: np.ndarray, seeds: np.ndarray | None = None) -> None:
        """Start episodes in the slots `which` [B] bool, where the back-end has started battles from `seeds` [B]."""
        super().begin(which)
        self._vision.begin(which, self._backend.units)
        if self._visibility is not None:
            self._visibility.begin(which, np.zeros(len(which), np.int64) if seeds is None else seeds)
            self._look(which)  # SMACv2's `reset` observes once by itself
        self._look(which)

    def orders(self, actions: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Check `actions` [B, n] of the `active` slots and return (order, target, dest) for the back-end.

        Errors: ValueError for an action that is not available, or a slot whose episode is over.
        """
        order, target, dest = super().orders(actions, active)
        chosen = np.where(active[:, None], actions, 0)
        if not self._masks_reach:
            order[~np.take_along_axis(self._within_reach, chosen[..., None], -1)[..., 0]] = int(Order.NONE)
        if not self._scripted:
            self._vision.turn(chosen, active)
        return order, target, dest

    def finish_step(self, active: np.ndarray) -> StepResult:
        """Return the results of the step that the back-end has just played in the `active` slots [B]."""
        result = super().finish_step(active)
        if self._visibility is not None:
            self._visibility.forget_dead(active, self._backend.units.alive)
        self._look(active)
        return result

    def ranges(self, slot: int) -> tuple[list[float], list[float]]:
        """Return the sight and attack ranges of the agents of a slot, [n] each, cells."""
        return self._vision.sight[slot, :, 0].tolist(), self._vision.reach[slot, :, 0].tolist()

    def _look(self, which: np.ndarray) -> None:
        """Update what the agents of the slots `which` see; once per step."""
        self._refresh()
        geometry, n = self._geometry, self._n
        in_sight = self._vision.in_sight(geometry)
        shown = geometry.pair & in_sight if self._hides else geometry.pair.copy()
        if self._visibility is not None:
            shown[..., n:] &= self._visibility.look(which, in_sight[..., n:], self._backend.units.alive[:, :n])
        self._shown[which] = shown[which]

    def _seen(self) -> np.ndarray:
        return self._shown

    def _fill_masks(self) -> None:
        units, medivac, geometry = self._backend.units, self._medivac(), self._geometry
        self._rules.fill_mask(units, medivac, geometry, self._within_reach, self._vision.in_reach(geometry))
        if not self._masks_reach:
            self._rules.fill_mask(units, medivac, geometry, self._avail, geometry.pair)
