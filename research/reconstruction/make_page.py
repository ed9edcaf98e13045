"""Fills in the tables of docs/results/reconstruction.md from the results file of its study.

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

from omagd.lab.analysis.statistics import improvement, iqm, lead

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "results" / "reconstruction.md"
RESULTS = HERE / "data" / "belief_head.jsonl"
HEAD, WON, STEPS = "head", "test_battle_won_mean", 1_000_000
ARMS = [HEAD, "baseline", "baseline_x3", "full_obs", "ctds", "ma2e", "mappo"]
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


def table(found: Runs, clock: str) -> str:
    """Return a row for each map, a column for each arm: level; the head's lead [interval]; P(it is better).

    clock: `cpu_seconds`, at the map's budget, or `t_env`, at a million steps.
    """
    won = {
        place: {
            arm: scores(tests, clock, budget(runs) if clock == "cpu_seconds" else STEPS) for arm, tests in runs.items()
        }
        for place, runs in sorted(found.items())
    }
    arms = [arm for arm in ARMS if any(len(runs.get(arm, ())) for runs in won.values())]
    lines = ["| map | " + " | ".join(f"`{arm}`" for arm in arms) + " |", "| --- |" + " --- |" * len(arms)]
    for place, runs in won.items():
        cells = [_cell(runs[HEAD], runs.get(arm, np.empty(0)), arm == HEAD) for arm in arms]
        lines.append(f"| {place} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def costs(found: Runs) -> str:
    """Return each map's CPU time for a step of the head, relative to `baseline`: medians over runs."""
    ratios = []
    for place, runs in sorted(found.items()):
        head, baseline = (
            float(np.median([run["cpu_seconds"][-1] / run["t_env"][-1] for run in runs[arm]]))
            for arm in (HEAD, "baseline")
        )
        ratios.append(f"{place} {head / baseline:.2f}")
    return "CPU time for a step of `head`, relative to `baseline`: " + ", ".join(ratios) + ".\n"


def _cell(own: np.ndarray, other: np.ndarray, head: bool) -> str:
    """Return what a table says of an arm's win rates `other`, and of the head's lead over them."""
    if not len(other):
        return "-"
    level = f"{float(iqm([other])):.2f}"
    if head:
        return f"{level} (seeds: {len(own)})"
    return f"{level}; {_between(lead([own], [other], statistic=iqm))}; {improvement(own, other)[0]:.2f}"


def _between(found: tuple[float, Any]) -> str:
    value, ends = found
    return f"{value:.2f}" + ("" if ends is None else f" [{float(ends[0]):.2f},{float(ends[1]):.2f}]")


def main() -> None:
    """Write the page."""
    page = PAGE.read_text()
    found = runs_of(RESULTS.read_text().splitlines())
    made = "\n".join((table(found, "cpu_seconds"), table(found, "t_env"), costs(found)))
    PAGE.write_text(PART.sub(lambda part: f"{part[1]}{made}{part[2]}", page))


if __name__ == "__main__":
    main()
