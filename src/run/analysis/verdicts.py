"""Whether a study of reconstruction holds what was asked of it, computed from its runs.

What is asked depends on the class of a map (`omagd beliefs census`), which is written down before any run:

- a, constants of the map are unseen: `METHOD` is not slower than `LOWER`, by the mean height of the curve;
- b, inferable: it closes at least `LEAST` of the gap from `LOWER` to `UPPER`, and is above each of `SIMPLE`;
- c, hardly inferable: it is not below `LOWER`.

All of win rates, interquartile means over seeds. "Above" is a 95 % interval of the difference that lies above 0, "not
below" one that does not lie below 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from omagd.run.analysis.contrasts import LOWER, METRIC, UPPER, final_tests, mean_heights, text_of, unlike
from omagd.run.analysis.groups import Group
from omagd.run.analysis.statistics import FEW_SEEDS, Interval, difference, gap_share, iqm

METHOD, SIMPLE = "omagd", ("last_seen", "map_constant", "baseline_truth", "map_constant_truth")
LEAST = 0.5
REACHED = 0.9
"""Share of the baseline's last test that a learner has to reach: its steps are given beside the verdict of class a."""

Kind = Literal["a", "b", "c"]
Values = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Verdict:
    """What was found on a map.

    Attributes:
        state: `holds`, `does not hold`, or `open` where arms or seeds are missing, or runs are not alike. why: with
            numbers.
    """

    place: str
    kind: Kind
    state: Literal["holds", "does not hold", "open"]
    why: str

    @property
    def text(self) -> str:
        """One line of Markdown."""
        return f"**{self.place}, class {self.kind}: {self.state}.** {self.why}"

    @property
    def short(self) -> str:
        """`text` with the first of its numbers alone."""
        return self.text.split(";")[0].removesuffix(".") + "."


def verdict(found: Sequence[Group], place: str, kind: Kind) -> Verdict:
    """Return what the runs of a study say about `METHOD` at a place, of a class that was written down before.

    found: groups whose labels are the arms; each seed once.
    """
    last = final_tests(found, place)
    needed = (METHOD, LOWER, *((UPPER, *SIMPLE) if kind == "b" else ()))
    if missing := [label for label in needed if label not in last]:
        return Verdict(place, kind, "open", f"Not run yet: {', '.join(f'`{label}`' for label in missing)}.")
    if text := unlike(found, place, needed):
        return Verdict(place, kind, "open", f"Runs are not alike: {text}.")
    holds, parts = {"a": _fast, "b": _closes, "c": _not_below}[kind](found, place, last)
    seeds = len({run.seed for group in found if group.label == METHOD for run in group.at(place)} - {None})
    why = f"{'; '.join(parts)}; {seeds} seed{'s' * (seeds != 1)}."
    if seeds < FEW_SEEDS:
        return Verdict(place, kind, "open", f"At least {FEW_SEEDS} seeds are needed, so far: {why}")
    return Verdict(place, kind, "holds" if holds else "does not hold", why[0].upper() + why[1:])


def _closes(found: Sequence[Group], place: str, last: Values) -> tuple[bool, list[str]]:
    gap, ends = difference([last[UPPER]], [last[LOWER]], iqm)
    if not gap > 0:
        return False, [f"there is no gap: `{UPPER}` - `{LOWER}` = {text_of(gap, ends)}"]
    share, ends = gap_share([last[METHOD]], [last[LOWER]], [last[UPPER]], iqm)
    parts = [(share >= LEAST, f"`{METHOD}` closes {text_of(share, ends)} of the gap (asked: {LEAST})")]
    for label in SIMPLE:
        above, ends = difference([last[METHOD]], [last[label]], iqm)
        parts.append((_lower_end(ends) > 0, f"`{METHOD}` - `{label}` = {text_of(above, ends)}"))
    parts.sort(key=lambda part: part[0])  # what fails comes first
    return all(good for good, _ in parts), [words for _, words in parts]


def _not_below(found: Sequence[Group], place: str, last: Values) -> tuple[bool, list[str]]:
    gap, ends = difference([last[METHOD]], [last[LOWER]], iqm)
    return _upper_end(ends) >= 0, [f"`{METHOD}` - `{LOWER}` = {text_of(gap, ends)}"]


def _fast(found: Sequence[Group], place: str, last: Values) -> tuple[bool, list[str]]:
    heights = mean_heights(found, place)
    gap, ends = difference([heights[METHOD]], [heights[LOWER]], iqm)
    level = REACHED * float(iqm([last[LOWER]]))
    steps = {label: _median_steps(found, place, label, level) for label in (METHOD, LOWER)}
    return _upper_end(ends) >= 0, [
        f"mean height of the curve, `{METHOD}` - `{LOWER}` = {text_of(gap, ends)}",
        f"median steps to a win rate of {level:.2f}: "
        + ", ".join(f"`{label}` {each}" for label, each in steps.items()),
    ]


def _median_steps(found: Sequence[Group], place: str, label: str, level: float) -> str:
    """Return the median over seeds of the steps of the first test at a level; seeds that never reach it count last."""
    runs = [run for group in found if group.label == label for run in group.at(place)]
    curves = [run.test_curve(METRIC) for run in runs]
    firsts = [next((t for t, won in zip(steps, values, strict=True) if won >= level), math.inf)
              for steps, _, values in curves if len(values)]  # fmt: skip
    middle = float(np.median(firsts))
    return f"{middle:,.0f}" if math.isfinite(middle) else "never"


def _lower_end(ends: Interval | None) -> float:
    return -math.inf if ends is None else float(ends[0])


def _upper_end(ends: Interval | None) -> float:
    return math.inf if ends is None else float(ends[1])
