"""Targets, shots, splash, explosions, healing and regeneration of one battle. Damage in a substep is simultaneous.

`s`, `k`: the battle's floats and ints [rows, U]; `t`: the map's constants (`tables`).
"""

from __future__ import annotations

import math

import numpy as np

from omagd.envs.battle.backend import Order
from omagd.envs.battle.compiled import function
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.tables import Array, Tables
from omagd.envs.battle.units import LOOPS_PER_SECOND, SHIELD_REGEN, SHIELD_REGEN_DELAY

ATTACK, HEAL_ORDER, MOVE, NONE, STOP = (int(Order[name]) for name in ("ATTACK", "HEAL", "MOVE", "NONE", "STOP"))
INDEX_BITS = np.int32(127)  # low bits of a squared distance that carry a unit's index; relative error below 2**-16
NOBODY = np.int32(0x7F000000)
FAR = np.float32(1.0e9)
LINE_DEPTH = np.float32(0.15)  # half the depth of a colossus' strip
QUIET_LOOPS = np.float32(SHIELD_REGEN_DELAY * LOOPS_PER_SECOND)
SHIELD_PER_LOOP = np.float32(SHIELD_REGEN / LOOPS_PER_SECOND)
ZERO, ONE, TINY, NOWHERE = np.float32(0), np.float32(1), np.float32(1e-6), np.float32(1e6)


@function
def take_order(t: Tables, s: Array, k: Array, i: int, order: int, target: int, x: np.float32, y: np.float32) -> None:
    """Store an ally's order; one that the game would refuse changes nothing."""
    aimed = min(max(target, 0), t.fact[row.UNITS] - 1)
    if order == NONE or (order == ATTACK and not t.able[row.CAN_HIT, i, aimed]):
        return
    if order == HEAL_ORDER and not t.able[row.HEALABLE, i, aimed]:
        return
    k[row.ORDER, i] = order
    k[row.TARGET, i] = aimed if order == ATTACK or order == HEAL_ORDER else -1
    if order == MOVE:
        s[row.GOAL_X, i], s[row.GOAL_Y, i] = x, y


@function
def measure(t: Tables, s: Array, k: Array) -> tuple[int, int]:
    """Write the places by which distances are measured: slightly apart, and dead units far away.

    Return the numbers of living allies and of all living units. Their places also stand side by side (`NEAR_X`), with
    nobody behind them up to the end of a block: dead units cost nothing in loops over pairs.
    """
    for i in range(t.fact[row.LANES]):
        s[row.PLACE_Y, i] = s[row.Y, i] + t.unit[row.OFFSET_Y, i]
        here = s[row.X, i] + t.unit[row.OFFSET_X, i]
        s[row.PLACE_X, i] = here if k[row.ALIVE, i] > 0 else t.unit[row.FAR, i]
    look_at_targets(t, s, k)
    allies, living = 0, 0
    for i in range(t.fact[row.UNITS]):  # a dead unit is overwritten by the next one
        s[row.NEAR_X, living], s[row.NEAR_Y, living] = s[row.PLACE_X, i], s[row.PLACE_Y, i]
        s[row.NEAR_RADIUS, living], s[row.NEAR_LAYER, living] = t.unit[row.RADIUS, i], t.unit[row.LAYER, i]
        k[row.UNIT, living] = i
        living += k[row.ALIVE, i]
        allies += k[row.ALIVE, i] & (i < t.fact[row.AGENTS])
    for c in range(living, living + t.fact[row.REST]):
        s[row.NEAR_X, c], s[row.NEAR_Y, c], s[row.NEAR_RADIUS, c], k[row.UNIT, c] = NOWHERE, NOWHERE, ZERO, 0
    return allies, living


@function
def whole_blocks(t: Tables, count: int) -> int:
    """Return a number of units rounded up to whole blocks."""
    return (count + t.fact[row.REST]) & ~t.fact[row.REST]


@function
def squared(s: Array, i: int, j: int) -> np.float32:
    """Return the squared distance of two units."""
    dx, dy = s[row.PLACE_X, i] - s[row.PLACE_X, j], s[row.PLACE_Y, i] - s[row.PLACE_Y, j]
    return dx * dx + dy * dy


@function
def packed(x: np.float32, y: np.float32) -> np.int32:
    """Return the squared length of (x, y) as an integer of the same order, its low bits free for an index."""
    return np.int32(np.float32(x * x + y * y).view(np.int32) & ~INDEX_BITS)


