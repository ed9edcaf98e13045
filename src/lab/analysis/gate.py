"""`omagd beliefs gate`: on which maps does an arm that sees everything win more than one that sees least?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omagd.lab.analysis.curves import places, without_repeats
from omagd.lab.analysis.groups import Group, groups
from omagd.lab.analysis.runs import Run, natural
from omagd.lab.analysis.statistics import FEW, FEW_SEEDS, Interval, difference
from omagd.run.reporting.card import Card, differences
from omagd.utils.errors import UserError, nearest
from omagd.utils.storage import is_number

METRIC = "test_battle_won_mean"
MAY_DIFFER = "observations"
"""Entry of the cards in which arms differ by design."""

LEAST_STEPS = 0.9
"""Share of the longest run's steps at which every other run has its last test: rounds end a little after `t_max`."""

Table = dict[str, Any]
"""`title`, `head`, `rows` and `note`, all text."""


@dataclass(frozen=True)
class GateRow:
    """What the gate says of an environment.

    Attributes:
        low, high: win rates of the last tests, [seeds], of the arm that sees least and of the one that sees everything.
        gap, ends: difference of their means, NaN without tests, and its interval.
        enters: whether it enters the main study; None: open. why: of a no without tests and of what is open.
    """

    place: str
    low: np.ndarray
    high: np.ndarray
    gap: float
    ends: Interval | None
    enters: bool | None
    why: str = ""

    @property
    def seeds(self) -> int:
        """Seeds that both arms have."""
        return min(len(self.low), len(self.high))


def gate(runs: Sequence[Run], lower: str, upper: str, least: float) -> list[GateRow]:
    """Return for each environment the difference between two arms' last tests, and whether it enters the main study.

    It enters where the mean difference is at least `least` and its interval lies above 0; that is open where the runs
    are not alike. Errors: UserError for names of no arm, or runs that have not ended.
    """
    found, _ = without_repeats(groups([run for run in runs if run.kind == "training"]))
    by_label = {group.label: group for group in found}
    for flag, label in (("--lower", lower), ("--upper", upper)):
        if label not in by_label:
            known = ", ".join(by_label)
            raise UserError(f"{flag}={label}: is no arm of this study.{nearest(label, by_label)} Arms: {known}")
    if going_on := [run.label for group in found for run in group.runs if not run.finished]:
        raise UserError(f"{going_on[0]} has not ended. Continue its study with omagd study, then compare again")
    rows = []
    for place in places(found):
        low, high = (last_tests(by_label[label].at(place)) for label in (lower, upper))
        if not len(low) or not len(high):
            rows.append(GateRow(place, low, high, math.nan, None, False, "an arm has no test here"))
            continue
        gap, ends = difference([high], [low])
        enters = gap >= least and ends is not None and float(ends[0]) > 0
        why = unlike(found, place, (lower, upper))
        rows.append(GateRow(place, low, high, gap, ends, None if why else enters, why))
    return rows


def gate_table(rows: Sequence[GateRow], lower: str, upper: str, least: float) -> Table:
    """Return the rows of `gate` as a table."""
    lines = []
    for row in rows:
        means = [f"{values.mean():.3f}" if len(values) else "-" for values in (row.low, row.high)]
        state = {True: "yes", False: "no", None: "open"}[row.enters] + (f": {row.why}" if row.why else "")
        lines.append([row.place, f"{len(row.low)}, {len(row.high)}", *means, text_of(row.gap, row.ends), state])
    note = f"Enters: difference of the last tests at least {least:g}, its 95 % interval above 0."
    note += f" Note: {FEW}." if any(0 < row.seeds < FEW_SEEDS for row in rows) else ""
    head = ["environment", "seeds", lower, upper, "difference", "enters"]
    return {"title": "Which maps enter the main study", "head": head, "rows": lines, "note": note}


def unlike(found: Sequence[Group], place: str, labels: Sequence[str]) -> str:
    """Return in what the runs of some arms at a place differ that must be alike, as text; "" if they are comparable.

    Each has ended normally, its last test has a win rate and comes after as many steps, and the cards agree in all but
    what agents read. All arms have the same seeds.
    """
    runs = {group.label: group.at(place) for group in found if group.label in labels}
    every = [(label, run) for label, each in runs.items() for run in each if run.kind == "training"]
    longest = max((run.tests[-1]["t_env"] for _, run in every if run.tests), default=0)
    for label, run in every:
        who = f"`{label}`, seed {run.seed}"
        if run.state != "completed":
            return f"{who}, ended as {run.state}"
        if not run.tests or not is_number(run.tests[-1].get(METRIC)):
            return f"the last test of {who}, has no win rate"
        if (last := run.tests[-1]["t_env"]) < LEAST_STEPS * longest:
            return f"{who}, has its last test after {last:,} steps, others after {longest:,}"
        if text := differences(_alike(run), _alike(every[0][1])):
            return f"{who}, against `{every[0][0]}`, seed {every[0][1].seed}: {text}"
    seeds = {label: {run.seed for run in each} for label, each in runs.items()}
    for label, other in ((a, b) for a in seeds for b in seeds):
        if only := seeds[label] - seeds[other]:
            return f"`{label}` has seeds that `{other}` lacks: {', '.join(sorted(map(str, only), key=natural))}"
    return ""


def _alike(run: Run) -> Card | None:
    """Return the card without what may differ."""
    if not run.card:
        return None
    kept = {name: value for name, value in run.card["compared"].items() if name != MAY_DIFFER}
    return {**run.card, "compared": kept}


def last_tests(runs: Sequence[Run]) -> np.ndarray:
    """Return the last win rate of each training that has one, by seed: the files' order must not change a resample."""
    ordered = sorted((run for run in runs if run.kind == "training"), key=lambda run: natural(str(run.seed)))
    curves = [run.test_curve(METRIC)[2] for run in ordered]
    return np.array([float(values[-1]) for values in curves if len(values)])


def text_of(value: float, ends: Interval | None) -> str:
    """Return a value with its interval, `-` where there is none."""
    if math.isnan(value):
        return "-"
    known = ends is not None and all(np.isfinite(end).all() for end in ends)
    all_three = (value, *((ends or ()) if known else (0, 0)))
    value, low, high = (round(float(each), 3) + 0.0 for each in all_three)  # no -0
    return f"{value:.3f}" + (f" [{low:.3f}, {high:.3f}]" if known else "")
