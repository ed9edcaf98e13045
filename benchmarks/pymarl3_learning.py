"""Whether QMIX learns as fast here as in PyMARL3: both at PyMARL3's sizes, on the same skirmish battles, same seeds.

    OMP_NUM_THREADS=1 python benchmarks/pymarl3_learning.py --peer PYMARL3 --map 3m --t-max 200000 --seeds 1 2 3 4 5
    python benchmarks/pymarl3_learning.py --show             # the table of what has been run; --picture: the curves

Without --peer only our side runs. 8 battles, one update of 128 episodes a round, targets copied every 200 episodes,
epsilon over 100,000 steps, Adam with 0.001; greedy tests on 256 battles that no training has. Each line of
results/pymarl3_learning.jsonl is one run; what stands there already is not run again. The table gives the area under
the test win rate over environment steps (0 to 1), and the 95 % interval (Welch) of the difference of the means.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pymarl3_peer
from runs import area, play, summary, tests
from scipy import stats

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = ["batch_size_run=8", "batch_size=128", "updates_per_iteration=1", "epsilon_anneal_time=100000"]
SIZES += ["grad_norm_clip=10", "target_update_interval=200", "lr=0.001", "td_lambda=0.6", "buffer_size=5000"]
SIDES = ("omagd", "pymarl3")


def ours(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train a run of ours."""
    words = [*SIZES, f"env_args.map_name={arguments.map}", f"seed={seed}", f"t_max={arguments.t_max}"]
    words += [f"test_nepisode={arguments.test_episodes}", "save_model=False", "enable_checkpointing=False"]
    intervals = ("test_interval", "log_interval", "runner_log_interval", "learner_log_interval")
    words += [f"{name}={arguments.test_interval}" for name in intervals]
    token = f"pymarl3_{arguments.map}_seed{seed}_{time.time_ns()}"
    folder = play(token, arguments.results, "qmix", "skirmish", [*words, *arguments.words])
    found = summary(folder)
    played = [[t_env, round(seconds), round(won, 4)] for t_env, seconds, won in tests(folder)]
    clock = found["stages"]["stage3"]["clock"]
    counts = {"updates": found["updates"], "episodes": clock["episodes"], "seconds": round(found["wall_seconds"])}
    return {"tests": played, **counts}


def theirs(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train PyMARL3's learner."""
    wanted = (arguments.map, seed, arguments.t_max, arguments.test_interval, arguments.test_episodes)
    return pymarl3_peer.train(arguments.peer, *wanted)


def area_of(run: dict[str, Any]) -> float:
    """Return the area under a run's win rate over environment steps, 0 to 1."""
    t_env, _, won = zip(*run["tests"], strict=True)
    return area(list(t_env), list(won), run["t_max"])


def welch(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Return the difference of the means of a and b, and the ends of its 95 % interval by Welch's t."""
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    return float(a.mean() - b.mean()), float(low), float(high)


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table: each seed's area and last win rate by side, and the difference of the mean areas."""
    head = ["map, steps", "", "areas of the seeds", "mean", "last win rates", "wall, s (shared)"]
    out = ["| " + " | ".join([*head, "difference of the means (95 %)"]) + " |", "|---|---|---|---|---|---|---|"]
    for name, t_max in dict.fromkeys((run["map"], run["t_max"]) for run in runs):
        areas = {}
        for side in SIDES:
            mine = [run for run in runs if (run["side"], run["map"], run["t_max"]) == (side, name, t_max)]
            mine.sort(key=lambda run: int(run["seed"]))
            areas[side] = np.array([area_of(run) for run in mine])
            verdict = ""
            if side == SIDES[-1] and min(map(len, areas.values())) >= 3:
                middle, low, high = welch(*(areas[one] for one in SIDES))
                verdict = f"{middle:+.3f} ({low:+.3f} to {high:+.3f})"
            if mine:
                cells = [f"{name}, {t_max:,}", side, ", ".join(f"{value:.3f}" for value in areas[side])]
                cells += [f"{areas[side].mean():.3f}", ", ".join(f"{run['tests'][-1][2]:.2f}" for run in mine)]
                cells += [f"{np.median([run['seconds'] for run in mine]):.0f}", verdict]
                out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the win rates over environment steps: a panel for each map, a thin line for each seed, a thick mean."""
    from matplotlib.figure import Figure

    maps = list(dict.fromkeys((run["map"], run["t_max"]) for run in runs))
    figure = Figure(figsize=(4.6 * len(maps), 3.8), dpi=110, layout="constrained")
    for axis, (name, t_max) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
        grid = np.linspace(0, t_max, 201)
        for side, colour in zip(SIDES, ("#0f8f8a", "#d95f3a"), strict=True):
            mine = [run for run in runs if (run["side"], run["map"], run["t_max"]) == (side, name, t_max)]
            rates = [np.interp(grid, *np.array(run["tests"], float).T[[0, 2]]) for run in mine]
            for rate in rates:
                axis.plot(grid, rate, color=colour, linewidth=0.8, alpha=0.5)
            if rates:
                axis.plot(
                    grid, np.mean(rates, axis=0), color=colour, linewidth=2.2, label=f"{side}, {len(rates)} seeds"
                )
        axis.set(title=f"skirmish {name}", xlabel="environment steps, thousands", ylim=(-0.02, 1.02))
        ticks = np.linspace(0, t_max, 5)
        axis.set_xticks(ticks, [f"{tick / 1000:.0f}" for tick in ticks])
        axis.set_ylabel("share of battles won (greedy test)")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    """Run what is missing, then print the table and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="a checkout of PyMARL3")
    parser.add_argument("--map", default="3m")
    parser.add_argument("--t-max", type=int, default=200_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--test-interval", type=int, default=20_000)
    parser.add_argument("--test-episodes", type=int, default=256)
    parser.add_argument("--results", default="results/benchmarks/pymarl3", help="where our runs' folders go")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, help="draw the curves into this file")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("words", nargs="*", help="further key=value for our runs")
    arguments = parser.parse_args()
    path = arguments.out / "pymarl3_learning.jsonl"
    if not arguments.show:
        run_missing(arguments, path)
    runs = read(path)
    print(table(runs))
    if arguments.picture:
        draw(runs, arguments.picture)


def run_missing(arguments: argparse.Namespace, path: Path) -> None:
    """Run what does not stand in the file of results yet, and append it there."""
    done = {(run["side"], run["map"], run["seed"], run["t_max"]) for run in read(path)}
    for seed in arguments.seeds:
        for side in arguments.sides:
            key = (side, arguments.map, seed, arguments.t_max)
            if key in done or (side == "pymarl3" and arguments.peer is None):
                continue
            run = ours(arguments, seed) if side == "omagd" else theirs(arguments, seed)
            line = dict(zip(("side", "map", "seed", "t_max"), key, strict=True)) | run
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{side}, {arguments.map}, seed {seed}: area {area_of(line):.3f}, {line['seconds']} s", flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs that stand in a file of results."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
