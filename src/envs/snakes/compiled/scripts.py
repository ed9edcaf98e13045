"""Scripted opponents, and draws of networks, as kernels over boards; compare `omagd.envs.snakes.opponents`."""

from __future__ import annotations

import math

import numpy as np

from omagd.envs.snakes.compiled import tables
from omagd.envs.snakes.compiled.compiling import function, kernel
from omagd.envs.snakes.compiled.draws import below, draw
from omagd.envs.snakes.compiled.tables import FIRST_SNAKE, NEXT_CELL, Array, Boards, plain_square
from omagd.envs.snakes.draws import PLAYERS
from omagd.envs.snakes.opponents import FAR

N_TEAM, N_BEANS, N_ACTIONS = tables.N_TEAM, tables.N_BEANS, tables.N_ACTIONS
RANDOM, GREEDY, EVASION, TOWARD_NEAREST = range(4)  # kinds of scripts


@function
def choose_beans(g: Boards, b: int, team: int, shared: bool, chosen: Array) -> None:
    """Write the nearest bean of each snake [3]; if `shared`, of those that no earlier snake has taken."""
    for i in range(N_TEAM):
        head, best, least = g.heads[b, N_TEAM * team + i], 0, FAR + 1
        for bean in range(N_BEANS):
            far = plain_square(head, g.beans[b, bean])
            if shared:
                for earlier in range(i):
                    if chosen[earlier] == bean:
                        far = FAR
            if far < least:
                best, least = bean, far
        chosen[i] = best


@function
def shut_in(codes: Array, cell: int) -> bool:
    """Return whether snakes are on all neighbours of a cell."""
    for a in range(N_ACTIONS):
        if codes[NEXT_CELL[cell, a]] < FIRST_SNAKE:
            return False
    return True


@function
def cost(codes: Array, kind: int, penalty: float, cell: int, bean: int) -> float:
    """Return what a step to `cell` costs a snake that wants a bean."""
    far, blocked = plain_square(cell, bean), codes[cell] >= FIRST_SNAKE
    if kind == GREEDY:
        return np.float64(FAR if blocked else far)
    if kind == EVASION:
        return np.float64(far + FAR * blocked + FAR * shut_in(codes, cell))
    return math.sqrt(far) + penalty * blocked


@kernel
def act(g: Boards, team: Array, kind: int, penalty: float, chosen: Array, actions: Array) -> None:
    """Write the actions of a script for `team` [B] into `actions` [B, 3]; chosen: [3], working memory."""
    for b in range(len(team)):
        if kind == RANDOM:
            for i in range(N_TEAM):
                index = PLAYERS + N_TEAM * team[b] + i
                actions[b, i] = below(draw(g.keys[b], g.steps[b] + 1, index), N_ACTIONS)
            continue
        choose_beans(g, b, team[b], kind == GREEDY, chosen)
        for i in range(N_TEAM):
            head, bean = g.heads[b, N_TEAM * team[b] + i], g.beans[b, chosen[i]]
            best, least = 0, cost(g.codes[b], kind, penalty, NEXT_CELL[head, 0], bean)
            for a in range(1, N_ACTIONS):
                here = cost(g.codes[b], kind, penalty, NEXT_CELL[head, a], bean)
                if here < least:
                    best, least = a, here
            actions[b, i] = best


@kernel
def random_bits(g: Boards, first: int, out: Array) -> None:
    """Write players' draws of the current step, from index `first` on, into `out` [B, n]."""
    for b in range(out.shape[0]):
        for n in range(out.shape[1]):
            out[b, n] = draw(g.keys[b], g.steps[b] + 1, PLAYERS + first + n)
