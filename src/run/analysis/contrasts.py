"""How arms of a study compare with named ones: interquartile means, chance of being better, share of a gap, area.

Arms are found by their names: `LOWER` sees least, `UPPER` everything, `METHOD` fills in what it does not see, and the
others are compared with `REFERENCES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from omagd.run.analysis.curves import places, without_repeats
from omagd.run.analysis.groups import Group, groups
from omagd.run.analysis.runs import Run, natural
from omagd.run.analysis.statistics import (
    FEW,
    FEW_SEEDS,
    Interval,
    area,
    difference,
    gap_share,
    improvement,
    interval,
    iqm,
)
from omagd.run.reporting.card import Card, differences
from omagd.utils.errors import UserError, nearest
from omagd.utils.storage import is_number

LOWER, UPPER, METHOD = "baseline", "full_obs", "omagd"
REFERENCES = ("last_seen", "map_constant", "baseline")
GAP = ("share of the gap", "share of the gap, whole curve")
METRIC = "test_battle_won_mean"
MAY_DIFFER = "observations"
"""Entry of the cards in which arms differ by design."""

LEAST_STEPS = 0.9
"""Share of the longest run's steps at which every other run has its last test: rounds end a little after `t_max`."""

Table = dict[str, Any]
"""`title`, `head`, `rows` and `note`, all text."""


def contrasts(found: Sequence[Group]) -> list[Table]:
    """Return a table for each environment: what the final win rates and the curves of the arms say beside each other.

    Empty unless there are arms called `LOWER` and `UPPER`; an environment without runs of `UPPER` has no gap.
    """
    labels = {group.label for group in found}
    if not {LOWER, UPPER} <= labels:
        return []
    references = [label for label in REFERENCES if label in labels]
    return [table for place in places(found) if (table := _contrast(found, place, references)) is not None]


def _contrast(found: Sequence[Group], place: str, references: Sequence[str]) -> Table | None:
    last, mean_height = final_tests(found, place), mean_heights(found, place)
    if LOWER not in last or len(last) < 2:
        return None
    references, has_gap = [label for label in references if label in last], UPPER in last
    minutes = {group.label: cpu_minutes(group.at(place)) for group in found}
    measured = not all(map(math.isnan, minutes.values()))
    rows = []
    for label, values in last.items():
        ends = interval(iqm, [values])
        height = float(np.mean(mean_height[label]))
        row = [label, str(len(values)), text_of(float(iqm([values])), ends), f"{height:.3f}"]
        if METHOD in last:
            row.append("-" if label == METHOD else text_of(*difference([last[METHOD]], [values], iqm)))
        row += ["-" if other == label else text_of(*improvement([values], [last[other]]))
                for other in references]  # fmt: skip
        for of in (last, mean_height) if has_gap else ():
            inner = label not in (LOWER, UPPER) and iqm([of[UPPER]]) > iqm([of[LOWER]])  # else there is no gap
            row.append(text_of(*gap_share([of[label]], [of[LOWER]], [of[UPPER]], iqm))
                       if inner else "-")  # fmt: skip
        took = minutes[label]
        rows.append([*row, *(["-" if math.isnan(took) else f"{took:.1f}"] if measured else [])])
    head = ["arm", "seeds", "win rate at the end, IQM", "mean height of the curve",
            *([f"{METHOD} - arm, at the end"] if METHOD in last else ()),
            *(f"P(better than {reference})" for reference in references),
            *(GAP if has_gap else ()),
            *(["CPU minutes of a run"] if measured else [])]  # fmt: skip
    note = f"Gap: from {LOWER} to {UPPER}, interquartile means, all three resampled together. " if has_gap else ""
    note += "Brackets: 95 % bootstrap intervals over seeds."
    shares = [cell for row in rows for name, cell in zip(head, row, strict=True) if name in GAP]
    if any(cell != "-" and "[" not in cell for cell in shares):
        note += " A share without brackets has no interval: some resamples have no gap, or there is one seed."
    few = any(len(values) < FEW_SEEDS for values in last.values())
    return {"title": place, "head": head, "rows": rows, "note": f"{note} Note: {FEW}." if few else note}


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
        low, high = (_values(by_label[label].at(place), _last) for label in (lower, upper))
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
        lines.append([row.place, f"{len(row.low)}, {len(row.high)}", *means, text_of(row.gap, row.ends, 3), state])
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


def final_tests(found: Sequence[Group], place: str) -> dict[str, np.ndarray]:
    """Return the win rates of the last tests of each group that has some at a place, [seeds] by label."""
    return {group.label: values for group in found if len(values := _values(group.at(place), _last))}


def mean_heights(found: Sequence[Group], place: str) -> dict[str, np.ndarray]:
    """Return the area under each curve over its steps, as `final_tests` does."""
    return {group.label: values for group in found if len(values := _values(group.at(place), _area))}


def cpu_minutes(runs: Sequence[Run]) -> float:
    """Return the CPU minutes of one run, the mean over those where they are known; NaN where none is."""
    known = [run.cpu_seconds for run in runs if run.cpu_seconds]
    return float(np.mean(known)) / 60 if known else math.nan


def _values(runs: Sequence[Run], of: Callable[[Run], float | None]) -> np.ndarray:
    """Return a number of each training that has one, by seed: what is resampled must not depend on the files' order."""
    ordered = sorted(runs, key=lambda run: natural(str(run.seed)))
    found = [of(run) for run in ordered if run.kind == "training"]
    return np.array([value for value in found if value is not None])


def _last(run: Run) -> float | None:
    values = run.test_curve(METRIC)[2]
    return float(values[-1]) if len(values) else None


def _area(run: Run) -> float | None:
    steps, _, values = run.test_curve(METRIC)
    return area(steps, values) if len(values) else None


def text_of(value: float, ends: Interval | None, digits: int = 2) -> str:
    """Return a value with its interval, `-` where there is none."""
    if math.isnan(value):
        return "-"
    known = ends is not None and all(np.isfinite(end).all() for end in ends)
    all_three = (value, *((ends or ()) if known else (0, 0)))
    value, low, high = (round(float(each), digits) + 0.0 for each in all_three)  # no -0
    return f"{value:.{digits}f}" + (f" [{low:.{digits}f}, {high:.{digits}f}]" if known else "")
