"""Where the CPU seconds of a training go: battles, acting, storing, sampling, updates, tests, start-up.

    OMP_NUM_THREADS=1 python benchmarks/time_parts.py --maps 3m 5m_vs_6m --runs 3 [--checkout PATH] [--rows FILE]
        [--plot PICTURE] [--config qmix] [--t-max 100000] [key=value ...]

Runs the command line with its usual logs, tests and files, in a process of its own. Methods that every version has are
timed from outside by processor seconds; a part that calls another one does not count it. With `--checkout` the code of
another checkout takes turns with this one, in the same Python environment. A first short run of each compiles what has
to be compiled. Prints the medians of the runs, per 100,000 environment steps of stage 3. `--runs 0` draws the rows that
a file has.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PER = 100_000
# The parts of the picture, in the order of an iteration: (name, colour, what is measured).
PARTS = (
    ("battles", "#D55E00", ("battles: step", "battles: reset")),
    ("observing", "#E69F00", ("observing",)),
    ("acting", "#F0E442", ("acting: network", "acting: choice", "acting: reconstruction")),
    ("storing, loop", "#009E73", ("storing", "playing: rest")),
    ("sampling", "#B7E4D2", ("sampling",)),
    ("update: forward, targets", "#0072B2", ("update: forward", "update: targets")),
    ("update: backward, step", "#56B4E9", ("update: backward", "update: step", "update: rest")),
    ("tests", "#CC79A7", ("tests",)),
    ("start-up", "#8C8C8C", ("start-up",)),
    ("rest", "#CCCCCC", ("rest", "pre-training")),
)
METHODS = (
    ("omagd.envs.battle.skirmish_env", "SkirmishEnv", "step", "battles: step"),
    ("omagd.envs.battle.skirmish_env", "SkirmishEnv", "reset", "battles: reset"),
    ("omagd.envs.smac", "BattleEnv", "observe", "observing"),
    ("omagd.controllers.basic_mac", "BasicMAC", "act", "acting: network"),
    ("omagd.controllers.basic_mac", "BasicMAC", "select_actions", "acting: choice"),
    ("omagd.modules.graph_reconstructers.reconstructor", "Reconstructor", "step", "acting: reconstruction"),
    ("omagd.runners.rollout", "Recorder", "record_observations", "storing"),
    ("omagd.runners.rollout", "Recorder", "record_actions", "storing"),
    ("omagd.runners.rollout", "Recorder", "record_results", "storing"),
    ("omagd.runners.rollout", "Recorder", "take", "storing"),
    ("omagd.learners.nq_learner", "QLoss", "forward", "update: forward"),
    ("omagd.learners.nq_learner", "NQLearner", "targets", "update: targets"),
    ("torch", "Tensor", "backward", "update: backward"),
    ("torch.nn", "utils", "clip_grad_norm_", "update: step"),
    ("torch.optim", "Adam", "step", "update: step"),
)
# The phases of the framework; others belong to the rest.
PHASES = {
    "prepare": "start-up", "collect": "playing: rest", "replay": "storing", "sample": "sampling",
    "update": "update: rest", "test": "tests",
}  # fmt: skip
WHOLE = ("start-up", "pre-training", "tests")  # what is called within them is not told apart


class Meter:
    """Processor seconds of this process by part; the innermost part counts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.open = ["start-up"]
        self.at = 0.0  # of the process: its start

    def turn(self) -> None:
        """Add the time since the last reading to the innermost part."""
        now = time.process_time()
        self.seconds[self.open[-1]] += now - self.at
        self.at = now

    def begin(self, part: str) -> None:
        """Restart with an outermost part."""
        self.turn()
        self.open[0] = part

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count a block as `part`, unless it is within one that is not divided."""
        self.turn()
        self.open.append(self.open[-1] if self.open[-1] in WHOLE else part)
        try:
            yield
        finally:
            self.turn()
            self.open.pop()

    def wrapped(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return `function`, whose time is counted as `part`."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.turn()
            self.open.append(self.open[-1] if self.open[-1] in WHOLE else part)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.open.pop()

        return call


def inside(words: list[str], result: str) -> int:
    """Run the command line with all parts measured, and write the seconds to `result`."""
    meter, began = Meter(), time.monotonic()
    for module, owner, method, part in METHODS:
        cls = getattr(importlib.import_module(module), owner)
        setattr(cls, method, meter.wrapped(getattr(cls, method), part))
    profiling = importlib.import_module("omagd.run.reporting.profiling")
    phase, stage = profiling.Phases.__call__, profiling.Profiler.begin

    @contextmanager
    def in_phase(self: Any, name: str) -> Iterator[None]:
        if name == "collect" and meter.open == ["start-up"]:
            meter.begin("rest")
        with meter.within(PHASES.get(name, "rest")), phase(self, name):
            yield

    def in_stage(self: Any, name: str) -> None:
        if name:
            meter.begin("start-up" if name == "stage3" else "pre-training")
        stage(self, name)

    profiling.Phases.__call__, profiling.Profiler.begin = in_phase, in_stage
    try:
        code: int = importlib.import_module("omagd.run.cli.main").main(words) or 0
    finally:
        meter.turn()
        said = {"cpu_seconds": meter.seconds, "wall_seconds": time.monotonic() - began}
        Path(result).write_text(json.dumps(said))
    return code


def run(checkout: Path, config: str, words: list[str]) -> dict[str, Any]:
    """Train with the code of a checkout; return the steps, and processor seconds by part."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "omagd").symlink_to(checkout / "src")
        line = [f"--config={config}", "--env-config=skirmish", "with", f"local_results_path={folder}/results", *words]
        command = [sys.executable, __file__, "--inside", str(folder / "seconds.json"), *line]
        environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{checkout}: exit code {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")
        (metrics,) = folder.glob("results/*/metrics.jsonl")
        steps = max(json.loads(line).get("t_env", 0) for line in metrics.read_text().splitlines())
        return {"steps": steps, **json.loads((folder / "seconds.json").read_text())}


def commit(checkout: Path) -> str:
    """Return the commit of a checkout."""
    line = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def measure(options: argparse.Namespace, extra: list[str]) -> list[dict[str, Any]]:
    """Return a row for each run: versions take turns."""
    checkouts = {"before": options.checkout, "now": ROOT} if options.checkout else {"now": ROOT}
    rows = []
    for map_name in options.maps:
        words = [f"env_args.map_name={map_name}", f"t_max={options.t_max}", *extra]
        for number in range(-1 if options.warm_up else 0, options.runs):
            for version, checkout in checkouts.items():
                short = ["t_max=3000"] if number < 0 else []
                row = run(checkout, options.config, [*words, *short])
                facts = {"version": version, "commit": commit(checkout), "config": options.config, "map": map_name}
                if number >= 0:
                    rows.append({**facts, "run": number, **row})
                    print(json.dumps(rows[-1]), flush=True)
                    if options.rows:
                        options.rows.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return rows


def medians(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Return (map, version) -> seconds of each part of the picture, per 100,000 steps: medians of the runs."""
    runs: defaultdict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        scale = PER / row["steps"]
        sums = {name: scale * sum(row["cpu_seconds"].get(key, 0.0) for key in keys) for name, _, keys in PARTS}
        runs[row["map"], row["version"]].append(sums)
    return {bar: {name: statistics.median(run[name] for run in runs[bar]) for name, *_ in PARTS} for bar in runs}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a stacked bar for each map and version."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    bars = medians(rows)
    figure, axis = plt.subplots(figsize=(7.5, 1.9 + 0.55 * len(bars)))
    labels: list[str] = []
    places: list[float] = []
    place = 0.0
    for number, ((map_name, version), seconds) in enumerate(bars.items()):
        place += 1.0 if number and list(bars)[number - 1][0] == map_name else 1.35
        left = 0.0
        places.append(place)
        labels.append(f"{map_name}, {version}" if len({row["version"] for row in rows}) > 1 else map_name)
        for name, colour, _ in PARTS:
            wide, white = seconds[name], colour in ("#0072B2", "#D55E00", "#009E73")
            axis.barh(place, wide, left=left, color=colour, edgecolor="white", linewidth=0.8)
            if wide > 0.028 * max(sum(bar.values()) for bar in bars.values()):
                ink = "white" if white else "black"
                axis.text(left + wide / 2, place, f"{wide:.0f}", ha="center", va="center", color=ink, fontsize=10)
            left += wide
        axis.text(left, place, f" {left:.0f} s", va="center", weight="bold", fontsize=11)
    axis.set_yticks(places, labels, fontsize=11)
    axis.invert_yaxis()
    axis.margins(x=0.09)
    axis.set_xlabel("CPU seconds per 100,000 environment steps, one thread", fontsize=11)
    axis.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=colour) for _, colour, _ in PARTS]
    names = [name for name, *_ in PARTS]
    figure.legend(handles, names, loc="upper center", ncols=4, frameon=False, fontsize=10, columnspacing=1.2)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.75 / figure.get_figheight()))
    figure.savefig(path, dpi=160)


def main() -> None:
    """Measure, print a table, draw."""
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(inside(sys.argv[3:], sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--maps", nargs="+", default=["3m", "5m_vs_6m"])
    parser.add_argument("--t-max", type=int, default=PER)
    parser.add_argument("--runs", type=int, default=3, help="of each map and version; 0: draw the rows of --rows")
    parser.add_argument("--checkout", type=Path, help="another checkout, `before`")
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false", help="no short run before the first")
    parser.add_argument("--rows", type=Path, help="JSON lines, one for each run")
    parser.add_argument("--plot", type=Path)
    options, extra = parser.parse_known_args()
    if options.runs:
        rows = measure(options, extra)
    else:
        rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    for (map_name, version), seconds in medians(rows).items():
        parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())
        print(f"{map_name}, {version}: {sum(seconds.values()):.1f} s for {PER:,} steps: {parts}")
    if options.plot:
        draw(rows, options.plot)


if __name__ == "__main__":
    main()
