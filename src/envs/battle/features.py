"""SMAC's observations and state as arrays: sizes, layout, and the code that fills them.

Shapes: B slots, n agents, m enemies, U = n + m units, A actions, F features of one block. Blocks are computed feature
by feature, [F, B, n, K], and masked by bits while they are copied into place, so that an entry hidden from an agent is
exactly zero and a visible one is bit-equal in `obs` and `full_obs`.
"""

from __future__ import annotations

import numpy as np

from omagd.config.env_info import EntityLayout
from omagd.envs.battle.actions import N_NORMAL_ACTIONS, NORTH, WEST, GridLookup
from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.backend import Terrain, Units
from omagd.envs.battle.geometry import Geometry
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.tables import UnitTables

SIGHT_RANGE = 9.0
N_MOVES = WEST - NORTH + 1
N_PATHING, N_HEIGHT = 8, 9

# Cells around a unit at which pathing and height are read, in units of `move_amount`; the last is its own cell.
AROUND_X = np.array([0, 0, 2, -2, 1, -1, 1, -1, 0])
AROUND_Y = np.array([2, -2, 0, 0, 1, -1, -1, 1, 0])


def n_actions(spec: MapSpec) -> int:
    """Return A: six that aim at nobody, one for each enemy."""
    return N_NORMAL_ACTIONS + spec.n_enemies


def entity_layout(spec: MapSpec, args: BattleArgs) -> EntityLayout:
    """Return where everything stands in an observation.

    With `obs_timestep_number` SMAC announces one feature but appends it to a block that already has room for it; the
    vector that it returns is longer by one than it says. The layout describes the vector, so `own_dim` grows by two.
    """
    ally_shield, enemy_shield = int(spec.a_race == "P"), int(spec.b_race == "P")
    health, bits = int(args.obs_all_health), spec.unit_type_bits
    own_health = int(args.obs_own_health or args.obs_all_health)
    return EntityLayout(
        move_dim=N_MOVES + N_PATHING * args.obs_pathing_grid + N_HEIGHT * args.obs_terrain_height,
        n_enemies=spec.n_enemies,
        enemy_dim=4 + bits + health * (1 + enemy_shield),
        n_allies=spec.n_agents - 1,
        ally_dim=4 + bits + health * (1 + ally_shield) + (n_actions(spec) if args.obs_last_action else 0),
        own_dim=bits + own_health * (1 + ally_shield) + 2 * args.obs_timestep_number,
        health=4 if args.obs_all_health else -1,
    )


def state_dim(spec: MapSpec, args: BattleArgs) -> int:
    """Return the length of the state."""
    if args.obs_instead_of_state:
        return spec.n_agents * entity_layout(spec, args).obs_dim
    size = spec.n_agents * (4 + (spec.a_race == "P") + spec.unit_type_bits)
    size += spec.n_enemies * (3 + (spec.b_race == "P") + spec.unit_type_bits)
    size += spec.n_agents * n_actions(spec) * args.state_last_action
    return size + args.state_timestep_number


class UnitFeatures:
    """Features of units that do not depend on who looks: shares of health and shield, type bits.

    Attributes:
        health, shield: [B, U] float32 in [0, 1]. onehot_ally: [B, n, bits], onehot_enemy: [B, m, bits] float32.
    """

    def __init__(self, tables: UnitTables, n_agents: int) -> None:
        self._tables, self._n = tables, n_agents

    def refresh(self, units: Units) -> None:
        """Recompute from `units`."""
        self.health = units.health / np.maximum(units.health_max, np.float32(1e-6))
        self.shield = units.shield / np.maximum(units.shield_max, np.float32(1e-6))
        self.onehot_ally = self._tables.ally_onehot.take(units.type_id[:, : self._n], axis=0)
        self.onehot_enemy = self._tables.enemy_onehot.take(units.type_id[:, self._n :], axis=0)


class Block:
    """The part of the observations about one kind of other units (allies or enemies).

    Args:
        shape: (F, B, n, K). start: first feature of the block in an observation.
    """

    def __init__(self, shape: tuple[int, int, int, int], start: int) -> None:
        self.planes = np.zeros(shape, np.float32)
        self._bits = self.planes.view(np.int32)
        self._start = start

    def place(self, dx: np.ndarray, dy: np.ndarray, dist: np.ndarray) -> None:
        """Fill features 1 to 3 from cells, each [B, n, K]."""
        np.divide(dist, SIGHT_RANGE, out=self.planes[1], casting="same_kind")
        np.divide(dx, SIGHT_RANGE, out=self.planes[2], casting="same_kind")
        np.divide(dy, SIGHT_RANGE, out=self.planes[3], casting="same_kind")

    def write(self, obs: np.ndarray, shown: np.ndarray) -> None:
        """Copy the block into `obs` [B, n, obs_dim]; pairs not `shown` [B, n, K] become zero."""
        n_features, n_slots, n, n_units = self.planes.shape
        part = obs[..., self._start : self._start + n_features * n_units].view(np.int32)
        target = part.reshape(n_slots, n, n_units, n_features).transpose(3, 0, 1, 2)
        np.bitwise_and(self._bits, bit_mask(shown), out=target)


