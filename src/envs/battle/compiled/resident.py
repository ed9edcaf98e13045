"""Battles that live in the memory of one device: everything in and out is a torch tensor there.

On a CPU the kernels of `engine` write into the tensors' memory, on an NVIDIA GPU
those of `cuda`. Nothing is copied between host and device, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled import features, play, rules, starts
from omagd.envs.battle.compiled.engine import compiled
from omagd.envs.battle.compiled.features import Layout
from omagd.envs.battle.compiled.rules import Prices, Results
from omagd.envs.battle.compiled.starts import Starts
from omagd.envs.battle.compiled.tables import (
    Array,
    Episodes,
    Orders,
    State,
    Tables,
    one_by_one,
    shared_memory,
    working_memory,
)
from omagd.envs.battle.maps import MapSpec
from omagd.envs.protocol import Outcome, Seen
from omagd.utils.compiling import Kernels
from omagd.utils.errors import UserError, require_extra


def _reset(
    t: Tables, begin: Starts, o: Layout, scale: float, state: State, episodes: Episodes, which: Array, seeds: Array
) -> None:
    starts.reset(t, begin, state, which, seeds)
    rules.begin(o, scale, state, episodes, which)


def _step(
    t: Tables, o: Layout, p: Prices, move_amount: float, state: State, episodes: Episodes, s: Array, k: Array,
    orders: Orders, avail: Array, actions: Array, active: Array, lost: Array, died: Array, results: Results,
    faults: Array,
) -> None:  # fmt: skip
    for result in results:
        result[...] = 0
    mistake = play.step(
        t, o, p, move_amount, state, episodes, s[0], orders, avail, actions, active, lost[0], died[0], results, False
    )
    if mistake != play.EVERY_CHOICE_FITS:
        faults[mistake] = True


def _look(o: Layout, state: State, episodes: Episodes, w: Array, distance: Array, shown: Seen, want_full: bool) -> None:
    features.observe(o, state, episodes, w[0], shown, want_full)


LOOPS: dict[str, Callable[..., None]] = {"reset": _reset, "step": _step, "look": _look}


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels of a device. Errors: UserError where `numba-cuda` is missing, or for another device."""
    if device.type == "cpu":
        return Kernels(Tensor.numpy, lambda name, threads, *args: LOOPS[name](*args), side_by_side=False)
    if device.type != "cuda":
        raise UserError(f"runner=resident: plays on cpu and cuda, not on {device.type}. Use runner=parallel")
    require_extra("runner=resident on a GPU", "gpu", "numba_cuda")
    from omagd.envs.battle.compiled import cuda

    return cuda.compiler.kernels(cuda.KERNELS, device, cuda.THREADS)


