"""The simulator of `skirmish` in NumPy, over a batch of battles: what compiled battles must equal, bit for bit.

Constants and the arrays of the state are shared with the kernels. Inside, arrays are [U, B]: U units (n allies, then m
enemies), B slots. All operations are elementwise over slots, and sums over units have a fixed order.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.args import MOST_GROUPS
from omagd.envs.battle.backend import Order, Terrain
from omagd.envs.battle.compiled import engine
from omagd.envs.battle.compiled.combat import FAR, INDEX_BITS, LINE_DEPTH, NOBODY, QUIET_LOOPS, SHIELD_PER_LOOP
from omagd.envs.battle.compiled.movement import PUSH_MOST, PUSH_STANDING, PUSH_WALKING, STOP_SHORT, TINY
from omagd.envs.battle.compiled.play import LOOPS_PER_STEP, LOOPS_PER_SUBSTEP, SUBSTEPS
from omagd.envs.battle.compiled.starts import (
    ANGLE,
    EAST,
    GROUPS,
    HALF,
    HEIGHT,
    HIGH,
    INNER,
    JITTER,
    LOW,
    MEMBER,
    MIDDLE,
    N_ANGLES,
    NEAR,
    ORDER,
    OUTER,
    REFLECTS,
    SHARE,
    START_X,
    WEST,
    Plan,
    make_plan,
)
from omagd.envs.battle.compiled.starts import APART as HIDDEN_APART
from omagd.envs.battle.compiled.tables import APART, FAR_AWAY, FLOATS, HOLD_BACK, INTS, SWING, Roster
from omagd.envs.battle.maps import HIDDEN, MIXED, SIZE, MapSpec, Wall, ground_grid, lanes
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.utils.seeding import GOLDEN, splitmix64

Floats = np.ndarray | np.float32
Hits = tuple[np.ndarray, np.ndarray, np.ndarray]  # attackers, targets, slots: one entry per hit


class ReferenceEnv(SkirmishEnv):
    """`skirmish`, played and judged by NumPy."""

    @staticmethod
    def engine():
        return Simulator, BattleSemantics


class Simulator(engine.Simulator):
    """The same state, played by NumPy."""

    def __init__(self, map_spec: MapSpec, n_slots: int, *, difficulty: str = "7") -> None:
        super().__init__(map_spec, n_slots, difficulty=difficulty)
        self._spec, self._sight = map_spec, engine.SIGHT[difficulty]
        self._movement = Movement(map_spec, self._roster, self.terrain)
        self._battle = Battle(self._floats, self._ints)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in the slots `which` ([B] bool), slot b from `seeds[b]`."""
        slots = np.flatnonzero(which)
        roster, n = self._roster, self._roster.n
        battle = Battle.empty(roster.total, slots.size)
        position, goals = start_positions(self._spec, np.asarray(seeds)[slots])
        battle.x[...], battle.y[...] = position
        battle.goal_x[...], battle.goal_y[...] = goals
        if self._spec.enemy_waits:
            battle.goal_x[n:], battle.goal_y[n:] = battle.x[n:], battle.y[n:]
        battle.health[...], battle.shield[...], battle.energy[...] = roster.health_max, roster.shield_max, roster.energy
        battle.alive[...] = 1
        battle.order[:n] = Order.STOP
        battle.order[n:] = Order.ATTACK
        self._battle.put(slots, battle)
        self._publish()

    def advance(self, order: np.ndarray, target: np.ndarray, dest: np.ndarray, active: np.ndarray) -> None:
        """Give orders ([B, n] `Order`, [B, n], [B, n, 2]) to the allies of the active slots and play 8 game loops."""
        slots = np.flatnonzero(active)
        if slots.size:
            part = self._battle.take(slots)
            self._play(part, order[slots].T, target[slots].T, dest[slots].swapaxes(0, 1))
            self._battle.put(slots, part)
        self._publish()

    def _play(self, battle: Battle, order: np.ndarray, target: np.ndarray, dest: np.ndarray) -> None:
        take_orders(self._roster, battle, order, target, dest)
        pairs = Pairs(self._roster)
        for substep in range(SUBSTEPS):
            self._substep(battle, pairs, choose=substep % 2 == 0)
        regenerate(self._roster, battle, LOOPS_PER_STEP)

    def _substep(self, battle: Battle, pairs: Pairs, choose: bool) -> None:
        roster = self._roster
        pairs.measure(battle)
        if choose:
            acquire(roster, battle, pairs, self._sight)
        aiming = (battle.target >= 0) & (battle.of_target(battle.alive) > 0)
        dx, dy = battle.of_target(pairs.x) - pairs.x, battle.of_target(pairs.y) - pairs.y
        in_reach = aiming & (np.sqrt(dx * dx + dy * dy) <= reach_of(roster, battle.target))
        shoot(roster, battle, in_reach)
        if roster.healers:
            heal(roster, battle, in_reach, LOOPS_PER_SUBSTEP)
        np.greater(battle.health, 0, out=battle.alive, casting="unsafe")
        self._movement.walk(battle, pairs, aiming, in_reach, LOOPS_PER_SUBSTEP)
        battle.timer -= LOOPS_PER_SUBSTEP
        # A delay of less than a substep counts towards the next shot, so that the average rate of fire is right.
        np.copyto(battle.timer, 0, where=battle.timer <= -LOOPS_PER_SUBSTEP)


