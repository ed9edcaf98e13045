"""Walking, pushing and walls of one battle; compare `omagd.envs.battle.physics`. Names as in `combat`."""

from __future__ import annotations

import math

import numpy as np

from omagd.envs.battle import physics
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.combat import ATTACK, MOVE, ONE, ZERO
from omagd.envs.battle.compiled.compiling import function
from omagd.envs.battle.compiled.tables import Array, Tables

TINY, HOLD_BACK, STOP_SHORT = physics.TINY, physics.HOLD_BACK, physics.STOP_SHORT
NEARLY = np.float32(1.0001)
PUSH_WALKING, PUSH_STANDING, PUSH_MOST = physics.PUSH_WALKING, physics.PUSH_STANDING, physics.PUSH_MOST


@function
def walk(t: Tables, s: Array, k: Array, living: int, loops: np.float32) -> None:
    """Move all units by one substep: first those that walk to a place, then those that chase a moving target.

    living: number of units that lived when distances were measured; some may have died since.
    """
    for c in range(living):
        i = k[row.UNIT, c]
        s[row.NEXT_X, i], s[row.NEXT_Y, i] = s[row.X, i], s[row.Y, i]
        if k[row.ALIVE, i] and goes(t, k, i):
            most = t.unit[row.PACE, i] * loops
            x, y = stride(t, s, i, s[row.GOAL_X, i], s[row.GOAL_Y, i], ZERO, most)
            s[row.NEXT_X, i], s[row.NEXT_Y, i] = x, y
    push(t, s, k, living)
    behind = t.fact[row.HOLDS_BACK] and any_bomb(t, k)
    for c in range(living):
        if k[row.ALIVE, k[row.UNIT, c]]:
            step_forward(t, s, k, c, behind, loops)
    for c in range(living):
        if k[row.ALIVE, k[row.UNIT, c]]:
            place(t, s, k[row.UNIT, c])


@function
def goes(t: Tables, k: Array, i: int) -> bool:
    """Return whether a unit walks to a place: ordered to move, or an enemy without a target."""
    return k[row.ORDER, i] == MOVE or (i >= t.fact[row.AGENTS] and not k[row.AIMING, i])


@function
def any_bomb(t: Tables, k: Array) -> bool:
    """Return whether an exploding enemy lives."""
    for bomb in t.bombs:
        if k[row.ALIVE, bomb]:
            return True
    return False


@function
def step_forward(t: Tables, s: Array, k: Array, c: int, behind: bool, loops: np.float32) -> None:
    """Write where living unit `c` wants to stand after chasing its target and being pushed."""
    i = k[row.UNIT, c]
    x, y, chasing = s[row.NEXT_X, i], s[row.NEXT_Y, i], k[row.AIMING, i] and k[row.ORDER, i] >= ATTACK
    if chasing and s[row.TIMER, i] <= t.unit[row.FREE_BELOW, i]:
        target = k[row.TARGET, i]
        most = t.unit[row.STEP, i] * loops
        if behind and t.mark[row.REARGUARD, i]:
            most *= HOLD_BACK
        slack = t.pair[row.REACH, i, target] - STOP_SHORT
        x, y = stride(t, s, i, s[row.NEXT_X, target], s[row.NEXT_Y, target], slack, most)
    give = PUSH_WALKING if goes(t, k, i) or (chasing and not k[row.IN_REACH, i]) else PUSH_STANDING
    give *= t.unit[row.CAN_MOVE, i]
    low, high = t.unit[row.LOW, i], t.unit[row.HIGH, i]
    x += min(max(-s[row.PUSH_X, c] * give, -PUSH_MOST), PUSH_MOST)
    y += min(max(-s[row.PUSH_Y, c] * give, -PUSH_MOST), PUSH_MOST)
    s[row.WANT_X, i], s[row.WANT_Y, i] = min(max(x, low), high), min(max(y, low), high)


