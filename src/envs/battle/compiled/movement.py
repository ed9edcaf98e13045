"""Walking, pushing and walls of one battle. Names as in `combat`."""

from __future__ import annotations

import math

import numpy as np

from omagd.envs.battle.compiled import function
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.combat import ATTACK, INDEX_BITS, MOVE, ONE, ZERO, whole_blocks
from omagd.envs.battle.compiled.tables import Array, Tables

PUSH_WALKING, PUSH_STANDING, PUSH_MOST = np.float32(0.5), np.float32(0.1), np.float32(0.4)
STOP_SHORT = np.float32(0.05)  # a chasing unit stops this far inside its weapon's reach
TINY, NEARLY = np.float32(1.0e-6), np.float32(1.0001)


@function
def walk(t: Tables, s: Array, k: Array, living: int, loops: np.float32) -> None:
    """Move all units by one substep: first those that walk to a place, then those that chase a moving target.

    living: number of units that lived when distances were measured; some may have died since.
    """
    head_for_goals(t, s, k, loops)
    stride(t, s, row.NEXT_X, row.NEXT_Y)
    for i in range(t.fact[row.UNITS]):  # well before they are read as vectors, as in `look_at_targets`
        target = max(k[row.TARGET, i], 0)
        s[row.GO_X, i], s[row.GO_Y, i] = s[row.NEXT_X, target], s[row.NEXT_Y, target]
    push(t, s, living)
    for c in range(living):
        i = k[row.UNIT, c] & INDEX_BITS
        s[row.PUSHED_X, i], s[row.PUSHED_Y, i] = s[row.PUSH_X, c], s[row.PUSH_Y, c]
    head_for_targets(t, s, k, loops)
    stride(t, s, row.WANT_X, row.WANT_Y)
    yield_to_push(t, s, k)
    if t.fact[row.WALLED]:
        for i in range(t.fact[row.UNITS]):
            stop_at_wall(t, s, i)
    for i in range(t.fact[row.LANES]):
        s[row.X, i], s[row.Y, i] = s[row.WANT_X, i], s[row.WANT_Y, i]


@function
def head_for_goals(t: Tables, s: Array, k: Array, loops: np.float32) -> None:
    """Let units walk to a place that are ordered to move, and enemies without a target."""
    n = t.fact[row.AGENTS]
    for i in range(t.fact[row.LANES]):
        going = (k[row.ORDER, i] == MOVE) | ((i >= n) & (k[row.AIMING, i] == 0))
        going &= k[row.ALIVE, i] > 0
        k[row.GOING, i] = going
        s[row.GO_X, i], s[row.GO_Y, i], s[row.SLACK, i] = s[row.GOAL_X, i], s[row.GOAL_Y, i], ZERO
        s[row.MOST, i] = t.unit[row.PACE, i] * loops if going else ZERO


@function
def head_for_targets(t: Tables, s: Array, k: Array, loops: np.float32) -> None:
    """Let units chase their targets, from a moment after a shot on; behind exploding enemies at half the speed."""
    for i in range(t.fact[row.LANES]):
        chasing = (k[row.AIMING, i] > 0) & (k[row.ORDER, i] >= ATTACK) & (k[row.ALIVE, i] > 0)
        s[row.SLACK, i] = s[row.TO_REACH, i] - STOP_SHORT
        moves = chasing & (s[row.TIMER, i] <= t.unit[row.FREE_BELOW, i])
        s[row.MOST, i] = t.unit[row.STEP, i] * loops if moves else ZERO
    if t.fact[row.HOLDS_BACK] and any_bomb(t, k):
        for i in range(t.fact[row.LANES]):
            s[row.MOST, i] *= t.unit[row.HELD, i]


@function
def any_bomb(t: Tables, k: Array) -> bool:
    """Return whether an exploding enemy lives."""
    for bomb in t.bombs:
        if k[row.ALIVE, bomb]:
            return True
    return False


@function
def stride(t: Tables, s: Array, to_x: int, to_y: int) -> None:
    """Write (rows `to_x`, `to_y`) where units stand that walk up to `MOST` cells towards (`GO_X`, `GO_Y`), but not
    nearer than `SLACK`.
    """
    if t.fact[row.WALLED]:
        go_around_wall(t, s)
    for i in range(t.fact[row.LANES]):
        x, y = s[row.X, i], s[row.Y, i]
        way_x, way_y = s[row.GO_X, i] - x, s[row.GO_Y, i] - y
        distance = np.float32(math.sqrt(way_x * way_x + way_y * way_y)) + TINY
        share = min(max(distance - s[row.SLACK, i], ZERO), s[row.MOST, i]) / distance
        s[to_x, i], s[to_y, i] = x + way_x * share, y + way_y * share


