"""SMAC's observations and state: sizes, layout, and the code that fills them.

Source: oxwhirl/smac, starcraft2.py, `get_obs_agent` and `get_state`. Every number that may appear is computed once per
step: a hidden entry is exactly zero, and a visible one is bit-equal in `obs` and `full_obs`.
Shapes: B slots, n agents, m enemies, U = n + m units, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omagd.config.env_info import EntityLayout, EnvInfo, StateLayout
from omagd.envs.battle.actions import NORTH, WEST, Geometry, GridLookup
from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.backend import Terrain, Units
from omagd.envs.battle.maps import HEALING, SIGHT_RANGE, MapSpec
from omagd.envs.battle.units import UNIT_ID

N_MOVES, N_PATHING, N_HEIGHT = WEST - NORTH + 1, 8, 9
_TINY, _ZERO = np.float32(1e-6), np.float32(0)

# Cells around a unit at which pathing and height are read, in units of `move_amount`; the last is its own cell
# (`get_surrounding_points`).
AROUND = np.array([[0, 0, 2, -2, 1, -1, 1, -1, 0], [2, -2, 0, 0, 1, -1, -1, 1, 0]])


def entity_layout(spec: MapSpec, args: BattleArgs) -> EntityLayout:
    """Return the layout of an observation.

    With `obs_timestep_number`, SMAC's `get_obs_own_feats_size` counts one feature, and `get_obs_agent` appends another
    one to that block: the vector is longer by one than SMAC's `get_obs_size`. This layout describes the vector, so
    `own_dim` grows by two. SMACv2 fixed that: there it grows by one.
    """
    variant, ally_shield, enemy_shield = args.variant, int(spec.a_race == "P"), int(spec.b_race == "P")
    health, bits = int(args.obs_all_health), spec.unit_type_bits
    own_health = int(args.obs_own_health or args.obs_all_health)
    before_bits = own_health * (1 + ally_shield) + 2 * (variant.own_place + variant.direction)
    heals = spec.map_type in HEALING and bits > 0
    first = [4 + health * (1 + shield) if bits else -1 for shield in (ally_shield, enemy_shield)]
    return EntityLayout(
        move_dim=N_MOVES + N_PATHING * args.obs_pathing_grid + N_HEIGHT * args.obs_terrain_height,
        n_enemies=spec.n_enemies,
        enemy_dim=4 + bits + health * (1 + enemy_shield),
        n_allies=spec.n_agents - 1,
        ally_dim=4 + bits + health * (1 + ally_shield) + (variant.n_actions(spec) if args.obs_last_action else 0),
        own_dim=before_bits + bits + (1 + variant.padded_time) * args.obs_timestep_number,
        health=4 if args.obs_all_health else -1,
        sight=spec.sight_range,
        healer=before_bits + spec.ally_types.index("medivac") if heals else -1,
        ally_types=first[0] if variant.ally_types else -1,
        enemy_types=first[1],
        n_types=bits,
    )


def state_unit_dims(spec: MapSpec, args: BattleArgs) -> tuple[int, int]:
    """Return the number of features of an ally and of an enemy in the state."""
    ally = 4 + (spec.a_race == "P") + 2 * args.variant.direction + spec.unit_type_bits
    return ally, 3 + (spec.b_race == "P") + spec.unit_type_bits


def state_component(spec: MapSpec, args: BattleArgs) -> list[int]:
    """Return the lengths of the state's parts: allies, enemies, last actions, elapsed time; or of all observations."""
    if args.obs_instead_of_state:
        return [entity_layout(spec, args).obs_dim] * spec.n_agents
    ally, enemy = state_unit_dims(spec, args)
    parts = [spec.n_agents * ally, spec.n_enemies * enemy]
    parts += [spec.n_agents * args.variant.n_actions(spec)] * args.state_last_action
    return parts + [1] * args.state_timestep_number


def battle_info(name: str, spec: MapSpec, args: BattleArgs, scripted_policies: tuple[str, ...] = ()) -> EnvInfo:
    """Return the sizes of environment `name` on a map."""
    variant, layout, state_dim = args.variant, entity_layout(spec, args), sum(state_component(spec, args))
    ally, enemy = state_unit_dims(spec, args)
    last = variant.n_actions(spec) * args.state_last_action
    units = None if args.obs_instead_of_state else StateLayout(spec.n_agents, ally, spec.n_enemies, enemy, last)
    return EnvInfo(
        name, spec.name, spec.n_agents, variant.n_actions(spec), layout.obs_dim, state_dim, spec.limit,
        n_normal_actions=variant.n_normal_actions, layout=layout, scripted_policies=scripted_policies,
        state_layout=units,
    )  # fmt: skip


