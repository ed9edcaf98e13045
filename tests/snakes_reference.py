"""One board of 3v3 snakes in plain Python: an independent reference of opponents, observations, rewards and draws."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

HEIGHT, WIDTH = 10, 20
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
Place = tuple[int, int]


@dataclass
class Slow:
    """A board as one team sees it: its own snakes are the first three.

    bodies: six lists of (row, col), head first. beans: oldest first, and `slots`, their numbers. directions: of the
    last moves.
    """

    bodies: list[list[Place]]
    beans: list[Place]
    slots: list[int]
    directions: list[int]
    steps: int

    def code(self, place: Place) -> int:
        return next((2 + i for i, body in enumerate(self.bodies) if place in body), int(place in self.beans))

    def snake_at(self, place: Place) -> float:
        return float(self.code(place) > 1)

    @property
    def lengths(self) -> list[int]:
        return [len(body) for body in self.bodies]

    def facts(self, snake: int) -> list[float]:
        """Return length and direction."""
        return [self.lengths[snake] / 20, *(float(self.directions[snake] == a) for a in range(4))]


def of_engine(engine, row, team) -> Slow:
    def places(cells):
        return [divmod(int(cell), WIDTH) for cell in cells]

    order, board = [0, 1, 2, 3, 4, 5] if team == 0 else [3, 4, 5, 0, 1, 2], engine.board
    bodies = [places(body) for body in engine.segments(row)]
    directions = board.directions[row, order].tolist()
    slots = board.bean_slots[row].tolist()
    return Slow([bodies[i] for i in order], places(board.beans[row]), slots, directions, int(board.steps[row]))


def beside(place, r, c):
    return (place[0] + r) % HEIGHT, (place[1] + c) % WIDTH


def around(place):
    return [beside(place, r, c) for r, c in STEPS]


def plain(a, b):
    return math.sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)


def difference(a, b):
    """Return (down, right) from a to b the shorter way around the torus."""
    gaps = zip(a, b, (HEIGHT, WIDTH), strict=True)
    return [y - x if abs(y - x) <= size // 2 else y - x - int(math.copysign(size, y - x)) for x, y, size in gaps]


def torus(a, b):
    return math.hypot(*difference(a, b))


def steps_between(a, b):
    return sum(map(abs, difference(a, b)))


def play(name: str, slow: Slow) -> list[int]:
    """Return the actions of a script (not "random") for the own snakes."""
    left, actions = list(slow.beans), []
    for head, *_ in slow.bodies[:3]:
        target = min(left, key=lambda bean: plain(head, bean))
        if name == "greedy":
            left.remove(target)
        costs = []
        for cell in around(head):
            cost, blocked = plain(cell, target), slow.snake_at(cell)
            dead_end = all(slow.snake_at(after) for after in around(cell))
            if name == "greedy":
                cost = math.inf if blocked else cost
            elif name == "evasion":
                cost = cost**2 + 10_000 * blocked + 10_000 * dead_end
            else:
                cost += {"l1": 0, "l3": 5, "l4": 1000}[name] * blocked
            costs.append(cost)
        actions.append(costs.index(min(costs)))
    return actions


SCALES = {
    "26": [10, 20, *[7] * 4, *[10, 20] * 10],
    "30": [10, 20, *[7] * 4, *[10, 5, 125**0.5] * 2, 1, 1, *[10, 20] * 5, 1, 1, *[10, 20] * 2],
    "35": [10, 20, *[7] * 4, *[10, 20] * 5, *[10, 5, 125**0.5] * 2, 1, *[10, 20] * 5, 1, 1],
}


def observation(slow: Slow, agent: int, args: dict) -> list[float]:
    """Return what an agent sees under these `env_args`."""
    name = args["obs"]
    if name == "entities":
        return entities(slow, agent, args.get("sight"))
    if name == "near":
        return near(slow, agent)
    raw = flat(name.removesuffix("_raw"), slow, agent)
    return [x / scale for x, scale in zip(raw, SCALES[name], strict=True)] if args.get("normalise") else raw


def state(slow: Slow) -> list[float]:
    """Return what mixers see."""
    out = []
    for i, body in enumerate(slow.bodies):
        length, *facing = slow.facts(i)
        out += [body[0][0] / 10, body[0][1] / 20, *facing, length, body[-1][0] / 10, body[-1][1] / 20]
    for _, (row, col) in sorted(zip(slow.slots, slow.beans, strict=True)):
        out += [row / 10, col / 20]
    return [*out, (sum(slow.lengths[:3]) - sum(slow.lengths[3:])) / 20, slow.steps / 200]


def flat(name: str, slow: Slow, agent: int) -> list[float]:
    """Return the raw features of "26", "30" or "35"."""
    heads = [body[0] for body in slow.bodies]
    head = heads[agent]
    start = [*head, *map(slow.code, around(head))]
    beans = [x for bean in slow.beans for x in bean]
    others = [x for j, other in enumerate(heads) if j != agent for x in other]
    near = []
    for bean in sorted(slow.beans, key=lambda b: torus(head, b))[:2]:
        down, right = difference(head, bean)
        near += [right, down, torus(head, bean)]
    foes = sorted([3, 4, 5], key=lambda i: torus(head, heads[i]))[:2]
    threats = [slow.lengths[i] / 3 / (torus(head, heads[i]) + 1) for i in foes]
    if name == "26":
        return [*start, *beans, *others]
    if name == "30":
        return [*start, *near, *threats, *beans, 0, 0, *(x for i in foes for x in heads[i])]
    return [*start, *beans, *near, slow.lengths[agent] / 20, *others, *threats]


def entities(slow: Slow, agent: int, sight: float | None) -> list[float]:
    head, scale = slow.bodies[agent][0], sight or 10.0

    def way(place):
        down, right = difference(head, place)
        return [right / scale, -down / scale]

    def unit(place, rest):
        if sight is not None and torus(head, place) > sight:
            return [0.0] * (4 + len(rest))
        return [1.0, torus(head, place) / scale, *way(place), *rest]

    snakes = [unit(body[0], [*slow.facts(i), *way(body[-1])]) for i, body in enumerate(slow.bodies)]
    foes = [x for snake in snakes[3:] for x in [*snake, 0.0]]
    beans = [x for _, bean in sorted(zip(slow.slots, slow.beans, strict=True)) for x in unit(bean, [0.0] * 7 + [1.0])]
    mates = [x for i in range(3) if i != agent for x in snakes[i]]
    free = [1 - slow.snake_at(cell) for cell in around(head)]
    two_away = sorted({beside(head, r, c) for r in range(-2, 3) for c in range(-2, 3) if abs(r) + abs(c) == 2})
    own = [*slow.facts(agent), *way(slow.bodies[agent][-1]), slow.steps / 200]
    return [*free, *foes, *beans, *mates, *own, *map(slow.snake_at, two_away)]


def near(slow: Slow, agent: int) -> list[float]:
    mates, foes, heads = [i for i in range(3) if i != agent], [3, 4, 5], [body[0] for body in slow.bodies]
    head = heads[agent]

    def way(place):
        down, right = difference(head, place)
        return [right / 10, -down / 10, (abs(down) + abs(right)) / 10]

    reach = [[i for i in (*mates, *foes) if heads[i] in around(cell)] for cell in around(head)]
    out = [1 - slow.snake_at(cell) for cell in around(head)]
    out += [float(any(i in mates for i in those)) for those in reach]
    out += [max((slow.lengths[i] / 20 for i in those if i in foes), default=0.0) for those in reach]
    for bean in sorted(slow.beans, key=lambda b: steps_between(head, b)):
        down, right = difference(head, bean)
        theirs = [min(steps_between(heads[i], bean) for i in those) for those in (mates, foes)]
        farther = [steps - steps_between(head, bean) for steps in theirs]
        out += [float(down < 0), float(down > 0), float(right < 0), float(right > 0), *way(bean)]
        out += [x for gap in farther for x in (gap / 10, np.sign(gap))] + [min(farther) / 10]
    for those in (mates, foes):
        for i in sorted(those, key=lambda i: steps_between(head, heads[i])):
            own_bean = min(steps_between(heads[i], bean) for bean in slow.beans)
            out += [*way(heads[i]), *slow.facts(i), own_bean / 10]
    out += [*slow.facts(agent), *way(slow.bodies[agent][-1])[:2]]
    window = [beside(head, r, c) for r in range(-3, 4) for c in range(-3, 4) if r or c]
    lead = sum(slow.lengths[:3]) - sum(slow.lengths[3:])
    return [*out, lead / 20, slow.steps / 200, *map(slow.snake_at, window)]


def rewards(kind: str, was: Slow, now: Slow, lead: int, over: bool) -> list[float]:
    """Return the own rewards of a step, with reward_win=2 for "score". lead: the sign of the difference of scores."""
    raw = [after - before for before, after in zip(was.lengths, now.lengths, strict=True)]
    out = []
    for i, own in enumerate(raw[:3]):
        score = own - sum(raw[3:]) / 3
        if kind == "baseline":
            standing = lead * ((50 if lead > 0 else 25) if over else (10 if lead > 0 else 5))
            distance = min(plain(now.bodies[i][0], bean) for bean in now.beans)
            out.append(standing + (20 if own > 0 else -distance - 10 * (own < 0)))
        elif kind == "potential":
            before, after = (min(steps_between(b.bodies[i][0], bean) for bean in b.beans) for b in (was, now))
            out.append(score + 0.1 * before - 0.99 * 0.1 * after * (not over))
        else:
            out.append(score + 2 * lead * over)
    return out


MASK, GOLDEN = 2**64 - 1, 0x9E3779B97F4A7C15
PLAYERS, TRIES = 4096, 32


def mix(z: int) -> int:
    """Return SplitMix64's output for a counter."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


