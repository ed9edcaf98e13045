"""Fills in the tables of docs/results/reconstruction.md from the results files of its studies.

    python research/reconstruction/make_page.py    # reads data/belief_{head,controls,comparators}.jsonl
    omagd plot research/reconstruction/data/belief_head.jsonl --x cpu --stat iqm --maps-only \\
        --out docs/images/belief_head    # and with --x steps, --out docs/images/belief_head_steps

The budget of a map is the least CPU time of training, without tests, that a run of `head` took there. The value of a
run at that budget, or at so many steps, is interpolated linearly between its tests; a run that ended before has none.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omagd.lab.analysis.statistics import improvement, iqm, lead

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "results" / "reconstruction.md"
RESULTS = [HERE / "data" / f"belief_{study}.jsonl" for study in ("head", "controls", "comparators")]
HEAD, WON, STEPS = "head", "test_battle_won_mean", 1_000_000
ARMS, COMPARATORS = ("baseline", "baseline_x3", "full_obs"), ("ctds", "ma2e", "mappo")
PART = re.compile(r"(<!-- begin results -->\n).*?(<!-- end results -->)", re.DOTALL)

Seeds = dict[int, dict[str, Any]]
Runs = dict[str, dict[str, Seeds]]


def runs_of(lines: Iterable[str]) -> Runs:
    """Return the tests of each run by map, arm and seed: lists `t_env`, `cpu_seconds` and the win rate."""
    found: Runs = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        run = json.loads(line)
        found[run["map"]][run["arm"]][run["seed"]] = run["tests"]
    return found


def at(tests: dict[str, Any], clock: str, when: float, name: str = WON) -> float:
    """Return a run's win rate, or another value, when `clock` was `when`, NaN where it ended before."""
    times, values = (np.array(tests[each], float) for each in (clock, name))
    return float(np.interp(when, times, values, right=np.nan))


def budget(runs: dict[str, Seeds]) -> float:
    """Return the CPU seconds that all runs of the head have had."""
    return float(min(tests["cpu_seconds"][-1] for tests in runs[HEAD].values()))


def scores(runs: Seeds, clock: str, when: float) -> np.ndarray:
    """Return the win rates of an arm's runs that have one then, [seeds]."""
    found = np.array([at(tests, clock, when) for tests in runs.values()])
    return found[~np.isnan(found)]


def table(found: Runs, clock: str, arms: Sequence[str] = ARMS) -> str:
    """Return a row for each map, a column for the head and each arm: level; lead of the head [interval]; P(more).

    Maps on which none of these arms had a run then have no row, such arms no column.
    clock: `cpu_seconds`, at the map's budget, or `t_env`, at a million steps.
    """
    won = {
        place: {arm: scores(runs[arm], clock, budget(runs) if clock == "cpu_seconds" else STEPS) for arm in runs}
        for place, runs in sorted(found.items())
    }
    won = {place: runs for place, runs in won.items() if any(len(runs.get(arm, ())) for arm in arms)}
    arms = [HEAD, *(arm for arm in arms if any(len(runs.get(arm, ())) for runs in won.values()))]
    lines = ["| map | " + " | ".join(f"`{arm}`" for arm in arms) + " |", "| --- |" + " --- |" * len(arms)]
    for place, runs in won.items():
        cells = [_cell(runs[HEAD], runs.get(arm, np.empty(0)), arm == HEAD) for arm in arms]
        lines.append(f"| {place} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def beside_baseline(found: Runs) -> str:
    """Return a row for each map: how much of the gap the head closes, what a step of it costs.

    The cost is the median over pairs of one seed.
    """
    lines = ["| map | share of the gap | CPU time for a step |", "| --- | --- | --- |"]
    for place, runs in sorted(found.items()):
        when = budget(runs)
        share = "-"
        if "full_obs" in runs:
            arms = (runs[arm] for arm in (HEAD, "baseline", "full_obs"))
            head, baseline, full = (float(iqm([scores(arm, "cpu_seconds", when)])) for arm in arms)
            share = _two((head - baseline) / (full - baseline))
        costs = []
        for seed, own in runs[HEAD].items():
            other = runs["baseline"][seed]
            steps = min(own["t_env"][-1], other["t_env"][-1])  # which both have made
            costs.append(at(own, "t_env", steps, "cpu_seconds") / at(other, "t_env", steps, "cpu_seconds"))
        lines.append(f"| {place} | {share} | {_two(float(np.median(costs)))} |")
    return "\n".join(lines) + "\n"


def _cell(own: np.ndarray, other: np.ndarray, head: bool) -> str:
    """Return what a table says of an arm's win rates `other`, and of the head's lead over them."""
    if not len(other):
        return "-"
    level = _two(float(iqm([other])))
    if head:
        return f"{level} (seeds: {len(own)})"
    better = f"; {improvement(own, other)[0]:.2f}" if min(len(own), len(other)) > 1 else ""
    return f"{level}; {_between(lead([own], [other], statistic=iqm))}{better}"


def _between(found: tuple[float, Any]) -> str:
    value, ends = found
    return _two(value) + ("" if ends is None else f" [{_two(float(ends[0]))},{_two(float(ends[1]))}]")


def _two(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # no minus before a zero


def main() -> None:
    """Write the page."""
    page = PAGE.read_text()
    found = runs_of(line for file in RESULTS if file.is_file() for line in file.read_text().splitlines())
    tables = table(found, "cpu_seconds"), table(found, "cpu_seconds", COMPARATORS), table(found, "t_env")
    made = "\n".join((*tables, beside_baseline(found)))
    PAGE.write_text(PART.sub(lambda part: f"{part[1]}{made}{part[2]}", page))


if __name__ == "__main__":
    main()
