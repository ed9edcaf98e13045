"""Whether a study of reconstruction holds what was asked of it, computed from its runs.

What is asked depends on the class of a map (`omagd beliefs census`), which is written down before any run:

- a, constants of the map are unseen: `METHOD` is not slower than `LOWER`, by the mean height of the curve;
- b, inferable: it closes at least `LEAST` of the gap from `LOWER` to `UPPER`, and is above each of `SIMPLE` (its
  difference to `LOWER` is shown, but not asked);
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

from omagd.run.analysis.contrasts import LOWER, METHOD, METRIC, UPPER, final_tests, mean_heights, text_of, unlike
from omagd.run.analysis.groups import Group
from omagd.run.analysis.runs import Run
from omagd.run.analysis.statistics import FEW_SEEDS, Interval, difference, gap_share, iqm

SIMPLE = ("last_seen", "map_constant", "baseline_truth", "map_constant_truth")
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
            numbers. short: what was found, in a few words.
    """

    place: str
    kind: Kind
    state: Literal["holds", "does not hold", "open"]
    why: str
    short: str = "open"

    @property
    def text(self) -> str:
        """One line of Markdown."""
        return f"**{self.place}, class {self.kind}: {self.state}.** {self.why}"


def needed_arms(kind: Kind) -> tuple[str, ...]:
    """Return the arms that a verdict on a map of a class compares."""
    return (METHOD, LOWER, *((UPPER, *SIMPLE) if kind == "b" else ()))


def unfinished(found: Sequence[Group], place: str, labels: Sequence[str], seeds: int) -> str:
    """Return which of some arms have fewer seeds than `seeds` at a place, and how many; empty: none has.

    found: groups whose labels are the arms.
    """
    reached = {label: len(_seeds(found, place, label)) for label in labels}
    none = [label for label, count in reached.items() if not count]
    few = {label: count for label, count in reached.items() if 0 < count < seeds}
    parts = [f"not run yet: {', '.join(f'`{label}`' for label in none)}"] if none else []
    if few:
        begun = ", ".join(f"`{label}` {count}" for label, count in few.items())
        parts.append(f"seeds so far, of {seeds}: {begun}")
    return "; ".join(parts)


def verdict(found: Sequence[Group], place: str, kind: Kind, seeds: int = FEW_SEEDS) -> Verdict:
    """Return what the runs of a study say about `METHOD` at a place, of a class that was written down before.

    Until each arm that is needed has its seeds, no number is computed: a verdict is not chosen by when one looks.

    found: groups whose labels are the arms; each seed once. seeds: that each arm needs.
    """
    needed = needed_arms(kind)
    if text := unfinished(found, place, needed, seeds):
        return Verdict(place, kind, "open", f"{text[0].upper()}{text[1:]}.")
    if text := unlike(found, place, needed):
        return Verdict(place, kind, "open", f"Runs are not alike: {text}.")
    last = final_tests(found, place)
    holds, short, parts = {"a": _fast, "b": _closes, "c": _not_below}[kind](found, place, last)
    why = f"{'; '.join(parts)}; {len(_seeds(found, place, METHOD))} seeds."
    return Verdict(place, kind, "holds" if holds else "does not hold", why[0].upper() + why[1:], short)


def _seeds(found: Sequence[Group], place: str, label: str) -> set[int]:
    """Return the seeds of the runs of an arm at a place; evaluations and runs without a seed do not count."""
    return {run.seed for run in _trainings(found, place, label) if run.seed is not None}


def _trainings(found: Sequence[Group], place: str, label: str) -> list[Run]:
    runs = [run for group in found if group.label == label for run in group.at(place)]
    return [run for run in runs if run.kind == "training"]


Finding = tuple[bool, str, list[str]]
"""Whether a class holds, what was found in a few words, and the conditions with numbers."""


def _closes(found: Sequence[Group], place: str, last: Values) -> Finding:
    gain = f"`{METHOD}` - `{LOWER}` = {text_of(*difference([last[METHOD]], [last[LOWER]], iqm))}"
    gap, ends = difference([last[UPPER]], [last[LOWER]], iqm)
    if not gap > 0:
        return False, "no gap to close", [f"there is no gap: `{UPPER}` - `{LOWER}` = {text_of(gap, ends)}", gain]
    share, ends = gap_share([last[METHOD]], [last[LOWER]], [last[UPPER]], iqm)
    parts = [(share >= LEAST, f"`{METHOD}` closes {text_of(share, ends, 3)} of the gap (asked: {LEAST})")]
    for label in SIMPLE:
        above, ends = difference([last[METHOD]], [last[label]], iqm)
        parts.append((_lower_end(ends) > 0, f"`{METHOD}` - `{label}` = {text_of(above, ends)}"))
    missed = sum(not good for good, _ in parts)
    short = f"misses {missed} of {len(parts)} conditions" if missed else "meets all conditions"
    parts.sort(key=lambda part: part[0])  # what fails comes first
    return not missed, short, [parts[0][1], gain, *(words for _, words in parts[1:])]


def _not_below(found: Sequence[Group], place: str, last: Values) -> Finding:
    gap, ends = difference([last[METHOD]], [last[LOWER]], iqm)
    holds = _upper_end(ends) >= 0
    return holds, "no loss found" if holds else "wins less", [f"`{METHOD}` - `{LOWER}` = {text_of(gap, ends)}"]


def _fast(found: Sequence[Group], place: str, last: Values) -> Finding:
    heights = mean_heights(found, place)
    gap, ends = difference([heights[METHOD]], [heights[LOWER]], iqm)
    level = REACHED * float(iqm([last[LOWER]]))
    steps = {label: median_steps(_trainings(found, place, label), level) for label in (METHOD, LOWER)}
    holds = _upper_end(ends) >= 0
    words = {label: f"{each:,.0f}" if math.isfinite(each) else "never" for label, each in steps.items()}
    sooner = ", ".join(f"`{label}` {each}" for label, each in words.items())
    return holds, "not found slower" if holds else "slower", [
        f"mean height of the curve, `{METHOD}` - `{LOWER}` = {text_of(gap, ends)}",
        f"median steps to a win rate of {level:.2f}: {sooner}",
    ]  # fmt: skip


def median_steps(runs: Sequence[Run], level: float) -> float:
    """Return the median over runs of the steps of the first test at a win rate; runs that never reach it: infinity."""
    curves = [run.test_curve(METRIC) for run in runs]
    firsts = [next((t for t, won in zip(steps, values, strict=True) if won >= level), math.inf)
              for steps, _, values in curves if len(values)]  # fmt: skip
    return float(np.median(firsts))


def _lower_end(ends: Interval | None) -> float:
    return -math.inf if ends is None else float(ends[0])


def _upper_end(ends: Interval | None) -> float:
    return math.inf if ends is None else float(ends[1])
