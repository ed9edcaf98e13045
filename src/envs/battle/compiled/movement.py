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
PUSH_WALKING, PUSH_STANDING, PUSH_MOST = physics.PUSH_WALKING, physics.PUSH_STANDING, physics.PUSH_MOST


@function
def walk(t: Tables, s: Array, k: Array, loops: np.float32) -> None:
    """Move all units by one substep: first those that walk to a place, then those that chase a moving target."""
    n, total = t.fact[row.AGENTS], t.fact[row.UNITS]
    for i in range(total):
        s[row.NEXT_X, i], s[row.NEXT_Y, i] = s[row.X, i], s[row.Y, i]
        if k[row.ALIVE, i] and (k[row.ORDER, i] == MOVE or (i >= n and not k[row.AIMING, i])):
            most = t.unit[row.PACE, i] * loops
            x, y = stride(t, s, i, s[row.GOAL_X, i], s[row.GOAL_Y, i], ZERO, most)
            s[row.NEXT_X, i], s[row.NEXT_Y, i] = x, y
    push(t, s, k)
    behind = t.fact[row.HOLDS_BACK] and any_bomb(t, k)
    for i in range(total):
        if k[row.ALIVE, i]:
            step_forward(t, s, k, i, behind, loops)
    for i in range(total):
        if k[row.ALIVE, i]:
            place(t, s, i)


@function
def any_bomb(t: Tables, k: Array) -> bool:
    """Return whether an exploding enemy lives."""
    for bomb in t.bombs:
        if k[row.ALIVE, bomb]:
            return True
    return False


@function
def step_forward(t: Tables, s: Array, k: Array, i: int, behind: bool, loops: np.float32) -> None:
    """Write where a unit wants to stand after chasing its target and being pushed."""
    x, y, chasing = s[row.NEXT_X, i], s[row.NEXT_Y, i], k[row.AIMING, i] and k[row.ORDER, i] >= ATTACK
    going = k[row.ORDER, i] == MOVE or (i >= t.fact[row.AGENTS] and not k[row.AIMING, i])
    if chasing and s[row.TIMER, i] <= t.unit[row.FREE_BELOW, i]:
        target = k[row.TARGET, i]
        most = t.unit[row.STEP, i] * loops
        if behind and t.mark[row.REARGUARD, i]:
            most *= HOLD_BACK
        slack = t.pair[row.REACH, i, target] - STOP_SHORT
        x, y = stride(t, s, i, s[row.NEXT_X, target], s[row.NEXT_Y, target], slack, most)
    give = PUSH_WALKING if going or (chasing and not k[row.IN_REACH, i]) else PUSH_STANDING
    give *= t.unit[row.CAN_MOVE, i]
    low, high = t.unit[row.LOW, i], t.unit[row.HIGH, i]
    x += min(max(-s[row.PUSH_X, i] * give, -PUSH_MOST), PUSH_MOST)
    y += min(max(-s[row.PUSH_Y, i] * give, -PUSH_MOST), PUSH_MOST)
    s[row.PUSH_X, i], s[row.PUSH_Y, i] = min(max(x, low), high), min(max(y, low), high)


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
def push(t: Tables, s: Array, k: Array) -> None:
    """Write the push on each unit by all that it overlaps with, each unit's sum in the order of the others' indices."""
    total = t.fact[row.UNITS]
    place_x, place_y, push_x, push_y = s[row.PLACE_X], s[row.PLACE_Y], s[row.PUSH_X], s[row.PUSH_Y]
    touching = k[row.TOUCHING]
    for i in range(total):
        push_x[i], push_y[i] = ZERO, ZERO
    for i in range(total - 1):
        x, y, some = place_x[i], place_y[i], np.int32(0)
        other_x, other_y, near2 = place_x[i + 1 : total], place_y[i + 1 : total], t.pair[row.TOUCH2, i, i + 1 : total]
        for j in range(len(other_x)):
            dx, dy = x - other_x[j], y - other_y[j]
            touches = np.int32(dx * dx + dy * dy < near2[j])
            touching[j] = touches
            some = np.int32(some | touches)
        if some:
            for j in range(i + 1, total):
                if touching[j - i - 1]:
                    dx, dy = x - place_x[j], y - place_y[j]
                    d = np.float32(math.sqrt(dx * dx + dy * dy))
                    weight = t.pair[row.TOUCH, i, j] / max(d, TINY) - ONE
                    if weight > 0:
                        push_x[i] -= dx * weight
                        push_y[i] -= dy * weight
                        push_x[j] += dx * weight
                        push_y[j] += dy * weight


@function
def place(t: Tables, s: Array, i: int) -> None:
    """Set a unit's new position; at a wall, it slides along or stays."""
    x, y, old_x, old_y = s[row.PUSH_X, i], s[row.PUSH_Y, i], s[row.X, i], s[row.Y, i]
    if t.fact[row.WALLED] and not t.mark[row.FREE, i] and not t.grid[int(x), int(y)]:
        if t.grid[int(x), int(old_y)]:
            y = old_y
        else:
            x = old_x
            if not t.grid[int(old_x), int(y)]:
                y = old_y
    s[row.X, i], s[row.Y, i] = x, y
