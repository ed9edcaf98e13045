"""SIGINT and SIGTERM as an exception that is raised once, so that what must be written and closed is."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_SECONDS = 2.0
"""One Ctrl-C may arrive twice, from the terminal and from the parent; a later one is a person who will not wait."""


class Stopped(KeyboardInterrupt):
    """This process was asked to end.

    Args:
        number: the signal. `exit_code` is what shells say for it: 130 or 143.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = 128 + number


@dataclass
class _Received:
    """What this process was told, and whether it may be told now."""

    number: int | None = None
    at: float = 0.0
    held: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self.at = number, now
            if self.held:
                return
        elif now - self.at < PATIENCE_SECONDS:
            return
        raise Stopped(number)


_received = _Received()


def stop_requested() -> bool:
    """Return whether a signal has arrived within `stoppable`."""
    return _received.number is not None


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, the first SIGINT or SIGTERM raises `Stopped`; outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.number, _received.held = None, False
    before = {number: signal.signal(number, _received.handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unhurried() -> Iterator[None]:
    """Within, a first signal waits for the end of the block; one that is repeated seconds later does not."""
    already = stop_requested()
    _received.held = True
    try:
        yield
    finally:
        _received.held = False
    if stop_requested() and not already:
        raise Stopped(_received.number or signal.SIGINT)
