"""What is done in every slot of a device, one kernel each: actions are chosen, rows are written.

The work of a slot is a function in plain loops. On a CPU a loop over slots calls it; on an NVIDIA GPU a slot has some
threads, and thread `lane` of `lanes` does every `lanes`-th part, so that neighbours work on neighbouring numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.utils.compiling import Compiler, require_numba
from omagd.utils.seeding import FACTORS, GOLDEN

require_numba("runner=resident")
SOURCE, WHAT = Path(__file__).resolve(), "kernels of slots"
compiler = Compiler(SOURCE, WHAT, "about 3 s")
function, kernel = compiler.function, compiler.kernel
cuda: Any = None  # of Numba, once there is work for a GPU
THREADS = 128
"""Threads of a block, and those that write a slot's row."""
FIELDS = 4
"""Fields with numbers of one size that are written in one go: kernels are compiled for so many."""
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
def choose_in_slot(
    b: int, lane: int, lanes: int, q: Any, avail: Any, epsilon: Any, key: Any, step: Any, actions: Any
) -> None:
    """Write the actions [B, n] of a slot: see `choose`."""
    agents, many = actions.shape[1], avail.shape[2]
    for i in range(lane, agents, lanes):
        number = (np.uint64(step[b]) * np.uint64(agents) + np.uint64(i)) * np.uint64(2)
        chosen = 0
        if drawn(number, np.uint64(key[b])) < epsilon[0]:
            left = 0
            for a in range(many):
                left += avail[b, i, a]
            wanted = np.int64(drawn(number + np.uint64(1), np.uint64(key[b])) * left)
            left = 0
            for a in range(many):
                left += avail[b, i, a]
                if left > wanted:
                    chosen = a
                    break
        else:
            most = -np.inf
            for a in range(many):
                value = np.float64(q[b, i, a]) if avail[b, i, a] else -np.inf
                if not value <= most and most == most:  # NaN, which equals nothing, counts as the largest
                    chosen, most = a, value
        actions[b, i] = chosen


@function
def copy_in_slot(b: int, lane: int, lanes: int, place: int, count: int, rows: Any, values: Any) -> None:
    """Copy a slot's `values` to a place in the `rows`: the first `count` of arrays [B, k] and [places, k]."""
    for field in range(count):
        row, value = rows[field], values[field]
        for k in range(lane, value.shape[1], lanes):
            row[place, k] = value[b, k]


@function
def write_in_slot(b: int, lane: int, lanes: int, episode: Any, step: Any, length: int, large: Any, small: Any) -> None:
    """Write a slot's row: see `RowWriter`. large, small: what `copy_in_slot` takes, of each size."""
    place = episode[b] * length + step[b]
    copy_in_slot(b, lane, lanes, place, *large)
    copy_in_slot(b, lane, lanes, place, *small)


@kernel
def _choose(slots: int, args: Any) -> None:
    for b in range(slots):
        choose_in_slot(b, 0, 1, *args)


@kernel
def _write(slots: int, args: Any) -> None:
    for b in range(slots):
        write_in_slot(b, 0, 1, *args)


def _choose_on_gpu(slots: int, lanes: int, args: Any) -> None:
    b, lane = divmod(cuda.grid(1), lanes)
    if b < slots:
        choose_in_slot(b, lane, lanes, *args)


def _write_on_gpu(slots: int, lanes: int, args: Any) -> None:
    b, lane = divmod(cuda.grid(1), lanes)
    if b < slots:
        write_in_slot(b, lane, lanes, *args)


LOOPS: dict[str, Callable[[int, Any], None]] = {"choose": _choose, "write": _write}
KERNELS: dict[str, Callable[..., None]] = {"choose": _choose_on_gpu, "write": _write_on_gpu}


