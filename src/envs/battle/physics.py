"""Where units go: towards targets and goals, round walls, apart from each other, and never off the ground."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Order, Terrain
from omagd.envs.battle.ground import detour, ground_grid
from omagd.envs.battle.maps import MapSpec
from omagd.envs.battle.roster import Battle, Roster

INDEX_BITS = 127  # low bits of a squared distance that carry the unit index; relative error below 2**-16
NOBODY = np.int32(0x7F000000)
FAR_AWAY, APART = np.float32(1.0e4), np.float32(1.0e-3)


def memory_size(units: int, slots: int) -> int:
    """Return how many float32 numbers `Pairs` works in."""
    return (2 + 4 * units) * units * slots


class Pairs:
    """Differences and squared distances of all units of all slots; the dead lie far away from everyone.

    Args:
        memory: float32, at least `memory_size(U, B)` numbers to work in.

    Attributes:
        x, y: [U, B] positions used. dx, dy: [U, U, B] position of the first unit less that of the second. d2: squared.
    """

    def __init__(self, roster: Roster, slots: int, memory: np.ndarray) -> None:
        self._roster = roster
        units = roster.total
        number = np.arange(units, dtype=np.float32)[:, None]
        # A hair's breadth between the columns, so that units on one spot know in which direction to part.
        self._offset_x, self._offset_y = APART * number, APART * ((number * 7) % 11)
        self._far = FAR_AWAY + 100 * number
        places = 2 * units * slots
        self.x, self.y = memory[:places].reshape(2, units, slots)
        pairs = memory[places : memory_size(units, slots)]
        self.dx, self.dy, self.d2, self.work = pairs.reshape(4, units, units, slots)
        self._index = np.arange(units, dtype=np.int32)

    def measure(self, battle: Battle) -> None:
        """Compute everything anew."""
        dead = battle.alive == 0
        np.add(battle.x, self._offset_x, out=self.x)
        np.add(battle.y, self._offset_y, out=self.y)
        np.copyto(self.x, self._far, where=dead)
        np.subtract(self.x[:, None], self.x[None], out=self.dx)
        np.subtract(self.y[:, None], self.y[None], out=self.dy)
        np.multiply(self.dx, self.dx, out=self.d2)
        np.multiply(self.dy, self.dy, out=self.work)
        self.d2 += self.work

    def nearest_foe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return [U, B] index of and centre distance to the nearest foe that the unit can hit."""
        n = self._roster.n
        key = np.concatenate([self._nearest(slice(0, n), slice(n, None)), self._nearest(slice(n, None), slice(0, n))])
        return key & INDEX_BITS, np.sqrt((key & ~INDEX_BITS).view(np.float32))

    def _nearest(self, who: slice, whom: slice) -> np.ndarray:
        """Return the smallest of (distance, index) packed into one integer: positive floats sort like their bits."""
        key = (self.d2[who, whom].view(np.int32) & ~INDEX_BITS) | self._index[whom][None, :, None]
        if not self._roster.all_hit:
            key = np.where(self._roster.can_hit[who, whom, None], key, NOBODY)
        return np.minimum.reduce(key, axis=1)


PUSH_WALKING, PUSH_STANDING, PUSH_MOST = np.float32(0.5), np.float32(0.1), np.float32(0.4)
HOLD_BACK = np.float32(0.5)  # pace of enemies while exploding friends go first
SWING = np.float32(6.0)  # loops for which a chaser stands after its shot; a MOVE order breaks it off
STOP_SHORT = np.float32(0.05)  # a chaser stops this much inside its weapon's reach
TINY = np.float32(1.0e-6)


