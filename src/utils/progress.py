"""A bar for long work, and log lines that do not tear it."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import threading
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from omagd.utils.writing import OUTPUT, STORAGE, drop_lost_output

GONE = frozenset({errno.EIO, errno.EPIPE})
"""Errors of a terminal that was closed, and of a pipe that nobody reads."""

ECHO = 2
"""Columns of ^C."""

# One bar per process: tqdm's default lock is a semaphore between processes, which an ended worker leaves behind.
tqdm.set_lock(threading.RLock())


def duration(seconds: float) -> str:
    """Return a time as people say it: `48 s`, `9 min 05 s`, `3 h 07 min`."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """Leaves room at the end of the line for the ^C that a terminal shows: else it would go over to the next line."""

    @property
    def format_dict(self) -> dict[str, Any]:
        values = super().format_dict
        return {**values, "ncols": max(1, values["ncols"] - ECHO)} if values.get("ncols") else values


class Progress:
    """How far long work is, how fast it goes and how long it will take, on stderr; quiet where that is no terminal.

    Args:
        total: where it ends, in `unit`. unit: what is counted ("step", "epoch", "episode").
        description: what is done. enabled: False on other ranks. initial: where it starts, after a restart.
    """

    def __init__(
        self, total: int, unit: str = "step", description: str = "", enabled: bool = True, initial: int = 0
    ) -> None:
        self._bar = _Bar(
            total=total,
            initial=initial,
            desc=description or None,
            unit=f" {unit}s",
            unit_scale=unit == "step",
            dynamic_ncols=True,
            smoothing=0.1,
            mininterval=0.25,
            leave=False,
            disable=None if enabled else True,
            file=sys.stderr,
        )
        self._at = initial

    def update(self, amount: int) -> None:
        """Go `amount` further."""
        self.set(self._at + amount)

    def set(self, at: int, total: int | None = None) -> None:
        """Go to `at`; a clock that passes the total fills the bar and no more. total: a new estimate of the end."""
        self._at = at
        if not self._bar.disable:
            self._bar.total = self._bar.total if total is None else total
            self._bar.update(max(0, min(at, self._bar.total) - self._bar.n))

    def note(self, **values: float) -> None:
        """Show values behind the bar."""
        if not self._bar.disable:
            self._bar.set_postfix({name: f"{value:.3g}" for name, value in values.items()}, refresh=False)

    def close(self) -> None:
        """Take the bar away. May be called twice."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _show(text: str, stream: TextIO) -> None:
    """Write a line; its reader may have gone, or the disk be full that it is sent to."""
    try:
        tqdm.write(text, file=stream)
        stream.flush()
    except OSError as problem:
        STORAGE.failed(OUTPUT, problem)
        if problem.errno in GONE:
            STORAGE.lost(OUTPUT)
            drop_lost_output()
    else:
        STORAGE.wrote(OUTPUT)


def close_bars() -> None:
    """Take all bars away, as before the last lines of a run that was interrupted."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():  # the terminal has shown Ctrl-C as ^C behind the bar
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class BarSafeHandler(logging.Handler):
    """Writes log lines above the bars instead of through them.

    Args:
        stream: where to; this process's stdout at the time of writing if None.
    """

    def __init__(self, stream: TextIO | None = None, level: int = logging.INFO) -> None:
        super().__init__(level)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            stream = self._stream or sys.stdout
            with STORAGE.logging():
                _show(self.format(record), stream)
        except Exception:  # noqa: BLE001 (as every logging handler does)
            self.handleError(record)
