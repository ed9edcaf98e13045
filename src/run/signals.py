"""SIGINT, SIGTERM and SIGHUP as an exception that is raised once, with time to write and close files."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from omagd.utils.errors import drop_lost_output

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals after which a run saves at the end of the iteration: Ctrl-C, a batch system, a closed terminal."""

PATIENCE_SECONDS = 2.0
"""Repeated signals within this time are ignored: Ctrl-C arrives from the terminal and from the parent process."""

BOUNDARY_SECONDS = 10.0
"""Longest delay of a signal until the end of an iteration."""

STARTED_BY = os.getppid()
"""The parent process at import; if it changes later, the parent has ended."""

WAITING = b"\nCtrl-C: the run saves and ends, in some seconds; again, two seconds later: at once\n"

CLOSING_SECONDS = 20.0
"""Longest time to close everything after an error or after the launcher has ended."""

SAVING_SECONDS = 20.0
"""Longest duration of the save after a signal."""


class Stopped(KeyboardInterrupt):
    """A signal has requested the end of this process.

    Args:
        number: the signal; `exit_code` is 128 + number, as in shells. cause: its sender, if known.

    Attributes:
        where: the interrupted run and how to resume it, once known.
    """

    def __init__(self, number: int, cause: str = "") -> None:
        super().__init__(signal.Signals(number).name)
        self.where = ""
        self.cause = cause
        self.number = number
        self.exit_code = 128 + number

    def render(self) -> str:
        """Return the last line that an interrupted command prints."""
        return f"interrupted{f': {self.cause}' if self.cause else f' by {self}'}{self.where}"


