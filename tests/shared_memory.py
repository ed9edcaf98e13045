"""What a test has left in /dev/shm, where other tests work at the same time."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

PLACE = "/dev/shm"


def names() -> set[str]:
    """Return the names of shared memory and semaphores."""
    return set(os.listdir(PLACE))


def left_since(before: set[str], patience: float = 30.0) -> list[str]:
    """Return the paths that are new and that no living process uses: those in use are some other test's.

    A process may have unmapped a semaphore that it removes a moment later, hence `patience` in seconds.
    """
    until = time.monotonic() + patience
    while (new := names() - before - _in_use()) and time.monotonic() < until:
        time.sleep(0.05)
    return sorted(f"{PLACE}/{name}" for name in new)


def _in_use() -> set[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {line.rpartition(f"{PLACE}/")[2] for line in maps.read_text().splitlines() if f" {PLACE}/" in line}
    return found
