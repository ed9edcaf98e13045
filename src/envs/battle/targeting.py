"""Who aims at whom: refused orders, idle allies, and the script of the enemy.

The enemy advances to where the allies started. A unit that sees an ally within its acquisition range turns to the
nearest one it can hit, and stays with it as long as its weapon reaches it. Healers turn to the nearest injured friend.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Order
from omagd.envs.battle.pairs import Pairs
from omagd.envs.battle.roster import Battle, Roster

FAR = np.float32(1.0e9)


def take_orders(roster: Roster, battle: Battle, order: np.ndarray, target: np.ndarray, dest: np.ndarray) -> None:
    """Write the allies' orders ([n, B], [n, B], [n, B, 2]) into the battle; what the game refuses changes nothing."""
    n = roster.n
    row = np.arange(n)[:, None]
    aimed = np.clip(target, 0, roster.total - 1)
    refused = (order == Order.NONE) | ((order == Order.ATTACK) & ~roster.can_hit[row, aimed])
    refused |= (order == Order.HEAL) & ~roster.healable[row, aimed]
    walk = order == Order.MOVE
    aims = (order == Order.ATTACK) | (order == Order.HEAL)
    np.copyto(battle.order[:n], order, where=~refused, casting="same_kind")
    np.copyto(battle.target[:n], np.where(aims, aimed, -1), where=~refused, casting="same_kind")
    np.copyto(battle.goal_x[:n], dest[..., 0], where=walk, casting="same_kind")
    np.copyto(battle.goal_y[:n], dest[..., 1], where=walk, casting="same_kind")


def acquire(roster: Roster, battle: Battle, pairs: Pairs, sight: float) -> None:
    """Choose targets for the enemy within `sight`, and for idle allies within the reach of their weapons."""
    n, total, slots = roster.n, roster.total, battle.slots
    near, distance = pairs.nearest_foe()
    in_reach = distance <= roster.reach_of(near)
    lost = battle.of_target(battle.alive) * (battle.target >= 0) == 0
    mine, aim = battle.order[:n], battle.target[:n]
    np.copyto(mine, np.int32(Order.STOP), where=lost[:n] & (mine >= Order.ATTACK))
    np.copyto(aim, np.where(in_reach[:n], near[:n], -1), where=mine == Order.STOP)
    current = battle.target[n:]
    pair = np.arange(n, total)[:, None] * total + np.maximum(current, 0)
    keeps = ~lost[n:] & (np.sqrt(pairs.d2.ravel()[pair * slots.size + slots]) <= roster.reach.ravel()[pair])
    battle.target[n:] = np.where(keeps, current, np.where(distance[n:] <= sight, near[n:], -1))
    if roster.has_vanguard:
        _aim_bombs(roster, battle, pairs, sight)
    for healer in roster.healers:
        _acquire_patient(roster, battle, pairs, healer)


def _aim_bombs(roster: Roster, battle: Battle, pairs: Pairs, sight: float) -> None:
    """Send each exploding enemy, where it goes ahead of others, into the thick of every so-manieth ally."""
    n, bombs = roster.n, roster.vanguard
    for rank, bomb in enumerate(bombs):
        prey = np.arange(rank, n, bombs.size)
        crowd = (pairs.d2[prey, :n] < roster.splash_radius[bomb] ** 2).sum(axis=1, dtype=np.int32)
        seen = (pairs.d2[bomb, prey] <= sight * sight) & (battle.alive[prey] > 0)
        score = np.where(seen, crowd, 0)
        best = score.argmax(axis=0)
        found = score[best, battle.slots] > 0
        np.copyto(battle.target[bomb], prey[best], where=found, casting="same_kind")


def _acquire_patient(roster: Roster, battle: Battle, pairs: Pairs, healer: int) -> None:
    """Turn a healer to the nearest injured friend: an enemy's follows its friends, an idle ally's stands."""
    friends = np.flatnonzero(roster.healable[healer])
    if friends.size == 0:
        return
    injured = battle.health[friends] < roster.health_max[friends]
    distance2 = pairs.d2[healer, friends]
    first = np.where(injured, distance2, distance2 + FAR)
    best = first.argmin(axis=0)
    choice = np.where(battle.alive[friends][best, battle.slots] > 0, friends[best], -1).astype(np.int32)
    if healer >= roster.n:
        battle.target[healer] = choice
        return
    close = np.sqrt(distance2[best, battle.slots]) <= roster.reach[healer, friends[best]]
    found = close & injured[best, battle.slots]
    np.copyto(battle.target[healer], np.where(found, choice, -1), where=battle.order[healer] == Order.STOP)
