"""The games of the snakes: scripts against each other, and every learner against the scripts.

    OMP_NUM_THREADS=1 python benchmarks/snakes.py scripts --games 500
    python benchmarks/snakes.py learners                        # all rows, seeds 1 2 3, two runs side by side
    python benchmarks/snakes.py learners --rows vdn iql --seeds 1
    python benchmarks/snakes.py learners --show                 # the table and the curves of what was run

`scripts` plays all pairs of scripted opponents and writes snakes_table.json and, into --pictures, a heat map. Rows play
as team A, columns as team B; both sides stand in the table, because team B wins slightly more often among equals.

`learners` trains each row by its preset, one process with one thread. A line for each row and seed is added to
snakes_learners.jsonl in --out as soon as it is there: shares of --games games won and drawn on each side against
`greedy` and against `random`, by the agent at the end of training, acting greedily, on episodes that no training has;
its tests while it trained; steps, updates and seconds. What stands there already is not run again. The curves go
to --pictures. Further words `key=value` go to every training.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from runs import play, summary, tests

from omagd.envs.factory import make_env
from omagd.lab.studies.results import append
from omagd.run.run_folder import read_records

HERE = Path(__file__).resolve().parent
AGAINST, SIDES = ("greedy", "random"), ("a", "b")
BICNET = ["agent=bicnet", "rnn_hidden_dim=128", "batch_size=128"]  # an update takes a sixth of the preset's sizes
PUBLISHED = ["t_max=60000", "test_interval=20000", "test_nepisode=128"]  # 300 of the published 50,000 games
ROWS: dict[str, tuple[str, list[str]]] = {
    "vdn": ("snakes_vdn", []),
    "qmix": ("snakes_qmix", []),
    "iql": ("snakes_iql", []),
    "ddpg": ("snakes_ddpg_near", ["gumbel_softmax=False"]),
    "ddpg gumbel": ("snakes_ddpg_near", []),
    "bicnet gumbel": ("snakes_ddpg_near", BICNET),
    "ddpg, published settings": ("snakes_ddpg", PUBLISHED),
}


def battle(first: str, second: str, games: int, seed: int) -> dict[str, float]:
    """Return how `first` as team A does against `second` as team B: shares of wins, draws, losses, and mean scores."""
    env = make_env("snakes_3v3", {"opponent": second, "side": "a"}, games, processes=False)
    rng, active = np.random.default_rng(seed), np.ones(games, bool)
    env.reset(active, np.arange(games) + 1_000_000 * seed)
    info: dict[str, np.ndarray] = {}
    while active.any():
        result = env.step(env.scripted_actions(first, rng), active)
        active &= ~result.terminated
        for name, values in result.info.items():
            info[name] = info.get(name, 0) + np.where(result.terminated, values, 0)
    won, drawn = (round(float(info[name].mean()), 4) for name in ("battle_won", "draw"))
    means = {name: round(float(info[name].mean()), 3) for name in ("score_own", "score_opponent", "beans", "deaths")}
    return {"won": won, "drawn": drawn, "lost": round(1 - won - drawn, 4), **means}


def pairs_of(games: int, seed: int) -> dict[str, Any]:
    """Return every pair's results, and each script's mean share of wins over both sides, weakest first."""
    names = make_env("snakes_3v3", {}, 1, processes=False).info.scripted_policies
    pairs = {a: {b: battle(a, b, games, seed) for b in names} for a in names}
    strength = {
        name: np.mean([(pairs[name][b]["won"] + pairs[b][name]["lost"]) / 2 for b in names if b != name])
        for name in names
    }
    order = sorted(names, key=lambda name: strength[name])
    return {
        "games": games,
        "seed": seed,
        "order": order,
        "mean_win_rate": {name: round(float(strength[name]), 4) for name in order},
        "pairs": pairs,
    }


def heat_map(found: dict[str, Any], path: Path) -> None:
    """Draw the shares of wins of team A (rows) against team B (columns)."""
    order, pairs = found["order"], found["pairs"]
    won = np.array([[pairs[a][b]["won"] for b in order] for a in order])
    figure = Figure(figsize=(8.4, 6.8), dpi=120, layout="constrained")
    axis = figure.subplots()
    image = axis.imshow(won, cmap="RdYlGn", vmin=0, vmax=1)
    for i, a in enumerate(order):
        for j, b in enumerate(order):
            pair = pairs[a][b]
            text = f"{100 * pair['won']:.1f} %\n{pair['score_own']:.1f} : {pair['score_opponent']:.1f}"
            dark = won[i, j] < 0.2 or won[i, j] > 0.85
            axis.text(j, i, text, ha="center", va="center", fontsize=9.5, color="white" if dark else "black")
    axis.set_xticks(range(len(order)), order)
    axis.set_yticks(range(len(order)), order)
    axis.set_xlabel("team B")
    axis.set_ylabel("team A")
    axis.set_title(f"snakes_3v3: games won by team A, mean scores ({found['games']} games each)")
    figure.colorbar(image, shrink=0.8, label="share of games won by team A")
    figure.savefig(path)


def measure(row: str, seed: int, games: int, results: str, extra: list[str]) -> dict[str, Any]:
    """Train one row with one seed and play its games; return the line for the results."""
    config, words = ROWS[row][0], [*ROWS[row][1], *extra]
    token = f"{row.replace(', ', '_').replace(' ', '_')}_seed{seed}"
    folder = play(token, results, config, "snakes", [f"seed={seed}", *words])
    found = summary(folder)
    against = {
        name: {side: _games(token, results, config, words, folder, name, side, games) for side in SIDES}
        for name in AGAINST
    }
    return {
        "row": row,
        "seed": seed,
        "command": f"--config={config} --env-config=snakes with seed={seed} {' '.join(words)}".strip(),
        "steps": found["stages"]["stage3"]["clock"]["t_env"],
        "updates": found["updates"],
        "seconds": round(found["wall_seconds"]),
        "games": games,
        "against": against,
        "tests": [[t_env, round(seconds), round(won, 4)] for t_env, seconds, won in tests(folder)],
    }


def _games(
    token: str, results: str, config: str, words: list[str], folder: Path, opponent: str, side: str, games: int
) -> dict[str, float]:
    """Return how the trained team does on one side against one script."""
    asked = ["evaluate=True", f"checkpoint_path={folder}", f"eval_report_episodes={games}", "batch_size_run=100"]
    asked += [f"env_args.opponent={opponent}", f"env_args.side={side}"]
    kept = [word for word in words if not word.startswith(("t_max", "test_"))]
    played = play(f"{token}_against_{opponent}_{side}", results, config, "snakes", [*kept, *asked])
    values = summary(played)["stages"]["stage3"]["values"]
    names = {"won": "battle_won", "drawn": "draw", "score_own": "score_own", "score_opponent": "score_opponent"}
    return {short: round(values[f"test_{name}_mean"], 4) for short, name in names.items()}


def table(lines: list[dict[str, Any]]) -> str:
    """Return a Markdown table: shares won over both sides, each seed, and the median of steps and seconds."""
    out = ["| learner | won against greedy, seeds | side a | side b | against random | steps | updates | minutes |"]
    out.append("|---|---|---|---|---|---|---|---|")
    for row in ROWS:
        runs = sorted((line for line in lines if line["row"] == row), key=lambda line: int(line["seed"]))
        if not runs:
            continue
        both = [100 * _won(run, "greedy", SIDES) for run in runs]
        sides = [100 * sum(_won(run, "greedy", side) for run in runs) / len(runs) for side in SIDES]
        other = 100 * sum(_won(run, "random", SIDES) for run in runs) / len(runs)
        error = max(_standard_error(won / 100, 2 * runs[0]["games"]) for won in both)
        shares = ", ".join(f"{won:.1f}" for won in both)
        cells = [row, f"{shares} (± {100 * error:.1f})", *(f"{won:.1f}" for won in (*sides, other))]
        cells += [f"{median(run[name] for run in runs):,.0f}" for name in ("steps", "updates")]
        out.append("| " + " | ".join([*cells, f"{median(run['seconds'] for run in runs) / 60:.0f}"]) + " |")
    return "\n".join(out)


def _won(run: dict[str, Any], opponent: str, sides: str | tuple[str, ...]) -> float:
    return sum(run["against"][opponent][side]["won"] for side in sides) / len(sides)


def _standard_error(share: float, games: int) -> float:
    return math.sqrt(share * (1 - share) / games)


def curves(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw the tests against `greedy` over the steps, a colour for each row, a line for each seed."""
    figure = Figure(figsize=(8.4, 5.0), dpi=120, layout="constrained")
    axis = figure.subplots()
    for number, row in enumerate(ROWS):
        label: str | None = row
        for line in (line for line in lines if line["row"] == row):
            steps, _, won = zip(*line["tests"], strict=True)
            axis.plot(steps, won, color=f"C{number}", linewidth=1.4, alpha=0.8, label=label)
            label = None
    axis.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
    axis.set(xlabel="environment steps", ylabel="share of test games won", ylim=(0, 1))
    axis.set_xscale("symlog", linthresh=20_000)
    axis.set_xlim(left=0)
    axis.set_title("snakes_3v3 against greedy, one line for each seed")
    axis.legend(loc="upper left", fontsize=8)
    figure.savefig(path)


