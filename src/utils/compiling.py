"""Functions compiled by Numba, kept in the user's cache until their source changes.

A function is written once, in plain loops, for CPUs and GPUs: CUDA kernels (`numba-cuda`) can call the same functions.
On a CPU no option changes results (no fused multiply-add unless a package asks for it, no reordered sums), so that a
kernel can equal a NumPy reference bit for bit.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from omagd.utils.caches import user_cache
from omagd.utils.writing import print_warning

# Without reference counts (`_nrt`): kernels allocate nothing, and counting each use of an array takes most of the time
# of a small one. Division by zero gives infinity, as in NumPy. Callers release Python's lock.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "nogil": True}


F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def compiled_or_reference(loss: str, compiled: Callable[[], T], reference: T) -> T:
    """Return what `compiled` loads or, where Numba is missing, the `reference`, with a warning that names the loss."""
    if find_spec("numba") is None:
        print_warning(f"Numba is not installed: {loss}. pip install numba")
        return reference
    return compiled()


@contextmanager
def kernels_optimised_only() -> Iterator[None]:
    """Leave functions as they are until a kernel contains them: only there the shapes of arrays are known.

    Otherwise a loop begins with a test whether its arrays overlap, which takes longer than a dozen of iterations, or it
    is unrolled before it can be vectorised.
    """
    import numba
    from numba.core import event

    settings: Any = numba.config
    depth, level = [0], settings.OPT

    class Depth(event.Listener):
        def on_start(self, event: Any) -> None:
            self.move(1)

        def on_end(self, event: Any) -> None:
            self.move(-1)

        def move(self, by: int) -> None:
            depth[0] += by
            settings.OPT = level if depth[0] <= 1 else 0

    try:
        with event.install_listener("numba:compile", Depth()):
            yield
    finally:
        settings.OPT = level


class Compiler:
    """Compiles the functions of one package.

    Args:
        source: folder with all source that results depend on; a change in it, here, or in Numba, starts a new cache.
        what: name for the message at the first start. seconds: that compiling takes, in its words.
        fused: whether a product and a sum may become one operation, which rounds once: faster, and other bits on
            processors that have it. late: functions are optimised only as parts of a kernel (shapes known there).
    """

    def __init__(
        self, source: Path, what: str, seconds: str = "10 to 20 s", *, fused: bool = False, late: bool = False
    ) -> None:
        import numba

        self._what, self._seconds, digest = what, seconds, zlib.crc32(numba.__version__.encode())
        self._options = {**OPTIONS, "fastmath": {"contract"}} if fused else OPTIONS
        self._late = late
        for file in (Path(__file__), *sorted(source.rglob("*.py"))):
            digest = zlib.crc32(file.read_bytes(), digest)
        self.folder = user_cache("compiled", f"{what}-{digest:08x}".replace(" ", "-"))
        self._kernels: list[Any] = []
        self._problem = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            self._problem = problem.strerror or str(problem)

    def function(self, function: F) -> F:
        """Compile a function that kernels call."""
        from numba import njit

        compiled: F = njit(forceinline=True, **self._options)(function)
        return compiled

    def kernel(self, function: F) -> F:
        """Compile a function that Python calls, once for the types of its first call."""
        import numba

        settings: Any = numba.config
        before, settings.CACHE_DIR = settings.CACHE_DIR, str(self.folder)
        try:
            kernel: Any = numba.njit(cache=not self._problem, **self._options)(function)
        finally:
            settings.CACHE_DIR = before
        self._kernels.append(kernel)
        compiled: F = kernel
        return compiled

    def prepare(self, call_all: Callable[[], None]) -> None:
        """Compile or load all kernels by `call_all`, which calls each with the types that it will always have.

        The first process says that it compiles; others on this machine wait for it.
        """
        if self._problem:
            print_warning(
                f"{self.folder}: {self._problem}. The {self._what} are compiled at each start ({self._seconds})."
            )
            self._compile(call_all)
        else:
            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._fill(call_all)
        for kernel in self._kernels:
            kernel.disable_compile()

    def _fill(self, call_all: Callable[[], None]) -> None:
        done = self.folder / "done"
        if done.exists():
            call_all()
            return
        sys.stderr.write(f"Compiling the {self._what}, once: {self._seconds}. Kept in {self.folder}.\n")
        sys.stderr.flush()
        start = time.monotonic()
        self._compile(call_all)
        done.write_text(f"{time.monotonic() - start:.1f} s, process {os.getpid()}\n", encoding="utf-8")

    def _compile(self, call_all: Callable[[], None]) -> None:
        with kernels_optimised_only() if self._late else nullcontext():
            call_all()