@function
def find_nearest(t: Tables, s: Array, k: Array, allies: int, living: int) -> None:
    """Write each living unit's nearest foe that it can hit: distance and index in one integer.

    Positive floats sort like their bits.
    """
    nearest, unit, foes = k[row.NEAREST], k[row.UNIT], whole_blocks(t, living - allies)
    for c in range(allies + foes):
        nearest[c] = NOBODY
    # Slices that start where the loop starts: an index from 0 needs no check for negative ones, and vectorises.
    foe_x, foe_y, foe, of_foe = s[row.NEAR_X, allies:], s[row.NEAR_Y, allies:], unit[allies:], nearest[allies:]
    for a in range(allies):
        x, y, best, i = s[row.NEAR_X, a], s[row.NEAR_Y, a], NOBODY, unit[a]
        if t.fact[row.ALL_HIT]:
            for j in range(foes):
                bits = packed(x - foe_x[j], y - foe_y[j])
                best = np.int32(min(best, np.int32(bits | foe[j])))
                of_foe[j] = min(of_foe[j], np.int32(bits | i))
        else:
            for j in range(living - allies):
                bits = packed(x - foe_x[j], y - foe_y[j])
                mine, its = t.able[row.CAN_HIT, i, foe[j]], t.able[row.CAN_HIT, foe[j], i]
                best = np.int32(min(best, np.int32(bits | foe[j]) if mine else NOBODY))
                of_foe[j] = min(of_foe[j], np.int32(bits | i) if its else NOBODY)
        nearest[a] = best


@function
def acquire(t: Tables, s: Array, k: Array, allies: int, living: int) -> bool:
    """Choose targets: for enemies within `sight`, for idle allies within their weapon's reach.

    Return whether any of them may be another one than before.
    """
    find_nearest(t, s, k, allies, living)
    for i in range(t.fact[row.LANES]):
        k[row.FOE_KEY, i] = NOBODY  # what the dead keep: too far from everybody
    for c in range(living):
        i, key = k[row.UNIT, c], k[row.NEAREST, c]
        near = key & INDEX_BITS
        k[row.FOE_KEY, i], k[row.FOE, i], s[row.FOE_REACH, i] = key, near, t.pair[row.REACH, i, near]
    changed = choose(t, s, k) or t.fact[row.HOLDS_BACK] > 0 or len(t.healers) > 0
    if t.fact[row.HOLDS_BACK]:
        aim_bombs(t, s, k)
    for healer in t.healers:
        find_patient(t, s, k, healer)
    return changed


@function
def choose(t: Tables, s: Array, k: Array) -> bool:
    """Stop allies whose target is lost, and aim idle allies and free enemies at their nearest foe, if near enough.

    Return whether any target is another one than before.
    """
    n, sight, changed = t.fact[row.AGENTS], t.length[row.SIGHT], np.int32(0)
    for i in range(t.fact[row.LANES]):
        order, ally = k[row.ORDER, i], i < n
        stops = ally & (order >= ATTACK) & (k[row.AIMING, i] == 0)
        order = STOP if stops else order
        distance = np.float32(math.sqrt(np.int32(k[row.FOE_KEY, i] & ~INDEX_BITS).view(np.float32)))
        found = k[row.FOE, i] if distance <= (s[row.FOE_REACH, i] if ally else sight) else -1
        replaced = (order == STOP) if ally else (k[row.IN_REACH, i] == 0)
        target = found if replaced else k[row.TARGET, i]
        changed = np.int32(changed | (target ^ k[row.TARGET, i]))
        k[row.ORDER, i], k[row.TARGET, i] = order, target
    return changed != 0


@function
def aim_bombs(t: Tables, s: Array, k: Array) -> None:
    """Aim each exploding enemy at the most crowded ally in sight, of its own share of the allies (every k-th)."""
    n, sight = t.fact[row.AGENTS], t.length[row.SIGHT]
    for rank in range(len(t.bombs)):
        bomb = t.bombs[rank]
        radius, most, best = t.unit[row.SPLASH_RADIUS, bomb], 0, -1
        for prey in range(rank, n, len(t.bombs)):
            if k[row.ALIVE, prey] and squared(s, bomb, prey) <= sight * sight:
                crowd = 0
                for other in range(n):
                    crowd += squared(s, prey, other) < radius * radius
                if crowd > most:
                    most, best = crowd, prey
        if best >= 0:
            k[row.TARGET, bomb] = best