def play_scripts(arguments: argparse.Namespace) -> None:
    """Measure, write, and print the table of all pairs."""
    start = time.monotonic()
    found = pairs_of(arguments.games, arguments.seed)
    (arguments.out / "snakes_table.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    heat_map(found, arguments.pictures / "snakes_table.png")
    for a in found["order"]:
        row = found["pairs"][a]
        cells = (f"{b} {100 * row[b]['won']:.1f}/{100 * row[b]['drawn']:.1f}" for b in found["order"])
        print(f"{a:>8}: " + "  ".join(cells))
    print(f"weakest first: {', '.join(found['order'])}; {time.monotonic() - start:.0f} s")


def train_learners(arguments: argparse.Namespace) -> None:
    """Run what is missing, then print the table and draw the curves."""
    path = arguments.out / "snakes_learners.jsonl"
    lines = list(read_records(path))
    there = {(line["row"], line["seed"]) for line in lines}
    missing = [(row, seed) for row in arguments.rows for seed in arguments.seeds if (row, seed) not in there]

    def one(task: tuple[str, int]) -> None:
        line = measure(*task, arguments.games, arguments.results, arguments.words)
        lines.append(line)
        append(path, line)
        print(f"{task[0]}, seed {task[1]}: {100 * _won(line, 'greedy', SIDES):.1f} % against greedy", flush=True)

    if not arguments.show:
        with ThreadPoolExecutor(arguments.side_by_side) as pool:
            list(pool.map(one, missing))
    print(table(lines))
    curves(lines, arguments.pictures / "snakes_learners.png")


def main() -> None:
    """Do what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    scripts = parts.add_parser("scripts", help="all pairs of scripts")
    scripts.add_argument("--games", type=int, default=500)
    scripts.add_argument("--seed", type=int, default=1)
    scripts.set_defaults(do=play_scripts)
    learners = parts.add_parser("learners", help="every learner against scripts")
    learners.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    learners.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    learners.add_argument("--games", type=int, default=500, help="on each side, against each opponent")
    learners.add_argument("--side-by-side", type=int, default=2, help="runs at a time")
    learners.add_argument("--results", default="results/benchmarks/snakes", help="where the runs' folders go")
    learners.add_argument("--show", action="store_true", help="run nothing")
    learners.add_argument("words", nargs="*", help="further key=value for every training")
    learners.set_defaults(do=train_learners)
    for part in (scripts, learners):
        part.add_argument("--out", type=Path, default=HERE / "results")
        part.add_argument("--pictures", type=Path, default=HERE.parent / "docs" / "images")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.do(arguments)


if __name__ == "__main__":
    main()
