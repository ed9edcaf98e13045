"""Physics of the built-in simulator: terrain, pairwise distances, movement and collision.

Arrays are [U, B], units first: an operation over units works on whole rows of slots.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.backend import Order, Terrain
from omagd.envs.battle.maps import MapSpec, Wall
from omagd.envs.battle.roster import Battle, Roster

SIZE, BORDER = 32, 1  # cells; units cannot enter the border
FLAT_HEIGHT, HIGH_GROUND = 0.4, 0.9
LANE_MARGIN = 0.4  # distance kept from the sides of an opening


def build_terrain(spec: MapSpec) -> Terrain:
    """Return the terrain of a map: an open field with a border, divided by the map's wall if it has one."""
    low, high = BORDER, SIZE - BORDER
    pathing = np.zeros((SIZE, SIZE), dtype=bool)
    pathing[low:high, low:high] = True
    height = np.full((SIZE, SIZE), FLAT_HEIGHT, dtype=np.float32)
    if spec.wall is not None:
        if spec.wall.cliff:
            _raise_plateau(height, spec.wall)
        else:
            pathing &= ~_wall_cells(spec.wall)
    return Terrain(SIZE, SIZE, (low, low, high, high), pathing, height)


def ground_grid(spec: MapSpec, terrain: Terrain) -> np.ndarray:
    """Return [map_x, map_y] bool: where units that cannot walk cliffs may stand."""
    if spec.wall is None:
        return terrain.pathing
    return terrain.pathing & ~_wall_cells(spec.wall)


def _wall_cells(wall: Wall) -> np.ndarray:
    cell = np.arange(SIZE)
    across = (cell >= wall.x0) & (cell < wall.x1)
    closed = (cell < wall.gap_y0) | (cell >= wall.gap_y1)
    return across[:, None] & closed[None, :]


def _raise_plateau(height: np.ndarray, wall: Wall) -> None:
    """Raise everything left of a cliff, with a ramp in the opening."""
    height[: int(wall.x1)] = HIGH_GROUND
    ramp = np.linspace(HIGH_GROUND, FLAT_HEIGHT, int(wall.x1 - wall.x0) + 2, dtype=np.float32)[1:-1]
    height[int(wall.x0) : int(wall.x1), int(wall.gap_y0) : int(wall.gap_y1)] = ramp[:, None]


def lanes(wall: Wall) -> tuple[float, float, float, float, float]:
    """Return the middle of a wall, the lowest and highest y of the way through it, and its left and right face."""
    low, high = wall.gap_y0 + LANE_MARGIN, wall.gap_y1 - LANE_MARGIN
    return 0.5 * (wall.x0 + wall.x1), low, high, wall.x0 - LANE_MARGIN, wall.x1 + LANE_MARGIN


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


INDEX_BITS = 127  # low bits of a squared distance that carry the unit index; relative error below 2**-16
NOBODY = np.int32(0x7F000000)
Floats = np.ndarray | np.float32
FAR_AWAY, APART = np.float32(1.0e4), np.float32(1.0e-3)


def memory_size(units: int, slots: int) -> int:
    """Return the number of float32 values in the working memory of `Pairs`."""
    return (2 + 4 * units) * units * slots


class Pairs:
    """Differences and squared distances of all pairs of units; dead units are placed far away.

    Args:
        memory: working memory, float32, at least `memory_size(U, B)` values.

    Attributes:
        x, y: [U, B], positions. dx, dy: [U, U, B], position of the first unit minus that of the second. d2: squared
            distance.
    """

    def __init__(self, roster: Roster, slots: int, memory: np.ndarray) -> None:
        self._roster = roster
        units = roster.total
        number = np.arange(units, dtype=np.float32)[:, None]
        # A tiny offset per unit gives units at the same position a direction to separate in.
        self._offset_x, self._offset_y = APART * number, APART * ((number * 7) % 11)
        self._far = FAR_AWAY + 100 * number
        places = 2 * units * slots
        self.x, self.y = memory[:places].reshape(2, units, slots)
        pairs = memory[places : memory_size(units, slots)]
        self.dx, self.dy, self.d2, self.work = pairs.reshape(4, units, units, slots)
        self._index = np.arange(units, dtype=np.int32)

    def measure(self, battle: Battle) -> None:
        """Recompute everything from the current positions."""
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


PUSH_WALKING, PUSH_STANDING, PUSH_MOST = np.float32(0.5), np.float32(0.1), np.float32(0.4)
HOLD_BACK = np.float32(0.5)  # speed factor of enemies behind their exploding units
SWING = np.float32(6.0)  # loops that a chasing unit stands still after a shot; a MOVE order interrupts it
STOP_SHORT = np.float32(0.05)  # a chasing unit stops this far inside its weapon's reach
TINY = np.float32(1.0e-6)


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

    def columns(self) -> dict[str, np.ndarray]:
        """Return constants of the units by name, each [U, 1]."""
        return {"low": self._low, "high": self._high, "free_below": self._free_below, "can_move": self._can_move}

    def lanes(self) -> tuple[float, float, float, float, float]:
        """Return the wall's middle, its opening's lowest and highest y, its left and right face; zeros without one."""
        return lanes(self.wall) if self.wall is not None else (0.0, 0.0, 0.0, 0.0, 0.0)

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
        """Return the push (x, y) [U, B] on each unit by all that it overlaps with; overwrites `dx` and `dy`."""
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

    def _place(self, battle: Battle, x: np.ndarray, y: np.ndarray) -> None:
        """Set the new positions; at a wall, slide along it or stay."""
        if self.wall is not None:
            cells = ((ax.astype(np.intp), ay.astype(np.intp)) for ax, ay in ((x, y), (x, battle.y), (battle.x, y)))
            ok, ok_x, ok_y = (self.grid[cell] | self.free for cell in cells)
            x = np.where(ok | ok_x, x, battle.x)
            y = np.where(ok | (ok_y & ~ok_x), y, battle.y)
        battle.x[...] = x
        battle.y[...] = y
