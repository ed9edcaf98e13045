"""Functions compiled by Numba, kept in the user's cache until their source changes.

A function is written once, in plain loops, for CPUs and GPUs: CUDA kernels (`numba-cuda`) can call the same functions.
On a CPU no option changes results (no fused multiply-add unless a package asks for it, no reordered sums), so that a
kernel can equal a NumPy reference bit for bit.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np

from omagd.utils import seeding
from omagd.utils.errors import UserError, print_note, print_warning
from omagd.utils.storage import replace_file

# Numba colours messages by colorama, which replaces sys.stdout: by Sacred's, which is closed when Python exits.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

# Without reference counts (`_nrt`): kernels allocate nothing, and counting each use of an array takes most of the time
# of a small one. Division by zero gives infinity, as in NumPy. Callers release Python's lock.
OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False, "nogil": True}
NO_C: dict[str, Any] = {"no_cfunc_wrapper": True}  # C calls nothing
NO_PYTHON: dict[str, Any] = {"no_cpython_wrapper": True, **NO_C}
OLDEST = 0, 68  # version of Numba
SWITCHED_OFF = "is switched off by NUMBA_DISABLE_JIT"
SHARED = Path(__file__).resolve(), Path(seeding.__file__).resolve()  # source of all kernels
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
_functions: list[Any] = []  # of all packages, since kernels of one may contain functions of another
_under_way: list[bool] = []  # one for each block of `no_hang`
T = TypeVar("T")


def require_numba(what: str) -> None:
    """Load Numba, which plays `what`. Errors: UserError where it is missing."""
    with no_hang():
        problem = numba_problem()
    if problem:
        install = f"pip install 'numba~={'.'.join(map(str, OLDEST))}.0'"
        cure = "Unset that variable" if problem == SWITCHED_OFF else install
        raise UserError(f"{what} needs Numba, which {problem}. {cure}")


def under_way() -> bool:
    """Return whether Numba or kernels are being loaded, compiled, or awaited from another process: that is no hang."""
    return bool(_under_way)


@contextmanager
def no_hang() -> Iterator[None]:
    """Let the watchdog know that kernels are loaded or compiled in the block: see `under_way`."""
    _under_way.append(True)
    try:
        yield
    finally:
        _under_way.pop()


def numba_problem() -> str:
    """Return why kernels cannot be compiled, as what follows the word Numba; empty if they can."""
    if find_spec("numba") is None:
        return "is not installed"
    try:
        import numba
    except (ImportError, AttributeError, SystemError, OSError) as problem:
        return f"cannot be imported ({str(problem).splitlines()[0] if str(problem) else type(problem).__name__})"
    if tuple(map(int, re.findall(r"\d+", numba.__version__)[:2])) < OLDEST:
        return f"is {numba.__version__}, which is too old"
    return SWITCHED_OFF if numba.config.DISABLE_JIT else ""  # type: ignore[attr-defined]


def as_kernels_take(name: str, array: np.ndarray, kind: type, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array for a kernel, which reads memory without checks: contiguous, of this type and shape.

    Errors: ValueError for another shape, TypeError for a type that would lose something.
    """
    if type(array) is np.ndarray and array.dtype == kind and array.shape == shape and array.flags.c_contiguous:
        return array  # the usual case, in a third of the time
    if np.shape(array) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(np.shape(array))}")
    if not np.can_cast(np.asarray(array).dtype, kind, "same_kind"):
        raise TypeError(f"{name} must be {np.dtype(kind).name}, not {np.asarray(array).dtype}")
    return np.ascontiguousarray(array, kind)


class Unchecked(Generic[P, T]):
    """A kernel that looks at its arguments' types at the first call only: that takes most of a call with many arrays.

    Callers give the same types, numbers of dimensions and memory layouts ever after.
    """

    def __init__(self, kernel: Callable[P, T]) -> None:
        self.checked = self._call = kernel

    def __call__(self, *args: P.args, **more: P.kwargs) -> T:
        """Run the kernel."""
        return self._call(*args, **more)

    def prepared(self) -> None:
        """Call the machine code from now on."""
        (only,) = self.checked.overloads.values()  # type: ignore[attr-defined]
        self._call = only.entry_point


