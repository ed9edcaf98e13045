"""Whether a run spends its time on playing and learning: wall time over (rollouts, tests among them, + updates).

    python benchmarks/whole_loop.py --map 5m_vs_6m --t-max 40000

Runs the command line with its usual logs, tests and files, and reads the seconds of the phases from `summary.json`.
Sampling, and what ranks wait for each other, count as neither playing nor learning.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile

from runs import play, summary

TARGET = 1.1
PLAYING, LEARNING = ("collect", "reconstruct", "test"), ("update",)


def figures(phases: dict[str, float]) -> dict[str, float]:
    """Return the seconds of playing, learning and everything else, and the ratio that has a target."""
    playing = sum(phases.get(name, 0.0) for name in PLAYING)
    learning = sum(phases.get(name, 0.0) for name in LEARNING)
    rest = {name: value for name, value in phases.items() if name not in {*PLAYING, *LEARNING, "wall"}}
    values = {"wall": phases["wall"], "rollouts": playing, "updates": learning, **rest}
    values["ratio"] = phases["wall"] / (playing + learning)
    return {name: round(value, 3) for name, value in values.items()}


def main() -> None:
    """Run once and print a line of JSON for each stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--t-max", type=int, default=40_000)
    arguments, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        words = [f"env_args.map_name={arguments.map}", f"t_max={arguments.t_max}", *extra]
        ended = summary(play("whole_loop", folder, arguments.config, arguments.env, words))
    for name, stage in ended["stages"].items():
        line = {"work": f"whole loop, {name}, {arguments.config}, {arguments.map}", **figures(stage["phases"])}
        sys.stdout.write(json.dumps({**line, "target": TARGET}) + "\n")


if __name__ == "__main__":
    main()
