"""What a run tells: one logger that hands every log to all sinks, and text logs for every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omagd.utils.errors import visible
from omagd.utils.log_sinks import REGISTRY
from omagd.utils.log_sinks.base import Record, RunFacts, Sink
from omagd.utils.progress import BarSafeHandler
from omagd.utils.writing import STORAGE, AppendFile

PACKAGE = "omagd"


class Logger:
    """Hands each log to all sinks. With `minimal=True`, which other ranks than 0 get, it does nothing at all.

    Args:
        console_logger: Python's logger for text. minimal: be silent.
        facts: what sinks are told when they are added.
    """

    def __init__(self, console_logger: logging.Logger, minimal: bool = False, facts: RunFacts | None = None) -> None:
        self.console_logger = console_logger
        self.minimal = minimal
        self.facts = facts or RunFacts(folder=Path("."))
        self.stage = "stage3"
        self.sinks: list[Sink] = []
        self._pending: dict[str, float] = {}
        self._private: set[str] = set()
        self._pending_t = 0

    def info(self, message: str) -> None:
        """Say one line of text; other ranks than 0 say it in their text log only."""
        self.console_logger.info(message)

    def warning(self, message: str) -> None:
        """Say one line that the user should not miss."""
        self.console_logger.warning(message)

    def error(self, message: str) -> None:
        """Say one line about what has gone wrong though the run goes on; other ranks say it on the console too."""
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
        if self.minimal:
            return
        self.print_recent_stats()
        self._send(Record({name: float(value) for name, value in values.items()}, stage, clock, int(t)))

    def log_stat(self, key: str, value: Any, t: int, to_sacred: bool = True) -> None:
        """Log one value at environment step `t`; values of the same step become one log."""
        if self.minimal:
            return
        if self._pending and t != self._pending_t:
            self.print_recent_stats()
        self._pending_t = int(t)
        self._pending[key] = float(value)
        if not to_sacred:
            self._private.add(key)

    def print_recent_stats(self) -> None:
        """Send what `log_stat` has gathered."""
        if self._pending:
            values, private = self._pending, frozenset(self._private)
            self._pending, self._private = {}, set()
            self._send(Record(values, self.stage, "t_env", self._pending_t, private))

    def state_dict(self) -> dict[str, Any]:
        """Return what the sinks of a run that goes on from here must know."""
        return {sink.name: sink.state_dict() for sink in self.sinks}

    def close(self, exit_state: str = "completed") -> None:
        """Send what is left and close all sinks."""
        self.print_recent_stats()
        for sink in self.sinks:
            sink.close(exit_state)
        self.sinks.clear()

    def _send(self, record: Record) -> None:
        STORAGE.retry()
        for sink in self.sinks:
            sink.log(record)


def make_logger(
    facts: RunFacts, names: Iterable[str], console_logger: logging.Logger, *, minimal: bool = False, sacred: Any = None
) -> Logger:
    """Return a logger with the sinks `names`.

    sacred: the Sacred run, or the `sender` of a `SacredRelay`; without it the sink "sacred" is left out.
    Errors: UserError for an unknown name.
    """
    logger = Logger(console_logger, minimal, facts)
    if minimal:
        return logger
    for name in names:
        if name == "sacred":
            if sacred is not None:
                logger.add_sink(REGISTRY.get(name)(sacred))
        elif name == "console":
            logger.add_sink(REGISTRY.get(name)(console_logger))
        else:
            logger.add_sink(REGISTRY.get(name)())
    return logger


def setup_logging(log_file: str | Path | None, rank: int = 0, level: int = logging.INFO) -> logging.Logger:
    """Return the package's Python logger: rank 0 speaks on the console, every rank writes `log_file` (appending).

    Other ranks show errors on the console, with their number. May be called again: handlers are replaced.
    """
    logger = logging.getLogger(PACKAGE)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)
    logger.propagate = False
    console = BarSafeHandler(level=level if rank == 0 else logging.ERROR)
    prefix = "" if rank == 0 else f"rank {rank}: "
    console.setFormatter(_ConsoleFormatter(prefix))
    logger.addHandler(console)
    if log_file is not None:
        logger.addHandler(_file_handler(log_file))
    return logger


def append_to_log(log_file: str | Path, message: str) -> None:
    """Append one line to a log file, also where its logger is closed already or belongs to another process."""
    handler = _file_handler(log_file)
    handler.handle(logging.LogRecord(PACKAGE, logging.WARNING, "", 0, message, None, None))
    handler.close()


def _file_handler(log_file: str | Path) -> logging.Handler:
    file = _FileHandler(Path(log_file))
    file.setFormatter(_FileFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    return file


class _FileHandler(logging.Handler):
    """Appends lines to a file; on a full disk they wait in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        try:
            with STORAGE.logging():
                self._file.write((self.format(record) + "\n").encode(errors="backslashreplace"))
        except Exception:  # noqa: BLE001 (as every logging handler does)
            self.handleError(record)

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()
        super().close()


class _ConsoleFormatter(logging.Formatter):
    """`[16:55:01] text`; the level only where it is more than information."""

    def __init__(self, prefix: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._prefix = prefix

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        text = f"[{self.formatTime(record, self.datefmt)}] {self._prefix}{level}{record.getMessage()}"
        return visible(text + ("\n" + self.formatException(record.exc_info) if record.exc_info else ""), kept="\n")


class _FileFormatter(logging.Formatter):
    """The lines of a log file: no text that a terminal would take for a command."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), kept="\n")
