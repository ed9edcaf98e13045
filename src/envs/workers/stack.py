"""Where a worker process that does not answer stands: its state and Python stack, asked for from outside (Linux)."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

NAME = "omagd_stack"
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk", "S": "waiting", "R": "computing"}


def offer_stack() -> None:
    """Have SIGUSR1 write this process's stack into a nameless file, which the parent reads through /proc."""
    if sys.platform == "linux":
        faulthandler.register(signal.SIGUSR1, os.memfd_create(NAME), all_threads=False)


def stack_of(pid: int, seconds: float = 1.0) -> tuple[str, str]:
    """Return a worker's state, in words, and its stack, innermost call first; empty where it cannot say it."""
    process = Path(f"/proc/{pid}")
    try:
        letter = (process / "stat").read_text().rpartition(")")[2].split()[0]
        state = _STATES.get(letter, f"state {letter}")
        (place,) = [entry for entry in (process / "fd").iterdir() if f"memfd:{NAME}" in os.readlink(entry)]
        if letter in "Tt":
            return state, ""
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + seconds
        while not (text := place.read_text(errors="replace")) and time.monotonic() < until:
            time.sleep(0.02)
    except (OSError, ValueError, IndexError):
        return "state unknown", ""
    return state, text
