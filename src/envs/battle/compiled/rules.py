"""SMAC's orders, rewards and episode ends as kernels over battles; compare `actions.ActionRules` and `reward`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle.actions import MOVE_X, MOVE_Y, NORTH, STOP, WEST
from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.compiled.combat import ATTACK, HEAL_ORDER, MOVE
from omagd.envs.battle.compiled.combat import NONE as NO_ORDER
from omagd.envs.battle.compiled.combat import STOP as STAY
from omagd.envs.battle.compiled.compiling import function, kernel
from omagd.envs.battle.compiled.features import FIRST, HEALS, TOTAL, N
from omagd.envs.battle.compiled.features import LIMIT as STEP_LIMIT
from omagd.envs.battle.compiled.tables import HEALTH, SHIELD, X, Y

WON, LOST, DRAW, LIMIT, OVER, N_FLAGS = range(6)  # rows of the flags of a step
DEATH, WIN, DEFEAT, NEGATIVE = range(4)  # entries of `Prices.amount`
SPARSE, ONLY_POSITIVE, SHIELD_FIX = range(3)  # of `Prices.flag`
EVERY_CHOICE_FITS = -1


class Prices(NamedTuple):
    """The reward's arguments. amount: [4] float64. flag: [3] bool."""

    amount: np.ndarray
    flag: np.ndarray


def make_prices(args: BattleArgs) -> Prices:
    """Return the reward's arguments."""
    amount = args.reward_death_value, args.reward_win, args.reward_defeat, args.reward_negative_scale
    flags = args.reward_sparse, args.reward_only_positive, args.reward_shield_fix
    return Prices(np.array(amount, np.float64), np.array(flags, bool))


@kernel
def find_mistake(actions, avail, active, ended):
    """Return the first active battle that is over or has an action that is not available; else `EVERY_CHOICE_FITS`."""
    for b in range(actions.shape[0]):
        if active[b]:
            if ended[b]:
                return b
            for i in range(actions.shape[1]):
                action = actions[b, i]
                if action < 0 or action >= avail.shape[2] or not avail[b, i, action]:
                    return b
    return EVERY_CHOICE_FITS


@kernel
def give_orders(o, floats, move_amount, actions, active, last_action, order, target, dest):
    """Translate the actions of the `active` battles [B] into orders, and write them down as the last actions."""
    n, first = actions.shape[1], o.fact[FIRST]
    for b in range(len(active)):
        for i in range(n):
            order[b, i] = NO_ORDER
            if not active[b]:
                continue
            action = actions[b, i]
            for other in range(last_action.shape[2]):
                last_action[b, i, other] = other == action
            if action == STOP:
                order[b, i] = STAY
            elif NORTH <= action <= WEST:
                order[b, i] = MOVE
                dest[b, i, 0] = np.float64(floats[b, X, i]) + MOVE_X[action - NORTH] * move_amount
                dest[b, i, 1] = np.float64(floats[b, Y, i]) + MOVE_Y[action - NORTH] * move_amount
            elif action >= first:
                order[b, i] = HEAL_ORDER if o.healer[i] else ATTACK
                target[b, i] = action - first + (0 if o.healer[i] else n)


@function
def update_points(n, weight, s, alive, points, living, lost, died):
    """Update health with shield and who lives; write what each side lost [2], the allies times `weight`, and how many
    of it died [2].
    """
    for side in range(2):
        lost[side], died[side] = 0.0, 0
    for i in range(len(alive)):
        side, before = int(i >= n), points[i]
        died[side] += living[i] and not alive[i]
        living[i] = living[i] and alive[i]  # a death is counted once
        points[i] = np.float64(s[HEALTH, i]) + np.float64(s[SHIELD, i]) if living[i] else 0.0
        lost[side] += before - points[i] if side else (before - points[i]) * weight


@function
def judge(o, alive, at_limit, flags):
    """Write how the battle ended [5] (rows WON to OVER); return the numbers of living allies and enemies."""
    n, allies, enemies, fighters, healers = o.fact[N], 0, 0, 0, 0
    for i in range(len(alive)):
        if alive[i]:
            if i < n:
                allies, fighters = allies + 1, fighters + (not o.healer[i])
            else:
                enemies, healers = enemies + 1, healers + o.healer[i]
    lost, won, draw = enemies > 0 and allies == 0, allies > 0 and enemies == 0, allies == 0 and enemies == 0
    if o.fact[HEALS]:
        lost = lost or fighters == 0
        won = (won or (enemies == 1 and healers > 0)) and not lost
        draw = draw and not lost
    over = won or lost or draw
    flags[WON], flags[LOST], flags[DRAW] = won, lost, draw
    flags[LIMIT], flags[OVER] = at_limit and not over, at_limit or over
    return allies, enemies


@function
def price(p, flags, lost, died):
    """Return the reward of a step before scaling (`reward`): what each side lost [2], how many of it died [2]."""
    if p.flag[SPARSE]:
        return np.float64(flags[WON]) - np.float64(flags[LOST])
    if p.flag[ONLY_POSITIVE]:
        reward = lost[1] + p.amount[DEATH] * died[1]
        reward = max(reward, 0.0) if p.flag[SHIELD_FIX] else abs(reward)
    else:
        deaths = p.amount[DEATH] * died[1] - p.amount[DEATH] * p.amount[NEGATIVE] * died[0]
        reward = lost[1] + deaths - lost[0]
    if flags[WON]:
        reward += p.amount[WIN]
    if flags[LOST]:
        reward += p.amount[DEFEAT]
    return reward


@kernel
def finish(o, p, floats, alive, points, living, scale, scaled, steps, ended, active, lost, died, flags, reward, dead):
    """Count the step just played in the `active` battles [B] and write its results.

    flags: [5, B] bool, rows WON to OVER. reward: [B] float32. dead: [2, B] int64, allies and enemies. Inactive: zero.
    """
    n, total = o.fact[N], o.fact[TOTAL]
    for b in range(len(active)):
        update_points(n, p.amount[NEGATIVE], floats[b], alive[b], points[b], living[b], lost, died)
        if not active[b]:
            continue
        steps[b] += 1
        of_battle = flags[:, b]
        allies, enemies = judge(o, alive[b], steps[b] >= o.size[STEP_LIMIT], of_battle)
        reward[b] = price(p, of_battle, lost, died) / scale[b]
        dead[0, b], dead[1, b] = n - allies, total - n - enemies
        ended[b] |= flags[OVER, b]


@kernel
def begin(o, new_scale, floats, alive, points, living, scale, scaled, steps, ended, which, last_action):
    """Start episodes in the slots `which` [B] bool, where battles have begun. new_scale: of the reward, 0 for none."""
    for b in range(len(which)):
        if not which[b]:
            continue
        steps[b], ended[b] = 0, False
        for i in range(o.fact[TOTAL]):
            living[b, i] = alive[b, i]
            points[b, i] = np.float64(floats[b, HEALTH, i]) + np.float64(floats[b, SHIELD, i]) if alive[b, i] else 0.0
        if new_scale != 0:
            scale[b], scaled[b] = new_scale, True
        for i in range(last_action.shape[1]):
            for action in range(last_action.shape[2]):
                last_action[b, i, action] = 0.0