# Source: oxwhirl/smac, starcraft2.py, `unit_max_cooldown`. A medivac shows its energy instead, of 200.
MAX_COOLDOWN = {
    "marine": 15.0, "marauder": 25.0, "medivac": 200.0, "stalker": 35.0, "zealot": 22.0, "colossus": 24.0,
    "hydralisk": 10.0, "zergling": 11.0, "baneling": 1.0,
}  # fmt: skip
DEFAULT_MAX_COOLDOWN = 15.0

# SMAC's `get_unit_type_id` numbers the enemies' zealots and stalkers in the opposite order to the allies'.
ENEMY_TYPES: dict[str, tuple[str, ...]] = {"stalkers_and_zealots": ("zealot", "stalker")}


class UnitTables:
    """Tables over type ids; the last row belongs to id -1 (unused column).

    Attributes:
        ally_onehot, enemy_onehot: [T + 1, unit_type_bits] float32.
        max_cooldown: [T + 1] float32, game loops (medivac: energy).
        medivac: [T + 1] bool.
    """

    def __init__(self, spec: MapSpec) -> None:
        self.ally_onehot = _onehot(spec.ally_types, spec.unit_type_bits)
        enemy_types = ENEMY_TYPES.get(spec.map_type, spec.ally_types)
        self.enemy_onehot = _onehot(enemy_types, spec.unit_type_bits)
        names = (*UNIT_ID, "")
        cooldowns = [MAX_COOLDOWN.get(name, DEFAULT_MAX_COOLDOWN) for name in names]
        self.max_cooldown = np.array(cooldowns, np.float32)
        self.medivac = np.array([name == "medivac" for name in names])


def _onehot(order: Sequence[str], bits: int) -> np.ndarray:
    table = np.zeros((len(UNIT_ID) + 1, bits), np.float32)
    if bits:
        for position, name in enumerate(order):
            table[UNIT_ID[name], position] = 1.0
    return table


