"""Whether a predictor of unseen units is as good as asked, from the tables of its errors (`learners.belief_metrics`).

All of it is about living enemies that a living agent does not see. In every row with at least `LEAST_CASES` of them the
error is at most `OF_SIMPLE` of the one of each simple baseline, and not above ridge regression's. Of the units seen
before, at most `MOST_TAKEN` of the living are taken for dead and at least `LEAST_RECOGNISED` of the dead are
recognised: nothing tells of the death of a unit that was never seen. The R² of health over all units is at least
ridge's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SIMPLE = ("zeros", "slot_mean", "last_seen", "last_seen_or_mean", "map_constant")
OF_SIMPLE, OF_RIDGE = 0.9, 1.0
"""Largest errors relative to the best simple baseline and to ridge regression."""

MOST_TAKEN, LEAST_RECOGNISED = 0.05, 0.95
"""Shares of the living taken for dead, and of the dead recognised."""

LEAST_CASES = 200
"""Living units that a row needs to be judged."""

ROWS = {
    "enemy": "all", "enemy_never": "never seen", "enemy_before": "seen before", "enemy_age1": "1 step ago",
    "enemy_age2_3": "2-3", "enemy_age4_7": "4-7", "enemy_age8_15": "8-15", "enemy_age16": "16 and more",
}  # fmt: skip
"""Titles of the rows of enemies."""

Row = Mapping[str, Any]
"""Of a table: `count` of the living; `mse` and `health_r2` by guess; `taken_for_dead`, `recall_dead`."""


@dataclass(frozen=True)
class Condition:
    """A part of what is asked.

    Attributes:
        met: None where a number is unknown. words: the number beside what is asked.
    """

    met: bool | None
    words: str


@dataclass(frozen=True)
class Judgement:
    """Whether all of it is met.

    Attributes:
        state: `yes`, `no`, or `open` where a number is unknown or seeds are missing. worst: the first condition that is
            not met, with its number. words: all conditions, the missed ones first.
    """

    state: str
    worst: str
    words: str


def judged(rows: Mapping[str, Row], seeds: int, least_seeds: int) -> Judgement:
    """Return whether what is asked is met. rows: as in `conditions`. seeds: behind the rows."""
    order = (False, None, True)
    found = sorted(conditions(rows), key=lambda each: order.index(each.met))
    state = "open" if seeds < least_seeds else {False: "no", None: "open", True: "yes"}[found[0].met]
    return Judgement(state, "" if found[0].met else found[0].words, "; ".join(each.words for each in found))


def mean_row(rows: Sequence[Row]) -> Row:
    """Return the mean over seeds of each number of a row; empty with fewer than `LEAST_CASES` living units."""
    cases = float(np.mean([row.get("count") or 0 for row in rows])) if rows else 0.0
    return {**_mean(rows), "count": cases} if cases >= LEAST_CASES else {}


def relative_error(row: Row, guesses: Sequence[str]) -> float:
    """Return the error divided by the smallest one of some guesses.

    NaN where one of them is unknown; infinite where a guess has no error and the predictor has one.
    """
    errors = row.get("mse", {})
    predictor, *others = (errors.get(name, math.nan) for name in ("predictor", *guesses))
    best = float(np.min(others))  # NaN where any is
    if best == 0:
        return 1.0 if predictor == 0 else math.copysign(math.inf, predictor)
    return float(predictor / best)


def conditions(rows: Mapping[str, Row]) -> list[Condition]:
    """Return the parts of what is asked.

    rows: of one seed, or means over seeds, by name. Rows of few cases are passed over.
    """
    rows = {name: row for name, row in rows.items() if name in ROWS and (row.get("count") or 0) >= LEAST_CASES}
    whole, before = rows.get("enemy", {}), rows.get("enemy_before", {})
    (simple, of), (ridge, at) = (_worst(rows, guesses) for guesses in (SIMPLE, ("ridge",)))
    taken, dead = (before.get(key, math.nan) for key in ("taken_for_dead", "recall_dead"))
    own, ridges = (whole.get("health_r2", {}).get(guess, math.nan) for guess in ("predictor", "ridge"))
    of_all = f"(asked: {LEAST_RECOGNISED}; of all the dead {_text(whole.get('recall_dead', math.nan))})"
    asked = [
        (OF_SIMPLE - simple, f"error at most {_text(simple)} of the best simple guess's ({of}asked: {OF_SIMPLE})"),
        (OF_RIDGE - ridge, f"error at most {_text(ridge)} of ridge regression's ({at}asked: {OF_RIDGE:g})"),
        (MOST_TAKEN - taken, f"{_text(taken)} of those seen before taken for dead (asked: {MOST_TAKEN})"),
        (dead - LEAST_RECOGNISED, f"{_text(dead)} of the dead that were seen before recognised {of_all}"),
        (own - ridges, f"R² of health {_text(own, 4)}, of ridge regression {_text(ridges, 4)}"),
    ]
    return [Condition(None if math.isnan(margin) else margin >= 0, words) for margin, words in asked]


def _text(number: float, digits: int = 3) -> str:
    return "unknown" if math.isnan(number) else f"{number:.{digits}f}"


def _worst(rows: Mapping[str, Row], guesses: Sequence[str]) -> tuple[float, str]:
    """Return the largest relative error of all rows, and of which row; NaN where one is unknown."""
    ratios = {name: relative_error(row, guesses) for name, row in rows.items()}
    unknown = [name for name, ratio in ratios.items() if math.isnan(ratio)]
    if unknown or not ratios:
        return math.nan, ""
    worst = max(ratios, key=lambda name: ratios[name])
    return ratios[worst], f"row: {ROWS[worst]}; "


def _mean(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the means of numbers, also inside of mappings; over the rows that have a number."""
    keys = dict.fromkeys(key for row in rows for key in row)
    known = {key: [row[key] for row in rows if row.get(key) is not None] for key in keys}
    return {
        key: _mean(each) if isinstance(each[0], Mapping) else float(np.mean(each))
        for key, each in known.items()
        if each and not isinstance(each[0], str)
    }
