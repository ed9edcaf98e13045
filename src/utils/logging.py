"""The logger that sends each log to all sinks, a text log for every rank, and progress bars that log lines respect."""

from __future__ import annotations

import contextlib
import errno
import logging
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from omagd.utils.errors import drop_lost_output, visible
from omagd.utils.storage import OUTPUT, STORAGE, AppendFile, FolderGone

PACKAGE = "omagd"


@dataclass(frozen=True)
class RunFacts:
    """Facts about the run that a sink may use.

    Attributes:
        folder: the run's folder. token: its unique name, which groups the stages.
        name: of the configuration. env, map_name: environment and map. world_size: ranks.
        config: the resolved configuration as plain values.
        totals: where each clock ends, by its name ("t_env", "epoch"), and `episode` if that ends the run.
        card: the comparability card, see `omagd.run.reporting.card`. made_by: code, command line, host and versions.
        saved: state of the sinks by name, from the checkpoint that this run resumes.
    """

    folder: Path
    token: str = "run"
    name: str = ""
    env: str = ""
    map_name: str = ""
    world_size: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Environment and map, the label of every result ("skirmish 3m")."""
        return f"{self.env} {self.map_name}".strip()


@dataclass(frozen=True)
class Record:
    """One log: values by name at time `t` of the clock ("t_env" or "epoch") of a stage."""

    values: dict[str, float]
    stage: str
    clock: str
    t: int


class Sink(ABC):
    """Base of log sinks. Subclasses write `_log`, and `_open` and `_close` if needed; callers use the public methods.

    The first error of a sink that is not `essential` is logged as one warning and switches the sink off; training
    continues.

    Attributes:
        key: of its state in checkpoints, and in warnings: a plug-in's name in the registry, else `name`.
        facts: about the run. saved: this sink's `state_dict()` in the checkpoint that the run resumes, else empty.
    """

    name: str = "sink"
    key: str = ""
    essential: bool = False
    alive: bool = True
    facts: RunFacts
    saved: dict[str, Any]

    def open(self, facts: RunFacts) -> None:
        """Prepare for the records of a run."""
        self.key = self.key or self.name
        # Earlier versions saved the state of a plug-in under its `name`.
        self.facts, self.saved = facts, facts.saved.get(self.key, facts.saved.get(self.name, {}))
        self._packed = self.saved
        self._guard(self._open, facts)

    def log(self, record: Record) -> None:
        """Write one record."""
        self._guard(self._log, record)

    def picture(self, name: str, path: Path, record: Record) -> None:
        """Show a picture (*.png) or a video (*.gif) that belongs to `record`, the last one."""
        if self.alive:
            with self._guarded():
                self._picture(name, path, record)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for the checkpoint; the sink of a resumed run finds them in `saved`."""
        return {}

    def packed_state(self, pack: Callable[[Any], Any]) -> dict[str, Any]:
        """Return what `pack` makes of `state_dict()`; after an error, what it returned before."""
        with self._guarded():
            self._packed = pack(dict(**self.state_dict()))  # keys that are no text are an error
        return self._packed

    def close(self, exit_state: str) -> None:
        """Flush and close; `exit_state` is "completed", "interrupted" or "failed". May be called twice."""
        self._guard(self._close, exit_state)
        self.alive = False

    def _guard(self, call: Any, argument: Any) -> None:
        if self.alive:
            with self._guarded():
                call(argument)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except FolderGone:
            raise
        except Exception as error:
            if self.essential:
                raise
            if self.alive:
                warn_off(self.key, error)
            self.alive = False

    def _open(self, facts: RunFacts) -> None: ...  # noqa: B027 (optional)

    @abstractmethod
    def _log(self, record: Record) -> None: ...

    def _picture(self, name: str, path: Path, record: Record) -> None: ...  # noqa: B027 (optional)

    def _close(self, exit_state: str) -> None: ...  # noqa: B027 (optional)


def warn_off(sink: str, error: Exception) -> None:
    """Log that a sink is switched off."""
    reason = " ".join(str(error).split()) or type(error).__name__
    logging.getLogger(PACKAGE).warning("%s is off from here on: %s", sink, reason[:300])