@contextmanager
def machine_code_of_kernels_only(late: bool) -> Iterator[None]:
    """Compile functions only as parts of kernels: machine code of their own, which nobody calls, takes half the time.

    late: functions are also left as they are until a kernel contains them, since only there the shapes of arrays are
    known. Otherwise a loop begins with a test whether its arrays overlap, which takes longer than a dozen of
    iterations, or it is unrolled before it can be vectorised. And loops compute one block of numbers at a time: with
    several at once, what is left of a dozen of units would be computed one by one.
    """
    import numba
    from llvmlite import binding
    from numba.core import event, registry

    settings: Any = numba.config
    codegen: Any = registry.cpu_target.target_context.codegen()
    level, depth = settings.OPT, 0
    add, set_env, tuning = codegen._add_module, codegen.set_env, binding.create_pipeline_tuning_options

    def tuned(*args: Any) -> Any:
        options = tuning(*args)
        options.loop_interleaving = False
        return options

    class Depth(event.Listener):
        def on_start(self, event: Any) -> None:
            self.move(1)

        def on_end(self, event: Any) -> None:
            self.move(-1)

        def move(self, by: int) -> None:
            nonlocal depth
            depth += by
            settings.OPT = 0 if late and depth > 1 else level

    try:
        codegen._add_module = lambda module: add(module) if depth <= 1 else None
        codegen.set_env = lambda name, env: set_env(name, env) if depth <= 1 else None
        if late:
            binding.create_pipeline_tuning_options = tuned
        with event.install_listener("numba:compile", Depth()):
            yield
    finally:
        settings.OPT, binding.create_pipeline_tuning_options = level, tuning
        del codegen._add_module, codegen.set_env


def user_cache(*names: str) -> Path:
    """Return a folder below `omagd` in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`); it may not exist.

    A user without a home, as in some containers, has a folder of its own among the temporary files.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        home = str(_own_temporary_folder())
    return Path(home, "omagd", *names)


def _own_temporary_folder() -> Path:
    """Return a folder that no other user can have filled: what is loaded from a cache is executed."""
    folder = Path(tempfile.gettempdir(), f"omagd-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if folder.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="omagd-"))


def _digest(file: Path) -> int | None:
    """Return the CRC of a file's content, None if it cannot be read."""
    try:
        return zlib.crc32(file.read_bytes())
    except OSError:
        return None


def files_of_kernels(folder: Path) -> list[Path]:
    """Return the files that Numba has left."""
    return [file for file in folder.rglob("*") if file.suffix in (".nbi", ".nbc")]


def kept(make: Callable[[], Any], settings: Any, folder: Path) -> Any:
    """Return the kernel that `make` makes, which Numba keeps in the folder; None where it cannot.

    Elsewhere, as beside the source, it would notice neither changes in other files nor damage. settings: Numba's.
    """
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
    try:
        kernel = make()
        return kernel if folder in Path(kernel._cache.cache_path).parents else None
    except RuntimeError:  # Numba cannot write anywhere
        return None
    finally:
        settings.CACHE_DIR = before


class Kernels(NamedTuple):
    """Kernels of a device.

    Attributes:
        view: returns a tensor's memory as kernels take it. run: runs a kernel by its name, on views; on a GPU on
            torch's current stream, with at least so many threads. side_by_side: whether threads run at the same time,
            so that each needs working memory of its own.
    """

    view: Callable[[Any], Any]
    run: Callable[..., None]
    side_by_side: bool


def source_folder(source: Path, what: str, version: str) -> tuple[list[Path], Path]:
    """Return the files with the `source` of kernels, and where they are kept: elsewhere after a change in these.

    source: a folder or a file; `SHARED` is added. version: what the compiler is.
    """
    files = [*SHARED, *sorted(source.resolve().rglob("*.py") if source.is_dir() else [source.resolve()])]
    digest = zlib.crc32(version.encode())
    for file in files:
        digest = zlib.crc32(file.read_bytes(), digest)
    return files, user_cache("compiled", f"{what}-{digest:08x}".replace(" ", "-"))


