"""Progress bars, and log lines that do not disturb them."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import threading
from typing import Any, TextIO

from tqdm import tqdm

from omagd.utils.writing import OUTPUT, STORAGE, drop_lost_output

GONE = frozenset({errno.EIO, errno.EPIPE})
"""Errors of a closed terminal and of a pipe without a reader."""

ECHO = 2
"""Columns of ^C."""

# tqdm's default lock is a semaphore between processes, which a dead worker would leave behind.
tqdm.set_lock(threading.RLock())


def duration(seconds: float) -> str:
    """Return a duration as text: `48 s`, `9 min 05 s`, `3 h 07 min`."""
    whole = int(round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class _Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar that leaves space for the ^C of a terminal, which would wrap to the next line otherwise."""

    @property
    def format_dict(self) -> dict[str, Any]:
        values = super().format_dict
        return {**values, "ncols": max(1, values["ncols"] - ECHO)} if values.get("ncols") else values


class Progress:
    """A progress bar with speed and time left on stderr; nothing if that is no terminal.

    Args:
        total: the end, in `unit`. unit: "step", "epoch" or "episode".
        description: text before the bar. enabled: False on ranks other than 0. initial: the start, after a restart.
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
        """Advance by `amount`."""
        self.set(self._at + amount)

    def set(self, at: int, total: int | None = None) -> None:
        """Set the position to `at`, at most the total. total: a new estimate of the end."""
        self._at = at
        if not self._bar.disable:
            self._bar.total = total or self._bar.total
            self._bar.update(max(0, min(at, self._bar.total) - self._bar.n))

    def close(self) -> None:
        """Remove the bar. May be called twice."""
        self._bar.close()


def _show(text: str, stream: TextIO) -> None:
    """Write a line; a closed reader or a full disk is recorded, not raised."""
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
    """Remove all bars, before the last lines of an interrupted run."""
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():  # erase the ^C that the terminal has printed
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class BarSafeHandler(logging.Handler):
    """Writes log lines above the bars.

    Args:
        stream: output; None: the process's stdout at the time of writing.
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
        except Exception:  # noqa: BLE001 (like every logging handler)
            self.handleError(record)
