"""`metrics.jsonl`: one JSON object per log, always written."""

from __future__ import annotations

import json
from typing import TextIO

from omagd.utils.log_sinks.base import Record, RunFacts, Sink
from omagd.utils.run_folder import RunFolder, plain


class JsonLinesSink(Sink):
    """Appends `{"stage": …, "t_env" | "epoch": …, metrics …}`, flushed line by line; NaN and infinities are null."""

    name = "metrics.jsonl"
    essential = True

    def __init__(self) -> None:
        super().__init__()
        self._file: TextIO | None = None

    def _open(self, facts: RunFacts) -> None:
        path = RunFolder(facts.folder).metrics_jsonl
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8", buffering=1)
        if torn:  # a killed run's half line stays one bad line, instead of spoiling the next
            self._file.write("\n")

    def _log(self, record: Record) -> None:
        assert self._file is not None, "log before open"
        line = {"stage": record.stage, record.clock: record.t, **record.values}
        self._file.write(json.dumps(plain(line), allow_nan=False) + "\n")
        self._file.flush()

    def _close(self, exit_state: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