@function
def find_patient(t: Tables, s: Array, k: Array, healer: int) -> None:
    """Aim a healer at the nearest injured friend: an enemy's healer follows its friends, an idle ally's stays."""
    n, best, least, hurt = t.fact[row.AGENTS], -1, ZERO, False
    for friend in range(t.fact[row.UNITS]):
        if t.able[row.HEALABLE, healer, friend]:
            injured = s[row.HEALTH, friend] < t.unit[row.HEALTH_MAX, friend]
            score = squared(s, healer, friend)
            if not injured:
                score += FAR
            if best < 0 or score < least:
                best, least, hurt = friend, score, injured
    if best < 0:
        return
    if healer >= n:
        k[row.TARGET, healer] = best if k[row.ALIVE, best] else -1
    elif k[row.ORDER, healer] == STOP:
        close = math.sqrt(squared(s, healer, best)) <= t.pair[row.REACH, healer, best]
        k[row.TARGET, healer] = best if close and hurt and k[row.ALIVE, best] else -1


@function
def look_up_reach(t: Tables, s: Array, k: Array) -> None:
    """Write the distance at which each unit's weapon reaches its target."""
    for i in range(t.fact[row.UNITS]):
        target = max(k[row.TARGET, i], 0)
        s[row.TO_REACH, i] = t.pair[row.REACH, i, target]


@function
def look_at_targets(t: Tables, s: Array, k: Array) -> None:
    """Write where each unit's target stands, and whether there is one that lives.

    Look-ups stand apart from `aim`, whose loop vectorises, and well before it: numbers that were written one by one
    are not at hand as a vector for a while.
    """
    for i in range(t.fact[row.UNITS]):
        target = max(k[row.TARGET, i], 0)
        k[row.AIMING, i] = k[row.ALIVE, target] & (k[row.TARGET, i] >= 0)
        s[row.TO_X, i], s[row.TO_Y, i] = s[row.PLACE_X, target], s[row.PLACE_Y, target]


@function
def aim(t: Tables, s: Array, k: Array) -> None:
    """Write whose weapon reaches the target, and whose weapon is also ready."""
    for i in range(t.fact[row.LANES]):
        dx, dy = s[row.TO_X, i] - s[row.PLACE_X, i], s[row.TO_Y, i] - s[row.PLACE_Y, i]
        near = (k[row.AIMING, i] > 0) & (np.float32(math.sqrt(dx * dx + dy * dy)) <= s[row.TO_REACH, i])
        armed = (t.unit[row.COOLDOWN, i] > ZERO) & (k[row.ALIVE, i] > 0)
        k[row.IN_REACH, i], k[row.READY, i] = near, near & armed & (s[row.TIMER, i] <= ZERO)


@function
def shoot(t: Tables, s: Array, k: Array) -> None:
    """Fire every ready weapon whose target is in reach, and apply damage, splash and explosions."""
    fired = 0
    for i in range(t.fact[row.UNITS]):
        k[row.SHOOTER, fired] = i
        fired += k[row.READY, i]
    if t.fact[row.SPLASHES]:
        for i in range(t.fact[row.UNITS]):
            k[row.EXPLODED, i] = k[row.BLAST, i] = 0
    for c in range(fired):
        i = k[row.SHOOTER, c]
        s[row.TIMER, i] += t.unit[row.COOLDOWN, i]
        if t.explodes[i]:
            k[row.EXPLODED, i] = k[row.BLAST, i] = 1
        else:
            add_hit(t, s, i, k[row.TARGET, i])
        if t.unit[row.SPLASH_LINE, i] > 0:
            hit_strip(t, s, k, i)
    if not fired:
        return
    if not t.fact[row.SPLASHES]:
        apply_hits(t, s)
        return
    again = True
    while again:
        explode(t, s, k)
        apply_hits(t, s)
        again = count_dead(t, s, k)


@function
def add_hit(t: Tables, s: Array, attacker: int, target: int) -> None:
    """Add one hit to what a unit suffers at this moment."""
    s[row.LOSS, target] += t.pair[row.HEALTH_HIT, attacker, target]
    s[row.HIT, target] += t.pair[row.SHIELD_HIT, attacker, target]


@function
def hit_strip(t: Tables, s: Array, k: Array, attacker: int) -> None:
    """Hit the foes on a strip across the line of fire, except the target."""
    target = k[row.TARGET, attacker]
    to_x, to_y = s[row.X, target], s[row.Y, target]
    ux, uy = to_x - s[row.X, attacker], to_y - s[row.Y, attacker]
    length = max(np.float32(math.sqrt(ux * ux + uy * uy)), TINY)
    ux, uy = ux / length, uy / length
    for j in range(t.fact[row.UNITS]):
        if j != target and k[row.ALIVE, j] and t.able[row.CAN_HIT, attacker, j]:
            rx, ry = s[row.X, j] - to_x, s[row.Y, j] - to_y
            along, across = abs(rx * ux + ry * uy), abs(ry * ux - rx * uy)
            if along <= LINE_DEPTH + t.unit[row.RADIUS, j] and across <= t.unit[row.SPLASH_LINE, attacker]:
                add_hit(t, s, attacker, j)


