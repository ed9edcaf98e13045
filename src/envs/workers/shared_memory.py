"""Memory that processes share and that has no name, so that nothing of it stays behind however they end."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd
from typing import Any


class NamelessMemory:
    """Memory that a process hands to those that it spawns, as an argument: also to those that it spawns later.

    Args:
        descriptor: what a pickled one arrives with; None makes new memory, of no size yet.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = _new() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    def resize(self, size: int) -> None:
        """Have `size` bytes, zero. Before anybody maps them. Errors: OSError where there is no room."""
        os.ftruncate(self._descriptor, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, 0, size)

    def map(self) -> mmap.mmap:
        """Return the bytes."""
        if self._map is None:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
        return self._map

    def close(self) -> None:
        """Let go of it; the memory goes with the last who has it. May be called twice."""
        with contextlib.suppress(BufferError):  # an error on its way up may still hold a view
            if self._map is not None:
                self._map.close()
        self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a process that is being spawned."""
        return _arrived, (DupFd(self._descriptor),)


def _new() -> int:
    """Return the descriptor of a file that lies in memory (Linux), else of one that has no name any more."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("omagd-envs")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _arrived(handle: Any) -> NamelessMemory:
    return NamelessMemory(handle.detach())
