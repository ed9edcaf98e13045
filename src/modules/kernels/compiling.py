"""Compiled code for learning: Numba kernels on a CPU, and torch.compile for `compile=True`."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor, nn

from omagd.config.schema import Config
from omagd.utils.compiling import compiled_or_reference

BACKEND = "inductor"
SMALL = 1 << 16  # numbers below which torch's operations are used: loading Numba takes longer than they do


def kernels_for(x: Tensor, n_numbers: int) -> ModuleType | None:
    """Return the Numba kernels (`compiled.py`) for work on `n_numbers` numbers like x, or None: use torch.

    They are for float32 on CPUs, and not what `torch.compile` compiles. Which of both computes depends on the size
    alone, so that the same batch always gives the same bits on a machine.
    """
    fits = x.device.type == "cpu" and x.dtype == torch.float32 and n_numbers >= SMALL
    return compiled_kernels() if fits and not torch.compiler.is_compiling() else None


@cache
def compiled_kernels() -> ModuleType | None:
    """Return the module of the kernels, compiled or loaded at the first call; None without Numba."""

    def load() -> ModuleType | None:
        from omagd.modules.kernels import compiled, tiles

        compiled.prepare(*([tiles.call_all] if tiles.has_tiles() else []))
        return compiled

    return compiled_or_reference(load, None)


@cache
def tile_kernels() -> ModuleType | None:
    """Return the module of the kernels that multiply bf16 by tiles (AMX); None where processor or Numba do not."""
    if compiled_kernels() is None:
        return None
    from omagd.modules.kernels import tiles

    return tiles if tiles.has_tiles() else None


def maybe_compile(config: Config, *modules: nn.Module) -> None:
    """Compile the forward of each module in place if `compile` is set, for batches of any size.

    Parameters and state dicts keep their names; copies of a module are not compiled. Only mixers are compiled: on a CPU
    their forward and backward take an eighth less time, while graph convolutions take twice as long in backward, and
    the agents' GRU has its own backward already.
    """
    if config.compile:
        for module in modules:
            module.compile(dynamic=True, backend=BACKEND)
