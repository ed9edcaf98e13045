"""Observations of a batch of battles, as one kernel; compare `BattleSemantics.observe`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omagd.envs.battle.compiled import features, tables
from omagd.envs.battle.compiled.compiling import function, kernel, memory_rows
from omagd.envs.battle.compiled.features import Layout
from omagd.envs.battle.compiled.rules import Episodes
from omagd.envs.battle.compiled.tables import ENERGY, HEALTH, SHIELD, Array, State, X, Y

N_ROWS, WIDTH = features.N_ROWS, tables.WIDTH


class Shown(NamedTuple):
    """What `observe` writes: avail [B, N, A] bool; obs, full [B, N, obs_dim], state [B, state_dim] float32."""

    avail: Array
    obs: Array
    full: Array
    state: Array


@function
def observe_agent(
    o: Layout, state: State, episodes: Episodes, w: Array, distance: Array, shown: Shown, want_full: bool, b: int,
    i: int,
) -> None:  # fmt: skip
    """Write what agent `i` of battle `b` is shown; `w` describes the units, and it and `distance` are overwritten."""
    alive, acted, mask, obs = state.alive[b], episodes.last_action[b], shown.avail[b, i], shown.obs[b, i]
    x, y = state.floats[b, X], state.floats[b, Y]
    elapsed = np.float32(episodes.steps[b] / o.size[features.LIMIT])
    if alive[i]:
        features.look_at_all(o, i, w, distance)
    features.fill_mask(o, x, y, alive, distance, i, mask)
    full = shown.full[b, i] if want_full else obs
    features.write_views(o, x, y, alive, w, distance, mask, acted, elapsed, i, obs, full)
    if o.fact[features.INSTEAD]:
        for entry in range(len(obs)):
            shown.state[b, i * len(obs) + entry] = obs[entry]


@function
def describe_battle(o: Layout, state: State, w: Array, b: int) -> None:
    """Write what does not depend on who looks at battle `b` into the working memory `w`."""
    s = state.floats[b]
    features.describe_units(o, s[HEALTH], s[SHIELD], s[ENERGY], state.cooldown[b], s[X], s[Y], w)


@function
def observe_whole(o: Layout, state: State, episodes: Episodes, w: Array, shown: Shown, b: int) -> None:
    """Write the state of battle `b`, unless it is made of the agents' observations; `w` describes the units."""
    if not o.fact[features.INSTEAD]:
        elapsed = np.float32(episodes.steps[b] / o.size[features.LIMIT])
        features.write_state(o, state.alive[b], w, episodes.last_action[b], elapsed, shown.state[b])


@function
def observe_battle(
    o: Layout, state: State, episodes: Episodes, w: Array, distance: Array, shown: Shown, want_full: bool, b: int
) -> None:
    """Write what is shown of battle `b`; `w` and `distance` are working memory."""
    describe_battle(o, state, w, b)
    for i in range(o.fact[features.N]):
        observe_agent(o, state, episodes, w, distance, shown, want_full, b, i)
    observe_whole(o, state, episodes, w, shown, b)


@kernel
def observe(o: Layout, state: State, episodes: Episodes, memory: Array, shown: Shown, want_full: bool) -> None:
    """Write masks, observations, those without range limit if `want_full`, and the state of all battles.

    memory: `features.shared_memory`.
    """
    w = memory_rows(memory, 0, N_ROWS, WIDTH, np.float32)
    distance = memory_rows(memory, N_ROWS, 1, WIDTH, np.float64)[0]
    for b in range(len(episodes.steps)):
        observe_battle(o, state, episodes, w, distance, shown, want_full, b)
