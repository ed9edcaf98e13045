"""A step of all battles as one kernel: each call from Python costs a quarter of a microsecond per array."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.compiled import play, rules
from omagd.envs.battle.compiled.compiling import kernel, memory_rows
from omagd.envs.battle.compiled.features import Layout
from omagd.envs.battle.compiled.rules import NEGATIVE, Episodes, Prices, Results
from omagd.envs.battle.compiled.tables import N_FLOATS, N_INTS, WIDTH, Array, Orders, State, Tables

EVERY_CHOICE_FITS = -1


@kernel
def step(
    t: Tables, o: Layout, p: Prices, move_amount: float, state: State, episodes: Episodes, memory: Array,
    orders: Orders, avail: Array, actions: Array, active: Array, lost: Array, died: Array, results: Results,
    strict: bool,
) -> int:  # fmt: skip
    """Play `actions` [B, N] in the `active` battles [B] and write their results; others' stay as they are.

    Return the first active battle that is over or has an action that is not available, else `EVERY_CHOICE_FITS`; then
    nothing is played if `strict`.

    memory: `shared_memory`. lost, died: [2] float64 and int64, working memory.
    """
    mistake = EVERY_CHOICE_FITS
    for b in range(len(active)):
        if mistake == EVERY_CHOICE_FITS and active[b] and not rules.fits(actions, avail, episodes, b):
            mistake = b
    if strict and mistake != EVERY_CHOICE_FITS:
        return mistake
    s = memory_rows(memory, 0, N_FLOATS, WIDTH, np.float32)
    k = memory_rows(memory, N_FLOATS, N_INTS, WIDTH, np.int32)
    near = play.near_tables(t, memory)
    for b in range(len(active)):
        if active[b]:
            rules.order_battle(o, state, move_amount, actions, episodes, orders, b)
            play.play_battle(near, state, s, k, orders, b)
        rules.update_points(o, p.amount[NEGATIVE], state, episodes, b, lost, died)
        if active[b]:
            rules.finish_battle(o, p, state, episodes, lost, died, results, b)
    return mistake
