"""`metrics.jsonl`: one JSON object per log, always written."""

from __future__ import annotations

import json

from omagd.utils.log_sinks.base import Record, RunFacts, Sink
from omagd.utils.run_folder import RunFolder, plain
from omagd.utils.writing import AppendFile


class JsonLinesSink(Sink):
    """Appends `{"stage": …, "t_env" | "epoch": …, metrics …}`, line by line; NaN and infinities are null."""

    name = "metrics.jsonl"
    essential = True

    def __init__(self) -> None:
        super().__init__()
        self._file: AppendFile | None = None

    def _open(self, facts: RunFacts) -> None:
        self._file = AppendFile(RunFolder(facts.folder).metrics_jsonl)

    def _log(self, record: Record) -> None:
        assert self._file is not None, "log before open"
        line = {"stage": record.stage, record.clock: record.t, **record.values}
        self._file.write((json.dumps(plain(line), allow_nan=False) + "\n").encode())

    def _close(self, exit_state: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
