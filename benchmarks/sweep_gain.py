"""Search a preset by `omagd sweep`, then train it and the old one on fresh seeds: the gain with its 95 % interval.

    python benchmarks/sweep_gain.py                                     # 30 trials on 3m, five fresh seeds
    python benchmarks/sweep_gain.py --trials 3 --t-max 1000 --seeds 2   # whether it works

The same command continues what was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from omagd.lab.analysis.runs import load
from omagd.lab.analysis.statistics import improvement, interval
from omagd.run.cli.main import main as omagd

METRIC = "test_battle_won_mean"


def main() -> int:
    """Search, train the best and the old preset, and print the gain; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", default="3m")
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--t-max", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, default=5, help="fresh ones, for both presets")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results"))
    given = parser.parse_args()
    shared = {
        "t_max": given.t_max, "test_interval": max(1, given.t_max // 10), "torch_threads": 1, "save_model": False,
        "test_nepisode": 128,
    }  # fmt: skip
    base = {"results": str(given.out), "executor": {"local": {"jobs": given.jobs}}}
    place = {"config": given.config, "map": given.map, "with": shared}
    search = {
        **base, **place, "name": "sweep_gain_search", "trials": given.trials, "seeds": [1, 2], "over_tests": "mean",
        "space": {
            "lr": {"low": 1e-4, "high": 5e-3, "log": True},
            "batch_size": {"low": 16, "high": 128, "step": 16},
            "target_update_interval": {"low": 50, "high": 400, "log": True},
            "epsilon_anneal_time": {"low": 10_000, "high": 100_000, "log": True},
        },
    }  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    code = _start("sweep", given.out / "sweep_gain_search.yaml", search)
    if code:
        return code
    best = given.out / "sweep_gain_search" / "best.yaml"
    fresh = {
        **base, "name": "sweep_gain_fresh", "with": shared, "environments": [given.map],
        "arms": {"old": {"config": given.config}, "new": {"config": str(best.absolute())}},
        "seeds": list(range(101, 101 + given.seeds)),
    }  # fmt: skip
    code = _start("study", given.out / "sweep_gain_fresh.yaml", fresh)
    if code:
        return code
    runs = load([given.out / "sweep_gain_fresh"])
    new, old = ([run.test_curve(METRIC)[2] for run in runs if run.arm == arm] for arm in ("new", "old"))
    print(f"{given.map}, {given.t_max} steps, {given.seeds} fresh seeds, {METRIC}: new - old")
    _report("last test", *(np.array([curve[-1] for curve in arm]) for arm in (new, old)))
    _report("mean of tests", *(np.array([curve.mean() for curve in arm]) for arm in (new, old)))
    return 0


def _gain(scores: Sequence[np.ndarray]) -> np.ndarray:
    return scores[0].mean(axis=-1) - scores[1].mean(axis=-1)


def _report(name: str, new: np.ndarray, old: np.ndarray) -> None:
    """Print the difference of the means over seeds with its interval. new, old: [seeds]."""
    ends = interval(_gain, [new, old])
    between = "one seed, no interval" if ends is None else f"[{ends[0]:+.3f}, {ends[1]:+.3f}]"
    share = improvement([new], [old])[0]
    print(
        f"  {name}: {new.mean():.3f} - {old.mean():.3f} = {_gain([new, old]):+.3f} {between}, P(new > old) {share:.2f}"
    )


def _start(command: str, file: Path, values: dict) -> int:
    file.write_text(json.dumps(values, indent=2))  # JSON is YAML
    return omagd([command, str(file)])


if __name__ == "__main__":
    sys.exit(main())
