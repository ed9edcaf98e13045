"""Action masks, observations and state of battles as one kernel; compare `omagd.envs.battle.actions` and `features`.

`o`: the map's `Layout`. Distances are double precision, as in SMAC; each number is rounded to float32 once.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from omagd.envs.battle.actions import MOVE_X, MOVE_Y, NORTH, STOP, reach_of
from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.backend import Terrain, Units
from omagd.envs.battle.compiled import function, kernel, memory_rows
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.tables import BLOCK, WIDTH, Array, Episodes, State
from omagd.envs.battle.features import AROUND, N_HEIGHT, N_MOVES, N_PATHING, UnitTables
from omagd.envs.battle.maps import HEALING, MapSpec
from omagd.envs.protocol import Seen

(
    N, TOTAL, FIRST, HEALS, ALLY_SHIELD, ENEMY_SHIELD, ALL_HEALTH, OWN_HEALTH, BITS, SEEN_ACTION, PATHING, HEIGHT,
    OBS_TIME, INSTEAD, STATE_ACTION, STATE_TIME, LANES,
) = range(17)  # fmt: skip
CENTRE_X, CENTRE_Y, EXTENT_X, EXTENT_Y, LIMIT, SIGHT, REACH = range(7)
HEALTH_MAX, SHIELD_MAX, READY_MAX = range(3)  # rows of `Layout.unit`
HEALTH, SHIELD, PLACE_X, PLACE_Y, READY, DISTANCE, TOWARD_X, TOWARD_Y, UNIT_X, UNIT_Y = range(10)  # of working memory
N_ROWS = UNIT_Y + 1
ZERO, ONE, TINY = np.float32(0), np.float32(1), np.float32(1e-6)


class Layout(NamedTuple):
    """What observations and state contain. U units.

    Attributes:
        fact: [17] int64, sizes and flags; LANES: units up to the end of a block. size: [7] float64. unit: [3, U]
            float32. bits: [U, unit_type_bits] float32. healer: [U] bool. ahead: [2, 4] float64, where a move is
            tested. around: [2, 9] int64, cells that are read.
        pathing, height: [map_x, map_y] bool and float32.
    """

    fact: Array
    size: Array
    unit: Array
    bits: Array
    healer: Array
    ahead: Array
    around: Array
    pathing: Array
    height: Array


def make_layout(spec: MapSpec, args: BattleArgs, tables: UnitTables, terrain: Terrain, units: Units) -> Layout:
    """Return the layout of a map. units: of any battle; kinds, greatest health and shield are the same in all."""
    n, heals, kind = spec.n_agents, spec.map_type in HEALING, units.type_id[0]
    fact = [
        n, n + spec.n_enemies, args.variant.n_normal_actions, heals, spec.a_race == "P", spec.b_race == "P",
        args.obs_all_health, args.obs_own_health or args.obs_all_health, spec.unit_type_bits, args.obs_last_action,
        args.obs_pathing_grid, args.obs_terrain_height, args.obs_timestep_number, args.obs_instead_of_state,
        args.state_last_action, args.state_timestep_number, -(-(n + spec.n_enemies) // BLOCK) * BLOCK,
    ]  # fmt: skip
    x0, y0, x1, y1 = terrain.playable
    sight = spec.sight_range
    size = [terrain.map_x / 2, terrain.map_y / 2, x1 - x0, y1 - y0, spec.limit, sight, reach_of(sight)]
    unit = np.stack([units.health_max[0], units.shield_max[0], tables.max_cooldown[kind]])
    return Layout(
        np.array(fact, np.int64), np.array(size, np.float64), np.maximum(unit, TINY).astype(np.float32),
        np.concatenate([tables.ally_onehot[kind[:n]], tables.enemy_onehot[kind[n:]]]), tables.medivac[kind] & heals,
        np.stack([MOVE_X, MOVE_Y]) * args.move_amount / 2, (AROUND * args.move_amount).astype(np.int64),
        terrain.pathing.copy(), terrain.height.copy(),
    )  # fmt: skip


def working_memory(units: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the working memory of `rows` observers at the same time: [rows, .., U] float32, distance [rows, U]."""
    return np.zeros((rows, N_ROWS, units), np.float32), np.zeros((rows, units))


