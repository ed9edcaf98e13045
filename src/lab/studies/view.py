"""How a study goes on: a line for each change, and on a terminal a last line with the numbers of all."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from omagd.lab.analysis.runs import aligned
from omagd.lab.studies.engine import View
from omagd.lab.studies.state import DONE, FAILED, RUNNING, WAITING, Record, StudyState
from omagd.utils.errors import visible
from omagd.utils.storage import is_number, read_entry

REDRAW_SECONDS = 1.0


class ConsoleView(View):
    """Writes to standard error.

    Args:
        state: of the study. headline: returns the numbers of all; default: those of the runs.
    """

    def __init__(
        self, state: StudyState, headline: Callable[[], str] | None = None, stream: TextIO | None = None
    ) -> None:
        self._headline = headline or (lambda: state_line(state))
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._at = 0.0

    def change(self, record: Record) -> None:
        """Write a line for a job's new state."""
        if record.state != WAITING or record.starts:
            reason = f": {record.error}" if record.state == FAILED and record.error else ""
            line = f"{record.job.name}: {record.state}{reason} ({self._headline()})"
            self._write(f"[{time.strftime('%H:%M:%S')}] {visible(line)}\n")

    def tick(self) -> None:
        """Draw the last line again."""
        if self._live and time.monotonic() - self._at >= REDRAW_SECONDS:
            self._at = time.monotonic()
            width = 80
            with contextlib.suppress(OSError):
                width = os.get_terminal_size(self._stream.fileno()).columns
            self._write(visible(self._headline())[: width - 1])

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(f"\r\x1b[K{text}" if self._live else text)
            self._stream.flush()


def state_line(state: StudyState) -> str:
    """Return how many runs are in each state."""
    counts = state.counts()
    return ", ".join(
        f"{counts.get(name, 0)} {name}" for name in dict.fromkeys([DONE, RUNNING, WAITING, FAILED, *counts])
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def study_table(state: StudyState) -> str:
    """Return a table of arms and environments: how many runs are in each state, and their results; then failures."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in state.records.values():
        groups.setdefault((record.job.arm, f"{record.job.env} {record.job.map}".strip()), []).append(record)
    states = list(state.counts())
    rows = [["arm", "environment", *states, "win rate", "return"]]
    for (arm, place), records in groups.items():
        counts = [str(sum(record.state == name for record in records)) for name in states]
        summaries = [read_entry(state.run_folder(r.job.name).summary_json) for r in records if r.state == DONE]
        rows.append([arm, place, *counts, _spread(summaries, "win_rate"), _spread(summaries, "return")])
    head, *lines = aligned(rows)
    failed = [record for record in state.records.values() if record.state == FAILED]
    lines += [f"failed: {r.job.name}: {r.error} ({state.folder / 'logs' / r.job.name}.log)" for r in failed]
    return "\n".join([head, "─" * max(map(len, [head, *lines])), *lines])


def _spread(summaries: Sequence[dict[str, Any]], name: str) -> str:
    values = [float(s[name]) for s in summaries if is_number(s.get(name))]
    if not values:
        return "-"
    return f"{_mean(values):.3f}" + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")