class Battle:
    """State of B battles: float32 and int32 arrays [U, B], in one block each, so that slots are copied together.

    Attributes:
        timer: loops until the weapon is ready; at most one substep below zero. quiet: loops since the last damage.
        goal_x, goal_y: destination of MOVE and of the enemy's advance. order: `Order`. target: unit index or -1.
        alive: 0 or 1.
    """

    def __init__(self, floats: np.ndarray, ints: np.ndarray) -> None:
        self.floats, self.ints = floats, ints
        self.x, self.y, self.health, self.shield, self.energy, self.timer, self.quiet, self.goal_x, self.goal_y = floats
        self.order, self.target, self.alive = ints
        self.slots = np.arange(floats.shape[2])

    @classmethod
    def empty(cls, units: int, slots: int) -> Battle:
        """Return battles without living units."""
        battle = cls(np.zeros((len(FLOATS), units, slots), np.float32), np.zeros((len(INTS), units, slots), np.int32))
        battle.target.fill(-1)
        return battle

    def take(self, slots: np.ndarray) -> Battle:
        """Return a copy of some slots."""
        return Battle(self.floats.take(slots, axis=2), self.ints.take(slots, axis=2))

    def put(self, slots: np.ndarray, part: Battle) -> None:
        """Write a copy made by `take` back."""
        self.floats[:, :, slots] = part.floats
        self.ints[:, :, slots] = part.ints

    def of_target(self, values: np.ndarray) -> np.ndarray:
        """Return `values` [U, B] of each unit's target; those of unit 0 where there is none."""
        return values.ravel()[self.target_flat()]

    def target_flat(self) -> np.ndarray:
        """Return [U, B], indices of the targets in a flattened [U, B] array."""
        return np.maximum(self.target, 0) * self.slots.size + self.slots


def reach_of(roster: Roster, target: np.ndarray) -> np.ndarray:
    """Return [U, B], the centre distance at which each unit's weapon reaches its target."""
    return roster.reach.ravel()[np.arange(roster.total)[:, None] * roster.total + np.maximum(target, 0)]


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
    in_reach = distance <= reach_of(roster, near)
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


