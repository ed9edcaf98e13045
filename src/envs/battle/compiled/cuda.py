"""The battles' kernels on an NVIDIA GPU: the functions of the CPU's kernels, one battle per thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from omagd.envs.battle.compiled import features, play, rules, starts
from omagd.envs.battle.compiled.features import Layout, N
from omagd.envs.battle.compiled.rules import NEGATIVE, Prices, Results
from omagd.envs.battle.compiled.starts import Starts
from omagd.envs.battle.compiled.tables import Array, Episodes, Orders, State, Tables
from omagd.envs.protocol import Seen
from omagd.utils.cuda import CUDACompiler, cuda, view

compiler = CUDACompiler(Path(__file__).parents[1], "battles", "20 to 40 s", exact=True)
THREADS = 64
"""Threads of a block: few, so that a few thousand battles reach all multiprocessors."""


def reset(
    t: Tables, begin: Starts, o: Layout, scale: float, state: State, episodes: Episodes, which: Array, seeds: Array
) -> None:
    """Start new battles and their episodes in the slots `which` [B], slot b from `seeds[b]`."""
    b = cuda.grid(1)
    if b < len(which) and which[b]:
        starts.reset_battle(t, begin, state, seeds[b], b)
        rules.begin_battle(o, scale, state, episodes, b)


def step(
    t: Tables, o: Layout, p: Prices, move_amount: float, state: State, episodes: Episodes, s: Array, k: Array,
    orders: Orders, avail: Array, actions: Array, active: Array, lost: Array, died: Array, results: Results,
    faults: Array,
) -> None:  # fmt: skip
    """Play `actions` [B, N] in the `active` battles [B]; `faults` [B] is set where one of them is not available."""
    b = cuda.grid(1)
    if b >= len(active):
        return
    for flag in range(results.flags.shape[0]):
        results.flags[flag, b] = False
    results.reward[b], results.dead[0, b], results.dead[1, b] = 0.0, 0, 0
    if active[b]:
        if not rules.fits(actions, avail, episodes, b):
            faults[b] = True
        rules.order_battle(o, state, move_amount, actions, episodes, orders, b)
        play.play_battle(t, state, s[b], k[b], orders, b)
    rules.update_points(o, p.amount[NEGATIVE], state, episodes, b, lost[b], died[b])
    if active[b]:
        rules.finish_battle(o, p, state, episodes, lost[b], died[b], results, b)


def look(o: Layout, state: State, episodes: Episodes, w: Array, distance: Array, shown: Seen, want_full: bool) -> None:
    """Write what is shown of all battles: a thread for each agent of each battle, and one for its state.

    w, distance: working memory of the threads. Threads of a warp have the same agent's number, so they do the same.
    """
    thread, battles = cuda.grid(1), len(episodes.steps)
    i = thread // battles
    b = thread - i * battles
    if i > o.fact[N]:
        return
    features.describe_battle(o, state, w[thread], b)
    if i < o.fact[N]:
        features.observe_agent(o, state, episodes, w[thread], distance[thread], shown, want_full, b, i)
    else:
        features.write_state(o, state, episodes, w[thread], shown.state[b], b)


KERNELS: dict[str, Callable[..., None]] = {"reset": reset, "step": step, "look": look}


def try_out() -> None:
    """Compile a small kernel as those of battles are compiled, and run it. Errors: whatever is wrong."""

    def count(values: Array) -> None:
        i = cuda.grid(1)
        values[i] = i

    values = torch.zeros(THREADS, dtype=torch.int64, device="cuda")
    with compiler.compiling():
        cuda.jit(count, lto=False)[1, THREADS](view(values))
    if not torch.equal(values.cpu(), torch.arange(THREADS)):
        raise RuntimeError("a kernel of numba-cuda computes wrongly")
