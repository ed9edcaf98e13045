"""Start positions and fresh battles as a kernel; compare `physics.start_positions` and `Simulator.reset`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle import physics
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.combat import ATTACK, STOP, ZERO
from omagd.envs.battle.compiled.compiling import function, kernel
from omagd.envs.battle.compiled.tables import Array, State, Tables
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.roster import Roster
from omagd.utils.seeding import GOLDEN, splitmix64

STEP, BITS = np.uint64(GOLDEN), np.uint64(40)
mix = function(splitmix64)
SPREAD, HALF, UNIT = np.float32(2 * physics.JITTER), physics.HALF, np.float32(2.0**-24)
X, Y, GOAL_X, GOAL_Y, N_PLACES = range(5)  # rows of `Starts.place`
HEALTH, SHIELD, ENERGY = range(3)  # of `Starts.full`


class Starts(NamedTuple):
    """How battles begin. place: [4, U] float32, centres of the positions, and goals. full: [3, U] float32, health,
    shield, energy. kind: [U] int64, allies of one kind are sorted. waits: [1] bool, enemies stay where they are.
    """

    place: Array
    full: Array
    kind: Array
    waits: Array


def make_starts(spec: MapSpec, roster: Roster) -> Starts:
    """Return how battles of a map begin."""
    place = np.concatenate([physics.formations(spec), physics.advance_goals(spec)])
    full = np.stack([column.ravel() for column in (roster.health_max, roster.shield_max, roster.energy)])
    names = (*spec.allies, *spec.enemies)
    kind = np.array([names.index(name) for name in names], np.int64)
    return Starts(place.astype(np.float32), full.astype(np.float32), kind, np.array([spec.enemy_waits]))


@function
def jitter(seed: int, number: int) -> np.float32:
    """Return the `number`-th offset from the formation of the battle with this seed, float32 cells."""
    z = mix(mix(np.uint64(seed) + STEP) + STEP * np.uint64(number + 1))
    return SPREAD * (np.float32(z >> BITS) * UNIT - HALF)


@function
def sort_allies(t: Tables, begin: Starts, x: Array, y: Array) -> None:
    """Sort the places of allies of the same kind by (x, y)."""
    n = t.fact[row.AGENTS]
    for i in range(n):
        for j in range(i + 1, n):
            if begin.kind[i] == begin.kind[j] and (x[j] < x[i] or (x[j] == x[i] and y[j] < y[i])):
                x[i], x[j] = x[j], x[i]
                y[i], y[j] = y[j], y[i]


@function
def reset_battle(t: Tables, begin: Starts, state: State, seed: int, b: int) -> None:
    """Start a new battle from `seed` in slot `b`."""
    n, total = t.fact[row.AGENTS], t.fact[row.UNITS]
    s, k = state.floats[b], state.ints[b]
    for i in range(total):
        s[row.X, i] = begin.place[X, i] + jitter(seed, i)
        s[row.Y, i] = begin.place[Y, i] + jitter(seed, total + i)
    sort_allies(t, begin, s[row.X], s[row.Y])
    for i in range(total):
        stays = begin.waits[0] and i >= n
        s[row.GOAL_X, i] = s[row.X, i] if stays else begin.place[GOAL_X, i]
        s[row.GOAL_Y, i] = s[row.Y, i] if stays else begin.place[GOAL_Y, i]
        s[row.HEALTH, i], s[row.SHIELD, i] = begin.full[HEALTH, i], begin.full[SHIELD, i]
        s[row.ENERGY, i], s[row.TIMER, i], s[row.QUIET, i] = begin.full[ENERGY, i], ZERO, ZERO
        k[row.ORDER, i], k[row.TARGET, i], k[row.ALIVE, i] = STOP if i < n else ATTACK, -1, 1
        state.cooldown[b, i], state.alive[b, i] = ZERO, True


@kernel
def reset(t: Tables, begin: Starts, state: State, which: Array, seeds: Array) -> None:
    """Start new battles in the slots `which` [B] bool, slot b from `seeds[b]`."""
    for b in range(len(which)):
        if which[b]:
            reset_battle(t, begin, state, seeds[b], b)
