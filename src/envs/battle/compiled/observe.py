"""Observations of a batch of battles, as one kernel; compare `BattleSemantics.observe`."""

from __future__ import annotations

import numpy as np

from omagd.envs.battle.compiled import features, tables
from omagd.envs.battle.compiled.compiling import function, kernel

X, Y, HEALTH, SHIELD, ENERGY = tables.X, tables.Y, tables.HEALTH, tables.SHIELD, tables.ENERGY
LIMIT, SIGHT, EVERYWHERE = features.LIMIT, features.SIGHT_RANGE, features.EVERYWHERE


@function
def copy_observations(obs, state):
    """Write all agents' observations one after the other."""
    for i in range(obs.shape[0]):
        for entry in range(obs.shape[1]):
            state[i * obs.shape[1] + entry] = obs[i, entry]


@kernel
def observe(o, floats, cooldown, alive, last_action, steps, w, distance, avail, obs, full, state, want_full):
    """Write masks, observations, those without range limit if `want_full`, and the state of all battles."""
    for b in range(len(steps)):
        s, living, acted = floats[b], alive[b], last_action[b]
        x, y = s[X], s[Y]
        elapsed = np.float32(steps[b] / o.size[LIMIT])
        features.describe_units(o, x, y, s[HEALTH], s[SHIELD], s[ENERGY], cooldown[b], w)
        for i in range(o.fact[features.N]):
            mask = avail[b, i]
            features.look_at_all(o, x, y, i, w, distance)
            features.fill_mask(o, x, y, living, distance, i, mask)
            features.write_view(o, x, y, living, w, distance, mask, acted, elapsed, i, SIGHT, obs[b, i])
            if want_full:
                features.write_view(o, x, y, living, w, distance, mask, acted, elapsed, i, EVERYWHERE, full[b, i])
        if o.fact[features.INSTEAD]:
            copy_observations(obs[b], state[b])
        else:
            features.write_state(o, living, w, acted, elapsed, state[b])