class Logger:
    """Sends each log to all sinks; with `minimal=True`, on ranks other than 0, it does nothing.

    Args:
        console_logger: Python's logger for text. minimal: ignore all logs.
        facts: passed to each sink when it is added.
    """

    def __init__(self, console_logger: logging.Logger, minimal: bool = False, facts: RunFacts | None = None) -> None:
        self.console_logger = console_logger
        self.minimal = minimal
        self.facts = facts or RunFacts(folder=Path("."))
        self.sinks: list[Sink] = []
        self._last: Record | None = None

    def info(self, message: str) -> None:
        """Log one line of text; on ranks other than 0 it goes to the log file only."""
        self.console_logger.info(message)

    def warning(self, message: str) -> None:
        """Log a warning."""
        self.console_logger.warning(message)

    def error(self, message: str) -> None:
        """Log an error that does not end the run; other ranks print it on the console too."""
        self.console_logger.error(message)

    def add_sink(self, sink: Sink) -> None:
        """Open a sink and send it every log from now on."""
        if not self.minimal:
            sink.open(self.facts)
            self.sinks.append(sink)

    def log(self, values: Mapping[str, Any], *, stage: str, clock: str, t: int) -> None:
        """Send one log to all sinks.

        values: numbers by metric name. stage: "stage1", "stage2" or "stage3". clock: "epoch" or "t_env". t: its time.
        """
        if not self.minimal:
            STORAGE.retry()
            self._last = Record({name: float(value) for name, value in values.items()}, stage, clock, int(t))
            for sink in self.sinks:
                sink.log(self._last)

    def picture(self, name: str, path: Path) -> None:
        """Send a picture (*.png) or a video (*.gif) to all sinks, at the time of the last log; nothing before that."""
        if self._last is not None and path.is_file():
            for sink in self.sinks:
                sink.picture(name, path, self._last)

    def state_dict(self, pack: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the state of the sinks for the checkpoint, by key. pack: fails for what a checkpoint cannot hold."""
        return {sink.key: sink.packed_state(pack) for sink in self.sinks}

    def close(self, exit_state: str = "completed") -> None:
        """Close all sinks."""
        for sink in self.sinks:
            sink.close(exit_state)
        self.sinks.clear()


def setup_logging(log_file: str | Path | None, rank: int = 0) -> logging.Logger:
    """Return the package's Python logger: rank 0 prints on the console, every rank appends to `log_file`.

    Other ranks print only errors, with their number. May be called again: handlers are replaced.
    """
    logger = logging.getLogger(PACKAGE)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    console = BarSafeHandler(level=logging.INFO if rank == 0 else logging.ERROR)
    prefix = "" if rank == 0 else f"rank {rank}: "
    console.setFormatter(_Formatter(f"[%(asctime)s] {prefix}%(label)s%(message)s", "%H:%M:%S"))
    logger.addHandler(console)
    if log_file is not None:
        logger.addHandler(_file_handler(log_file))
    return logger


def append_to_log(log_file: str | Path, message: str) -> None:
    """Append one line to a log file whose logger is closed or belongs to another process."""
    handler = _file_handler(log_file)
    handler.handle(logging.LogRecord(PACKAGE, logging.WARNING, "", 0, message, None, None))
    handler.close()


def _file_handler(log_file: str | Path) -> logging.Handler:
    file = _FileHandler(Path(log_file))
    file.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    return file


class _FileHandler(logging.Handler):
    """Appends lines to a file; while the disk is full they wait in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            with STORAGE.logging():
                self._file.write((self.format(record) + "\n").encode(errors="backslashreplace"))
        except FolderGone:  # the next write of the run itself ends it
            return
        except Exception:  # noqa: BLE001 (like every logging handler)
            self.handleError(record)

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()
        super().close()


class _Formatter(logging.Formatter):
    """Escapes control characters; `label` is the level of warnings and errors, as in `error: `, and else empty."""

    def format(self, record: logging.LogRecord) -> str:
        record.label = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return visible(super().format(record), kept="\n")


GONE = frozenset({errno.EIO, errno.EPIPE})
"""Errors of a closed terminal and of a pipe without a reader."""

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


class Progress:
    """A progress bar with speed and time left on stderr; nothing if that is no terminal.

    Args:
        total: the end, in `unit`. unit: "step", "epoch", "episode" or "byte".
        description: text before the bar. enabled: False on ranks other than 0. initial: the start, after a restart.
    """

    def __init__(
        self, total: int, unit: str = "step", description: str = "", enabled: bool = True, initial: int = 0
    ) -> None:
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=description or None,
            unit=f" {unit}s",
            unit_scale=unit in ("step", "byte"),
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


def _show(text: str) -> None:
    """Write a line; a closed reader or a full disk is recorded, not raised."""
    try:
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()
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
    """Writes log lines above the bars, to the process's stdout at the time of writing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            with STORAGE.logging():
                _show(self.format(record))
        except Exception:  # noqa: BLE001 (like every logging handler)
            self.handleError(record)
