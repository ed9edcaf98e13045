"""Kernels for NVIDIA GPUs by `numba-cuda`, kept in the user's cache until their source changes.

From its second launch on a kernel allocates nothing and waits for nothing, so a CUDA graph can hold it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba.cuda
import numpy as np
import torch
from torch import Tensor

from omagd.utils.compiling import Kernels, files_of_kernels, kept, source_folder
from omagd.utils.errors import print_note, print_warning

cuda: Any = numba.cuda  # without types
if not hasattr(np, "row_stack"):  # numba-cuda names it at import, to 0.30.4 at least; NumPy 2.5 has `vstack` only
    np.row_stack = np.vstack
# Numba warns of grids with few blocks, which small batches have.
warnings.filterwarnings("ignore", message="Grid size")


def view(tensor: Tensor) -> Any:
    """Return what a kernel takes as this tensor: the same memory."""
    with torch.cuda.device(tensor.device):
        return cuda.as_cuda_array(tensor.detach(), sync=False)


@contextmanager
def without_fma() -> Iterator[None]:
    """Let NVVM, which compiles kernels, fuse no product and sum into one operation."""
    from numba.cuda.cudadrv import nvvm

    before = nvvm.compile_ir
    nvvm.compile_ir = functools.partial(before, fma=0)
    try:
        yield
    finally:
        nvvm.compile_ir = before


class CUDACompiler:
    """Compiles and launches the kernels of one package.

    Args:
        source: folder or file with all source that results depend on.
        what: name for the message at the first start. seconds: that compiling takes, in its words.
        exact: without fused multiply-add: a GPU then computes sums, products, quotients and roots as a CPU does.
    """

    def __init__(self, source: Path, what: str, seconds: str, *, exact: bool = False) -> None:
        self._source, self._what, self._seconds = source, what, seconds
        self.compiling = without_fma if exact else nullcontext
        self.jitted = functools.cache(self._jitted)

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of compiled kernels: another one after a change in their source, or of numba-cuda."""
        made_by = version("numba-cuda") + Path(__file__).read_text(encoding="utf-8")
        _, folder = source_folder(self._source, f"{self._what} cuda", made_by)
        with suppress(OSError):  # `jitted` says so
            folder.mkdir(parents=True, exist_ok=True)
            if not files_of_kernels(folder):
                print_note(f"Compiling the {self._what} for this GPU, once: {self._seconds}. Kept in {folder}.")
        return folder

    def _jitted(self, function: Callable[..., None]) -> Any:
        """Return a kernel, compiled once for each kind of arguments, and kept for later processes.

        Link-time optimisation is off: nvJitLink would generate the code, and ignore NVVM's option for fused operations.
        """
        from numba.cuda.core import config

        kernel = kept(lambda: cuda.jit(function, lto=False, cache=True), config, self.folder)
        if kernel is None:
            often = f"The {self._what} are compiled for this GPU at each start ({self._seconds})."
            print_warning(f"{self.folder}: Numba cannot write there. {often}")
            kernel = cuda.jit(function, lto=False)
        return kernel

    def launch(
        self, function: Callable[..., None], device: torch.device, blocks: int, threads: int, *args: Any
    ) -> None:
        """Launch a kernel on torch's current stream; the first call compiles it."""
        given = [view(value) if isinstance(value, Tensor) else value for value in args]
        stream = cuda.external_stream(torch.cuda.current_stream(device).cuda_stream)
        with torch.cuda.device(device), self.compiling():  # also in autograd's threads
            self.jitted(function)[blocks, threads, stream](*given)

    def kernels(self, functions: dict[str, Callable[..., None]], device: torch.device, threads: int) -> Kernels:
        """Return the kernels of a GPU. threads: of a block."""

        def run(name: str, total: int, *args: Any) -> None:
            self.launch(functions[name], device, -(-total // threads), threads, *args)

        return Kernels(view, run, side_by_side=True)
