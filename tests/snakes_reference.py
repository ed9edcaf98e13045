"""One board of 3v3 snakes in plain Python, slowly and by other means: what opponents, observations and rewards mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

HEIGHT, WIDTH = 10, 20
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))


@dataclass
class Slow:
    """bodies: six lists of (row, col), head first. beans: (row, col), oldest first. directions: of the last moves."""

    bodies: list[list[tuple[int, int]]]
    beans: list[tuple[int, int]]
    directions: list[int]
    steps: int

    def code(self, place):
        for i, body in enumerate(self.bodies):
            if place in body:
                return 2 + i
        return int(place in self.beans)

    def around(self, place):
        return [((place[0] + r) % HEIGHT, (place[1] + c) % WIDTH) for r, c in STEPS]


def bodies_of(engine, row) -> list[list[int]]:
    """Return the cells of each snake on a board, head first."""
    segments, lengths = engine.segments(np.array([row]))[0], engine.board.lengths[row]
    return [body[:length].tolist() for body, length in zip(segments, lengths, strict=True)]


def of_engine(engine, row) -> Slow:
    def place(cell):
        return int(cell) // WIDTH, int(cell) % WIDTH

    bodies = [[place(cell) for cell in body] for body in bodies_of(engine, row)]
    board = engine.board
    return Slow(bodies, [place(c) for c in board.beans[row]], board.directions[row].tolist(), int(board.steps[row]))


def plain(a, b):
    return math.sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)


def difference(a, b):
    """Return (down, right) from a to b the shorter way around."""
    out = []
    for i, size in enumerate((HEIGHT, WIDTH)):
        d = b[i] - a[i]
        if abs(d) > size // 2:
            d -= int(math.copysign(size, d))
        out.append(d)
    return out


def torus(a, b):
    return math.hypot(*difference(a, b))


def nearest(head, beans):
    best = 0
    for i, bean in enumerate(beans):
        if plain(head, bean) < plain(head, beans[best]):
            best = i
    return best


def first_smallest(costs):
    return costs.index(min(costs))


def play(name: str, slow: Slow, snakes: list[int]) -> list[int]:
    """Return the actions of a script (not "random") for `snakes`."""
    left, actions = list(slow.beans), []
    for i in snakes:
        head = slow.bodies[i][0]
        target = left.pop(nearest(head, left)) if name == "greedy" else slow.beans[nearest(head, slow.beans)]
        costs = []
        for cell in slow.around(head):
            cost, blocked = plain(cell, target), slow.code(cell) > 1
            dead_end = all(slow.code(after) > 1 for after in slow.around(cell))
            if name == "greedy":
                cost = math.inf if blocked else cost
            elif name == "evasion":
                cost = cost**2 + 10_000 * blocked + 10_000 * dead_end
            else:
                cost += {"l1": 0, "l3": 5, "l4": 1000}[name] * blocked
            costs.append(cost)
        actions.append(first_smallest(costs))
    return actions


def order_of(team: int) -> list[int]:
    return [0, 1, 2, 3, 4, 5] if team == 0 else [3, 4, 5, 0, 1, 2]


def flat(name: str, slow: Slow, team: int, agent: int) -> list[float]:
    """Return the raw features of "26", "30" or "35"."""
    order = order_of(team)
    heads = [slow.bodies[i][0] for i in order]
    head = heads[agent]

    def code(place):
        value = slow.code(place)
        return value if value < 2 else 2 + order.index(value - 2)

    start = [*head, *(code(cell) for cell in slow.around(head))]
    beans = [x for bean in slow.beans for x in bean]
    others = [x for j, other in enumerate(heads) if j != agent for x in other]
    near = []
    for bean in sorted(slow.beans, key=lambda b: torus(head, b))[:2]:
        down, right = difference(head, bean)
        near += [right, down, torus(head, bean)]
    foes = sorted(order[3:], key=lambda i: torus(head, slow.bodies[i][0]))[:2]
    threats = [len(slow.bodies[i]) / 3 / (torus(head, slow.bodies[i][0]) + 1) for i in foes]
    if name == "26":
        return [*start, *beans, *others]
    if name == "30":
        return [*start, *near, *threats, *beans, 0, 0, *(x for i in foes for x in slow.bodies[i][0])]
    return [*start, *beans, *near, len(slow.bodies[order[agent]]) / 20, *others, *threats]


def one_hot(k: int) -> list[float]:
    return [float(k == j) for j in range(4)]


def entities(slow: Slow, team: int, agent: int, sight: float | None, slots: list[int]) -> list[float]:
    """Return the features of "entities"; `slots` are the numbers of the beans."""
    order, scale = order_of(team), sight or 10.0
    me = order[agent]
    head = slow.bodies[me][0]

    def way(place):
        down, right = difference(head, place)
        return [right / scale, -down / scale]

    def block(place, rest):
        if sight is not None and torus(head, place) > sight:
            return [0.0] * (4 + len(rest))
        return [1.0, torus(head, place) / scale, *way(place), *rest]

    def snake(i):
        body = slow.bodies[i]
        return block(body[0], [len(body) / 20, *one_hot(slow.directions[i]), *way(body[-1])])

    foes = []
    for i in order[3:]:
        shown = snake(i)
        foes += [*shown, 0.0]
    beans = [[]] * 5
    for slot, bean in zip(slots, slow.beans, strict=True):
        beans[slot] = block(bean, [0.0] * 7 + [1.0])
    mates = [x for i in order[:3] if i != me for x in snake(i)]
    free = [float(slow.code(cell) < 2) for cell in slow.around(head)]
    two_away = sorted(
        {
            ((head[0] + r) % HEIGHT, (head[1] + c) % WIDTH)
            for r in range(-2, 3)
            for c in range(-2, 3)
            if abs(r) + abs(c) == 2
        }
    )
    own = [len(slow.bodies[me]) / 20, *one_hot(slow.directions[me]), *way(slow.bodies[me][-1]), slow.steps / 200]
    own += [float(slow.code(cell) > 1) for cell in two_away]
    return [*free, *foes, *(x for bean in beans for x in bean), *mates, *own]


def steps_between(a, b):
    return sum(abs(d) for d in difference(a, b))


def near(slow: Slow, team: int, agent: int) -> list[float]:
    """Return the features of "near"."""
    order = order_of(team)
    me, mates, foes = order[agent], [i for i in order[:3] if i != order[agent]], order[3:]
    head = slow.bodies[me][0]

    def head_of(i):
        return slow.bodies[i][0]

    def way(place):
        down, right = difference(head, place)
        return [right / 10, -down / 10, (abs(down) + abs(right)) / 10]

    def sign(x):
        return (x > 0) - (x < 0)

    def snake(i):
        own_bean = min(steps_between(head_of(i), bean) for bean in slow.beans)
        return [*way(head_of(i)), len(slow.bodies[i]) / 20, *one_hot(slow.directions[i]), own_bean / 10]

    out = [float(slow.code(cell) < 2) for cell in slow.around(head)]
    reach = [[i for i in order if i != me and head_of(i) in slow.around(cell)] for cell in slow.around(head)]
    out += [float(any(i in mates for i in those)) for those in reach]
    out += [max((len(slow.bodies[i]) / 20 for i in those if i in foes), default=0.0) for those in reach]
    for bean in sorted(slow.beans, key=lambda b: steps_between(head, b)):
        down, right = difference(head, bean)
        farther = [
            min(steps_between(head_of(i), bean) for i in those) - steps_between(head, bean) for those in (mates, foes)
        ]
        out += [float(down < 0), float(down > 0), float(right < 0), float(right > 0), *way(bean)]
        out += [x for gap in farther for x in (gap / 10, sign(gap))] + [min(farther) / 10]
    for those in (mates, foes):
        for i in sorted(those, key=lambda i: steps_between(head, head_of(i))):
            out += snake(i)
    lead = sum(len(slow.bodies[i]) for i in order[:3]) - sum(len(slow.bodies[i]) for i in foes)
    out += [len(slow.bodies[me]) / 20, *one_hot(slow.directions[me]), *way(slow.bodies[me][-1])[:2]]
    out += [lead / 20, slow.steps / 200]
    for r in range(-3, 4):
        for c in range(-3, 4):
            if r or c:
                out.append(float(slow.code(((head[0] + r) % HEIGHT, (head[1] + c) % WIDTH)) > 1))
    return out


def planes(slow: Slow, team: int, agent: int, centred: bool) -> dict[tuple[int, int, int], float]:
    """Return the cells (plane, row, col) of "planes" that are not zero; plane 4 left out."""
    order, out = order_of(team), {}
    head = slow.bodies[order[agent]][0]

    def mark(plane, place):
        r, c = place
        if centred:
            r, c = (r - head[0] + 5) % HEIGHT, (c - head[1] + 10) % WIDTH
        out[plane, r, c] = 1.0

    for bean in slow.beans:
        mark(0, bean)
    for j, i in enumerate(order):
        first = 1 if j == agent else 5 if j < 3 else 8
        mark(first, slow.bodies[i][0])
        mark(first + 2, slow.bodies[i][-1])
        for part in slow.bodies[i]:
            mark(first + 1, part)
    return out
