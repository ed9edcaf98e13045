"""Fast forms of the operators in `ops.py` and `graph_ops.py`, with their own backward: Numba kernels, oneDNN."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omagd.utils.compiling import require_numba

SMALL = 1 << 16  # numbers below which torch's operations are used: loading Numba takes longer than they do


def kernels_for(x: Tensor, n_numbers: int, module: str = "compiled") -> ModuleType | None:
    """Return a module of Numba kernels for work on `n_numbers` numbers like x, or None: use torch.

    They are for float32 on CPUs, and not what `torch` compiles or exports. Which of both computes depends on the size
    alone, so that the same batch always gives the same bits on a machine.
    """
    # Gradients of gradients, other types and devices are torch's.
    fits = not torch.compiler.is_compiling() and x.device.type == "cpu" and x.dtype == torch.float32
    return compiled_kernels(module) if fits and n_numbers >= SMALL else None


@cache
def compiled_kernels(module: str) -> ModuleType:
    """Return a module of kernels, compiled or loaded at the first call. Errors: UserError without Numba."""
    require_numba("learning on a CPU")
    kernels = import_module(f"{__name__}.{module}")
    kernels.prepare()
    return kernels


def arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]]:
    """Return the memory of contiguous tensors as kernels take it."""
    return [tensor.detach().numpy() for tensor in tensors]
