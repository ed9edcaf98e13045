"""`omagd compare`: a table of runs, with one row for the repetitions of a method on a map."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omagd.lab.analysis.groups import differences, groups, repeated, shown, telling, with_studies
from omagd.lab.analysis.run_report import stages_of, values_of
from omagd.lab.analysis.runs import Run, aligned, load
from omagd.lab.analysis.statistics import FEW, FEW_SEEDS, interval, mean
from omagd.run.reporting.report import SHOWN, number_text
from omagd.utils.errors import UserError, print_out
from omagd.utils.logging import duration

KEYS_SHOWN = 6
"""Most differing keys that have a column, and most others that a footnote names."""


@dataclass(frozen=True)
class Row:
    """Runs of one method on one map; `values` are the keys in which the methods differ."""

    label: str
    values: dict[str, Any]
    runs: tuple[Run, ...]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run, a folder of runs, a study, or its results file")
    parser.add_argument("--each", action="store_true", help="one row for each run, also for repetitions")


def main(options: argparse.Namespace) -> int:
    """Print the table."""
    if not options.runs:
        raise UserError("compare: name the folders of runs, as in: omagd compare results/<run> results/<other run>")
    print_out(table(load(options.runs, "compare"), options.each) + "\n")
    return 0


def table(runs: Sequence[Run], each: bool = False) -> str:
    """Return a table: a row for each method and map, those that cannot be compared with the first row marked.

    A row of several seeds has the mean of their values with its 95 % interval. Rows of one map are below each other;
    the first of them is the one that the others are compared with.

    Args:
        each: a row for each run.
    """
    rows = _rows(runs, each)
    keys = telling([row.values for row in rows])
    stage = max((name for run in runs for name in [*stages_of(run), *(["stage3"] if run.tests else [])]), default="")
    results = {run.folder: values_of(run, stage) for run in runs}
    columns = [
        key for known in SHOWN for key in (known, f"best_{known}") if any(key in each for each in results.values())
    ]
    several_maps = len({row.runs[0].place for row in rows}) > 1
    evaluations = any(run.kind == "evaluation" for run in runs)
    short = Counter(key.rpartition(".")[2] for key in keys)
    head = ["run", *(["map"] if several_maps else [])]
    head += [key.rpartition(".")[2] if short[key.rpartition(".")[2]] == 1 else key for key in keys[:KEYS_SHOWN]]
    head += [
        "n",
        "seeds",
        *(SHOWN.get(key) or f"best {SHOWN[key.removeprefix('best_')]}" for key in columns),
        *(["kind"] if evaluations else []),
    ]
    cells = []
    asterisks, notes = _marks(rows)
    for row, asterisk in zip(rows, asterisks, strict=True):
        line = [row.label + asterisk, *([row.runs[0].place] if several_maps else [])]
        line += [shown(row.values, key) for key in keys[:KEYS_SHOWN]]
        line += [str(len(row.runs)), _seeds(row.runs)]
        line += [_cell([results[run.folder][key] for run in row.runs if key in results[run.folder]]) for key in columns]
        line += [row.runs[0].kind] if evaluations else []
        cells.append([*line, _time(row.runs), _state(row.runs), _card(row.runs)])
    lines = aligned([[*head, "time", "state", "card"], *cells])
    rule = "─" * max(map(len, lines))
    if any(len(row.runs) > 1 for row in rows):
        notes.append("rows of several seeds: mean [95 % bootstrap interval over seeds], mean time")
        notes += [FEW] if any(1 < len(row.runs) < FEW_SEEDS for row in rows) else []
    if others := _others(rows, keys[:KEYS_SHOWN]):
        notes.append(f"these keys differ too: {others}")
    return "\n".join([lines[0], rule, *lines[1:], rule, *notes])


def _rows(runs: Sequence[Run], each: bool) -> list[Row]:
    """Return the rows, those of one map together; runs that repeat a seed have rows of their own."""
    rows: list[Row] = []
    found = groups(runs)
    for place in dict.fromkeys(run.place for run in runs):
        first = len(rows)
        for group in found:
            there = group.at(place)
            if each or repeated(there):
                rows += [Row(run.label, group.values, (run,)) for run in there]
            elif there:
                name = there[0].label if len(there) == 1 else there[0].arm or there[0].name
                rows.append(Row(name, group.values, tuple(there)))
        labels = with_studies([row.label for row in rows[first:]], [row.runs[0] for row in rows[first:]])
        rows[first:] = [replace(row, label=label) for row, label in zip(rows[first:], labels, strict=True)]
    return rows


def _cell(known: Sequence[float]) -> str:
    """Return the mean of values with its interval."""
    if len(known) < 2:
        return number_text(known[0] if known else None)
    found = interval(mean, [np.array(known)])
    ends = "" if found is None else f" [{number_text(float(found[0]))}, {number_text(float(found[1]))}]"
    return number_text(float(np.mean(known))) + ends


def _marks(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return an asterisk for each row that cannot be compared with the first row of its map, and the footnotes."""
    asterisks, notes = [""] * len(rows), dict[tuple[str, str], dict[str, None]]()
    places = dict.fromkeys(row.runs[0].place for row in rows)
    for place in places:
        mine = [(i, run.card or None) for i, row in enumerate(rows) if row.runs[0].place == place for run in row.runs]
        for i, card in mine:
            if text := differences(card, mine[0][1]):
                asterisks[i] = "*"
                notes.setdefault((place, text), {})[f"run {rows[i].label}"] = None
    return asterisks, [
        f"* not comparable with the first row: {', '.join(names)}: {text}" + f" (on {place})" * (len(places) > 1)
        for (place, text), names in notes.items()
    ]


def _seeds(runs: Sequence[Run]) -> str:
    """Return the seeds as text: `1-5`, or `1, 2, 7`."""
    seeds = sorted(run.seed for run in runs if run.seed is not None)
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]}-{seeds[-1]}"
    return ", ".join(map(str, seeds)) or "-"


def _time(runs: Sequence[Run]) -> str:
    seconds = [run.summary["wall_seconds"] for run in runs if run.summary.get("wall_seconds") is not None]
    return duration(float(np.mean(seconds))) if seconds else "-"


def _state(runs: Sequence[Run]) -> str:
    count = Counter(run.state for run in runs)
    return next(iter(count)) if len(count) == 1 else ", ".join(f"{n} {state}" for state, n in count.items())


def _card(runs: Sequence[Run]) -> str:
    found = list(dict.fromkeys(str(run.card["id"]) if run.card else "-" for run in runs))
    return found[0] if len(found) == 1 else f"{found[0]} …"


def _others(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """Return the differing keys that have no column."""
    found = [key for key in dict.fromkeys(key for row in rows for key in row.values) if key not in keys]
    return ", ".join(found[:KEYS_SHOWN]) + (f" and {len(found) - KEYS_SHOWN} more" if len(found) > KEYS_SHOWN else "")