def shared_memory() -> np.ndarray:
    """Return working memory [.., WIDTH] for agents that are served one after the other; two rows hold distances."""
    return np.zeros((N_ROWS + 2, WIDTH), np.float32)


def one_by_one(o: Layout) -> Layout:
    """Return the layout for a processor that computes one number at a time: no blocks."""
    fact = o.fact.copy()
    fact[LANES] = fact[TOTAL]
    return o._replace(fact=fact)


@function
def read_cell(grid: Array, x: int, y: int, outside: Any) -> Any:
    """Return a map layer's value at a cell, `outside` beyond the map."""
    if x < 0 or y < 0 or x >= grid.shape[0] or y >= grid.shape[1]:
        return outside
    return grid[x, y]


@function
def fill_mask(o: Layout, x: Array, y: Array, alive: Array, distance: Array, i: int, mask: Array) -> None:
    """Write the available actions of agent `i`. distance: [U] float64, to all units."""
    n, total, first, reach = o.fact[N], o.fact[TOTAL], o.fact[FIRST], o.size[REACH]
    for action in range(len(mask)):
        mask[action] = False
    if not alive[i]:
        mask[0] = True
        return
    mask[STOP] = True
    for move in range(N_MOVES):
        ahead_x, ahead_y = np.float64(x[i]) + o.ahead[0, move], np.float64(y[i]) + o.ahead[1, move]
        mask[NORTH + move] = read_cell(o.pathing, int(ahead_x), int(ahead_y), False)
    if o.healer[i]:
        for j in range(n):
            mask[first + j] = alive[j] and not o.healer[j] and distance[j] <= reach
    else:
        for j in range(n, total):
            mask[first + j - n] = alive[j] and distance[j] <= reach


@function
def describe_battle(o: Layout, state: State, w: Array, b: int) -> None:
    """Write the features of battle `b`'s units that do not depend on who looks into the working memory `w` [10, U]."""
    s, cooldown = state.floats[b], state.cooldown[b]
    health, shield, energy, x, y = s[row.HEALTH], s[row.SHIELD], s[row.ENERGY], s[row.X], s[row.Y]
    for i in range(o.fact[TOTAL]):
        w[UNIT_X, i], w[UNIT_Y, i] = x[i], y[i]
        w[HEALTH, i] = health[i] / o.unit[HEALTH_MAX, i]
        w[SHIELD, i] = shield[i] / o.unit[SHIELD_MAX, i]
        w[PLACE_X, i] = (np.float64(x[i]) - o.size[CENTRE_X]) / o.size[EXTENT_X]
        w[PLACE_Y, i] = (np.float64(y[i]) - o.size[CENTRE_Y]) / o.size[EXTENT_Y]
        w[READY, i] = (energy[i] if o.healer[i] else cooldown[i]) / o.unit[READY_MAX, i]


@function
def look_at_all(o: Layout, i: int, w: Array, distance: Array) -> None:
    """Write distance and direction from agent `i` to all units, also as shares of the sight range."""
    own_x, own_y, sight = np.float64(w[UNIT_X, i]), np.float64(w[UNIT_Y, i]), o.size[SIGHT]
    for j in range(o.fact[LANES]):
        dx, dy = np.float64(w[UNIT_X, j]) - own_x, np.float64(w[UNIT_Y, j]) - own_y
        far = math.sqrt(dx * dx + dy * dy)
        distance[j] = far
        w[DISTANCE, j], w[TOWARD_X, j], w[TOWARD_Y, j] = far / sight, dx / sight, dy / sight


