"""Sacred's record of a long run: bounded, with its beginning and its end, in the form that Sacred's readers know."""

from __future__ import annotations

import json
from datetime import datetime

from omagd.run.reporting.sacred_record import MOST, BoundedObserver


def beat(observer, first, count):
    now = datetime(2024, 1, 1)
    steps = list(range(first, first + count))
    new = {"values": [0.5 * step for step in steps], "steps": steps, "timestamps": [now] * count}
    observer.log_metrics({"loss": new}, {})


def test_a_long_record_is_thinned_and_keeps_both_ends(tmp_path):
    observer = BoundedObserver(str(tmp_path))
    observer.dir = str(tmp_path)
    beat(observer, 0, MOST - 1)
    assert json.loads((tmp_path / "metrics.json").read_text())["loss"]["steps"] == list(range(MOST - 1))
    for first in range(MOST - 1, 20 * MOST, 7):
        beat(observer, first, 7)
    kept = json.loads((tmp_path / "metrics.json").read_text())["loss"]
    assert MOST / 3 <= len(kept["steps"]) == len(kept["values"]) == len(kept["timestamps"]) <= MOST
    assert (kept["steps"][0], kept["steps"][-1]) == (0, max(range(MOST - 1, 20 * MOST, 7)) + 6)
    assert kept["steps"] == sorted(set(kept["steps"]))
    assert kept["values"] == [0.5 * step for step in kept["steps"]]
    assert max(b - a for a, b in zip(kept["steps"], kept["steps"][1:], strict=False)) <= 64


def test_names_are_apart_and_nothing_new_writes_nothing(tmp_path):
    observer = BoundedObserver(str(tmp_path))
    observer.dir = str(tmp_path)
    observer.log_metrics({}, {})
    assert list(tmp_path.iterdir()) == []
    beat(observer, 0, 2)
    observer.log_metrics({"other": {"values": [1.0], "steps": [3], "timestamps": [datetime(2024, 1, 1)]}}, {})
    kept = json.loads((tmp_path / "metrics.json").read_text())
    assert (kept["loss"]["steps"], kept["other"]["steps"]) == ([0, 1], [3])
