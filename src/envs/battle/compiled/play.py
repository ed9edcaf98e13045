"""One agent step of all battles as one kernel: each call from Python costs a quarter of a microsecond per array.

A step is 8 game loops, played as 4 substeps of 2. In a substep, units choose targets (every other substep), ready
weapons fire simultaneously, units walk and push each other apart. Idle allies (STOP) fire at enemies in their weapon's
reach and do not move. A chasing unit stands still for a moment after each shot; nobody turns or accelerates.
"""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.compiled import combat, function, kernel, memory_rows, movement, rules
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.features import Layout
from omagd.envs.battle.compiled.rules import NEGATIVE, Prices, Results
from omagd.envs.battle.compiled.tables import FLOATS, INTS, Array, Episodes, Orders, State, Tables

LOOPS_PER_STEP, LOOPS_PER_SUBSTEP = 8, 2
SUBSTEPS = LOOPS_PER_STEP // LOOPS_PER_SUBSTEP
EVERY_CHOICE_FITS = -1
N_STATE_FLOATS, N_STATE_INTS = len(FLOATS), len(INTS)
N_FLOATS, N_INTS, N_COLUMNS, WIDTH = row.N_FLOATS, row.N_INTS, row.N_COLUMNS, row.WIDTH
FIRST_COLUMN = N_FLOATS + N_INTS
STEP_LOOPS, LOOPS = np.float32(LOOPS_PER_STEP), np.float32(LOOPS_PER_SUBSTEP)
ZERO = np.float32(0)


@function
def load(t: Tables, state: State, s: Array, k: Array, b: int) -> None:
    """Copy a battle into the working memory."""
    for f in range(N_STATE_FLOATS):
        for i in range(t.fact[row.LANES]):
            s[f, i] = state.floats[b, f, i]
    for f in range(N_STATE_INTS):
        for i in range(t.fact[row.LANES]):
            k[f, i] = state.ints[b, f, i]


@function
def store(t: Tables, state: State, s: Array, k: Array, b: int) -> None:
    """Copy a battle back, with what others see of it."""
    for f in range(N_STATE_FLOATS):
        for i in range(t.fact[row.LANES]):
            state.floats[b, f, i] = s[f, i]
    for f in range(N_STATE_INTS):
        for i in range(t.fact[row.LANES]):
            state.ints[b, f, i] = k[f, i]
    for i in range(t.fact[row.LANES]):
        state.cooldown[b, i] = max(s[row.TIMER, i], ZERO)
        state.alive[b, i] = k[row.ALIVE, i] > 0


@function
def play_battle(t: Tables, state: State, s: Array, k: Array, orders: Orders, b: int) -> None:
    """Give battle `b` its orders and play one agent step, in the working memory `s`, `k`."""
    load(t, state, s, k, b)
    for i in range(t.fact[row.AGENTS]):
        dest = orders.dest[b, i]
        combat.take_order(t, s, k, i, orders.order[b, i], orders.target[b, i], dest[0], dest[1])
    combat.look_up_reach(t, s, k)
    for substep in range(SUBSTEPS):
        allies, living = combat.measure(t, s, k)
        combat.aim(t, s, k)
        if substep % 2 == 0 and combat.acquire(t, s, k, allies, living):
            combat.look_up_reach(t, s, k)
            combat.look_at_targets(t, s, k)
            combat.aim(t, s, k)
        combat.shoot(t, s, k)
        combat.heal(t, s, k, LOOPS)
        for i in range(t.fact[row.LANES]):
            k[row.ALIVE, i] = s[row.HEALTH, i] > ZERO
        movement.walk(t, s, k, living, LOOPS)
        for i in range(t.fact[row.LANES]):
            # A delay of less than a substep counts towards the next shot: the average rate of fire is right.
            timer = s[row.TIMER, i] - LOOPS
            s[row.TIMER, i] = timer if timer > -LOOPS else ZERO
    combat.regenerate(t, s, k, STEP_LOOPS)
    store(t, state, s, k, b)


@function
def near_tables(t: Tables, memory: Array) -> Tables:
    """Return the tables with their columns in `memory`, where they cannot overlap with what is written."""
    unit = memory_rows(memory, FIRST_COLUMN, N_COLUMNS, WIDTH, np.float32)
    for column in range(N_COLUMNS):
        for i in range(t.fact[row.LANES]):
            unit[column, i] = t.unit[column, i]
    return Tables(unit, t.explodes, t.pair, t.able, t.fact, t.length, t.grid, t.healers, t.bombs)


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
    near = near_tables(t, memory)
    for b in range(len(active)):
        if active[b]:
            rules.order_battle(o, state, move_amount, actions, episodes, orders, b)
            play_battle(near, state, s, k, orders, b)
        rules.update_points(o, p.amount[NEGATIVE], state, episodes, b, lost, died)
        if active[b]:
            rules.finish_battle(o, p, state, episodes, lost, died, results, b)
    return mistake
