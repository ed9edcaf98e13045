"""SMAC's observations and state: sizes, layout, and the code that fills them.

Source: oxwhirl/smac, starcraft2.py, `get_obs_agent` and `get_state`. Every number that may appear is computed once into
one row per battle; hidden ones are zeroed by a bit mask, and observations and state are gathered by index. So a hidden
entry is exactly zero, and a visible one is bit-equal in `obs` and `full_obs`.
Shapes: B slots, n agents, m enemies, U = n + m units, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from omagd.config.env_info import EntityLayout, EnvInfo, StateLayout
from omagd.envs.battle.actions import NORTH, WEST, Geometry, GridLookup
from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.backend import Terrain, Units
from omagd.envs.battle.maps import HEALING, SIGHT_RANGE, MapSpec

N_MOVES, N_PATHING, N_HEIGHT = WEST - NORTH + 1, 8, 9
_TINY = np.float32(1e-6)

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

    Args:
        names: unit types in the order of their ids. spec: the map.

    Attributes:
        ally_onehot, enemy_onehot: [T + 1, unit_type_bits] float32.
        max_cooldown: [T + 1] float32, game loops (medivac: energy).
        medivac: [T + 1] bool.
    """

    def __init__(self, names: Sequence[str], spec: MapSpec) -> None:
        self.ally_onehot = _onehot(names, spec.ally_types, spec.unit_type_bits)
        enemy_types = ENEMY_TYPES.get(spec.map_type, spec.ally_types)
        self.enemy_onehot = _onehot(names, enemy_types, spec.unit_type_bits)
        cooldowns = [MAX_COOLDOWN.get(name, DEFAULT_MAX_COOLDOWN) for name in (*names, "")]
        self.max_cooldown = np.array(cooldowns, np.float32)
        self.medivac = np.array([name == "medivac" for name in (*names, "")])


def _onehot(names: Sequence[str], order: Sequence[str], bits: int) -> np.ndarray:
    table = np.zeros((len(names) + 1, bits), np.float32)
    if bits:
        for position, name in enumerate(order):
            table[names.index(name), position] = 1.0
    return table