class Dice:
    """The random numbers of a board that was reset with this seed."""

    def __init__(self, seed: int) -> None:
        self.key = mix((seed * GOLDEN + GOLDEN) & MASK)

    def bits(self, moment: int, index: int) -> int:
        return mix((self.key + (65536 * moment + index) * GOLDEN) & MASK)

    def below(self, n: int, moment: int, index: int) -> int:
        return (self.bits(moment, index) >> 32) * n >> 32

    def start(self) -> list[list[int]]:
        """Return the cells of all snakes at the beginning, head first."""
        bodies: list[list[int]] = []
        for snake in range(6):
            taken, attempt = {cell for body in bodies for cell in body}, 0
            while len(bodies) == snake:
                tail, way = self.below(200, 0, 256 * snake + attempt), self.bits(0, 256 * snake + attempt) & 3
                places = [divmod(tail, WIDTH)]
                for _ in range(2):
                    places.append(beside(places[-1], *STEPS[way]))
                cells = [row * WIDTH + col for row, col in reversed(places)]
                bodies += [cells] if not taken & {*cells} else []
                attempt += 1
        return bodies

    def turn(self, moment: int, snake: int, direction: int) -> int:
        """Return the direction that replaces a reversal of `direction`."""
        return [a for a in range(4) if a != direction ^ 1][self.below(3, moment, snake)]

    def bean(self, moment: int, place: int, free: list[int]) -> int:
        """Return the cell of a new bean at this place of the list."""
        for attempt in range(TRIES):
            cell = self.below(200, moment, 16 + 2 * TRIES * place + attempt)
            if cell in free:
                return cell
        return free[self.below(len(free), moment, 16 + 2 * TRIES * place + TRIES)]
