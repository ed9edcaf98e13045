"""The simulator's step as kernels over battles; compare `omagd.envs.battle.simulator`."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.compiled import combat, movement
from omagd.envs.battle.compiled import tables as row
from omagd.envs.battle.compiled.compiling import function, kernel
from omagd.envs.battle.roster import FLOATS, INTS
from omagd.envs.battle.simulator import LOOPS_PER_STEP, LOOPS_PER_SUBSTEP, SUBSTEPS

N_STATE_FLOATS, N_STATE_INTS = len(FLOATS), len(INTS)
STEP_LOOPS, LOOPS = np.float32(LOOPS_PER_STEP), np.float32(LOOPS_PER_SUBSTEP)
ZERO = np.float32(0)


@function
def play_battle(t, floats, ints, cooldown, alive, s, k, order, target, dest, b):
    """Give battle `b` its orders and play one agent step."""
    n, total = t.fact[row.AGENTS], t.fact[row.UNITS]
    for i in range(total):
        for f in range(N_STATE_FLOATS):
            s[f, i] = floats[b, f, i]
        for f in range(N_STATE_INTS):
            k[f, i] = ints[b, f, i]
    for i in range(n):
        combat.take_order(t, k, s, i, order[b, i], target[b, i], dest[b, i, 0], dest[b, i, 1])
    for substep in range(SUBSTEPS):
        combat.measure(t, s, k)
        if substep % 2 == 0:
            combat.acquire(t, s, k)
        combat.aim(t, s, k)
        combat.shoot(t, s, k)
        combat.heal(t, s, k, LOOPS)
        for i in range(total):
            k[row.ALIVE, i] = s[row.HEALTH, i] > 0
        movement.walk(t, s, k, LOOPS)
        for i in range(total):
            # A delay of less than a substep counts towards the next shot: the average rate of fire is right.
            s[row.TIMER, i] -= LOOPS
            if s[row.TIMER, i] <= -LOOPS:
                s[row.TIMER, i] = ZERO
    combat.regenerate(t, s, k, STEP_LOOPS)
    for i in range(total):
        for f in range(N_STATE_FLOATS):
            floats[b, f, i] = s[f, i]
        for f in range(N_STATE_INTS):
            ints[b, f, i] = k[f, i]
        cooldown[b, i] = max(s[row.TIMER, i], ZERO)
        alive[b, i] = k[row.ALIVE, i] > 0


@kernel
def play(t, floats, ints, cooldown, alive, s, k, order, target, dest, active):
    """Play one agent step in the `active` battles [B]."""
    for b in range(len(active)):
        if active[b]:
            play_battle(t, floats, ints, cooldown, alive, s[0], k[0], order, target, dest, b)
