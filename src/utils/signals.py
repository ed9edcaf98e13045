"""SIGINT, SIGTERM and SIGHUP as an exception that is raised once, so that what must be written and closed is."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from omagd.utils.writing import drop_lost_output

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVING = frozenset({signal.SIGTERM, signal.SIGHUP})
"""Signals that save at the end of an iteration: a batch system's, and that of a terminal that has been closed."""

PATIENCE_SECONDS = 2.0
"""One Ctrl-C may arrive twice, from the terminal and from the parent; a later one is a person who will not wait."""

BOUNDARY_SECONDS = 10.0
"""How long a SIGTERM or SIGHUP waits for the end of an iteration where state can be saved."""

STARTED_BY = os.getppid()
"""The process that started this one, as early as it can be asked; another one later means that it is gone."""

CLOSING_SECONDS = 20.0
"""How long a process that must end, because of an error or since its launcher is gone, may take to close everything."""

SAVING_SECONDS = 20.0
"""How long the save may take that a SIGTERM or SIGHUP has asked for."""


class Stopped(KeyboardInterrupt):
    """This process was asked to end.

    Args:
        number: the signal. `exit_code` is what shells say for it: 129, 130 or 143.
        cause: what has sent it, if that is known.

    Attributes:
        where: what was interrupted and how to continue it, once that is known.
    """

    def __init__(self, number: int, cause: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.where = ""
        self.cause = cause
        self.number = number
        self.exit_code = 128 + number

    def render(self) -> str:
        """Return the last line of what was interrupted."""
        return f"interrupted{f': {self.cause}' if self.cause else f' by {self}'}{self.where}"


@dataclass
class _Received:
    """What this process was told, and whether it may be told now.

    Attributes:
        error: what shall be raised instead of a stop. cause: what has sent the signal, if that is known.
        number, at: the first signal and its moment. held: within `unhurried`. seconds: given by `deferred`, 0 outside.
        late: the time that was given has passed while signals were held.
    """

    number: int | None = None
    at: float = 0.0
    error: Exception | None = None
    cause: str = ""
    held: bool = False
    seconds: float = 0.0
    late: bool = False

    @property
    def waits(self) -> bool:
        """Whether the signal that was received may wait for the end of an iteration."""
        return self.seconds > 0 and self.number in SAVING

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if number == signal.SIGHUP:
            drop_lost_output()
        now = time.monotonic()
        if self.number is None:
            self.number, self.at = number, now
            if self.waits:
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
                return
            if self.held:
                return
        elif now - self.at < PATIENCE_SECONDS:
            return
        raise self.stopped(number)

    def too_late(self, number: int, frame: FrameType | None) -> None:
        """End the time that `deferred` gave; a SIGALRM from outside, with no stop pending, is a stop by itself."""
        if self.number is None:
            self.number, self.at = number, time.monotonic()
        if self.held:
            self.late = True
        else:
            raise self.stopped(self.number)

    def stopped(self, number: int) -> Stopped:
        """Return the stop that a signal means."""
        return Stopped(number, self.cause)


_received = _Received()


def stop_requested() -> bool:
    """Return whether a signal has arrived within `stoppable`."""
    return _received.number is not None


def ending() -> bool:
    """Return whether this process has been asked to end and does so, within `stoppable`. For any thread."""
    return stop_requested() and signal.getsignal(signal.SIGTERM) == _received.handle


def raise_in_main_thread(error: Exception) -> None:
    """Within `stoppable`, called in another thread: raise `error` in the main thread, whatever it does in Python."""
    if signal.getsignal(signal.SIGTERM) == _received.handle:
        _received.error = error
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def ask_to_end(cause: str) -> None:
    """Ask this process to end, as by Ctrl-C; `cause` is what the user reads. For any thread."""
    _received.cause = cause
    os.kill(os.getpid(), signal.SIGINT)


def _send_again(lost: Any) -> None:
    """Send a signal again whose `Stopped` was raised where Python drops errors, as in a finalizer."""
    if not isinstance(lost.exc_value, Stopped):
        sys.__unraisablehook__(lost)
        return
    _received.number = None
    timer = threading.Timer(0.01, os.kill, (os.getpid(), lost.exc_value.number))  # once the finalizer is over
    timer.daemon = True
    timer.start()


@contextmanager
def stoppable() -> Iterator[None]:
    """Within, the first SIGINT, SIGTERM or SIGHUP raises `Stopped`; outside the main thread nothing changes.

    A SIGHUP that is ignored already stays so: that is what nohup asks for.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.number, _received.held, _received.error, _received.cause = None, False, None, ""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, _received.handle) for number in handled}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)  # the fork server of ranks blocks some
    hook, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook
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
    if _received.late or (stop_requested() and not already and not _received.waits):
        raise _received.stopped(_received.number or signal.SIGINT)


@contextmanager
def deferred(seconds: float = BOUNDARY_SECONDS) -> Iterator[None]:
    """Within, a first SIGTERM or SIGHUP is only noted, for `stop_wanted`; SIGINT raises at once as ever.

    Who asks `stop_wanted` at the end of an iteration saves and calls `stop_now`. If nobody has asked within `seconds`,
    `Stopped` is raised; so it is at the end of the block if a stop is still pending. A second signal seconds later
    raises at once. Outside `stoppable` and outside the main thread nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != _received.handle:
        yield
        return
    alarm = signal.signal(signal.SIGALRM, _received.too_late)
    _received.seconds, _received.late = seconds, False
    try:
        yield
        if _received.waits:
            stop_now()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, alarm)
        _received.seconds, _received.late = 0.0, False


def stop_wanted() -> bool:
    """Return whether a SIGTERM or SIGHUP waits. For the end of an iteration: from then on it waits for the save."""
    if _received.waits:
        saving()
    return _received.waits


def saving(seconds: float = SAVING_SECONDS) -> None:
    """Within `deferred`, give the save that comes now `seconds`, whether the SIGTERM is here already or still comes.

    All ranks call it once one of them wants to stop; a signal that arrives at another one later cannot cut it short.
    """
    _received.seconds = seconds if _received.seconds > 0 else 0.0
    if _received.waits:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def stop_now() -> None:
    """Raise `Stopped` for the noted signal, or, where another rank was told, for SIGTERM."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if _received.number is None:
        _received.number, _received.at = signal.SIGTERM, time.monotonic()
    raise _received.stopped(_received.number)
