"""Observations of a batch of battles, as one kernel; compare `BattleSemantics.observe`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle.compiled import features
from omagd.envs.battle.compiled.compiling import function, kernel
from omagd.envs.battle.compiled.features import Layout
from omagd.envs.battle.compiled.rules import Episodes
from omagd.envs.battle.compiled.tables import ENERGY, HEALTH, SHIELD, Array, State, X, Y

SIGHT, EVERYWHERE = features.SIGHT, features.EVERYWHERE


class Shown(NamedTuple):
    """What `observe` writes: avail [B, N, A] bool; obs, full [B, N, obs_dim], state [B, state_dim] float32."""

    avail: Array
    obs: Array
    full: Array
    state: Array


@function
def copy_observations(obs: Array, state: Array) -> None:
    """Write all agents' observations one after the other."""
    for i in range(obs.shape[0]):
        for entry in range(obs.shape[1]):
            state[i * obs.shape[1] + entry] = obs[i, entry]


@function
def observe_battle(
    o: Layout, state: State, episodes: Episodes, w: Array, distance: Array, shown: Shown, want_full: bool, b: int
) -> None:
    """Write what is shown of battle `b`; `w` and `distance` are working memory."""
    s, alive, acted = state.floats[b], state.alive[b], episodes.last_action[b]
    x, y = s[X], s[Y]
    elapsed = np.float32(episodes.steps[b] / o.size[features.LIMIT])
    features.describe_units(o, s[HEALTH], s[SHIELD], s[ENERGY], state.cooldown[b], x, y, w)
    for i in range(o.fact[features.N]):
        mask = shown.avail[b, i]
        if alive[i]:
            features.look_at_all(x, y, i, w, distance)
        features.fill_mask(o, x, y, alive, distance, i, mask)
        features.write_view(o, x, y, alive, w, distance, mask, acted, elapsed, i, SIGHT, shown.obs[b, i])
        if want_full:
            features.write_view(o, x, y, alive, w, distance, mask, acted, elapsed, i, EVERYWHERE, shown.full[b, i])
    if o.fact[features.INSTEAD]:
        copy_observations(shown.obs[b], shown.state[b])
    else:
        features.write_state(o, alive, w, acted, elapsed, shown.state[b])


@kernel
def observe(
    o: Layout, state: State, episodes: Episodes, w: Array, distance: Array, shown: Shown, want_full: bool
) -> None:
    """Write masks, observations, those without range limit if `want_full`, and the state of all battles."""
    for b in range(len(episodes.steps)):
        observe_battle(o, state, episodes, w, distance, shown, want_full, b)
