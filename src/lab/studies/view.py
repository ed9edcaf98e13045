"""How a study goes on: a live table on a terminal, else a line for each change."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from omagd.lab.studies.engine import View
from omagd.lab.studies.state import DONE, FAILED, RUNNING, STATE, WAITING, Record, StudyState
from omagd.utils.errors import visible
from omagd.utils.logging import duration
from omagd.utils.storage import is_number, read_entry

REDRAW_SECONDS = 1.0
RUNS_SHOWN = 12
TAIL = 16384


class ConsoleView(View):
    """Writes to standard error.

    Args:
        state: of the study. slots: runs at a time.
    """

    def __init__(self, state: StudyState, slots: int, stream: TextIO | None = None) -> None:
        self._state, self._slots = state, slots
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn, self._at = 0, 0.0

    def change(self, record: Record) -> None:
        """Write a line for a job's new state; on a terminal only for failures."""
        if record.state == WAITING and not record.starts:
            return
        if not self._live or record.state == FAILED:
            reason = f": {record.error}" if record.state == FAILED and record.error else ""
            self._clear()
            line = f"{record.job.name}: {record.state}{reason}"
            self._write(f"[{time.strftime('%H:%M:%S')}] {line} ({self.headline()})\n")

    def tick(self) -> None:
        """Draw the table again."""
        if self._live and time.monotonic() - self._at >= REDRAW_SECONDS:
            self._at = time.monotonic()
            lines = [self.headline(), *self._running()]
            with contextlib.suppress(OSError):
                width = os.get_terminal_size(self._stream.fileno()).columns
                lines = [line[: width - 1] for line in lines]
            self._clear()
            self._write("".join(f"{line}\n" for line in lines))
            self._drawn = len(lines)

    def headline(self) -> str:
        """Return how many runs are in each state, and the time left."""
        counts = self._state.counts()
        parts = [
            f"{counts.get(state, 0)} {state}" for state in dict.fromkeys([DONE, RUNNING, WAITING, FAILED, *counts])
        ]
        left = seconds_left(self._state, self._slots)
        return ", ".join(parts) + (f"; about {duration(left)} left" if left else "")

    def _running(self) -> list[str]:
        found = [record for record in self._state.records.values() if record.state == RUNNING]
        rows = [f"  {r.job.name}  {reached(self._state, r)[1]}  {duration(time.time() - r.since)}" for r in found]
        return rows[:RUNS_SHOWN] + [f"  … and {len(rows) - RUNS_SHOWN} more"] * (len(rows) > RUNS_SHOWN)

    def _clear(self) -> None:
        if self._drawn:
            self._write(f"\x1b[{self._drawn}F\x1b[J", raw=True)
            self._drawn = 0

    def _write(self, text: str, raw: bool = False) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text if raw else visible(text, kept="\n"))
            self._stream.flush()


def reached(state: StudyState, record: Record) -> tuple[float | None, str]:
    """Return the part of a running run that is over (None where it is unknown), and words about it."""
    folder = state.run_folder(record.job.name)
    last = _last_line(folder.metrics_jsonl)
    config = read_entry(folder.config_json) if last else {}
    name = str(last.get("stage", "starts"))
    try:
        if "t_env" in last:
            part = last["t_env"] / config["t_max"]
        else:
            part = last["epoch"] / config["graph_pretrain_epochs"]
    except (KeyError, TypeError, ArithmeticError):
        return None, name
    whole = None if config.get("use_graph_reconstruction") else min(1.0, part)
    return whole, f"{name} {min(1.0, part):.0%}"


def _last_line(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                return found if isinstance(found, dict) else {}
    except OSError:
        pass
    return {}


def seconds_left(state: StudyState, slots: int) -> float | None:
    """Return the seconds until all runs are over, by how long finished ones took; None while none is known."""
    took: dict[tuple[str, str, str], list[float]] = {}
    for record in state.records.values():
        if record.state == DONE and record.seconds:
            took.setdefault(_kind(record), []).append(record.seconds)
    waiting = [record for record in state.records.values() if record.state in {RUNNING, WAITING}]
    if not took or not waiting:
        return None
    every = [seconds for each in took.values() for seconds in each]
    left = 0.0
    for record in waiting:
        usual = _mean(took.get(_kind(record), every))
        spent = record.seconds + (time.time() - record.since if record.state == RUNNING else 0.0)
        left += max(0.0, usual - spent)
    return left / max(1, min(slots, len(waiting)))


def _kind(record: Record) -> tuple[str, str, str]:
    return record.job.arm, record.job.env, record.job.map


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
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "─" * max(map(len, lines)))
    failed = [record for record in state.records.values() if record.state == FAILED]
    lines += [f"failed: {r.job.name}: {r.error} ({state.folder / 'logs' / r.job.name}.log)" for r in failed]
    return "\n".join(lines)


def left_over(folder: Path, trials: int | None = None) -> str:
    """Return how many runs of an interrupted study are done, were stopped, wait, or go on without it.

    trials: how many a sweep has in all.
    """
    if not (folder / STATE).exists():
        return "nothing was started"
    state = StudyState.read(folder)
    left = [record for record in state.records.values() if record.state in {RUNNING, WAITING}]
    queued = [record for record in left if record.reference]
    stopped = [record for record in left if record.since and not record.error and not record.reference]
    counts = {"done": state.counts().get(DONE, 0), "stopped": len(stopped)}
    counts["waiting"] = len(left) - len(queued) - len(stopped)
    others = {name: number for name, number in state.counts().items() if name not in {DONE, RUNNING, WAITING}}
    parts = [f"{number} {name}" for name, number in {**counts, **others}.items()]
    parts += [f"{len(queued)} go on in their queue"] * bool(queued)
    begun = len({record.job.arm for record in state.records.values()})
    return (f"{begun} of {trials} trials begun; runs: " if trials else "") + ", ".join(parts)


def _spread(summaries: Sequence[dict[str, Any]], name: str) -> str:
    values = [float(s[name]) for s in summaries if is_number(s.get(name))]
    if not values:
        return "-"
    return f"{_mean(values):.3f}" + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")
