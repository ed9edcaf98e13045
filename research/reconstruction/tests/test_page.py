"""The table of docs/results/reconstruction.md, from lines of a results file."""

import json
import re

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
    lines = [line("head", s, [0.0, 0.2, 0.6 + 0.01 * s], [0, 5, 10 + s]) for s in range(4)]
    lines += [line("baseline", s, [0.0, 0.1, 0.2, 0.4], [0, 4, 8, 12]) for s in range(4)]
    lines += [line("short", s, [0.0, 0.9], [0, 9.9]) for s in range(4)]
    rows = [re.split(r" *\| *", row)[1:-1] for row in page.table(page.runs_of(lines)).splitlines()]
    head, baseline, short = rows[2:]
    budget = 600.0  # the head's quickest run had ten minutes
    own = sorted(np.interp(budget, [0, 300, 600 + 60 * s], [0, 0.2, 0.6 + 0.01 * s]) for s in range(4))
    middle = (own[1] + own[2]) / 2
    assert head[1:4] == ["`head`", "4", head[3]] and float(head[3].split()[0]) == pytest.approx(middle, abs=0.006)
    assert baseline[3] == "0.30 [0.30, 0.30]"  # half-way between its tests at 8 and 12 minutes
    assert float(baseline[4].split()[0]) == pytest.approx(middle - 0.3, abs=0.006) and baseline[5].startswith("1.00")
    assert baseline[6] == "0.20 [0.20, 0.20]"  # after a million steps
    assert float(head[6].split()[0]) == pytest.approx(0.615, abs=0.006)
    assert short[3:7] == ["-"] * 4  # it ended before


def test_the_probability_that_one_is_better_counts_a_tie_half():
    assert page.improvement(np.array([1.0, 2.0]), np.array([1.0, 0.0]))[0] == 0.875