@function
def explode(t: Tables, s: Array, k: Array) -> None:
    """Hit the foes around the units that explode now; they have no health left."""
    for i in range(t.fact[row.UNITS]):
        if k[row.BLAST, i]:
            for j in range(t.fact[row.UNITS]):
                if k[row.ALIVE, j] and t.able[row.CAN_HIT, i, j]:
                    rx, ry = s[row.X, j] - s[row.X, i], s[row.Y, j] - s[row.Y, i]
                    reach = t.unit[row.SPLASH_RADIUS, i] + t.unit[row.RADIUS, j]
                    if rx * rx + ry * ry <= reach * reach:
                        add_hit(t, s, i, j)
    for i in range(t.fact[row.UNITS]):
        if k[row.BLAST, i]:
            k[row.BLAST, i], s[row.HEALTH, i] = 0, ZERO


@function
def apply_hits(t: Tables, s: Array) -> None:
    """Subtract the hits from shields, then health. Sums of multiples of 0.5 are exact in any order."""
    units = t.fact[row.LANES]
    if t.fact[row.SHIELDS]:
        for i in range(units):
            full = s[row.HIT, i]
            absorbed = min(s[row.SHIELD, i], full)
            s[row.SHIELD, i] -= absorbed
            s[row.LOSS, i] *= (full - absorbed) / max(full, ONE)
            s[row.QUIET, i] = ZERO if full > ZERO else s[row.QUIET, i]
    for i in range(units):
        s[row.HEALTH, i] = max(s[row.HEALTH, i] - s[row.LOSS, i], ZERO)
        s[row.LOSS, i], s[row.HIT, i] = ZERO, ZERO


@function
def count_dead(t: Tables, s: Array, k: Array) -> bool:
    """Mark units without health as dead, and return whether any of them explodes now."""
    again = False
    for i in range(t.fact[row.UNITS]):
        if k[row.ALIVE, i] and s[row.HEALTH, i] <= 0:
            k[row.ALIVE, i] = 0
            if t.explodes[i] and not k[row.EXPLODED, i]:
                k[row.EXPLODED, i] = k[row.BLAST, i] = 1
                again = True
    return again


@function
def heal(t: Tables, s: Array, k: Array, loops: np.float32) -> None:
    """Let every healer heal its target in reach, as far as its energy lasts."""
    for healer in t.healers:
        patient = k[row.TARGET, healer]
        if k[row.IN_REACH, healer] and k[row.ALIVE, healer] and s[row.HEALTH, patient] > 0:
            cost, missing = t.unit[row.HEAL_COST, healer], t.unit[row.HEALTH_MAX, patient] - s[row.HEALTH, patient]
            affordable = s[row.ENERGY, healer] / cost
            amount = min(min(missing, affordable), t.unit[row.HEAL, healer] * loops)
            s[row.HEALTH, patient] += amount
            s[row.ENERGY, healer] = max(s[row.ENERGY, healer] - amount * cost, ZERO)


@function
def regenerate(t: Tables, s: Array, k: Array, loops: np.float32) -> None:
    """Regenerate shields, Zerg health and energy of living units."""
    units = t.fact[row.LANES]
    if t.fact[row.SHIELDS]:
        for i in range(units):
            s[row.QUIET, i] += loops
            grown = min(s[row.SHIELD, i] + SHIELD_PER_LOOP * loops, t.unit[row.SHIELD_MAX, i])
            grows = (k[row.ALIVE, i] > 0) & (s[row.QUIET, i] > QUIET_LOOPS)
            s[row.SHIELD, i] = grown if grows else s[row.SHIELD, i]
    if t.fact[row.REGENERATES]:
        for i in range(units):
            grown = min(s[row.HEALTH, i] + t.unit[row.HP_REGEN, i] * loops, t.unit[row.HEALTH_MAX, i])
            s[row.HEALTH, i] = grown if k[row.ALIVE, i] > 0 else s[row.HEALTH, i]
    if len(t.healers):
        for i in range(units):
            grown = min(s[row.ENERGY, i] + t.unit[row.ENERGY_REGEN, i] * loops, t.unit[row.ENERGY_MAX, i])
            s[row.ENERGY, i] = grown if k[row.ALIVE, i] > 0 else s[row.ENERGY, i]
