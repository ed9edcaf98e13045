"""Fills in the table of docs/results/reconstruction.md from the results file of its study.

    python research/reconstruction/make_page.py    # reads data/belief_head.jsonl
    omagd plot research/reconstruction/data/belief_head.jsonl --x cpu --stat iqm --maps-only \\
        --out docs/images/belief_head

The budget of a map is the least CPU time of training, without tests, that a run of `head` took there. The value of a
run at that budget, or at so many steps, is interpolated linearly between its tests; a run that ended before has none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from omagd.lab.analysis.statistics import improvement, interval, iqm, lead

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "results" / "reconstruction.md"
RESULTS = HERE / "data" / "belief_head.jsonl"
HEAD, WON, STEPS = "head", "test_battle_won_mean", 1_000_000
PART = re.compile(r"(<!-- begin results -->\n).*?(<!-- end results -->)", re.DOTALL)

Runs = dict[str, dict[str, list[dict[str, Any]]]]


def runs_of(lines: Iterable[str]) -> Runs:
    """Return the tests of each run by map and arm: lists `t_env`, `cpu_seconds` and the win rate."""
    found: Runs = defaultdict(lambda: defaultdict(list))
    for line in lines:
        run = json.loads(line)
        found[run["map"]][run["arm"]].append(run["tests"])
    return found


def at(tests: dict[str, Any], clock: str, when: float) -> float:
    """Return a run's win rate when `clock` was `when`, NaN where it ended before."""
    times, won = (np.array(tests[name], float) for name in (clock, WON))
    return float(np.interp(when, times, won, right=np.nan))


def budget(runs: dict[str, list[dict[str, Any]]]) -> float:
    """Return the CPU seconds that all runs of the head have had."""
    return float(min(tests["cpu_seconds"][-1] for tests in runs[HEAD]))


def scores(tests: Iterable[dict[str, Any]], clock: str, when: float) -> np.ndarray:
    """Return the win rates of an arm's runs that have one then, [seeds]."""
    found = np.array([at(run, clock, when) for run in tests])
    return found[~np.isnan(found)]


def table(found: Runs) -> str:
    """Return a row for each map and arm: at equal CPU time, the head's lead there, and at equal steps."""
    head = "| map | arm | seeds | at equal CPU time | head's lead | P(head is better) | at equal steps | CPU minutes |"
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for place, arms in sorted(found.items()):
        if HEAD not in arms:
            continue
        seconds = budget(arms)
        own = scores(arms[HEAD], "cpu_seconds", seconds)
        for arm, tests in sorted(arms.items(), key=lambda each: each[0] != HEAD):
            here, later = scores(tests, "cpu_seconds", seconds), scores(tests, "t_env", STEPS)
            ahead = _between(lead([own], [here], statistic=iqm)) if arm != HEAD and len(here) else "-"
            better = _between(improvement(own, here)) if arm != HEAD and len(here) else "-"
            minutes = np.median([run["cpu_seconds"][-1] for run in tests]) / 60
            cells = (place, f"`{arm}`", len(tests), _level(here), ahead, better, _level(later), f"{minutes:.1f}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _level(values: np.ndarray) -> str:
    """Return the interquartile mean with its interval."""
    if not len(values):
        return "-"
    return _between((float(iqm([values])), interval(iqm, [values])))


def _between(found: tuple[float, Any]) -> str:
    value, ends = found
    return f"{value:.2f}" + ("" if ends is None else f" [{float(ends[0]):.2f}, {float(ends[1]):.2f}]")


def main() -> None:
    """Write the page."""
    page = PAGE.read_text()
    made = table(runs_of(RESULTS.read_text().splitlines()))
    PAGE.write_text(PART.sub(lambda part: f"{part[1]}{made}{part[2]}", page))


if __name__ == "__main__":
    main()
