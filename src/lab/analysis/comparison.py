"""`omagd compare`: a table of runs, with one row for the repetitions of a method on a map."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omagd.lab.analysis.groups import Group, differences, groups, repeated, shown, telling, with_studies
from omagd.lab.analysis.run_report import COUNTS, stages_of, values_of
from omagd.lab.analysis.runs import Run, aligned, load
from omagd.lab.analysis.statistics import INTERVALS, Interval, estimate, lead, wins
from omagd.run.reporting.report import SHOWN, number_text
from omagd.utils.errors import UserError, print_out
from omagd.utils.logging import duration

KEYS_SHOWN = 6
"""Most differing keys that have a column, and most others that a footnote names."""

RESULTS = {"test_battle_won_mean": "win rate", "test_return_mean": "return"}
"""In which methods are compared with the first one."""

EMPTY = {"-", ""}


@dataclass(frozen=True)
class Column:
    """A column of the table; the highest `rank` is left out first where the terminal is narrow, 0 never is."""

    head: str
    cells: list[str]
    rank: int = 0


@dataclass(frozen=True)
class Lead:
    """How much higher the mean of some runs is than that of others, its interval, and whether it excludes 0.

    better: the probability that one of the runs is better than one of the others. pairs: runs have the same seeds.
    """

    gap: float
    ends: Interval | None
    better: float
    pairs: bool

    @property
    def sure(self) -> bool:
        """Whether the interval excludes 0."""
        return self.ends is not None and bool(self.ends[0] > 0 or self.ends[1] < 0)

    @property
    def text(self) -> str:
        """Difference and interval."""
        return f"{'+' if self.gap > 0 else ''}{number_text(self.gap)} {ends_text(self.ends)}".rstrip()


def lead_of(runs: Sequence[Run], first: Sequence[Run], metric: str) -> Lead | None:
    """Return how far the last tests of runs lead those of the `first`; None where either are fewer than two."""
    own, others = last_values(runs, metric), last_values(first, metric)
    if min(len(own), len(others)) < 2:
        return None
    pairs = own.keys() == others.keys()
    mine, theirs = (np.array([each[key] for key in (own if pairs else each)]) for each in (own, others))
    gap, ends = lead([mine], [theirs], pairs)
    return Lead(gap, ends, float(wins(mine, theirs)), pairs)


def last_values(runs: Sequence[Run], metric: str) -> dict[Any, float]:
    """Return the last test's result by the seed of its run, or by the run's folder where the seed is not known."""
    ends = {run.folder if run.seed is None else run.seed: run.test_curve(metric)[2][-1:] for run in runs}
    return {key: float(end[0]) for key, end in ends.items() if len(end)}


def ends_text(ends: Interval | None) -> str:
    """Return an interval as text, nothing for none."""
    return "" if ends is None else f"[{number_text(float(ends[0]))}, {number_text(float(ends[1]))}]"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run, a folder of runs, a study, or its results file")
    parser.add_argument("--each", action="store_true", help="one row for each run, also for repetitions")
    parser.add_argument("--wide", action="store_true", help="all columns, also empty ones and more than fit here")


def main(options: argparse.Namespace) -> int:
    """Print the table."""
    if not options.runs:
        raise UserError("compare: name the folders of runs, as in: omagd compare results/<run> results/<other run>")
    width = None if options.wide else shutil.get_terminal_size((1000, 24)).columns  # of a pipe, for other programs
    print_out(table(load(options.runs, "compare"), options.each, width) + "\n")
    return 0


def table(runs: Sequence[Run], each: bool = False, width: int | None = None) -> str:
    """Return a table: a row for each method and map, those that cannot be compared with the first row marked.

    A row of several seeds has the mean of their values with its 95 % interval. Rows of one map are below each other;
    the first of them is the one that the others are compared with, in a second table.

    Args:
        each: a row for each run. width: of the terminal; columns that are empty or do not fit are left out.
    """
    rows = _rows(runs, each)
    keys = telling([row.values for row in rows])
    asterisks, notes = _marks(rows)
    about = _about(rows, keys[:KEYS_SHOWN], asterisks)
    count = [Column("n", [str(len(row.runs)) for row in rows]), Column("seeds", [_seeds(row.runs) for row in rows], 5)]
    columns, out = _fitting([*about, *count, *_results(runs, rows), *_ends(rows)], width)
    if any(len(row.runs) > 1 for row in rows):
        notes.append(f"rows of several seeds: mean [{INTERVALS}], mean time")
    if others := _others(rows, keys[:KEYS_SHOWN]):
        notes.append(f"these keys differ too: {others}")
    notes += [f"left out: {', '.join(out)} (--wide shows them)"] if out else []
    notes = [textwrap.fill(note, width, subsequent_indent="  ") if width else note for note in notes]
    lines = _lines(columns)
    rule = "─" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:], rule, *notes, *_leads(rows, about, width)])


def _lines(columns: Sequence[Column]) -> list[str]:
    return aligned([[column.head for column in columns], *zip(*(column.cells for column in columns), strict=True)])


def _fitting(columns: Sequence[Column], width: int | None) -> tuple[list[Column], list[str]]:
    """Return the columns that fit `width`, and the heads of those that do not; empty ones are in neither."""
    if width is None:
        return list(columns), []
    kept, out = [column for column in columns if not column.rank or {*column.cells} - EMPTY], list[str]()
    while max(map(len, _lines(kept))) > width and any(column.rank for column in kept):
        worst = max(reversed(kept), key=lambda column: column.rank)
        kept.remove(worst)
        out.insert(0, worst.head)
    return kept, out


def _about(rows: Sequence[Group], keys: Sequence[str], asterisks: Sequence[str]) -> list[Column]:
    """Return the columns that say what a row is: run, map, and the keys in which the methods differ."""
    columns = [Column("run", [row.label + asterisk for row, asterisk in zip(rows, asterisks, strict=True)])]
    places = [row.runs[0].place for row in rows]
    columns += [Column("map", places)] if len({*places}) > 1 else []
    short = Counter(key.rpartition(".")[2] for key in keys)
    heads = [name if short[name := key.rpartition(".")[2]] == 1 else key for key in keys]
    return columns + [
        Column(head, [shown(row.values, key) for row in rows], 1) for head, key in zip(heads, keys, strict=True)
    ]


def _results(runs: Sequence[Run], rows: Sequence[Group]) -> list[Column]:
    """Return a column for each value that the last stage of any run has, and for its best."""
    stage = max((name for run in runs for name in [*stages_of(run), *(["stage3"] if run.tests else [])]), default="")
    results = {run.folder: values_of(run, stage) for run in runs}
    columns, ranks = [], {"test_battle_won_mean": 0, "test_return_mean": 2, "test_ep_length_mean": 6}
    for key in (key for known in SHOWN for key in (known, f"best_{known}")):
        found = [[results[run.folder][key] for run in row.runs if key in results[run.folder]] for row in rows]
        if any(found):
            name = key.removeprefix("best_")
            cells = [_cell(values) if any(values) or key not in COUNTS else "-" for values in found]
            columns.append(
                Column(SHOWN.get(key) or f"best {SHOWN[name]}", cells, 7 if key != name else ranks.get(key, 9))
            )
    return columns


def _ends(rows: Sequence[Group]) -> list[Column]:
    """Return the last columns: time, state and card."""
    kinds, states = [row.runs[0].kind for row in rows], [_state(row.runs) for row in rows]
    return [
        *([Column("kind", kinds)] if "evaluation" in kinds else []),
        Column("time", [_time(row.runs) for row in rows], 4),
        Column("state", states, 0 if set(states) - {"completed"} else 3),
        Column("card", [_card(row.runs) for row in rows], 8),
    ]


def _leads(rows: Sequence[Group], about: Sequence[Column], width: int | None) -> list[str]:
    """Return the table of differences from the first row of each map; nothing where no two rows have two seeds."""
    firsts: dict[str, Group] = {}
    first = [firsts.setdefault(row.runs[0].place, row) for row in rows]
    columns, some, paired = list[Column](), set[int](), set[bool]()
    for metric, name in RESULTS.items():
        found = [
            None if row is one else lead_of(row.runs, one.runs, metric) for row, one in zip(rows, first, strict=True)
        ]
        some |= {i for i, each in enumerate(found) if each}
        paired |= {each.pairs for each in found if each}
        rank = 2 * (name == "return")
        columns += [Column(name, [each.text if each else "-" for each in found], rank)] * any(found)
        columns += [Column("P(better)", [f"{each.better:.2f}" if each else "-" for each in found], rank)] * any(found)
    if not some:
        return []
    columns = [replace(each, cells=[each.cells[i] for i in sorted(some)]) for each in (*about, *columns)]
    lines = _lines(_fitting(columns, width)[0])
    how = ("paired by seed" + " where all are the same" * (False in paired)) if True in paired else "not paired"
    title = f"difference from the first row of the map, {how}; probability that a run is better:"
    return ["", *([title] if width is None else textwrap.wrap(title, width)), *lines]


def _rows(runs: Sequence[Run], each: bool) -> list[Group]:
    """Return the rows, those of one map together; runs that repeat a seed have rows of their own."""
    rows: list[Group] = []
    found = groups(runs)
    for place in dict.fromkeys(run.place for run in runs):
        first = len(rows)
        for group in found:
            there = group.at(place)
            if each or repeated(there):
                rows += [Group(run.label, group.values, (run,)) for run in there]
            elif there:
                name = there[0].label if len(there) == 1 else there[0].arm or there[0].name
                rows.append(Group(name, group.values, tuple(there)))
        labels = with_studies([row.label for row in rows[first:]], [row.runs[0] for row in rows[first:]])
        rows[first:] = [replace(row, label=label) for row, label in zip(rows[first:], labels, strict=True)]
    return rows


def _cell(known: Sequence[float]) -> str:
    """Return the mean of values with its interval."""
    if len(known) < 2:
        return number_text(known[0] if known else None)
    middle, ends = estimate([np.array(known)])
    return f"{number_text(middle)} {ends_text(ends)}".rstrip()


def _marks(rows: Sequence[Group]) -> tuple[list[str], list[str]]:
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


def _others(rows: Sequence[Group], keys: Sequence[str]) -> str:
    """Return the differing keys that have no column."""
    found = [key for key in dict.fromkeys(key for row in rows for key in row.values) if key not in keys]
    return ", ".join(found[:KEYS_SHOWN]) + (f" and {len(found) - KEYS_SHOWN} more" if len(found) > KEYS_SHOWN else "")