@dataclass
class _Received:
    """State of the signal handlers.

    Attributes:
        error: raised instead of `Stopped`, if set. cause: sender of the signal, if known.
        number, at: first signal and its time. held: within `uninterrupted`. seconds: given by `deferred`, 0 outside.
        tells: Ctrl-C is answered on the terminal. at_once: the first signal has a cause, and waits for nothing.
        late: `seconds` have passed while signals were held. raised: the `Stopped` that a handler has raised.
    """

    number: int | None = None
    at: float = 0.0
    error: Exception | None = None
    cause: str = ""
    held: bool = False
    seconds: float = 0.0
    tells: bool = False
    at_once: bool = False
    late: bool = False
    raised: weakref.ref[Stopped] | None = None

    @property
    def waits(self) -> bool:
        """Whether the received signal may wait for the end of an iteration."""
        return self.seconds > 0 and self.number in SIGNALS and not self.at_once

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        if number == signal.SIGHUP:
            drop_lost_output()
        now = time.monotonic()
        if self.number is None:
            self.number, self.at, self.at_once = number, now, bool(self.cause)
            if self.waits:
                signal.setitimer(signal.ITIMER_REAL, self.seconds)
                if self.tells and number == signal.SIGINT:
                    with suppress(OSError):  # Ctrl-C has ended what read it, as `tee`
                        os.write(2, WAITING)
                return
            if self.held:
                return
        elif now - self.at < PATIENCE_SECONDS:
            return
        raise self.stop(number)

    def too_late(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGALRM: the time of `deferred` is over, or, with no stop pending, SIGALRM came from outside."""
        if self.number is None:
            self.number, self.at = number, time.monotonic()
        if self.held:
            self.late = True
        else:
            raise self.stop(self.number)

    def stop(self, number: int) -> Stopped:
        """Return the exception of a handler; where it is caught and dropped within `stoppable`, the signal is repeated.

        Handlers run between any two lines, also in those whose exceptions Python or a library ignores: finalizers,
        callbacks of weak references, `except BaseException`. An exception that is on its way is referred to by
        something; one that is ignored is freed.
        """
        error = Stopped(number, self.cause)

        def again() -> None:
            if signal.getsignal(signal.SIGTERM) == self.handle:
                self.number = None
                os.kill(os.getpid(), number)

        def freed(_: object) -> None:
            timer = threading.Timer(0.01, again)  # once the finalizer is over; if not, it is freed again
            timer.daemon = True
            timer.start()

        self.raised = weakref.ref(error, freed)
        return error


_received = _Received()


def stop_requested() -> bool:
    """Return whether a signal has arrived within `stoppable`."""
    return _received.number is not None


def orphaned() -> bool:
    """Return whether the launcher that has spawned this rank has ended; its sockets close a little before."""
    parent = multiprocessing.parent_process()
    return parent is not None and bool(multiprocessing.connection.wait([parent.sentinel], timeout=0.2))


def ending() -> bool:
    """Return whether this process is ending after a signal, within `stoppable`. For any thread."""
    return stop_requested() and signal.getsignal(signal.SIGTERM) == _received.handle


def raise_in_main_thread(error: Exception) -> None:
    """Raise `error` in the main thread, within `stoppable`. Called in another thread."""
    if signal.getsignal(signal.SIGTERM) == _received.handle:
        _received.error = error
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def ask_to_end(cause: str) -> None:
    """Send this process a SIGINT that is not deferred; `cause` is shown to the user. For any thread."""
    _received.cause = cause
    os.kill(os.getpid(), signal.SIGINT)


def _without_traceback(lost: Any) -> None:
    """Show an exception that Python ignores, as in a finalizer, except `Stopped`: its signal is repeated."""
    if not isinstance(lost.exc_value, Stopped):
        sys.__unraisablehook__(lost)


@contextmanager
def stoppable() -> Iterator[None]:
    """Within a block the first SIGINT, SIGTERM or SIGHUP raises `Stopped`. No effect outside the main thread.

    An ignored SIGHUP stays ignored, as nohup requires.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.number, _received.held, _received.error, _received.cause = None, False, None, ""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, _received.handle) for number in handled}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)  # the fork server of ranks blocks some
    hook, sys.unraisablehook = sys.unraisablehook, _without_traceback
    try:
        yield
    finally:
        _received.raised = None
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a first signal until the end of the block; a second one seconds later raises at once."""
    already = stop_requested()
    _received.held = True
    try:
        yield
    finally:
        _received.held = False
    if _received.late or (stop_requested() and not already and not _received.waits):
        raise Stopped(_received.number or signal.SIGINT, _received.cause)


@contextmanager
def deferred(seconds: float = BOUNDARY_SECONDS, *, tells: bool = False) -> Iterator[None]:
    """Delay a signal until the end of an iteration.

    At the end of an iteration the caller checks `stop_wanted`, saves and calls `stop_now`. Otherwise `Stopped` is
    raised after `seconds`, or at the end of the block. A second signal seconds later raises immediately. No effect
    outside `stoppable` and outside the main thread. tells: answer Ctrl-C on the terminal at once.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != _received.handle:
        yield
        return
    alarm = signal.signal(signal.SIGALRM, _received.too_late)
    _received.seconds, _received.tells, _received.late = seconds, tells, False
    try:
        yield
        if _received.waits:
            stop_now()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, alarm)
        _received.seconds, _received.late = 0.0, False


def stop_wanted() -> bool:
    """Return whether a signal is pending; it then waits for the save. Call it once for each iteration."""
    if _received.waits:
        saving()
    return _received.waits


def saving(seconds: float = SAVING_SECONDS) -> None:
    """Within `deferred`, allow `seconds` for the save that follows, also for a signal that arrives during it.

    All ranks call it once one of them wants to stop, so a signal that reaches another rank later does not interrupt it.
    """
    _received.seconds = seconds if _received.seconds > 0 else 0.0
    if _received.waits:
        signal.setitimer(signal.ITIMER_REAL, seconds)


def stop_now() -> None:
    """Raise `Stopped` for the pending signal, or for SIGTERM if another rank received it."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if _received.number is None:
        _received.number, _received.at = signal.SIGTERM, time.monotonic()
    raise Stopped(_received.number, _received.cause)
