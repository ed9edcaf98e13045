"""All pairs of scripted opponents of `snakes_3v3`, on both sides: a table and a heat map.

OMP_NUM_THREADS=1 python benchmarks/snakes_table.py --games 500

Writes benchmarks/results/snakes_table.json and snakes_table.png (--out for another folder). `rows` play as team A,
`columns` as team B; both sides stand in the table, because team B wins slightly more often among equals.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.factory import make_env

RESULTS = Path(__file__).resolve().parent / "results"


def play(first: str, second: str, games: int, seed: int) -> dict[str, float]:
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


def table(games: int, seed: int) -> dict[str, Any]:
    """Return every pair's results, and each script's mean share of wins over both sides, weakest first."""
    names = make_env("snakes_3v3", {}, 1, processes=False).info.scripted_policies
    pairs = {a: {b: play(a, b, games, seed) for b in names} for a in names}
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order, pairs = found["order"], found["pairs"]
    won = np.array([[pairs[a][b]["won"] for b in order] for a in order])
    figure = Figure(figsize=(8.4, 6.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
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


def main() -> None:
    """Measure, write, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    start = time.monotonic()
    found = table(args.games, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "snakes_table.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    heat_map(found, args.out / "snakes_table.png")
    for a in found["order"]:
        row = found["pairs"][a]
        cells = (f"{b} {100 * row[b]['won']:.1f}/{100 * row[b]['drawn']:.1f}" for b in found["order"])
        print(f"{a:>8}: " + "  ".join(cells))
    print(f"weakest first: {', '.join(found['order'])}; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