class ResidentBattles:
    """Battles of `skirmish` on one device; results and observations are those of `SkirmishEnv`, bit for bit on a CPU.

    Call `observe` before each `step`, which checks actions by its masks. All methods can be part of a CUDA graph once
    each has run.

    Args:
        spec, args: the map and its flags. n_slots: B. device: cpu or cuda.

    Attributes:
        faults, results, capturable: see `ResidentGame`.
    """

    results: tuple[str, ...] = ("battle_won", "battle_draw", "episode_limit", "dead_allies", "dead_enemies")
    capturable: bool = True

    def __init__(self, spec: MapSpec, args: SkirmishArgs, n_slots: int, device: torch.device) -> None:
        simulator_class, semantics_class = compiled()
        simulator = simulator_class(spec, n_slots, difficulty=args.difficulty)
        parts = semantics_class(spec, args, simulator).parts
        self.device, self.n_slots = device, n_slots
        self._kernels = kernels_for(device)
        self._continuing = args.continuing_episode
        n, units = spec.n_agents, spec.n_agents + spec.n_enemies
        self._state, state = self._share(parts.state)
        self._episodes, episodes = self._share(parts.episodes)
        self._seen, shown = self._share(parts.shown)
        self._results, results = self._share(rules.no_results(n_slots))
        self._never = torch.zeros_like(self._results.flags[0])
        self._orders, orders = self._share(parts.orders)
        tables, layout = parts.tables, parts.layout
        if self._kernels.side_by_side:
            tables, layout = one_by_one(tables), features.one_by_one(layout)
        constants = tables, parts.starts, layout, parts.prices
        # Kept: on a GPU the views do not own their memory.
        self._constants, (tables, begin, layout, prices) = zip(*map(self._share, constants), strict=True)
        no = np.zeros(n_slots, bool)
        self._given, given = self._share(
            Given(np.zeros((n_slots, n), np.int64), no, no.copy(), np.zeros(n_slots, np.int64))
        )
        self._lookers = n_slots * (n + 1)
        self._work, work = self._work_memory(units)
        self.faults = self._tensor(np.zeros(n_slots, bool))
        self._reset = (tables, begin, layout, parts.scale, state, episodes, given.which, given.seeds)
        self._step = (
            tables, layout, prices, parts.move_amount, state, episodes, work.s, work.k, orders, shown.avail,
            given.actions, given.active, work.lost, work.died, results, self._kernels.view(self.faults),
        )  # fmt: skip
        self._look = (layout, state, episodes, work.w, work.distance, shown)

    def reset(self, which: Tensor, seeds: Tensor) -> None:
        """Start new battles in the slots `which` [B] bool, slot b from `seeds[b]` (int64 ≥ 0)."""
        self._given.which.copy_(which)
        self._given.seeds.copy_(seeds)
        self._kernels.run("reset", self.n_slots, *self._reset)

    def step(self, actions: Tensor, active: Tensor) -> Outcome:
        """Play `actions` [B, n] int64 in the slots `active` [B] bool; the other slots do not change."""
        self._given.actions.copy_(actions)
        self._given.active.copy_(active)
        self._kernels.run("step", self.n_slots, *self._step)
        flags, reward, dead = self._results
        won, _, draw, limit, over = flags.unbind()
        return Outcome(reward, over, limit if self._continuing else self._never, won, draw, limit, dead)

    def observe(self, full: bool = False) -> Seen:
        """Return masks, observations and state, and `full` observations if asked; the next call overwrites them."""
        self._kernels.run("look", self._lookers, *self._look, full)
        return self._seen

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _share(self, group: Any) -> tuple[Any, Any]:
        """Return a named tuple of arrays as tensors on the device, and as the kernels take it."""
        tensors = type(group)(*map(self._tensor, group))
        return tensors, type(group)(*map(self._kernels.view, tensors))

    def _work_memory(self, units: int) -> tuple[Work, Work]:
        """Return the working memory: of one battle on a CPU, which stays in its cache; on a GPU of each thread.

        There neighbouring threads' numbers lie side by side, so that a warp reads them in one go.
        """
        at_once, lookers = (self.n_slots, self._lookers) if self._kernels.side_by_side else (1, 1)
        floats, ints = working_memory(units, at_once)
        seen, distance = features.working_memory(units, lookers)
        if not self._kernels.side_by_side:
            floats, seen = shared_memory()[None], features.shared_memory()[None]
        shapes = Work(floats, ints, seen, distance, np.zeros((at_once, 2)), np.zeros((at_once, 2), np.int64))
        tensors = Work(*(self._tensor(interleaved(array)) for array in shapes))
        return tensors, Work(*map(self._kernels.view, tensors))


class Given(NamedTuple):
    """What the caller gives: actions [B, n] int64, active, which [B] bool, seeds [B] int64."""

    actions: Any
    active: Any
    which: Any
    seeds: Any


class Work(NamedTuple):
    """Working memory: of `play` (s, k), `observe` (w, distance) and `update_points` (lost, died)."""

    s: Any
    k: Any
    w: Any
    distance: Any
    lost: Any
    died: Any


def interleaved(array: Array) -> Array:
    """Return zeros of the same shape [threads, ...] whose first index is the innermost in memory."""
    return np.moveaxis(np.zeros((*array.shape[1:], array.shape[0]), array.dtype), -1, 0)