class Compiler:
    """Compiles the functions of one package.

    Args:
        source: folder or file with all source that results depend on; a change in it, in `SHARED`, or in Numba, starts
            a new cache.
        what: name for the message at the first start. seconds: that compiling takes, in its words.
        fused: whether a product and a sum may become one operation, which rounds once: faster, and other bits on
            processors that have it. late: functions are optimised only as parts of a kernel (shapes known there).
        checked: each call of a kernel looks at the types of its arguments; else see `Unchecked`.
    """

    def __init__(
        self,
        source: Path,
        what: str,
        seconds: str,
        *,
        fused: bool = False,
        late: bool = False,
        checked: bool = True,
    ) -> None:
        import numba

        self._what, self._seconds = what, seconds
        self._options = {**OPTIONS, "fastmath": {"contract"}} if fused else OPTIONS
        self._late, self._checked = late, checked
        self._source, self.folder = source_folder(source, what, numba.__version__)
        self._kernels: list[Any] = []
        self._unchecked: list[Unchecked[..., Any]] = []
        self._problem = ""  # why nothing is kept
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "lock").touch()
        except OSError as problem:
            self._problem = problem.strerror or str(problem)

    def function(self, function: F) -> F:
        """Compile a function that kernels call. Errors: ValueError where a change in it would not start a new cache."""
        from numba import njit

        file = Path(function.__code__.co_filename).resolve()
        if file not in self._source:
            raise ValueError(f"{function.__name__} is in {file}, which is not part of the source of the {self._what}")
        compiled: Any = njit(forceinline=True, **self._options)(function)
        _functions.append(compiled)
        part: F = compiled
        return part

    def kernel(self, function: F) -> F:
        """Compile a function that Python calls, once for the types of its first call."""
        import numba

        kernel: Any = None if self._problem else self._kept_kernel(function)
        kernel = kernel or numba.njit(**NO_C, **self._options)(function)
        self._kernels.append(kernel)
        if not self._checked:
            kernel = Unchecked(kernel)
            self._unchecked.append(kernel)
        compiled: F = kernel
        return compiled

    def _kept_kernel(self, function: F) -> Any:
        import numba

        kernel = kept(lambda: numba.njit(cache=True, **NO_C, **self._options)(function), numba.config, self.folder)
        if kernel is None:
            self._problem = "Numba cannot write there"
        return kernel

    def prepare(self, call_all: Callable[[], None]) -> None:
        """Compile or load all kernels by `call_all`, which calls each with the types that it will always have.

        The first process says that it compiles; others on this machine wait for it.
        """
        with no_hang():
            self._prepare(call_all)

    def _prepare(self, call_all: Callable[[], None]) -> None:
        if not self._problem:
            try:
                with (self.folder / "lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    self._fill(call_all)
            except OSError as problem:  # the disk is full, for example
                self._problem = problem.strerror or str(problem)
        if self._problem:
            where = f"{self.folder}: {self._problem}"
            print_warning(f"{where}. The {self._what} are compiled at each start ({self._seconds}).")
            self._keep_nothing()
            self._compile(call_all)
        for kernel in self._kernels:
            if kernel.signatures:  # the others are for another kind of processor
                kernel.disable_compile()
        for kernel in self._unchecked:
            kernel.prepared()

    def _fill(self, call_all: Callable[[], None]) -> None:
        """Compile what is not in the folder yet. Damaged files are compiled again: loading them could crash."""
        kept = self._kept()
        if any(_digest(self.folder / name) != digest for name, digest in kept.items()):
            print_warning(f"{self.folder} holds damaged files: the {self._what} are compiled again.")
            kept = {}
        for file in files_of_kernels(self.folder):
            if file.relative_to(self.folder).as_posix() not in kept:  # unknown: left by a process that was killed
                file.unlink()
        here = Path(self._kernels[0]._cache.cache_path).name
        if not any(name.startswith(f"{here}/") for name in kept):
            print_note(
                f"Compiling the {self._what}, once: {self._seconds}, more on a busy machine. Kept in {self.folder}."
            )
        self._compile(call_all)
        found = {file.relative_to(self.folder).as_posix(): _digest(file) for file in files_of_kernels(self.folder)}
        if found != kept:
            replace_file(self.folder / "done", json.dumps(found).encode())

    def _kept(self) -> dict[str, int]:
        """Return the digests of the files that a whole compilation has left, by name."""
        try:
            kept = json.loads((self.folder / "done").read_bytes())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def _keep_nothing(self) -> None:
        from numba.core.caching import NullCache

        for kernel in self._kernels:
            kernel._cache = NullCache()

    def _compile(self, call_all: Callable[[], None]) -> None:
        try:
            for function in _functions:
                function.targetoptions.update(NO_PYTHON)
            with machine_code_of_kernels_only(self._late):
                call_all()
        finally:
            for function in _functions:  # should Python call it, it is compiled again
                for name in NO_PYTHON:
                    del function.targetoptions[name]
                function._reset_overloads()
