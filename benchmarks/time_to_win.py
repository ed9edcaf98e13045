"""How long until a win rate, on one machine: several seeds, each ended once it is there.

    python benchmarks/time_to_win.py --map 8m --rate 0.9 --seeds 1 2 3 --at-once 3 runner=resident batch_size_run=512

Words `key=value` go to every run. A seed is there at its first test with that win rate: greedy play, 256 episodes whose
seeds no training episode has. Prints one JSON line: of each seed the seconds from the start of the command to that
test, those of training among them (from the first step on, tests included), and environment steps; null after `--limit`
seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runs import MAIN, RunError

from omagd.run.run_folder import read_records

ASKED_EVERY = 0.05  # seconds


def start(seed: int, options: argparse.Namespace, keys: list[str], folder: str) -> subprocess.Popen[bytes]:
    """Start the run of one seed, which writes into `folder`/`seed`."""
    words = [f"env_args.map_name={options.map}", f"seed={seed}", "test_nepisode=256", "save_model=False", *keys]
    words += [f"local_results_path={folder}", f"unique_token={seed}"]
    command = [sys.executable, str(MAIN), f"--config={options.config}", "--env-config=skirmish", "with", *words]
    with Path(folder, f"{seed}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def won(path: Path, rate: float) -> dict[str, Any] | None:
    """Return the first record of a run whose test has reached the win rate."""
    return next((record for record in read_records(path) if record.get("test_battle_won_mean", -1.0) >= rate), None)


Reached = dict[int, tuple[float, float, float]]
"""Seconds of the command and of training, and steps, by seed."""


def reached(seeds: list[int], options: argparse.Namespace, keys: list[str]) -> Reached:
    """Play these seeds side by side, each until it has won, for `options.limit` seconds at most."""
    found: Reached = {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        runs = {seed: start(seed, options, keys, folder) for seed in seeds}
        try:
            while any(run.poll() is None for run in runs.values()) and time.monotonic() - began < options.limit:
                time.sleep(ASKED_EVERY)
                for seed in runs.keys() - found:
                    if record := won(Path(folder, str(seed), "metrics.jsonl"), options.rate):
                        found[seed] = time.monotonic() - began, record["wall_seconds"], record["t_env"]
                        runs[seed].terminate()
                    elif runs[seed].poll():
                        raise RunError(Path(folder, f"{seed}.log").read_text()[-2000:])
        finally:
            for run in runs.values():
                run.terminate()
                run.wait()
    return found


def measure(options: argparse.Namespace, keys: list[str]) -> dict[str, Any]:
    """Return what is printed."""
    row: dict[str, Any] = {"work": "time_to_win", "map": options.map, "threshold": options.rate}
    row |= {"config": options.config, "keys": keys, "seeds": options.seeds, "at_once": options.at_once}
    there: Reached = {}
    for first in range(0, len(options.seeds), options.at_once):
        there |= reached(options.seeds[first : first + options.at_once], options, keys)
    for number, name in enumerate(("command_seconds", "training_seconds", "steps")):
        row[name] = [round(there[seed][number], 1) if seed in there else None for seed in options.seeds]
        middle = statistics.median_high(math.inf if value is None else value for value in row[name])
        row[f"median_{name}"] = None if middle == math.inf else middle
    return row


def main() -> None:
    """Print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--map", default="3m")
    parser.add_argument("--rate", type=float, default=0.9, help="of won battles")
    parser.add_argument("--config", default="qmix_fast")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--at-once", type=int, default=1, help="seeds side by side")
    parser.add_argument("--limit", type=float, default=60, help="seconds for those side by side")
    options, keys = parser.parse_known_args()
    if wrong := [word for word in keys if word.startswith("-")]:
        parser.error(f"{wrong[0]}: not understood")
    print(json.dumps(measure(options, keys)), flush=True)


if __name__ == "__main__":
    main()