class Movement:
    """Moves all units by one substep."""

    def __init__(self, spec: MapSpec, roster: Roster, terrain: Terrain) -> None:
        self._roster, self._wall = roster, spec.wall
        x0, y0, x1, y1 = terrain.playable
        inset = np.minimum(roster.radius, 0.5 * (x1 - x0)).astype(np.float32)
        self._low_x, self._high_x = np.float32(x0) + inset, np.float32(x1) - inset
        self._low_y, self._high_y = np.float32(y0) + inset, np.float32(y1) - inset
        self._grid = ground_grid(spec, terrain)
        self._touch = roster.touch[:, :, None]
        self._free_below = np.where(roster.armed, roster.cooldown - SWING, np.float32(0))
        self._can_move = (roster.step > 0).astype(np.float32)

    def walk(self, battle: Battle, pairs: Pairs, aiming: np.ndarray, in_reach: np.ndarray, loops: int) -> None:
        """Move by `loops` game loops: first those who walk to a place, then those who chase and see where prey goes.

        Args:
            aiming: [U, B] bool, the unit has a living target. in_reach: [U, B] bool, and its weapon reaches it.
        """
        roster, live = self._roster, battle.alive > 0
        chasing = aiming & (battle.order >= Order.ATTACK) & live
        going = ((battle.order == Order.MOVE) | (roster.enemy & ~aiming)) & live
        most = roster.pace * np.float32(loops) * going
        x, y = self._stride(battle, battle.goal_x, battle.goal_y, np.float32(0), most)
        slack = roster.reach_of(battle.target) - STOP_SHORT
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
        self._settle(battle, np.clip(x, self._low_x, self._high_x), np.clip(y, self._low_y, self._high_y))

    def _stride(
        self, battle: Battle, goal_x: np.ndarray, goal_y: np.ndarray, slack: np.ndarray, most: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return positions [U, B] after walking up to `most` cells towards a goal, no nearer than `slack`."""
        if self._wall is not None:
            goal_x, goal_y, slack = self._round_wall(battle, goal_x, goal_y, slack)
        way_x, way_y = goal_x - battle.x, goal_y - battle.y
        distance = np.sqrt(way_x * way_x + way_y * way_y) + TINY
        share = np.minimum(np.maximum(distance - slack, 0), most) / distance
        return battle.x + way_x * share, battle.y + way_y * share

    def _round_wall(
        self, battle: Battle, goal_x: np.ndarray, goal_y: np.ndarray, slack: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the next point on the way, and no slack where that point is not the goal itself."""
        free = self._roster.walks_cliffs if self._wall.cliff else np.zeros_like(self._roster.walks_cliffs)
        next_x, next_y = detour(self._wall, battle.x, battle.y, goal_x, goal_y)
        next_x, next_y = np.where(free, goal_x, next_x), np.where(free, goal_y, next_y)
        direct = (next_x == goal_x) & (next_y == goal_y)
        return next_x, next_y, np.where(direct, slack, np.float32(0))

    def _push(self, pairs: Pairs) -> tuple[np.ndarray, np.ndarray]:
        """Return [U, B] by how much, and whither, each unit overlaps with the others; uses up `dx` and `dy`."""
        work = pairs.work
        np.sqrt(pairs.d2, out=work)
        np.maximum(work, TINY, out=work)
        np.divide(self._touch, work, out=work)
        work -= 1
        np.maximum(work, 0, out=work)
        pairs.dx *= work
        pairs.dy *= work
        # dx[i, j] = x[i] - x[j]: the push on j is the sum over the leading axis, whose order no batch size changes.
        return -np.add.reduce(pairs.dx, axis=0), -np.add.reduce(pairs.dy, axis=0)

    def _settle(self, battle: Battle, x: np.ndarray, y: np.ndarray) -> None:
        """Take the new positions; at a wall, slide along it or stay."""
        if self._wall is not None:
            free = self._roster.walks_cliffs if self._wall.cliff else False
            ok, ok_x, ok_y = (self._open(*at) | free for at in ((x, y), (x, battle.y), (battle.x, y)))
            x = np.where(ok | ok_x, x, battle.x)
            y = np.where(ok | (ok_y & ~ok_x), y, battle.y)
        battle.x[...] = x
        battle.y[...] = y

    def _open(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return self._grid[x.astype(np.intp), y.astype(np.intp)]
