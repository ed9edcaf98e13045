"""Combat of the built-in simulator: targets, shots, splash, explosions, healing, regeneration.

Damage within a substep is simultaneous. Arrays are [U, B], units first.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Order
from omagd.envs.battle.physics import Pairs
from omagd.envs.battle.roster import Battle, Roster
from omagd.envs.battle.units import LOOPS_PER_SECOND, SHIELD_REGEN, SHIELD_REGEN_DELAY

FAR = np.float32(1.0e9)


def take_orders(roster: Roster, battle: Battle, order: np.ndarray, target: np.ndarray, dest: np.ndarray) -> None:
    """Store the allies' orders ([n, B], [n, B], [n, B, 2]); orders that the game would refuse change nothing."""
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
    """Choose targets: for enemies within `sight`, for idle allies within their weapon's reach."""
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
    """Aim each exploding enemy at the most crowded ally in sight, of its own share of the allies (every k-th)."""
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
    """Aim a healer at the nearest injured friend: an enemy's healer follows its friends, an idle ally's stays."""
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


LINE_DEPTH = np.float32(0.15)  # half the depth of a colossus' strip
QUIET_LOOPS = np.float32(SHIELD_REGEN_DELAY * LOOPS_PER_SECOND)
SHIELD_PER_LOOP = np.float32(SHIELD_REGEN / LOOPS_PER_SECOND)
Hits = tuple[np.ndarray, np.ndarray, np.ndarray]  # attackers, targets, slots: one entry per hit


def shoot(roster: Roster, battle: Battle, in_reach: np.ndarray) -> None:
    """Fire every ready weapon whose target is in reach ([U, B] bool), and apply damage, splash and explosions."""
    ready = in_reach & (battle.timer <= 0) & roster.armed & (battle.alive > 0)
    fired = np.flatnonzero(ready)
    if fired.size == 0:
        return
    width = battle.slots.size
    attacker, slot = np.divmod(fired, width)
    battle.timer.ravel()[fired] += roster.cooldown[attacker, 0]
    if not roster.has_splash:
        _apply(roster, battle, [(attacker, battle.target.ravel()[fired], slot)])
        return
    _shoot_with_splash(roster, battle, attacker, slot, battle.target.ravel()[fired])


def _shoot_with_splash(
    roster: Roster, battle: Battle, attacker: np.ndarray, slot: np.ndarray, target: np.ndarray
) -> None:
    """Apply direct hits and splash, then explosions, repeatedly while they kill exploding units."""
    booms = roster.explodes[attacker]
    direct = ~booms
    hits = [(attacker[direct], target[direct], slot[direct])]
    strips = roster.splash_line[attacker] > 0
    hits.append(_strip_hits(roster, battle, attacker[strips], target[strips], slot[strips]))
    hits.append(_blast_hits(roster, battle, attacker[booms], slot[booms]))
    battle.health[attacker[booms], slot[booms]] = 0
    exploded = np.zeros(battle.alive.shape, dtype=bool)
    exploded[attacker[booms], slot[booms]] = True
    while hits:
        _apply(roster, battle, hits)
        killed = (battle.health <= 0) & (battle.alive > 0)
        battle.alive[killed] = 0
        last = killed & roster.explodes[:, None] & ~exploded
        exploded |= last
        where, at = np.nonzero(last)
        hits = [_blast_hits(roster, battle, where, at)] if where.size else []


def _strip_hits(roster: Roster, battle: Battle, attacker: np.ndarray, target: np.ndarray, slot: np.ndarray) -> Hits:
    """Return the hits on a strip across each line of fire, except the target."""
    tx, ty = battle.x[target, slot], battle.y[target, slot]
    ux, uy = tx - battle.x[attacker, slot], ty - battle.y[attacker, slot]
    length = np.maximum(np.sqrt(ux * ux + uy * uy), np.float32(1e-6))
    ux, uy = ux / length, uy / length
    rx, ry = battle.x[:, slot] - tx, battle.y[:, slot] - ty
    along, across = np.abs(rx * ux + ry * uy), np.abs(ry * ux - rx * uy)
    inside = (along <= LINE_DEPTH + roster.radius) & (across <= roster.splash_line[attacker])
    inside[target, np.arange(target.size)] = False
    return _event_hits(roster, battle, inside, attacker, slot)