class FeatureWriter:
    """Fills observations and states of one map.

    Attributes:
        direction: [B, n, 2] float64, unit vectors of the agents' view directions, if the variant shows them.
    """

    def __init__(self, spec: MapSpec, args: BattleArgs, tables: UnitTables, terrain: Terrain, n_slots: int) -> None:
        self._spec, self._args, self._tables, self._n = spec, args, tables, spec.n_agents
        self._heals = spec.map_type in HEALING
        self._sides = slice(0, spec.n_agents), slice(spec.n_agents, None)
        self._points_of = 1 + (spec.a_race == "P"), 1 + (spec.b_race == "P")  # health, and shield where units have one
        self._others = np.array([[j for j in range(self._n) if j != i] for i in range(self._n)], np.int64)
        self.direction = np.zeros((n_slots, self._n, 2))
        self._grids = GridLookup(terrain.pathing.astype(np.float32), 1.0), GridLookup(terrain.height, 1.0)
        self._around = (AROUND * args.move_amount).astype(np.int64)[:, None, None]
        x0, y0, x1, y1 = terrain.playable
        self._centre = np.array([terrain.map_x / 2, terrain.map_y / 2])
        self._extent = np.array([float(x1 - x0), float(y1 - y0)])

    def refresh(
        self,
        units: Units,
        geometry: Geometry,
        avail: np.ndarray,
        last_action: np.ndarray,
        steps: np.ndarray,
        sight: float | np.ndarray = SIGHT_RANGE,
    ) -> None:
        """Compute all numbers of the current step.

        avail: [B, n, A] bool. last_action: [B, n, A] float32. steps: [B], steps played in the episode.
        sight: cells, or [B, n, 1] cells, by which relative positions are divided.
        """
        n, variant, first = self._n, self._args.variant, self._args.variant.n_normal_actions
        self._alive, self._last_action = units.alive[..., None], last_action
        health = units.health / np.maximum(units.health_max, _TINY)
        self._points = np.stack([health, units.shield / np.maximum(units.shield_max, _TINY)], -1)
        ally, enemy = self._tables.ally_onehot, self._tables.enemy_onehot
        self._types = ally.take(units.type_id[:, :n], axis=0), enemy.take(units.type_id[:, n:], axis=0)
        self._ready = self._readiness(units)[..., None]
        xy = np.moveaxis(geometry.xy, 0, -1)
        self._where = ((xy - self._centre) / self._extent).astype(np.float32)
        self._toward = np.moveaxis(geometry.place / sight, 0, -1).astype(np.float32)
        self._attack = avail[..., first : first + self._spec.n_enemies].astype(np.float32)
        self._moves = avail[..., NORTH : WEST + 1].astype(np.float32)
        self._elapsed = (steps / self._spec.limit).astype(np.float32)
        alive = self._alive[:, :n]
        self._ground = self._look_around(units, alive)
        self._place = (xy[:, :n] / (2 * self._centre) * alive).astype(np.float32)[..., : 2 * variant.own_place]
        self._view = (self.direction * alive).astype(np.float32)[..., : 2 * variant.direction]

    def _look_around(self, units: Units, alive: np.ndarray) -> list[np.ndarray]:
        """Return pathing and height around the agents, [B, n, 8] and [B, n, 9], as far as the flags include them."""
        cells = np.stack((units.x[:, : self._n, None], units.y[:, : self._n, None])).astype(np.int64) + self._around
        pathing = [self._grids[0].read(cells[..., :N_PATHING]) * alive] if self._args.obs_pathing_grid else []
        return pathing + ([self._grids[1].read(cells) * alive] if self._args.obs_terrain_height else [])

    def _readiness(self, units: Units) -> np.ndarray:
        """Return [B, n], remaining cooldown over its maximum; for medivacs that heal, energy over its maximum."""
        kind, left = units.type_id[:, : self._n], units.cooldown[:, : self._n]
        if self._heals:
            left = np.where(self._tables.medivac.take(kind), units.energy[:, : self._n], left)
        return left / self._tables.max_cooldown.take(kind)

    def write_obs(self, seen: np.ndarray, out: np.ndarray) -> None:
        """Write the observations [B, n, obs_dim] into `out`. seen: [B, n, U] bool, units visible to each agent."""
        args, n, types = self._args, self._n, self._types[0]
        own_points = self._points[:, :n, : self._points_of[0] * (args.obs_own_health or args.obs_all_health)]
        own = np.where(self._alive[:, :n], np.concatenate([own_points, types], -1), _ZERO)
        width = own_points.shape[-1]
        blocks = [self._moves, *self._ground, self._block(1, seen), self._block(0, seen)]
        blocks += [own[..., :width], self._place, self._view, own[..., width:]]
        if args.obs_timestep_number:
            time = np.broadcast_to(self._elapsed[:, None, None], (len(out), n, 1))
            blocks += [np.zeros_like(time)] * args.variant.padded_time + [time]
        np.concatenate(blocks, -1, out=out)

    def _block(self, side: int, seen: np.ndarray) -> np.ndarray:
        """Return what each agent sees of the other units of a side (0: allies), [B, n, features of all]."""
        args, units, types = self._args, self._sides[side], self._types[side]
        shape = seen[..., units].shape
        points = self._points[:, units, : self._points_of[side] * args.obs_all_health]
        near = self._attack if side else np.ones(shape, np.float32)  # may be attacked; an ally is visible
        shown = [near[..., None], self._toward[:, :, units]]
        of_unit = [points, types if side or args.variant.ally_types else np.zeros_like(types)]
        if side == 0 and args.obs_last_action:
            of_unit.append(self._last_action)
        shown += [np.broadcast_to(part[:, None], (*shape, part.shape[-1])) for part in of_unit]
        block = np.where(seen[..., units, None], np.concatenate(shown, -1), _ZERO)
        if side == 0:
            block = block[:, np.arange(self._n)[:, None], self._others]
        return block.reshape(*shape[:2], -1)

    def state(self, out: np.ndarray) -> np.ndarray:
        """Write the state [B, :] float32 into `out` and return it: allies, enemies, last actions, elapsed time."""
        return np.concatenate([part.reshape(len(out), -1) for part in self.state_parts().values()], 1, out=out)

    def state_parts(self) -> dict[str, np.ndarray]:
        """Return the state's parts: `allies` [B, n, :], `enemies` [B, m, :], and if the flags include them
        `last_action` [B, n, A] and `timestep` [B].
        """
        parts = {}
        for side, name in enumerate(("allies", "enemies")):
            units = self._sides[side]
            points, where = self._points[:, units], self._where[:, units]
            ready, view = ([self._ready], [self._view]) if side == 0 else ([], [])
            shield = points[..., 1 : self._points_of[side]]
            values = np.concatenate([points[..., :1], *ready, where, shield, *view, self._types[side]], -1)
            parts[name] = np.where(self._alive[:, units], values, _ZERO)
        if self._args.state_last_action:
            parts["last_action"] = self._last_action.copy()
        if self._args.state_timestep_number:
            parts["timestep"] = self._elapsed
        return parts
