"""The tables of docs/results/reconstruction.md, from lines of a results file."""

import json

import make_page as page
import numpy as np
import pytest


def line(arm: str, seed: int, won: list[float], minutes: list[float]) -> str:
    tests = {
        "t_env": [500_000.0 * i for i in range(len(won))],
        "cpu_seconds": [60 * minute for minute in minutes],
        page.WON: won,
    }
    return json.dumps({"map": "m", "arm": arm, "seed": seed, "tests": tests})


def test_arms_are_compared_at_the_time_that_all_runs_of_the_head_have_had():
    lines = [line("head", s, [0.0, 0.2, 0.6 + 0.01 * s], [0, 5, 10 + s]) for s in range(5)]
    lines += [line("baseline", s, [0.0, 0.1, 0.2, 0.4], [0, 4, 8, 12]) for s in range(5)]
    lines += [line("mappo", s, [0.0, 0.9], [0, 9.9]) for s in range(5)]
    head, baseline, *ended = _cells(page.table(page.runs_of(lines), "cpu_seconds"))
    budget = 600.0  # the head's quickest run had ten minutes
    own = sorted(np.interp(budget, [0, 300, 600 + 60 * s], [0, 0.2, 0.6 + 0.01 * s]) for s in range(5))
    middle = np.mean(own[1:4])
    assert head == f"{middle:.2f} (seeds: 5)"
    level, lead, better = baseline.split("; ")
    assert (level, better) == ("0.30", "1.00")  # half-way between its tests at 8 and 12 minutes
    assert float(lead.split()[0]) == pytest.approx(middle - 0.3, abs=0.006)
    assert not ended  # before the budget
    head, baseline = _cells(page.table(page.runs_of(lines), "t_env"))[:2]
    assert (head.split()[0], baseline) == ("0.62", "0.20; 0.42 [0.41,0.44]; 1.00")  # after a million steps
    # A million steps of `baseline` take 8 minutes, of the head 10 to 14.
    assert _cells(page.beside_baseline(page.runs_of(lines))) == ["-", "1.50"]
    # A slow pair moves no median. Of a gap of 0.8 - 0.3 the head closes its lead.
    lines += [line("full_obs", s, [0.0, 0.8], [0, 10]) for s in range(5)]
    lines += [line("baseline", 3, [0.0, 0.1, 0.2, 0.4], [0, 2, 4, 6])]
    share = f"{(middle - 0.3) / 0.5:.2f}"
    assert _cells(page.beside_baseline(page.runs_of(lines))) == [share, "1.50"]


def _cells(table: str) -> list[str]:
    return table.splitlines()[-1].strip("| ").split(" | ")[1:]


def test_the_probability_that_one_is_better_counts_a_tie_half():
    assert page.improvement(np.array([1.0, 2.0]), np.array([1.0, 0.0]))[0] == 0.875
