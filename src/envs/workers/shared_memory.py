"""Arrays shared between processes, in anonymous memory: nothing remains on the system however the processes end."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from itertools import accumulate
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from omagd.config.env_info import EnvInfo

Specs = dict[str, tuple[tuple[int, ...], str]]
Arrays = dict[str, np.ndarray]


def array_specs(info: EnvInfo, n_slots: int) -> Specs:
    """Return name -> (shape, dtype) of the arrays shared by all slots."""
    b, n = n_slots, info.n_agents
    return {
        "obs": ((b, n, info.obs_dim), "float32"),
        "full_obs": ((b, n, info.obs_dim), "float32"),
        "state": ((b, info.state_dim), "float32"),
        "avail": ((b, n, info.n_actions), "bool"),
        "reward": ((b,), "float32"),
        "agent_reward": ((b, n if info.agent_rewards else 0), "float32"),
        "terminated": ((b,), "bool"),
        "truncated": ((b,), "bool"),
        "lost": ((b,), "bool"),
        "actions": ((b, n), "int64"),
        "seeds": ((b,), "int64"),
        "want_full": ((1,), "bool"),
    }


def _size(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an array, rounded up to a multiple of 64."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64


def total_size(specs: Specs) -> int:
    """Return the number of bytes of all arrays."""
    return sum(_size(*spec) for spec in specs.values())


def array_views(buffer: mmap.mmap, specs: Specs) -> Arrays:
    """Return the arrays in `buffer`, by name."""
    starts = accumulate((_size(*spec) for spec in specs.values()), initial=0)
    return {name: np.ndarray(*spec, buffer, start) for (name, spec), start in zip(specs.items(), starts, strict=False)}


class AnonymousMemory:
    """Memory without a name that a process passes to the processes it spawns, now or later, as an argument.

    Args:
        descriptor: file descriptor of existing memory; None creates new memory of size zero.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _create() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def resize(self, size: int) -> None:
        """Reserve `size` zeroed bytes. Call before any process maps them. Errors: OSError without enough memory."""
        os.ftruncate(self._descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, size)

    def map(self) -> mmap.mmap:
        """Return the memory as a buffer."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return self._map

    def close(self) -> None:
        """Release this process's reference; the last one frees the memory. May be called twice."""
        with contextlib.suppress(BufferError):  # a traceback may still hold a view
            if self._map is not None:
                self._map.close()
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a process that is being spawned: it receives a duplicate of the descriptor."""
        return _receive, (DupFd(self._descriptor),)


def _create() -> int:
    """Return the descriptor of a file in memory (Linux), elsewhere of a deleted temporary file."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("omagd-envs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _receive(handle: Any) -> AnonymousMemory:
    return AnonymousMemory(handle.detach())
