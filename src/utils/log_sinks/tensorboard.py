"""TensorBoard event files, one folder for each stage, on request (`use_tensorboard=True`)."""

from __future__ import annotations

from typing import Any

from omagd.utils.log_sinks.base import Record, RunFacts, Sink


class TensorBoardSink(Sink):
    """Scalars under `<run folder>/tb/<stage>`; the step is the stage's clock."""

    name = "TensorBoard"

    def __init__(self) -> None:
        super().__init__()
        self._facts: RunFacts | None = None
        self._writers: dict[str, Any] = {}
        self._last: dict[str, int] = {}

    def _open(self, facts: RunFacts) -> None:
        import torch.utils.tensorboard  # noqa: F401  (say now that it is missing, not at the first log)

        self._facts = facts
        self._last = dict(facts.saved.get(self.name, {}).get("last", {}))

    def _log(self, record: Record) -> None:
        assert self._facts is not None, "log before open"
        if record.stage not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            # What a killed run wrote after the checkpoint is written again: boards hide the first version.
            purge = self._facts.saved.get(self.name, {}).get("last", {}).get(record.stage)
            path = str(self._facts.folder / "tb" / record.stage)
            self._writers[record.stage] = SummaryWriter(path, purge_step=None if purge is None else purge + 1)
        self._last[record.stage] = record.t
        writer = self._writers[record.stage]
        for key, value in record.values.items():
            writer.add_scalar(key, value, record.t)
        writer.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the time of the last record of each stage."""
        return {"last": dict(self._last)}

    def _close(self, exit_state: str) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