class ObsWriter:
    """Fills observations of one map.

    Args:
        spec: map facts. args: flags. terrain: for the pathing and height features. n_slots: B.
    """

    def __init__(self, spec: MapSpec, args: BattleArgs, terrain: Terrain, n_slots: int) -> None:
        self._args, self._n, self._limit = args, spec.n_agents, spec.limit
        self._shield_ally, self._shield_enemy = spec.a_race == "P", spec.b_race == "P"
        layout = self._layout = entity_layout(spec, args)
        enemy_end = layout.move_dim + layout.n_enemies * layout.enemy_dim
        self._enemy = Block((layout.enemy_dim, n_slots, spec.n_agents, layout.n_enemies), layout.move_dim)
        self._ally = Block((layout.ally_dim, n_slots, spec.n_agents, layout.n_allies), enemy_end)
        self._ally.planes[0] = 1.0
        self._pathing = GridLookup(terrain.pathing.astype(np.float32), 1.0)
        self._height = GridLookup(terrain.height, 1.0)
        self._around_x = (AROUND_X * args.move_amount).astype(np.int64)
        self._around_y = (AROUND_Y * args.move_amount).astype(np.int64)

    def fill(
        self,
        units: Units,
        geometry: Geometry,
        features: UnitFeatures,
        avail: np.ndarray,
        last_action: np.ndarray,
        steps: np.ndarray,
        obs: np.ndarray,
        full_obs: np.ndarray | None,
    ) -> None:
        """Write `obs` and, unless None, `full_obs`, both [B, n, obs_dim].

        avail: [B, n, A] bool. last_action: [B, n, A] float32. steps: [B], steps played in the episode.
        """
        self._compute_enemies(geometry, features, avail)
        self._compute_allies(geometry, features, last_action)
        self._write_own(units, features, avail, steps, obs)
        self._enemy.write(obs, geometry.enemy_pair & (geometry.enemy_dist < SIGHT_RANGE))
        self._ally.write(obs, geometry.ally_pair & (geometry.ally_dist < SIGHT_RANGE))
        if full_obs is not None:
            move_dim, own_dim = self._layout.move_dim, self._layout.own_dim
            full_obs[..., :move_dim] = obs[..., :move_dim]
            full_obs[..., full_obs.shape[-1] - own_dim :] = obs[..., obs.shape[-1] - own_dim :]
            self._enemy.write(full_obs, geometry.enemy_pair)
            self._ally.write(full_obs, geometry.ally_pair)

    def _compute_enemies(self, geometry: Geometry, features: UnitFeatures, avail: np.ndarray) -> None:
        planes, n, at = self._enemy.planes, self._n, 4
        planes[0] = avail[..., N_NORMAL_ACTIONS:]
        self._enemy.place(geometry.enemy_dx, geometry.enemy_dy, geometry.enemy_dist)
        if self._args.obs_all_health:
            planes[at] = features.health[:, None, n:]
            at += 1
            if self._shield_enemy:
                planes[at] = features.shield[:, None, n:]
                at += 1
        planes[at:] = features.onehot_enemy.transpose(2, 0, 1)[:, :, None, :]

    def _compute_allies(self, geometry: Geometry, features: UnitFeatures, last_action: np.ndarray) -> None:
        planes, others, at = self._ally.planes, geometry.others, 4
        self._ally.place(geometry.ally_dx, geometry.ally_dy, geometry.ally_dist)
        if self._args.obs_all_health:
            planes[at] = features.health.take(others, axis=1)
            at += 1
            if self._shield_ally:
                planes[at] = features.shield.take(others, axis=1)
                at += 1
        bits = features.onehot_ally.shape[-1]
        if bits:
            planes[at : at + bits] = features.onehot_ally.take(others, axis=1).transpose(3, 0, 1, 2)
            at += bits
        if self._args.obs_last_action:
            planes[at:] = last_action.take(others, axis=1).transpose(3, 0, 1, 2)

    def _write_own(
        self, units: Units, features: UnitFeatures, avail: np.ndarray, steps: np.ndarray, obs: np.ndarray
    ) -> None:
        args, n, at = self._args, self._n, N_MOVES
        alive = units.alive[:, :n]
        obs[..., :N_MOVES] = avail[..., NORTH : WEST + 1]
        if args.obs_pathing_grid or args.obs_terrain_height:
            cell_x = units.x[:, :n, None].astype(np.int64) + self._around_x
            cell_y = units.y[:, :n, None].astype(np.int64) + self._around_y
            if args.obs_pathing_grid:
                pathing = self._pathing.read(cell_x[..., :N_PATHING], cell_y[..., :N_PATHING])
                obs[..., at : at + N_PATHING] = pathing * alive[..., None]
                at += N_PATHING
            if args.obs_terrain_height:
                obs[..., at : at + N_HEIGHT] = self._height.read(cell_x, cell_y) * alive[..., None]
        at = obs.shape[-1] - self._layout.own_dim
        if args.obs_own_health or args.obs_all_health:
            np.multiply(features.health[:, :n], alive, out=obs[..., at])
            at += 1
            if self._shield_ally:
                np.multiply(features.shield[:, :n], alive, out=obs[..., at])
                at += 1
        bits = features.onehot_ally.shape[-1]
        if bits:
            np.multiply(features.onehot_ally, alive[..., None], out=obs[..., at : at + bits])
        if args.obs_timestep_number:
            obs[..., -1] = (steps / self._limit)[:, None]