@function
def stride(
    t: Tables, s: Array, i: int, goal_x: np.float32, goal_y: np.float32, slack: np.float32, most: np.float32
) -> tuple[np.float32, np.float32]:
    """Return where a unit stands after walking up to `most` cells towards a goal, but not nearer than `slack`."""
    x, y = s[row.X, i], s[row.Y, i]
    if t.fact[row.WALLED] and not t.mark[row.FREE, i]:
        next_x, next_y = detour(t, x, y, goal_x, goal_y)
        if next_x != goal_x or next_y != goal_y:
            goal_x, goal_y, slack = next_x, next_y, ZERO
    way_x, way_y = goal_x - x, goal_y - y
    distance = np.float32(math.sqrt(way_x * way_x + way_y * way_y)) + TINY
    share = min(max(distance - slack, ZERO), most) / distance
    return x + way_x * share, y + way_y * share


@function
def detour(
    t: Tables, x: np.float32, y: np.float32, goal_x: np.float32, goal_y: np.float32
) -> tuple[np.float32, np.float32]:
    """Return the next point on the way to a goal: the wall's opening if the wall lies between."""
    low, high = t.length[row.LANE_LOW], t.length[row.LANE_HIGH]
    left, right = t.length[row.LEFT_FACE], t.length[row.RIGHT_FACE]
    from_left = x < t.length[row.MIDDLE]
    near, far = (left, right) if from_left else (right, left)
    lane = min(max(y, low), high)
    if from_left != (goal_x < t.length[row.MIDDLE]):
        return far if lane == y else near, lane
    if left < x < right and lane == y and (goal_y < low or goal_y > high):
        return near, y
    return goal_x, goal_y


@function
def push(t: Tables, s: Array, k: Array, living: int) -> None:
    """Write the push on each living unit by all that it overlaps with, summed in the order of the others' indices."""
    near_x, near_y, radius = s[row.NEAR_X], s[row.NEAR_Y], s[row.NEAR_RADIUS]
    push_x, push_y, touches = s[row.PUSH_X], s[row.PUSH_Y], k[row.TOUCHES]
    for c in range(living):
        push_x[c], push_y[c] = ZERO, ZERO
    for c in range(living - 1):
        x, y, own, some = near_x[c], near_y[c], radius[c], np.int32(0)
        other_x, other_y, others = near_x[c + 1 : living], near_y[c + 1 : living], radius[c + 1 : living]
        for j in range(len(others)):
            # Slightly more than the exact bound: pairs beyond it need no square root to know that they do not touch.
            dx, dy, touch = x - other_x[j], y - other_y[j], own + others[j]
            touching = np.int32(dx * dx + dy * dy < touch * touch * NEARLY)
            touches[j] = touching
            some = np.int32(some | touching)
        if some:
            for j in range(c + 1, living):
                if touches[j - c - 1]:
                    push_apart(t, s, k, c, j)


@function
def push_apart(t: Tables, s: Array, k: Array, c: int, other: int) -> None:
    """Add the push of two living units on each other, if they overlap."""
    dx, dy = s[row.NEAR_X, c] - s[row.NEAR_X, other], s[row.NEAR_Y, c] - s[row.NEAR_Y, other]
    distance = np.float32(math.sqrt(dx * dx + dy * dy))
    weight = t.pair[row.TOUCH, k[row.UNIT, c], k[row.UNIT, other]] / max(distance, TINY) - ONE
    if weight > 0:
        s[row.PUSH_X, c] -= dx * weight
        s[row.PUSH_Y, c] -= dy * weight
        s[row.PUSH_X, other] += dx * weight
        s[row.PUSH_Y, other] += dy * weight


@function
def place(t: Tables, s: Array, i: int) -> None:
    """Set a unit's new position; at a wall, it slides along or stays."""
    x, y, old_x, old_y = s[row.WANT_X, i], s[row.WANT_Y, i], s[row.X, i], s[row.Y, i]
    if t.fact[row.WALLED] and not t.mark[row.FREE, i] and not t.grid[int(x), int(y)]:
        if t.grid[int(x), int(old_y)]:
            y = old_y
        else:
            x = old_x
            if not t.grid[int(old_x), int(y)]:
                y = old_y
    s[row.X, i], s[row.Y, i] = x, y