def _call_all() -> None:
    """Call the loops with the types that they always have, for no slot."""
    number, pair, real = np.zeros(1, np.int64), np.zeros((1, 1), np.int64), np.zeros((1, 1, 1))
    for q in (real, real.astype(np.float32)):
        _choose(0, (q, real > 0, real[0, 0], number, number, pair))
    fields = ((0, *[(pair.astype(size),) * FIELDS] * 2) for size in (np.int32, np.uint8))
    _write(0, (number, number, 0, *fields))


@cache
def kernels_for(device: torch.device) -> tuple[Callable[[Tensor], Any], Callable[[str, int, int, Any], None]]:
    """Return what views a tensor's memory as kernels of a CPU or an NVIDIA GPU take it, and what runs one.

    By its name, the number of slots, the threads of each on a GPU, and arguments; there on torch's current stream.
    """
    if device.type == "cpu":
        compiler.prepare(_call_all)
        return Tensor.numpy, lambda name, slots, lanes, args: LOOPS[name](slots, args)
    global cuda
    from omagd.utils.cuda import CUDACompiler, view
    from omagd.utils.cuda import cuda as loaded

    cuda, on_gpu = loaded, CUDACompiler(SOURCE, WHAT, "about 5 s", exact=True)

    def run(name: str, slots: int, lanes: int, args: Any) -> None:
        on_gpu.launch(KERNELS[name], device, -(-slots * lanes // THREADS), THREADS, slots, lanes, args)

    return view, run


def choose(q: Tensor, available: Tensor, epsilon: Tensor, key: Tensor, step: Tensor) -> Tensor:
    """Return epsilon-greedy actions [B, n] int64, by two random numbers of each agent: see `SelectorOnDevice`."""
    actions = torch.empty(q.shape[:2], dtype=torch.int64, device=q.device)
    values = q if q.dtype == torch.float64 else q.float()  # which holds all numbers of smaller types
    given, (view, run) = (values, available, epsilon.double().view(1), key, step, actions), kernels_for(q.device)
    run("choose", len(q), q.shape[1], tuple([view(each.contiguous()) for each in given]))
    return actions


class RowWriter:
    """Writes rows of episodes as their bits, so that kernels need not know types.

    Args:
        rows: name -> [E, L, ...], the fields of rows. device: of all tensors.
    """

    def __init__(self, rows: dict[str, Tensor], device: torch.device) -> None:
        self._view, self._run = kernels_for(device)
        self._length = max((field.shape[1] for field in rows.values()), default=0)
        self._unused = {size: (self._view(torch.zeros(1, 1, dtype=size, device=device)),) * 2 for size in SIZES}
        self._rows: dict[str, tuple[torch.dtype, torch.dtype, Any]] = {}
        for name, field in rows.items():
            size = SIZES[field.element_size() < 4]
            self._rows[name] = field.dtype, size, self._view(as_size(field.flatten(0, 1), size))

    def write(self, values: dict[str, Tensor], episode: Tensor, step: Tensor) -> None:
        """Write those of the `values` [B, ...] that are fields at the `episode` and `step` [B] of each slot."""
        view = self._view
        pairs: dict[torch.dtype, list[tuple[Any, Any]]] = {size: [] for size in SIZES}
        for name in filter(self._rows.__contains__, values):
            (dtype, size, rows), value = self._rows[name], values[name]
            value = value.view(torch.uint8) if value.dtype == torch.bool else value  # equal bits
            pairs[size].append((rows, view(as_size(value.to(dtype), size))))
        for first in range(0, max(map(len, pairs.values())), FIELDS):
            args = []
            for size, found in pairs.items():
                some = found[first : first + FIELDS]
                args.append((len(some), *zip(*some, *[self._unused[size]] * (FIELDS - len(some)), strict=True)))
            self._run("write", len(step), THREADS, (view(episode), view(step), self._length, *args))


def as_size(tensor: Tensor, size: torch.dtype) -> Tensor:
    """Return the bits of a tensor [B, ...] as [B, k]."""
    return tensor.contiguous().view(size).view(len(tensor), -1)