@function
def write_surroundings(o: Layout, x: Array, y: Array, i: int, at: int, out: Array) -> int:
    """Write pathing and height around agent `i` from place `at`; return the next place."""
    if o.fact[PATHING]:
        for p in range(N_PATHING):
            cell_x, cell_y = int(x[i]) + o.around[0, p], int(y[i]) + o.around[1, p]
            out[at + p] = ONE if read_cell(o.pathing, cell_x, cell_y, True) else ZERO
        at += N_PATHING
    if o.fact[HEIGHT]:
        for p in range(N_HEIGHT):
            cell_x, cell_y = int(x[i]) + o.around[0, p], int(y[i]) + o.around[1, p]
            out[at + p] = read_cell(o.height, cell_x, cell_y, ONE)
        at += N_HEIGHT
    return at


@function
def put(value: np.float32, near: bool, seen: bool, at: int, out: Array, full: Array) -> None:
    """Write a number of a unit that is `seen` into the full observation, and into the other if it is `near`."""
    full[at] = value if seen else ZERO
    out[at] = value if near else ZERO


@function
def write_unit(
    o: Layout, w: Array, j: int, available: np.float32, points: int, shielded: int, near: bool, seen: bool, at: int,
    out: Array, full: Array,
) -> int:  # fmt: skip
    """Write what an agent sees of unit `j` from place `at` of both observations; return the next place."""
    far, toward_x, toward_y, health, shield = (
        w[DISTANCE, j], w[TOWARD_X, j], w[TOWARD_Y, j], w[HEALTH, j], w[SHIELD, j]
    )  # fmt: skip
    put(available, near, seen, at, out, full)
    put(far, near, seen, at + 1, out, full)
    put(toward_x, near, seen, at + 2, out, full)
    put(toward_y, near, seen, at + 3, out, full)
    at += 4
    if points:
        put(health, near, seen, at, out, full)
        if shielded:
            put(shield, near, seen, at + 1, out, full)
        at += 1 + shielded
    for bit in range(o.fact[BITS]):
        put(o.bits[j, bit], near, seen, at + bit, out, full)
    return at + o.fact[BITS]


@function
def write_views(
    o: Layout, x: Array, y: Array, alive: Array, w: Array, distance: Array, mask: Array, last_action: Array,
    elapsed: np.float32, i: int, out: Array, full: Array,
) -> None:  # fmt: skip
    """Write agent `i`'s observation, in the order of SMAC's `get_obs_agent`; units at sight range or farther are zero.

    `full`: the same without range limit, or again `out`, which is written last.
    """
    n, total, first, sight = o.fact[N], o.fact[TOTAL], o.fact[FIRST], o.size[SIGHT]
    points, seen_action, ally_shield, enemy_shield = (
        o.fact[ALL_HEALTH], o.fact[SEEN_ACTION], o.fact[ALLY_SHIELD], o.fact[ENEMY_SHIELD]
    )  # fmt: skip
    if not alive[i]:
        write_nothing(o, elapsed, full)
        write_nothing(o, elapsed, out)
        return
    for move in range(N_MOVES):
        put(np.float32(mask[NORTH + move]), True, True, move, out, full)
    write_surroundings(o, x, y, i, N_MOVES, full)
    at = write_surroundings(o, x, y, i, N_MOVES, out)
    for j in range(n, total):
        near, available = alive[j] & (distance[j] < sight), np.float32(mask[first + j - n])
        at = write_unit(o, w, j, available, points, enemy_shield, near, alive[j], at, out, full)
    for j in range(n):
        if j != i:
            near = alive[j] & (distance[j] < sight)
            at = write_unit(o, w, j, ONE, points, ally_shield, near, alive[j], at, out, full)
            for action in range(len(mask) * seen_action):
                put(last_action[j, action], near, alive[j], at + action, out, full)
            at += len(mask) * seen_action
    write_own(o, w, elapsed, i, at, full)
    write_own(o, w, elapsed, i, at, out)


@function
def write_nothing(o: Layout, elapsed: np.float32, out: Array) -> None:
    """Write a dead agent's observation."""
    for place in range(len(out)):
        out[place] = ZERO
    if o.fact[OBS_TIME]:
        out[len(out) - 1] = elapsed


