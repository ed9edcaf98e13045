"""TensorBoard event files, one folder for each stage, on request (`use_tensorboard=True`)."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from omagd.utils.log_sinks.base import Record, RunFacts, Sink
from omagd.utils.writing import AppendFile, open_records

VERSION = "brain.Event:2"
"""Of the format of event files."""


class TensorBoardSink(Sink):
    """Scalars under `<run folder>/tb/<stage>`; the step is the stage's clock."""

    name = "TensorBoard"

    def __init__(self) -> None:
        super().__init__()
        self._facts: RunFacts | None = None
        self._writers: dict[str, EventFile] = {}
        self._last: dict[str, int] = {}

    def _open(self, facts: RunFacts) -> None:
        import torch.utils.tensorboard  # noqa: F401  (say now that it is missing, not at the first log)

        self._facts = facts
        self._last = dict(facts.saved.get(self.name, {}).get("last", {}))

    def _log(self, record: Record) -> None:
        assert self._facts is not None, "log before open"
        if record.stage not in self._writers:
            # What a killed run wrote after the checkpoint is written again: boards hide the first version.
            purge = self._facts.saved.get(self.name, {}).get("last", {}).get(record.stage)
            folder = self._facts.folder / "tb" / record.stage
            self._writers[record.stage] = EventFile(folder, None if purge is None else purge + 1)
        self._last[record.stage] = record.t
        self._writers[record.stage].add(record.values, record.t)

    def state_dict(self) -> dict[str, Any]:
        """Return the time of the last record of each stage."""
        return {"last": dict(self._last)}

    def _close(self, exit_state: str) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


class EventFile:
    """An event file, written record by record in this thread.

    `SummaryWriter` writes in a thread of its own, which a full disk ends with a traceback, and what it held is lost.

    Args:
        folder: of a stage. purge: events of earlier files from this step on are hidden, if given.
    """

    def __init__(self, folder: Path, purge: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = AppendFile(folder / name, open_records)
        self._records = RecordWriter(self._file)
        self._write(Event(file_version=VERSION))
        if purge is not None:
            self._write(Event(step=purge, session_log=SessionLog(status=SessionLog.START)))

    def add(self, values: dict[str, float], step: int) -> None:
        """Write scalars by name."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(Event(step=step, summary=Summary(value=scalars)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
