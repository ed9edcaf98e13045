"""What is done in every slot of a device, one kernel each: actions are chosen, rows are written.

The work is a function in plain loops. On a CPU a loop calls it; on an NVIDIA GPU an agent has a thread, and a row the
threads of a block, each of which copies every `THREADS`-th number, so that neighbours work on neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.utils.compiling import Compiler, Kernels, require_numba
from omagd.utils.seeding import FACTORS, GOLDEN

require_numba("runner=resident")
SOURCE, WHAT = Path(__file__).resolve(), "kernels of slots"
compiler = Compiler(SOURCE, WHAT, "about 3 s")
function, kernel = compiler.function, compiler.kernel
cuda: Any = None  # of Numba, once there is work for a GPU
THREADS = 128
"""Threads of a block."""
FIELDS = 4
"""Most fields with numbers of one size that are written at once: kernels are compiled for so many."""
SIZES = torch.int32, torch.uint8
"""Types as which numbers are copied: of four bytes, or a multiple; of fewer."""


@function
def drawn(number: Any, key: Any) -> Any:
    """Return `seeding.uniform` of one number of the stream `key`, both uint64."""
    z = (number + np.uint64(1)) * np.uint64(GOLDEN) + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(FACTORS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(FACTORS[1])
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@function
def choose_one(place: int, q: Any, avail: Any, epsilon: Any, key: Any, step: Any, actions: Any) -> None:
    """Write the action of one agent of one slot: see `choose`."""
    b, i = divmod(place, actions.shape[1])
    number = (np.uint64(step[b]) * np.uint64(actions.shape[1]) + np.uint64(i)) * np.uint64(2)
    chosen, most, left = 0, -np.inf, 0
    if drawn(number, np.uint64(key[b])) < epsilon[0]:
        for a in range(avail.shape[2]):
            left += avail[b, i, a]
        left = int(drawn(number + np.uint64(1), np.uint64(key[b])) * left)
        for a in range(avail.shape[2]):
            left -= avail[b, i, a]
            if left < 0:
                chosen = a
                break
    else:
        for a in range(avail.shape[2]):
            value = np.float64(q[b, i, a]) if avail[b, i, a] else -np.inf
            if not value <= most and most == most:  # NaN, which equals nothing, counts as the largest
                chosen, most = a, value
    actions[b, i] = chosen


@function
def copy(b: int, lane: int, lanes: int, episode: Any, step: Any, pairs: Any) -> None:
    """Copy slot b's part of each value [B, k] to its row of [E, L, k]."""
    e, t = episode[b], step[b]
    for rows, value in pairs:
        if t < rows.shape[1]:
            for k in range(lane, value.shape[1], lanes):
                rows[e, t, k] = value[b, k]


@kernel
def _choose(q: Any, avail: Any, epsilon: Any, key: Any, step: Any, actions: Any) -> None:
    for place in range(actions.size):
        choose_one(place, q, avail, epsilon, key, step, actions)


@kernel
def _write(episode: Any, step: Any, large: Any, small: Any) -> None:
    for b in range(len(step)):
        copy(b, 0, 1, episode, step, large)
        copy(b, 0, 1, episode, step, small)


def _choose_on_gpu(q: Any, avail: Any, epsilon: Any, key: Any, step: Any, actions: Any) -> None:
    place = cuda.grid(1)
    if place < actions.size:
        choose_one(place, q, avail, epsilon, key, step, actions)


def _write_on_gpu(episode: Any, step: Any, large: Any, small: Any) -> None:
    b, lane = cuda.blockIdx.x, cuda.threadIdx.x
    copy(b, lane, THREADS, episode, step, large)
    copy(b, lane, THREADS, episode, step, small)


LOOPS: dict[str, Callable[..., None]] = {"choose": _choose, "write": _write}
KERNELS: dict[str, Callable[..., None]] = {"choose": _choose_on_gpu, "write": _write_on_gpu}


def _call_all() -> None:
    """Call the loops with the types that they always have, for no slot."""
    number, pair, real = np.zeros(0, np.int64), np.zeros((0, 1), np.int64), np.zeros((0, 1, 1))
    for q in (real, real.astype(np.float32)):
        _choose(q, real > 0, real[:, 0, 0].copy(), number, number, pair)
    _write(number, number, *[((real.astype(size), pair.astype(size)),) * FIELDS for size in (np.int32, np.uint8)])


@cache
def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels of a CPU or an NVIDIA GPU."""
    if device.type == "cpu":
        compiler.prepare(_call_all)
        return Kernels(Tensor.numpy, lambda name, threads, *args: LOOPS[name](*args), side_by_side=False)
    global cuda
    from omagd.utils import cuda as gpu

    cuda = gpu.cuda
    return gpu.CUDACompiler(SOURCE, WHAT, "about 5 s", exact=True).kernels(KERNELS, device, THREADS)


def choose(q: Tensor, available: Tensor, epsilon: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """Return epsilon-greedy actions [B, n] int64, by two random numbers of each agent: see `SelectorOnDevice`."""
    actions, kernels = torch.empty(q.shape[:2], dtype=torch.int64, device=q.device), kernels_for(q.device)
    values = q if q.dtype == torch.float64 else q.float()  # which holds all numbers of smaller types
    given = values, available.expand_as(q), epsilon.double().view(1), key, step, actions
    kernels.run("choose", actions.numel(), *[kernels.view(each.contiguous()) for each in given])
    return actions


class RowWriter:
    """Writes rows of episodes as their bits, so that kernels need not know types.

    Args:
        rows: name -> [E, L, ...], the fields of rows. device: of all tensors.
    """

    def __init__(self, rows: dict[str, Tensor], device: torch.device) -> None:
        self._kernels = kernels_for(device)
        self._rows: dict[str, tuple[torch.dtype, torch.dtype, int, Any]] = {}
        for name, field in rows.items():
            size = SIZES[field.element_size() < 4]
            bits = field.view(*field.shape[:2], -1).view(size)
            self._rows[name] = field.dtype, size, bits.shape[-1], self._kernels.view(bits)
        nothing = (torch.zeros(1, 1, 0, dtype=size, device=device) for size in SIZES)
        self._unused = [(self._kernels.view(each), self._kernels.view(each[0])) for each in nothing]

    def write(self, values: dict[str, Tensor], episode: Tensor, step: Tensor) -> None:
        """Write those of the `values` [B, ...] that are fields at the `episode` and `step` [B] of each slot."""
        view = self._kernels.view
        pairs: dict[torch.dtype, list[tuple[Any, Any]]] = {size: [] for size in SIZES}
        for name in filter(self._rows.__contains__, values):
            (dtype, size, width, rows), value = self._rows[name], values[name]
            value = value.view(torch.uint8) if value.dtype == torch.bool else value  # equal bits
            bits = value.to(dtype).reshape(len(step), -1).contiguous().view(size).view(len(step), width)
            pairs[size].append((rows, view(bits)))
        for first in range(0, max(map(len, pairs.values())), FIELDS):
            some = (found[first : first + FIELDS] for found in pairs.values())
            full = [(*each, *[none] * (FIELDS - len(each))) for each, none in zip(some, self._unused, strict=True)]
            self._kernels.run("write", len(step) * THREADS, view(episode), view(step), *full)