@function
def go_around_wall(t: Tables, s: Array) -> None:
    """Replace goals by the next point on the way to them: the wall's opening if the wall lies between."""
    middle, low, high = t.length[row.MIDDLE], t.length[row.LANE_LOW], t.length[row.LANE_HIGH]
    left, right = t.length[row.LEFT_FACE], t.length[row.RIGHT_FACE]
    for i in range(t.fact[row.LANES]):
        x, y, goal_x, goal_y = s[row.X, i], s[row.Y, i], s[row.GO_X, i], s[row.GO_Y, i]
        from_left, lane, bound = x < middle, min(max(y, low), high), t.unit[row.FREE, i] <= ZERO
        near, far = left if from_left else right, right if from_left else left
        crosses = bound & (from_left != (goal_x < middle))
        aside = (goal_y < low) | (goal_y > high)
        leaves = bound & (x > left) & (x < right) & (lane == y) & aside
        next_x = near if leaves else goal_x
        next_x = (far if lane == y else near) if crosses else next_x
        next_y = lane if crosses else (y if leaves else goal_y)
        direct = (next_x == goal_x) & (next_y == goal_y)
        s[row.GO_X, i], s[row.GO_Y, i] = next_x, next_y
        s[row.SLACK, i] = s[row.SLACK, i] if direct else ZERO


@function
def push(t: Tables, s: Array, living: int) -> None:
    """Write the push on each living unit by all that it overlaps with, summed in the order of the others' indices."""
    x, y, radius, layer = s[row.NEAR_X], s[row.NEAR_Y], s[row.NEAR_RADIUS], s[row.NEAR_LAYER]
    push_x, push_y, units = s[row.PUSH_X], s[row.PUSH_Y], whole_blocks(t, living)
    for j in range(units):
        push_x[j], push_y[j] = ZERO, ZERO
    for c in range(living):
        own_x, own_y, own, own_layer, near = x[c], y[c], radius[c], layer[c], np.int32(0)
        for j in range(units):
            # Slightly more than the exact bound: pairs beyond it need no square root to know that they do not touch.
            dx, dy, touch = own_x - x[j], own_y - y[j], own + radius[j]
            near = np.int32(near + np.int32(dx * dx + dy * dy < touch * touch * NEARLY))
        if near > 1:  # not only itself
            for j in range(units):
                dx, dy = own_x - x[j], own_y - y[j]
                distance = max(np.float32(math.sqrt(dx * dx + dy * dy)), TINY)
                weight = max((own + radius[j]) / distance - ONE, ZERO)
                weight = weight if layer[j] == own_layer else ZERO
                push_x[j] += dx * weight
                push_y[j] += dy * weight


@function
def either(first: bool, a: np.float32, b: np.float32) -> np.float32:
    """Return `a` if `first`, else `b`, without a branch, in which the compiler would read one of two places."""
    mask = np.int32(-np.int32(first))
    bits = (np.float32(a).view(np.int32) & mask) | (np.float32(b).view(np.int32) & ~mask)
    return np.int32(bits).view(np.float32)


@function
def yield_to_push(t: Tables, s: Array, k: Array) -> None:
    """Write where units want to stand after walking and being pushed."""
    for i in range(t.fact[row.LANES]):
        alive = k[row.ALIVE, i] > 0
        chasing = (k[row.AIMING, i] > 0) & (k[row.ORDER, i] >= ATTACK) & alive
        walking = (k[row.GOING, i] > 0) | (chasing & (k[row.IN_REACH, i] == 0))
        give = (PUSH_WALKING if walking else PUSH_STANDING) * t.unit[row.CAN_MOVE, i]
        give = give if alive else ZERO
        x = either(chasing, s[row.WANT_X, i], s[row.NEXT_X, i])
        y = either(chasing, s[row.WANT_Y, i], s[row.NEXT_Y, i])
        x += min(max(-s[row.PUSHED_X, i] * give, -PUSH_MOST), PUSH_MOST)
        y += min(max(-s[row.PUSHED_Y, i] * give, -PUSH_MOST), PUSH_MOST)
        low, high = t.unit[row.LOW, i], t.unit[row.HIGH, i]
        s[row.WANT_X, i], s[row.WANT_Y, i] = min(max(x, low), high), min(max(y, low), high)


@function
def stop_at_wall(t: Tables, s: Array, i: int) -> None:
    """Let a unit that would enter a wall slide along it or stay."""
    x, y, old_x, old_y = s[row.WANT_X, i], s[row.WANT_Y, i], s[row.X, i], s[row.Y, i]
    if t.unit[row.FREE, i] <= ZERO and not t.grid[int(x), int(y)]:
        if t.grid[int(x), int(old_y)]:
            y = old_y
        else:
            x = old_x
            if not t.grid[int(old_x), int(y)]:
                y = old_y
    s[row.WANT_X, i], s[row.WANT_Y, i] = x, y