class StateWriter:
    """Fills the state of one map: allies, enemies, last actions, elapsed time.

    Args:
        spec: map facts. args: flags. tables: unit tables. terrain: for centre and size of the map.
    """

    def __init__(self, spec: MapSpec, args: BattleArgs, tables: UnitTables, terrain: Terrain) -> None:
        self._args, self._n, self._m, self._limit = args, spec.n_agents, spec.n_enemies, spec.limit
        self._tables, self._heals = tables, spec.map_type == "MMM"
        self._ally_dim = 4 + (spec.a_race == "P") + spec.unit_type_bits
        self._enemy_dim = 3 + (spec.b_race == "P") + spec.unit_type_bits
        self._bits = spec.unit_type_bits
        x0, y0, x1, y1 = terrain.playable
        self._centre = (terrain.map_x / 2, terrain.map_y / 2)
        self._extent = (float(x1 - x0), float(y1 - y0))

    def fill(
        self, units: Units, features: UnitFeatures, last_action: np.ndarray, steps: np.ndarray, out: np.ndarray
    ) -> None:
        """Write the state into `out` [B, state_dim] float32. last_action: [B, n, A] float32. steps: [B]."""
        n, m, bits = self._n, self._m, self._bits
        end = n * self._ally_dim
        ally = out[:, :end].reshape(-1, n, self._ally_dim)
        enemy = out[:, end : end + m * self._enemy_dim].reshape(-1, m, self._enemy_dim)
        ally[..., 0] = features.health[:, :n]
        ally[..., 1] = self._readiness(units)
        enemy[..., 0] = features.health[:, n:]
        self._place(units, slice(0, n), ally[..., 2:4])
        self._place(units, slice(n, None), enemy[..., 1:3])
        if self._ally_dim - bits == 5:
            ally[..., 4] = features.shield[:, :n]
        if self._enemy_dim - bits == 4:
            enemy[..., 3] = features.shield[:, n:]
        if bits:
            ally[..., -bits:] = features.onehot_ally
            enemy[..., -bits:] = features.onehot_enemy
        hide_dead(ally, units.alive[:, :n])
        hide_dead(enemy, units.alive[:, n:])
        end += m * self._enemy_dim
        if self._args.state_last_action:
            size = last_action.shape[1] * last_action.shape[2]
            out[:, end : end + size] = last_action.reshape(-1, size)
        if self._args.state_timestep_number:
            out[:, -1] = steps / self._limit

    def _readiness(self, units: Units) -> np.ndarray:
        """Return [B, n] share of the cooldown that is left; for medivacs of MMM maps share of energy."""
        kind = units.type_id[:, : self._n]
        left = units.cooldown[:, : self._n]
        if self._heals:
            left = np.where(self._tables.medivac.take(kind), units.energy[:, : self._n], left)
        return left / self._tables.max_cooldown.take(kind)

    def _place(self, units: Units, which: slice, out: np.ndarray) -> None:
        out[..., 0] = (units.x[:, which].astype(np.float64) - self._centre[0]) / self._extent[0]
        out[..., 1] = (units.y[:, which].astype(np.float64) - self._centre[1]) / self._extent[1]


def bit_mask(shown: np.ndarray) -> np.ndarray:
    """Return int32 with all bits set where `shown` (bool), else zero."""
    return np.negative(shown, dtype=np.int32)


def hide_dead(block: np.ndarray, alive: np.ndarray) -> None:
    """Zero the rows of `block` [B, K, F] float32 where not `alive` [B, K]."""
    bits = block.view(np.int32)
    np.bitwise_and(bits, bit_mask(alive)[..., None], out=bits)