def detour(wall: Wall, x: np.ndarray, y: np.ndarray, gx: np.ndarray, gy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the next point [U, B] on the way to (gx, gy): the wall's opening if the wall lies between."""
    middle, low, high, left_face, right_face = (np.float32(length) for length in lanes(wall))
    from_left = x < middle
    crossing = from_left != (gx < middle)
    lane = np.clip(y, low, high)
    in_lane = lane == y
    near_face, far_face = np.where(from_left, left_face, right_face), np.where(from_left, right_face, left_face)
    inside = (x > left_face) & (x < right_face)
    leaving = inside & in_lane & ((gy < low) | (gy > high)) & ~crossing
    way_x = np.where(in_lane, far_face, near_face)
    out_x = np.where(crossing, way_x, np.where(leaving, near_face, gx))
    return out_x, np.where(crossing, lane, np.where(leaving, y, gy))


class Pairs:
    """Differences and squared distances of all pairs of units; dead units are placed far away.

    Attributes:
        x, y: [U, B], positions. dx, dy: [U, U, B], position of the first unit minus that of the second. d2: squared
            distance.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        number = np.arange(roster.total, dtype=np.float32)[:, None]
        # A tiny offset per unit gives units at the same position a direction to separate in.
        self._offset_x, self._offset_y = APART * number, APART * ((number * 7) % 11)
        self._far = FAR_AWAY + 100 * number
        self._index = np.arange(roster.total, dtype=np.int32)

    def measure(self, battle: Battle) -> None:
        """Recompute everything from the current positions."""
        self.x = np.where(battle.alive == 0, self._far, battle.x + self._offset_x)
        self.y = battle.y + self._offset_y
        self.dx, self.dy = self.x[:, None] - self.x[None], self.y[:, None] - self.y[None]
        self.d2 = self.dx * self.dx + self.dy * self.dy

    def nearest_foe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return index of and centre distance to the nearest foe that each unit can hit, both [U, B]."""
        n = self._roster.n
        key = np.concatenate([self._nearest(slice(0, n), slice(n, None)), self._nearest(slice(n, None), slice(0, n))])
        return key & INDEX_BITS, np.sqrt((key & ~INDEX_BITS).view(np.float32))

    def _nearest(self, units: slice, foes: slice) -> np.ndarray:
        """Return the smallest (distance, index), packed into one integer: positive floats sort like their bits."""
        key = (self.d2[units, foes].view(np.int32) & ~INDEX_BITS) | self._index[foes][None, :, None]
        if not self._roster.all_hit:
            key = np.where(self._roster.can_hit[units, foes, None], key, NOBODY)
        return np.minimum.reduce(key, axis=1)


class Movement:
    """Moves all units by one substep."""

    def __init__(self, spec: MapSpec, roster: Roster, terrain: Terrain) -> None:
        self._roster, self.wall = roster, spec.wall
        low, _, high, _ = terrain.playable  # a square
        inset = np.minimum(roster.radius, 0.5 * (high - low)).astype(np.float32)
        self._low, self._high = np.float32(low) + inset, np.float32(high) - inset
        self.grid = ground_grid(spec, terrain)
        self.free = roster.walks_cliffs & (spec.wall is not None and spec.wall.cliff)
        self._touch = roster.touch[:, :, None]
        self._free_below = np.where(roster.armed, roster.cooldown - SWING, np.float32(0))
        self._can_move = (roster.step > 0).astype(np.float32)

    def walk(self, battle: Battle, pairs: Pairs, aiming: np.ndarray, in_reach: np.ndarray, loops: int) -> None:
        """Move by `loops` game loops: first units that walk to a place, then units that chase a moving target.

        Args:
            aiming: [U, B] bool, the unit has a living target. in_reach: [U, B] bool, and its weapon reaches it.
        """
        roster, live = self._roster, battle.alive > 0
        chasing = aiming & (battle.order >= Order.ATTACK) & live
        going = ((battle.order == Order.MOVE) | (roster.enemy & ~aiming)) & live
        most = roster.pace * np.float32(loops) * going
        x, y = self._stride(battle, battle.goal_x, battle.goal_y, np.float32(0), most)
        slack = reach_of(roster, battle.target) - STOP_SHORT
        most = roster.step * np.float32(loops) * (chasing & (battle.timer <= self._free_below))
        if roster.has_vanguard:
            behind = roster.rearguard & (battle.alive[roster.vanguard] > 0).any(axis=0)
            most *= np.where(behind, HOLD_BACK, np.float32(1))
        hunt_x, hunt_y = self._stride(battle, battle.of_target(x), battle.of_target(y), slack, most)
        x, y = np.where(chasing, hunt_x, x), np.where(chasing, hunt_y, y)
        push_x, push_y = self._push(pairs)
        give = np.where(going | (chasing & ~in_reach), PUSH_WALKING, PUSH_STANDING) * self._can_move * live
        x += np.clip(push_x * give, -PUSH_MOST, PUSH_MOST)
        y += np.clip(push_y * give, -PUSH_MOST, PUSH_MOST)
        self._place(battle, np.clip(x, self._low, self._high), np.clip(y, self._low, self._high))

    def _stride(
        self, battle: Battle, goal_x: np.ndarray, goal_y: np.ndarray, slack: Floats, most: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return positions [U, B] after walking up to `most` cells towards a goal, but not nearer than `slack`."""
        if self.wall is not None:
            goal_x, goal_y, slack = self._around_wall(self.wall, battle, goal_x, goal_y, slack)
        way_x, way_y = goal_x - battle.x, goal_y - battle.y
        distance = np.sqrt(way_x * way_x + way_y * way_y) + TINY
        share = np.minimum(np.maximum(distance - slack, 0), most) / distance
        return battle.x + way_x * share, battle.y + way_y * share

    def _around_wall(
        self, wall: Wall, battle: Battle, goal_x: np.ndarray, goal_y: np.ndarray, slack: Floats
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the next point on the way, with zero slack unless it is the goal itself."""
        next_x, next_y = detour(wall, battle.x, battle.y, goal_x, goal_y)
        next_x, next_y = np.where(self.free, goal_x, next_x), np.where(self.free, goal_y, next_y)
        direct = (next_x == goal_x) & (next_y == goal_y)
        return next_x, next_y, np.where(direct, slack, np.float32(0))

    def _push(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """Return the push (x, y) [U, B] on each unit by all that it overlaps with."""
        weight = np.maximum(self._touch / np.maximum(np.sqrt(pairs.d2), TINY) - 1, 0)
        # dx[i, j] = x[i] - x[j]: the push on j is the sum over the leading axis, whose order no batch size changes.
        return -np.add.reduce(pairs.dx * weight, axis=0), -np.add.reduce(pairs.dy * weight, axis=0)

    def _place(self, battle: Battle, x: np.ndarray, y: np.ndarray) -> None:
        """Set the new positions; at a wall, slide along it or stay."""
        if self.wall is not None:
            cells = ((ax.astype(np.intp), ay.astype(np.intp)) for ax, ay in ((x, y), (x, battle.y), (battle.x, y)))
            ok, ok_x, ok_y = (self.grid[cell] | self.free for cell in cells)
            x = np.where(ok | ok_x, x, battle.x)
            y = np.where(ok | (ok_y & ~ok_x), y, battle.y)
        battle.x[...] = x
        battle.y[...] = y


def seeded_uniform(seeds: np.ndarray, count: int) -> np.ndarray:
    """Return [count, B] float32 in [0, 1), column b a function of `seeds[b]` alone (SplitMix64)."""
    step = np.uint64(GOLDEN)
    z = splitmix64(seeds.astype(np.uint64) + step)[None, :] + step * np.arange(1, count + 1, dtype=np.uint64)[:, None]
    return (splitmix64(z) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def start_positions(spec: MapSpec, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return start positions and the places that units advance to, both [2, U, B] float32.

    Allies are sorted by (type, x, y). Enemies advance to the allies' start: to the middle of its formation, or of all
    allies, keeping their own formation.
    """
    plan, n, total = make_plan(spec), spec.n_agents, spec.n_agents + spec.n_enemies
    more = {MIXED: MEMBER + spec.n_enemies, HIDDEN: 1}.get(spec.start, 0)
    draws = seeded_uniform(seeds, 2 * total + more)
    noise, draws = draws[: 2 * total].reshape(2, total, -1), draws[2 * total :]
    shift = np.float32(2 * JITTER) * (noise - HALF)
    ahead = np.array([1, 0], np.float32)[:, None]  # from the allies to the enemies
    if spec.start == MIXED:
        position, centre = _mixed(plan, n, noise, shift, draws)
    elif spec.start == HIDDEN:
        ahead = plan.directions[:, (draws[ANGLE] * np.float32(N_ANGLES)).astype(np.int64)]
        position, centre = _hidden(plan, n, shift, ahead), plan.ground[MIDDLE]
    else:
        position, centre = plan.place[:, :, None] + shift, plan.ground[START_X:, None]
    _sort_allies(spec, position)
    goals = np.zeros_like(position)
    goals += np.broadcast_to(centre, (2, len(seeds)))[:, None]
    goals[:, n:] += _turned(plan.offset[:, n:], ahead)
    return position, goals


def _turned(offset: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Return offsets [2, m] from a formation's centre, turned from (1, 0) to `ahead` [2, B]: [2, m, B]."""
    x, y, dx, dy = offset[0, :, None], offset[1, :, None], ahead[0], ahead[1]
    return np.stack([x * dx - y * dy, x * dy + y * dx])


def _hidden(plan: Plan, n: int, shift: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Place the allies' formation in the middle and the enemy's on a circle around it, facing the middle.

    Units of large teams that would stand beyond the edge of the ground stand on it.
    """
    ground = plan.ground
    allies = ground[MIDDLE] + plan.offset[:, :n, None]
    enemies = (ground[MIDDLE] + ground[HIDDEN_APART] * ahead)[:, None] + _turned(plan.offset[:, n:], ahead)
    position: np.ndarray = np.concatenate([np.broadcast_to(allies, (2, n, shift.shape[2])), enemies], axis=1) + shift
    return np.minimum(np.maximum(position, ground[LOW]), ground[HIGH])


def _mixed(
    plan: Plan, n: int, noise: np.ndarray, shift: np.ndarray, draws: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return positions [2, U, B] of which half are mirrored and half surrounded, and the allies' centres [2, B]."""
    mirrors = draws[REFLECTS] < plan.ground[SHARE]
    reflected, centre = _reflected(plan, n, noise)
    position = np.where(mirrors, reflected, _surrounded(plan, n, shift, draws))
    return position, np.where(mirrors, centre, plan.ground[MIDDLE])


def _reflected(plan: Plan, n: int, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place allies anywhere in the west, enemies mirrored, and further enemies anywhere in the east.

    Returns positions and the means of the allies.
    """
    ground, total = plan.ground, noise.shape[1]
    x, y = ground[LOW] + noise[0] * ground[WEST], ground[LOW] + noise[1] * ground[HEIGHT]
    twins = min(n, total - n)
    x[n : n + twins], y[n : n + twins] = np.float32(SIZE) - x[:twins], y[:twins]
    x[n + twins :] = ground[MIDDLE] + noise[0, n + twins :] * ground[EAST]
    centre = np.zeros((2, noise.shape[2]), np.float32)
    for i in range(n):  # one after the other, as kernels add
        centre += (x[i], y[i])
    return np.stack([x, y]), centre / np.float32(n)


def _surrounded(plan: Plan, n: int, shift: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Place the allies' formation in the middle and enemies in one to four groups, each on its own diagonal."""
    ground, slots = plan.ground, np.arange(draws.shape[1])
    m = shift.shape[1] - n
    groups = 1 + (draws[GROUPS] * np.float32(MOST_GROUPS)).astype(np.int64)
    group = (draws[MEMBER : MEMBER + m] * groups.astype(np.float32)).astype(np.int64)
    order = plan.orders[(draws[ORDER] * np.float32(len(plan.orders))).astype(np.int64)]
    corner = order[slots, group]
    far = ground[OUTER] + draws[NEAR + group, slots] * (ground[INNER] - ground[OUTER])
    sides = np.stack([2 * (corner & 1) - 1, 2 * (corner >> 1) - 1]).astype(np.float32)
    number = np.array([(group[:i] == group[i]).sum(axis=0) for i in range(m)])  # among the members of the group
    enemies = (ground[MIDDLE] + sides * far) + plan.lattice[:, number]
    allies = np.broadcast_to(ground[MIDDLE] + plan.offset[:, :n, None], (2, n, len(slots)))
    placed: np.ndarray = np.concatenate([allies, enemies], axis=1) + shift
    return placed


def _sort_allies(spec: MapSpec, position: np.ndarray) -> None:
    """Sort the places [2, U, B] of allies of the same type by (x, y)."""
    for name in dict.fromkeys(spec.allies):
        rows = [i for i in range(spec.n_agents) if spec.allies[i] == name]
        x, y = position[0, rows], position[1, rows]
        rank = np.lexsort((y, x), axis=0)
        position[0, rows] = np.take_along_axis(x, rank, axis=0)
        position[1, rows] = np.take_along_axis(y, rank, axis=0)