def _blast_hits(roster: Roster, battle: Battle, attacker: np.ndarray, slot: np.ndarray) -> Hits:
    """Return the hits of explosions at the attackers' positions."""
    rx, ry = battle.x[:, slot] - battle.x[attacker, slot], battle.y[:, slot] - battle.y[attacker, slot]
    inside = rx * rx + ry * ry <= (roster.splash_radius[attacker] + roster.radius) ** 2
    return _event_hits(roster, battle, inside, attacker, slot)


def _event_hits(roster: Roster, battle: Battle, inside: np.ndarray, attacker: np.ndarray, slot: np.ndarray) -> Hits:
    """Return one hit for every living foe inside the areas [U, events]."""
    hurt = inside & (battle.alive[:, slot] > 0) & roster.can_hit[attacker].T
    unit, event = np.nonzero(hurt)
    return attacker[event], unit, slot[event]


def _apply(roster: Roster, battle: Battle, hits: list[Hits]) -> None:
    """Subtract the hits from shields, then health. Sums of multiples of 0.5 are exact in any order."""
    attacker, target, slot = (np.concatenate(part) for part in zip(*hits, strict=True)) if len(hits) > 1 else hits[0]
    shape, place = battle.health.shape, target * battle.slots.size + slot
    loss = _sum_at(place, roster.health_hit[attacker, target], shape)
    if roster.has_shields:
        full = _sum_at(place, roster.shield_hit[attacker, target], shape)
        absorbed = np.minimum(battle.shield, full)
        battle.shield -= absorbed
        loss *= (full - absorbed) / np.maximum(full, np.float32(1))
        battle.quiet *= full == 0
    battle.health -= loss
    np.maximum(battle.health, 0, out=battle.health)


def _sum_at(place: np.ndarray, amount: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    total = np.bincount(place, weights=amount, minlength=shape[0] * shape[1])
    return total.astype(np.float32).reshape(shape)


def heal(roster: Roster, battle: Battle, in_reach: np.ndarray, loops: int) -> None:
    """Let every healer heal its target in reach for `loops` game loops, as far as its energy lasts."""
    for healer in roster.healers:
        patient = np.maximum(battle.target[healer], 0)
        missing = roster.health_max[patient, 0] - battle.health[patient, battle.slots]
        able = in_reach[healer] & (battle.alive[healer] > 0)
        able &= battle.health[patient, battle.slots] > 0  # a unit killed in this substep stays dead
        affordable = battle.energy[healer] / roster.heal_cost[healer]
        amount = np.minimum(np.minimum(missing, affordable), roster.heal[healer] * np.float32(loops)) * able
        battle.health[patient, battle.slots] += amount
        battle.energy[healer] = np.maximum(battle.energy[healer] - amount * roster.heal_cost[healer], 0)


def regenerate(roster: Roster, battle: Battle, loops: int) -> None:
    """Regenerate shields, Zerg health and energy of living units for `loops` game loops."""
    live = battle.alive > 0
    if roster.has_shields:
        battle.quiet += np.float32(loops)
        grown = np.minimum(battle.shield + SHIELD_PER_LOOP * np.float32(loops), roster.shield_max)
        np.copyto(battle.shield, grown, where=live & (battle.quiet > QUIET_LOOPS))
    if roster.has_regen:
        grown = np.minimum(battle.health + roster.hp_regen * np.float32(loops), roster.health_max)
        np.copyto(battle.health, grown, where=live)
    if roster.healers:
        grown = np.minimum(battle.energy + roster.energy_regen * np.float32(loops), roster.energy_max)
        np.copyto(battle.energy, grown, where=live)
