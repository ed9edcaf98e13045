"""Sacred's records on disk, bounded: what a run of days logs neither fills the memory nor is written over and over."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sacred.observers import FileStorageObserver
from sacred.serializer import flatten

from omagd.utils.logging import setup_logging
from omagd.utils.writing import STORAGE, AppendFile, open_records

MOST = 500
"""Values kept of each name; beyond that only every second one, then every fourth, …, and always the last."""

Point = tuple[Any, int, str]
"""A value, its step, its time."""


class Series:
    """Values of one name, evenly thinned."""

    def __init__(self) -> None:
        self._kept: list[Point] = []
        self._last: Point | None = None
        self._seen, self._every = 0, 1

    def add(self, point: Point) -> None:
        """Take the next value."""
        if self._seen % self._every == 0:
            self._kept.append(point)
            if len(self._kept) >= MOST:
                del self._kept[1::2]
                self._every *= 2
        self._seen, self._last = self._seen + 1, point

    def shown(self) -> dict[str, list[Any]]:
        """Return what is kept as Sacred writes it."""
        points = self._kept if self._last is None or self._last in self._kept[-1:] else [*self._kept, self._last]
        return {name: [point[i] for point in points] for i, name in enumerate(("values", "steps", "timestamps"))}


class BoundedObserver(FileStorageObserver):
    """Writes what Sacred's own observer writes, with at most `MOST` values of each name in `metrics.json`.

    Sacred's reads and writes all values again at each heartbeat. All of them stand in the run's `metrics.jsonl`.
    Files are written through `STORAGE`: a full disk neither ends the record nor leaves half a file.
    """

    def started_event(self, *args: Any, **facts: Any) -> str | None:
        """Begin a record and return its name; where that is impossible, warn once: the run goes on without a record."""
        try:
            return str(super().started_event(*args, **facts))
        except OSError as problem:
            if self.dir is not None:
                with suppress(OSError):
                    os.rmdir(self.dir)
            self.dir, self.template, self.run_entry = None, None, {}  # what the later events of Sacred's class need
            without = "this run has no Sacred record; --file_storage=DIR puts it elsewhere"
            setup_logging(None).warning(f"{self.basedir} cannot be written ({problem.strerror}): {without}")
            return None

    def discard(self) -> None:
        """Remove this record, of a start that was rejected before there was a run folder."""
        if self.dir is not None:
            shutil.rmtree(self.dir, ignore_errors=True)

    def save_json(self, obj: Any, filename: str) -> None:
        """Write a file of the record."""
        if self.dir is None:
            return
        STORAGE.write(Path(str(self.dir)) / filename, json.dumps(flatten(obj), sort_keys=True, indent=2).encode())

    def save_cout(self) -> None:
        """Append what was said since the last time."""
        new = self.cout[self.cout_write_cursor :]
        self.cout_write_cursor = len(self.cout)
        if new and self.dir is not None:
            if not hasattr(self, "_said"):
                self._said = AppendFile(Path(str(self.dir)) / "cout.txt", open_records)
            self._said.write(new.encode(errors="backslashreplace"))

    def log_metrics(self, metrics_by_name: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any]) -> None:
        """Add new values, {name: {"values", "steps", "timestamps"}}, and write the file."""
        if not hasattr(self, "_series"):  # Sacred's observers are made in several ways
            self._series: dict[str, Series] = {}
        for name, new in metrics_by_name.items():
            series = self._series.setdefault(name, Series())
            for value, step, when in zip(new["values"], new["steps"], new["timestamps"], strict=True):
                series.add((value, step, when.isoformat()))
        if metrics_by_name:
            self.save_json({name: series.shown() for name, series in self._series.items()}, "metrics.json")
