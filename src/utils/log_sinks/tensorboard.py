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

    def _open(self, facts: RunFacts) -> None:
        import torch.utils.tensorboard  # noqa: F401  (say now that it is missing, not at the first log)

        self._facts = facts

    def _log(self, record: Record) -> None:
        assert self._facts is not None, "log before open"
        if record.stage not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            self._writers[record.stage] = SummaryWriter(str(self._facts.folder / "tb" / record.stage))
        writer = self._writers[record.stage]
        for key, value in record.values.items():
            writer.add_scalar(key, value, record.t)
        writer.flush()

    def _close(self, exit_state: str) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
