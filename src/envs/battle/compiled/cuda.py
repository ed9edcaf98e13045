"""The battles' kernels on an NVIDIA GPU, by `numba-cuda`: the functions of the CPU's kernels, one battle per thread.

Nothing is allocated or waited for, so a CUDA graph can hold the launches. Without fused multiply-add a GPU computes
sums, products, quotients and roots as a CPU does; NVVM's option is set while kernels are compiled.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba.cuda
import numpy as np
import torch
from torch import Tensor

from omagd.envs.battle.compiled import compiler, features, play, rules, starts
from omagd.envs.battle.compiled.features import Layout, N
from omagd.envs.battle.compiled.rules import NEGATIVE, Prices, Results
from omagd.envs.battle.compiled.starts import Starts
from omagd.envs.battle.compiled.tables import Array, Episodes, Orders, State, Tables
from omagd.envs.protocol import Seen
from omagd.utils.compiling import files_of_kernels
from omagd.utils.errors import print_note, print_warning

cuda: Any = numba.cuda  # without types
if not hasattr(np, "row_stack"):  # numba-cuda names it at import, to 0.30.4 at least; NumPy 2.5 has `vstack` only
    np.row_stack = np.vstack

SECONDS = "20 to 40 s"
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


@contextmanager
def exact() -> Iterator[None]:
    """Compile without fused multiply-add."""
    from numba.cuda.cudadrv import nvvm

    before = nvvm.compile_ir
    nvvm.compile_ir = functools.partial(before, fma=0)
    try:
        yield
    finally:
        nvvm.compile_ir = before


def try_out() -> None:
    """Compile a small kernel as those of battles are compiled, and run it. Errors: whatever is wrong."""

    def count(values: Array) -> None:
        i = cuda.grid(1)
        values[i] = i

    values = torch.zeros(THREADS, dtype=torch.int64, device="cuda")
    with exact():
        cuda.jit(count, lto=False)[1, THREADS](cuda.as_cuda_array(values))
    if not torch.equal(values.cpu(), torch.arange(THREADS)):
        raise RuntimeError("a kernel of numba-cuda computes wrongly")


class CUDAKernels:
    """Launches the kernels on torch's current stream.

    Args:
        device: a CUDA device, on which all tensors are.
    """

    side_by_side = True

    def __init__(self, device: torch.device) -> None:
        cuda.select_device(torch.cuda.current_device() if device.index is None else device.index)
        self._device = device
        # Numba warns of grids with few blocks, which small numbers of battles have.
        warnings.filterwarnings("ignore", message="Grid size")

    def view(self, tensor: Tensor) -> Any:
        """Return what a kernel takes as this tensor: the same memory."""
        return cuda.as_cuda_array(tensor, sync=False)

    def __call__(self, name: str, threads: int, *args: Any) -> None:
        """Launch a kernel with at least so many threads, on views; the first call compiles it."""
        stream = cuda.external_stream(torch.cuda.current_stream(self._device).cuda_stream)
        with exact():
            jitted(name)[-(-threads // THREADS), THREADS, stream](*args)


@functools.cache
def kept_in() -> Path:
    """Return the folder of compiled kernels: another one after a change in their source, or of numba-cuda."""
    digest = zlib.crc32(version("numba-cuda").encode(), int(compiler.folder.name[-8:], 16))
    folder = compiler.folder.with_name(f"battles-cuda-{digest:08x}")
    with suppress(OSError):  # `jitted` says so
        folder.mkdir(parents=True, exist_ok=True)
        if not files_of_kernels(folder):
            print_note(f"Compiling the battles for this GPU, once: {SECONDS}. Kept in {folder}.")
    return folder


@functools.cache
def jitted(name: str) -> Any:
    """Return one of `KERNELS`, compiled once for each kind of arguments, and kept for later processes.

    Without link-time optimisation: with it nvJitLink generates the code, and it fuses whatever NVVM was told.
    """
    from numba.cuda.core import config

    folder = kept_in()
    before, config.CACHE_DIR = config.CACHE_DIR, str(folder)
    try:
        kernel = cuda.jit(KERNELS[name], lto=False, cache=True)
        if folder in Path(kernel._cache.cache_path).parents:
            return kernel
    except RuntimeError:  # Numba cannot write anywhere
        pass
    finally:
        config.CACHE_DIR = before
    print_warning(f"{folder}: Numba cannot write there. The GPU's kernels are compiled at each start ({SECONDS}).")
    return cuda.jit(KERNELS[name], lto=False)