@function
def write_own(o: Layout, w: Array, elapsed: np.float32, i: int, at: int, out: Array) -> None:
    """Write agent `i`'s features of itself from place `at`."""
    if o.fact[OWN_HEALTH]:
        out[at] = w[HEALTH, i]
        if o.fact[ALLY_SHIELD]:
            out[at + 1] = w[SHIELD, i]
        at += 1 + o.fact[ALLY_SHIELD]
    for bit in range(o.fact[BITS]):
        out[at + bit] = o.bits[i, bit]
    if o.fact[OBS_TIME]:
        out[len(out) - 1] = elapsed


@function
def write_state(o: Layout, state: State, episodes: Episodes, w: Array, out: Array, b: int) -> None:
    """Write the state of battle `b`, unless it is made of the agents' observations; `w` describes the units.

    In the order of SMAC's `get_state`: allies, enemies, last actions, elapsed time.
    """
    if o.fact[INSTEAD]:
        return
    alive, last_action, n, at = state.alive[b], episodes.last_action[b], o.fact[N], 0
    for i in range(o.fact[TOTAL]):
        ally, shown = i < n, alive[i]
        health, ready, x, y, shield = w[HEALTH, i], w[READY, i], w[PLACE_X, i], w[PLACE_Y, i], w[SHIELD, i]
        out[at] = health if shown else ZERO
        if ally:
            out[at + 1] = ready if shown else ZERO
        at += 1 + ally
        out[at], out[at + 1] = x if shown else ZERO, y if shown else ZERO
        at += 2
        if o.fact[ALLY_SHIELD] if ally else o.fact[ENEMY_SHIELD]:
            out[at] = shield if shown else ZERO
            at += 1
        for bit in range(o.fact[BITS]):
            out[at + bit] = o.bits[i, bit] if shown else ZERO
        at += o.fact[BITS]
    if o.fact[STATE_ACTION]:
        for i in range(n):
            for action in range(last_action.shape[1]):
                out[at + action] = last_action[i, action]
            at += last_action.shape[1]
    if o.fact[STATE_TIME]:
        out[at] = np.float32(episodes.steps[b] / o.size[LIMIT])


@function
def observe_agent(
    o: Layout, state: State, episodes: Episodes, w: Array, distance: Array, shown: Seen, want_full: bool, b: int,
    i: int,
) -> None:  # fmt: skip
    """Write what agent `i` of battle `b` is shown; `w` describes the units, and it and `distance` are overwritten."""
    alive, acted, mask, obs = state.alive[b], episodes.last_action[b], shown.avail[b, i], shown.obs[b, i]
    x, y = state.floats[b, row.X], state.floats[b, row.Y]
    elapsed = np.float32(episodes.steps[b] / o.size[LIMIT])
    if alive[i]:
        look_at_all(o, i, w, distance)
    fill_mask(o, x, y, alive, distance, i, mask)
    full = shown.full[b, i] if want_full else obs
    write_views(o, x, y, alive, w, distance, mask, acted, elapsed, i, obs, full)
    if o.fact[INSTEAD]:
        for entry in range(len(obs)):
            shown.state[b, i * len(obs) + entry] = obs[entry]


@kernel
def observe(o: Layout, state: State, episodes: Episodes, memory: Array, shown: Seen, want_full: bool) -> None:
    """Write masks, observations, those without range limit if `want_full`, and the state of all battles.

    memory: `shared_memory`.
    """
    w = memory_rows(memory, 0, N_ROWS, WIDTH, np.float32)
    distance = memory_rows(memory, N_ROWS, 1, WIDTH, np.float64)[0]
    for b in range(len(episodes.steps)):
        describe_battle(o, state, w, b)
        for i in range(o.fact[N]):
            observe_agent(o, state, episodes, w, distance, shown, want_full, b, i)
        write_state(o, state, episodes, w, shown.state[b], b)
