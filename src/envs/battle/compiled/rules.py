"""SMAC's orders, rewards and episode ends as kernels over battles; compare `actions.ActionRules` and `reward`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle.actions import MOVE_X, MOVE_Y, NORTH, STOP, WEST
from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.compiled import function, kernel
from omagd.envs.battle.compiled.combat import ATTACK, HEAL_ORDER, MOVE
from omagd.envs.battle.compiled.combat import NONE as NO_ORDER
from omagd.envs.battle.compiled.combat import STOP as STAY
from omagd.envs.battle.compiled.features import FIRST, HEALS, TOTAL, Layout, N
from omagd.envs.battle.compiled.features import LIMIT as STEP_LIMIT
from omagd.envs.battle.compiled.tables import HEALTH, SHIELD, Array, Episodes, Orders, State, X, Y

WON, LOST, DRAW, LIMIT, OVER, N_FLAGS = range(6)  # rows of the flags of a step
DEATH, WIN, DEFEAT, NEGATIVE = range(4)  # entries of `Prices.amount`
SPARSE, ONLY_POSITIVE, SHIELD_FIX = range(3)  # of `Prices.flag`


class Results(NamedTuple):
    """Results of a step: flags [5, B] bool (rows WON to OVER), reward [B] float32, dead [2, B] int64 (both sides)."""

    flags: Array
    reward: Array
    dead: Array


def no_results(slots: int) -> Results:
    """Return results of `slots` battles, all zero."""
    return Results(np.zeros((N_FLAGS, slots), bool), np.zeros(slots, np.float32), np.zeros((2, slots), np.int64))


class Prices(NamedTuple):
    """The reward's arguments. amount: [4] float64. flag: [3] bool."""

    amount: Array
    flag: Array


def make_prices(args: BattleArgs) -> Prices:
    """Return the reward's arguments."""
    amount = args.reward_death_value, args.reward_win, args.reward_defeat, args.reward_negative_scale
    flags = args.reward_sparse, args.reward_only_positive, args.reward_shield_fix
    return Prices(np.array(amount, np.float64), np.array(flags, bool))


@function
def fits(actions: Array, avail: Array, episodes: Episodes, b: int) -> bool:
    """Return whether battle `b` is not over and all its `actions` [B, N] are available."""
    if episodes.ended[b]:
        return False
    for i in range(actions.shape[1]):
        action = actions[b, i]
        if action < 0 or action >= avail.shape[2] or not avail[b, i, action]:
            return False
    return True


@function
def order_battle(
    o: Layout, state: State, move_amount: float, actions: Array, episodes: Episodes, orders: Orders, b: int
) -> None:
    """Translate the actions of battle `b` into orders, and write them down as the last actions."""
    for i in range(actions.shape[1]):
        for action in range(episodes.last_action.shape[2]):
            episodes.last_action[b, i, action] = action == actions[b, i]
        order_agent(o, state, move_amount, actions[b, i], orders, b, i)


@function
def order_agent(o: Layout, state: State, move_amount: float, action: int, orders: Orders, b: int, i: int) -> None:
    """Write the order that an action gives."""
    if action == STOP:
        orders.order[b, i] = STAY
    elif NORTH <= action <= WEST:
        orders.order[b, i] = MOVE
        orders.dest[b, i, 0] = np.float64(state.floats[b, X, i]) + MOVE_X[action - NORTH] * move_amount
        orders.dest[b, i, 1] = np.float64(state.floats[b, Y, i]) + MOVE_Y[action - NORTH] * move_amount
    elif action >= o.fact[FIRST]:
        orders.order[b, i] = HEAL_ORDER if o.healer[i] else ATTACK
        orders.target[b, i] = action - o.fact[FIRST] + (0 if o.healer[i] else o.fact[N])
    else:
        orders.order[b, i] = NO_ORDER


@function
def update_points(o: Layout, weight: float, state: State, episodes: Episodes, b: int, lost: Array, died: Array) -> None:
    """Update health with shield and who lives; write what each side lost [2], the allies times `weight`, and how many
    of it died [2].
    """
    points, living, s = episodes.points[b], episodes.living[b], state.floats[b]
    for side in range(2):
        lost[side], died[side] = 0.0, 0
    for i in range(o.fact[TOTAL]):
        side, before = int(i >= o.fact[N]), points[i]
        died[side] += living[i] and not state.alive[b, i]
        living[i] = living[i] and state.alive[b, i]  # a death is counted once
        points[i] = np.float64(s[HEALTH, i]) + np.float64(s[SHIELD, i]) if living[i] else 0.0
        lost[side] += before - points[i] if side else (before - points[i]) * weight


@function
def judge(o: Layout, alive: Array, at_limit: bool, flags: Array) -> tuple[int, int]:
    """Write how the battle ended [5] (rows WON to OVER); return the numbers of living allies and enemies."""
    n, allies, enemies, fighters, healers = o.fact[N], 0, 0, 0, 0
    for i in range(o.fact[TOTAL]):
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
def price(p: Prices, flags: Array, lost: Array, died: Array) -> float:
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


@function
def finish_battle(
    o: Layout, p: Prices, state: State, episodes: Episodes, lost: Array, died: Array, results: Results, b: int
) -> None:
    """Count the step just played in battle `b` and write its results. lost, died: as `update_points` writes them."""
    n, total, steps, flags = o.fact[N], o.fact[TOTAL], episodes.steps, results.flags
    steps[b] += 1
    allies, enemies = judge(o, state.alive[b], steps[b] >= o.size[STEP_LIMIT], flags[:, b])
    results.reward[b] = price(p, flags[:, b], lost, died) / episodes.scale[b]
    results.dead[0, b], results.dead[1, b] = n - allies, total - n - enemies
    episodes.ended[b] |= flags[OVER, b]


@function
def begin_battle(o: Layout, new_scale: float, state: State, episodes: Episodes, b: int) -> None:
    """Start the episode of battle `b`, which has just been reset. new_scale: of the reward, 0 for none."""
    episodes.steps[b], episodes.ended[b], s = 0, False, state.floats[b]
    for i in range(o.fact[TOTAL]):
        alive = state.alive[b, i]
        episodes.living[b, i] = alive
        episodes.points[b, i] = np.float64(s[HEALTH, i]) + np.float64(s[SHIELD, i]) if alive else 0.0
    if new_scale != 0:
        episodes.scale[b], episodes.scaled[b] = new_scale, True
    for i in range(o.fact[N]):
        for action in range(episodes.last_action.shape[2]):
            episodes.last_action[b, i, action] = 0.0


@kernel
def begin(o: Layout, new_scale: float, state: State, episodes: Episodes, which: Array) -> None:
    """Start episodes in the slots `which` [B] bool, where battles have begun. new_scale: of the reward, 0 for none."""
    for b in range(len(which)):
        if which[b]:
            begin_battle(o, new_scale, state, episodes, b)
