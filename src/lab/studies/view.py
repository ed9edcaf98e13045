"""How a study goes on: a line for each change, and a table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from omagd.lab.analysis.runs import aligned, is_number
from omagd.lab.studies.state import DONE, FAILED, RUNNING, WAITING, Record, StudyState
from omagd.run.run_folder import read_entry
from omagd.utils.errors import print_note, visible


def printing(headline: Callable[[], str]) -> Callable[[Record], None]:
    """Return what prints a line for a job's new state. headline: returns the numbers of all."""

    def show(record: Record) -> None:
        if record.state != WAITING or record.starts:
            reason = f": {record.error}" if record.state == FAILED and record.error else ""
            line = f"{record.job.name}: {record.state}{reason} ({headline()})"
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                print_note(f"[{time.strftime('%H:%M:%S')}] {visible(line)}")

    return show


def state_line(state: StudyState) -> str:
    """Return how many runs are in each state."""
    counts = state.counts()
    return ", ".join(
        f"{counts.get(name, 0)} {name}" for name in dict.fromkeys([DONE, RUNNING, WAITING, FAILED, *counts])
    )


def study_table(state: StudyState) -> str:
    """Return a table of arms and environments: how many runs are in each state, and their results; then failures."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in state.records.values():
        groups.setdefault((record.job.arm, f"{record.job.env} {record.job.map}".strip()), []).append(record)
    states = list(state.counts())
    rows = [["arm", "environment", *states, "win rate (range)", "return (range)"]]
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
    return f"{fmean(values):.3f}" + (f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else "")
