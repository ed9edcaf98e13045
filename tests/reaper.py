"""Kills what a test session has started once the session has ended: `python reaper.py MARK SESSION`.

Every process that a test starts inherits MARK in its environment, also one with its own session or another parent.
pytest cannot do this itself: SIGTERM and SIGKILL leave it no time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

NAME = "OMAGD_TEST_SESSION"
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 10.0


def watch_this_session() -> None:
    """On Linux, mark the processes that this one starts from here on, and start another process that kills them."""
    if sys.platform != "linux":
        return
    mark = uuid.uuid4().hex
    # In its own session: Ctrl-C on the terminal is not for the watcher.
    subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark, str(os.getpid())],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    os.environ[NAME] = mark


def having(name: str, value: str) -> list[int]:
    """Return the ids of living processes whose environment holds this variable."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{name}={value}".encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(int(place.name))
    return found


def main(mark: str, session: str) -> None:
    """Wait for the end of the process `session`, the parent; then kill the processes with `mark`."""
    while os.getppid() == int(session):
        time.sleep(POLL_SECONDS)
    until = time.monotonic() + PATIENCE_SECONDS
    while (found := having(NAME, mark)) and time.monotonic() < until:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 4)


if __name__ == "__main__":
    main(*sys.argv[1:])