def named_parts(row: np.ndarray, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return views of consecutive parts of `row` [..., L] by name, each [..., *shape]."""
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = zip(shapes.items(), np.split(row, ends[:-1], axis=-1), strict=True)
    return {name: part.reshape(*row.shape[:-1], *shape) for (name, shape), part in parts}


class FeatureWriter:
    """Fills observations and states of one map.

    Args:
        spec: the map. args: flags. tables: unit tables. terrain: of the map. n_slots: B.

    Attributes:
        direction: [B, n, 2] float64, unit vectors of the agents' view directions, if the variant shows them.
    """

    def __init__(self, spec: MapSpec, args: BattleArgs, tables: UnitTables, terrain: Terrain, n_slots: int) -> None:
        variant = args.variant
        self._args, self._tables, self._spec, self._variant = args, tables, spec, variant
        self.direction = np.zeros((n_slots, spec.n_agents, 2))
        self._n, self._m, self._total = spec.n_agents, spec.n_enemies, spec.n_agents + spec.n_enemies
        self._bits, self._heals = spec.unit_type_bits, spec.map_type in HEALING
        self._shields = spec.a_race == "P", spec.b_race == "P"
        n, total = self._n, self._total
        # Per unit: health, shield, type bits (these three also in others' observations), cooldown or energy, x, y.
        self._first_bit = 1 + any(self._shields)
        self._shared = self._first_bit + self._bits
        self._unit = np.zeros((n_slots, self._shared + 3, total), np.float32)
        # Per pair (agent, unit): attack available (allies: 1), distance, dx, dy, and the three shared features.
        self._pair = np.zeros((n_slots, 4 + self._shared, n, total), np.float32)
        self._pair[:, 0, :, :n] = 1.0
        shapes = {
            "zero": (1,),
            "pair": self._pair.shape[1:],
            "unit": self._unit.shape[1:],
            "move": (n, N_MOVES),
            "pathing": (n, N_PATHING * args.obs_pathing_grid),
            "height": (n, N_HEIGHT * args.obs_terrain_height),
            "seen_action": (n, n, variant.n_actions(spec) * args.obs_last_action),
            "action": (n, variant.n_actions(spec) * args.state_last_action),
            "elapsed": (1,),
            "own_place": (n, 2 * variant.own_place),
            "direction": (n, 2 * variant.direction),
        }
        length = sum(math.prod(shape) for shape in shapes.values())
        self._row = np.zeros((n_slots, length), np.float32)
        self._part, at = named_parts(self._row, shapes), named_parts(np.arange(length), shapes)
        # Views made once: a step consists of many small operations.
        part, shared = self._part, self._shared
        self._health, self._ready = self._unit[:, 0], self._unit[:, shared, :n]
        self._where, self._shared_of_units = self._unit[:, shared + 1 :].swapaxes(0, 1), self._unit[:, :shared, None]
        self._attack, self._shared_of_pairs = self._pair[:, 0, :, n:], self._pair[:, 4:]
        self._toward = self._pair[:, 1:4].swapaxes(0, 1)
        self._unit_bits, self._shown_unit = self._unit.view(np.int32), part["unit"].view(np.int32)
        self._pair_bits, self._shown_pair = self._pair.view(np.int32), part["pair"].view(np.int32)
        self._obs_at, self._state_at = self._places_of_obs(at), self._places_of_state(at)
        self._grids = GridLookup(terrain.pathing.astype(np.float32), 1.0), GridLookup(terrain.height, 1.0)
        self._around = (AROUND * args.move_amount).astype(np.int64)[:, None, None]
        x0, y0, x1, y1 = terrain.playable
        self._centre = np.array([terrain.map_x / 2, terrain.map_y / 2])[:, None, None]
        self._extent = np.array([float(x1 - x0), float(y1 - y0)])[:, None, None]

    def _shown_of(self, side: int, health: bool) -> list[int]:
        """Return the features shown of a unit of that side (0: allies): health and shield if `health`, type bits."""
        points = [0, 1] if self._shields[side] else [0]
        return [*(points if health else []), *range(self._first_bit, self._shared)]

    def _places_of_obs(self, at: dict[str, np.ndarray]) -> np.ndarray:
        """Return [n * obs_dim], the place in the row of each observed number, in the order of `get_obs_agent`."""
        args, n = self._args, self._n
        agents = np.arange(n)[:, None]
        enemies = np.broadcast_to(np.arange(n, self._total), (n, self._m))
        others = np.array([[j for j in range(n) if j != i] for i in range(n)], np.int64).reshape(n, n - 1)
        blocks = [at["move"], at["pathing"], at["height"]]
        for side, units in ((1, enemies), (0, others)):
            features = [0, 1, 2, 3, *(4 + feature for feature in self._shown_of(side, args.obs_all_health))]
            block = np.stack([at["pair"][feature][agents, units] for feature in features], axis=-1)
            if side == 0 and not self._variant.ally_types:
                block[..., block.shape[-1] - self._bits :] = at["zero"][0]
            if args.obs_last_action and side == 0:
                block = np.concatenate([block, at["seen_action"][agents, units]], axis=-1)
            blocks.append(block.reshape(n, -1))
        own = at["unit"][self._shown_of(0, args.obs_own_health or args.obs_all_health), :n].T
        first_bit = own.shape[1] - self._bits
        blocks += [own[:, :first_bit], at["own_place"], at["direction"], own[:, first_bit:]]
        if args.obs_timestep_number:
            time = [at["zero"][0], at["elapsed"][0]][not self._variant.padded_time :]
            blocks.append(np.broadcast_to(time, (n, len(time))))
        return np.concatenate(blocks, axis=1).ravel()

    def _places_of_state(self, at: dict[str, np.ndarray]) -> np.ndarray:
        """Return [state_dim], the place in the row of each entry of the state, in the order of `get_state`."""
        n, ready = self._n, self._shared
        blocks = []
        for side, units in enumerate((slice(0, n), slice(n, None))):
            first, *others = self._shown_of(side, True)
            middle = ([ready] if side == 0 else []) + [ready + 1, ready + 2]
            block = at["unit"][[first, *middle, *others], units].T
            if side == 0:
                first_bit = block.shape[1] - self._bits
                block = np.concatenate([block[:, :first_bit], at["direction"], block[:, first_bit:]], axis=1)
            blocks.append(block.ravel())
        blocks.append(at["action"].ravel())
        if self._args.state_timestep_number:
            blocks.append(at["elapsed"])
        return np.concatenate(blocks)

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
        args, part, n, ready, unit = self._args, self._part, self._n, self._shared, self._unit
        np.divide(units.health, np.maximum(units.health_max, _TINY), out=self._health)
        if self._first_bit == 2:
            np.divide(units.shield, np.maximum(units.shield_max, _TINY), out=unit[:, 1])
        if self._bits:
            ally, enemy = self._tables.ally_onehot, self._tables.enemy_onehot
            unit[:, self._first_bit : ready, :n] = ally.take(units.type_id[:, :n], axis=0).swapaxes(1, 2)
            unit[:, self._first_bit : ready, n:] = enemy.take(units.type_id[:, n:], axis=0).swapaxes(1, 2)
        self._write_readiness(units)
        np.divide(geometry.xy - self._centre, self._extent, out=self._where, casting="same_kind")
        np.bitwise_and(self._unit_bits, bit_mask(units.alive)[:, None], out=self._shown_unit)
        first = self._variant.n_normal_actions
        self._attack[...] = avail[..., first : first + self._m]
        np.divide(geometry.place, sight, out=self._toward, casting="same_kind")
        self._shared_of_pairs[...] = self._shared_of_units
        part["move"][...] = avail[..., NORTH : WEST + 1]
        if args.obs_pathing_grid or args.obs_terrain_height:
            self._look_around(units)
        if self._variant.own_place:
            share = np.divide(geometry.xy[..., :n], 2 * self._centre).transpose(1, 2, 0)
            part["own_place"][...] = share * units.alive[:, :n, None]
        if self._variant.direction:
            part["direction"][...] = self.direction * units.alive[:, :n, None]
        if args.state_last_action:
            part["action"][...] = last_action
        if args.obs_timestep_number or args.state_timestep_number:
            part["elapsed"][:, 0] = steps / self._spec.limit

    def _look_around(self, units: Units) -> None:
        part, n = self._part, self._n
        cells = np.stack((units.x[:, :n, None], units.y[:, :n, None])).astype(np.int64) + self._around
        alive = units.alive[:, :n, None]
        if self._args.obs_pathing_grid:
            part["pathing"][...] = self._grids[0].read(cells[..., :N_PATHING].copy()) * alive
        if self._args.obs_terrain_height:
            part["height"][...] = self._grids[1].read(cells) * alive

    def write_obs(self, last_action: np.ndarray, seen: np.ndarray, out: np.ndarray) -> None:
        """Write the observations [B, n, obs_dim] into `out`. seen: [B, n, U] bool, units visible to each agent."""
        shown = bit_mask(seen)
        np.bitwise_and(self._pair_bits, shown[:, None], out=self._shown_pair)
        if self._args.obs_last_action:
            actions = last_action.view(np.int32)[:, None]
            np.bitwise_and(actions, shown[..., : self._n, None], out=self._part["seen_action"].view(np.int32))
        self._row.take(self._obs_at, axis=1, out=out.reshape(len(out), -1), mode="clip")

    def state(self, out: np.ndarray | None = None) -> np.ndarray:
        """Return the state [B, :] float32, in `out` if given: allies, enemies, last actions, elapsed time."""
        return self._row.take(self._state_at, axis=1, out=out, mode="clip")

    def state_parts(self) -> dict[str, np.ndarray]:
        """Return copies of the state's parts: `allies` [B, n, :], `enemies` [B, m, :], and if the flags include them
        `last_action` [B, n, A] and `timestep` [B].
        """
        args, (ally, enemy) = self._args, state_unit_dims(self._spec, self._args)
        shapes: dict[str, tuple[int, ...]] = {"allies": (self._n, ally), "enemies": (self._m, enemy)}
        if args.state_last_action:
            shapes["last_action"] = self._part["action"].shape[1:]
        if args.state_timestep_number:
            shapes["timestep"] = ()
        return named_parts(self.state(), shapes)

    def _write_readiness(self, units: Units) -> None:
        """Write [B, n], remaining cooldown over its maximum; for medivacs that heal, energy over its maximum."""
        kind = units.type_id[:, : self._n]
        left = units.cooldown[:, : self._n]
        if self._heals:
            left = np.where(self._tables.medivac.take(kind), units.energy[:, : self._n], left)
        np.divide(left, self._tables.max_cooldown.take(kind), out=self._ready)


def bit_mask(shown: np.ndarray) -> np.ndarray:
    """Return int32 with all bits set where `shown` (bool), elsewhere zero."""
    return np.negative(shown, dtype=np.int32)
