"""How well units are reconstructed that an agent does not see, beside baselines, on test episodes.

    python benchmarks/reconstruction.py --env skirmish --map 5m_vs_6m
    python benchmarks/reconstruction.py --env smax --map 5m_vs_6m --seeds 1 2 3

Runs stages 1 and 2 of `omagd_small` for each seed (further words `key=value` go to the runs; a finished run is not
repeated). Prints Markdown tables of the errors on living units, each row on the same cases for all: the mean over
seeds, then each seed. Writes a JSON line for each row and seed, and a picture of the error by steps since the last
sight.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from runs import play, summary

GUESSES = {
    "predictor": "reconstruction", "ridge": "ridge", "map_constant": "map constant",
    "last_seen_or_mean": "last seen, else mean", "last_seen": "last seen", "slot_mean": "mean of the node",
    "zeros": "zeros",
}  # fmt: skip
AGES = {"never": "never", "age1": "1", "age2_3": "2-3", "age4_7": "4-7", "age8_15": "8-15", "age16": "16+"}
DRAWN = {"predictor": ("#0f8b8d", "o"), "ridge": ("#e4572e", "s"), "last_seen": ("#4f5d95", "^")}
KINDS = {"enemy": "enemies", "ally": "allies"}
LEAST = 100
"""Fewest units over all seeds that make a point of the picture."""

VALUES = {
    "mse": "mean squared error of the features that vary", "position_rms": "position, RMS error in cells",
    "health_r2": "health, R²",
}  # fmt: skip
Rows = dict[str, dict[str, Any]]
"""Rows of one run's table by name."""


def rows_of(folder: Path) -> Rows:
    """Return the table of a run's test episodes."""
    return {row["row"]: row for row in summary(folder)["stages"]["stage2"]["beliefs"]["rows"]}


def run(arguments: argparse.Namespace, seed: int, extra: list[str]) -> Path:
    """Train and test one seed, unless that is done; return the folder."""
    token = f"reconstruction_{arguments.env}_{arguments.map}_seed{seed}"
    done = Path(arguments.results) / token
    if (done / "summary.json").is_file() and summary(done)["exit_state"] == "completed":
        return done
    words = [f"env_args.map_name={arguments.map}", "run=default", "pretrain_only=True", f"seed={seed}", *extra]
    return play(token, arguments.results, arguments.config, arguments.env, words)


def cells(found: list[Rows], value: Callable[[dict[str, Any]], float | None], name: str) -> str:
    """Return the mean over the runs in which a row has a value, then each run's."""
    each = [value(rows[name]) if name in rows else None for rows in found]
    known = [number for number in each if number is not None]
    if not known:
        return "-"
    if len(found) == 1:
        return f"{known[0]:.4g}"
    return f"{np.mean(known):.3g} ({', '.join('-' if number is None else f'{number:.3g}' for number in each)})"


def tables(label: str, found: list[Rows]) -> str:
    """Return the Markdown tables of several seeds."""
    names = list(dict.fromkeys(name for rows in found for name in rows))
    lines = []
    for value, title in VALUES.items():
        lines += [f"\n{label}: {title}\n", f"| units | count, mean | {' | '.join(GUESSES.values())} |"]
        lines.append("|---" * (len(GUESSES) + 2) + "|")
        for name in names:
            if not any(value in rows.get(name, {}) for rows in found):
                continue
            count = f"{counted(found, name) / len(found):,.0f}"
            numbers = [cells(found, lambda row, v=value, g=guess: row.get(v, {}).get(g), name) for guess in GUESSES]
            lines.append(f"| {name or 'all'} | {count} | {' | '.join(numbers)} |")
    more = {"taken_for_dead": "living taken for dead", "recall_dead": "dead recognised", "coverage": "within 1 σ"}
    lines += [f"\n{label}: dead or alive\n", f"| units | {' | '.join(more.values())} |", "|---" * (len(more) + 1) + "|"]
    for name in names:
        numbers = [cells(found, lambda row, k=key: row.get(k), name) for key in more]
        lines.append(f"| {name or 'all'} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def draw(label: str, found: list[Rows], path: Path) -> None:
    """Draw the position error by steps since the last sight; a point for each seed, a line through their means."""
    from matplotlib.figure import Figure

    shown = {kind: [age for age in AGES if counted(found, f"{kind}_{age}") >= LEAST] for kind in KINDS}
    kinds = [kind for kind in KINDS if shown[kind]]
    if not kinds:
        return
    figure = Figure(figsize=(1 + 4.4 * len(kinds), 3.8), dpi=110, facecolor="white", layout="constrained")
    for axis, kind in zip(np.ravel(figure.subplots(1, len(kinds))), kinds, strict=True):
        ages = shown[kind]
        for guess, (colour, marker) in DRAWN.items():
            points = [
                (at, [rows[name]["position_rms"][guess] for rows in found if counted([rows], name)])
                for at, name in enumerate(f"{kind}_{age}" for age in ages)
                if guess != "last_seen" or not name.endswith("never")
            ]  # fmt: skip
            line = [at for at, _ in points], [float(np.mean(each)) for _, each in points]
            axis.plot(*line, color=colour, marker=marker, ms=5, label=GUESSES[guess])
            for at, each in points:
                axis.plot([at] * len(each), each, ".", color=colour, alpha=0.5, ms=5)
        axis.set_xticks(range(len(ages)), [AGES[age] for age in ages])
        axis.set(xlabel="steps since the last sight", ylabel="RMS position error, cells", ylim=(0, None))
        axis.set_title(KINDS[kind], fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{label}: living units out of sight, {len(found)} seeds", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def counted(found: list[Rows], name: str) -> int:
    """Return the living units of a row in all runs."""
    return sum(int(rows.get(name, {}).get("count", 0)) for rows in found)


def main() -> None:
    """Run all seeds, print the tables, write JSON lines and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="omagd_small")
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", default="results/benchmarks")
    parser.add_argument("--lines", help="file of the JSON lines; default: in the results folder")
    parser.add_argument("--picture", help="file of the picture; default: in the results folder")
    arguments, extra = parser.parse_known_args()
    found = [rows_of(run(arguments, seed, extra)) for seed in arguments.seeds]
    label, name = f"{arguments.env} {arguments.map}", f"reconstruction_{arguments.env}_{arguments.map}"
    print(tables(label, found))
    lines = Path(arguments.lines or Path(arguments.results) / f"{name}.jsonl")
    about = {"env": arguments.env, "map": arguments.map, "config": arguments.config}
    with lines.open("w") as file:
        for seed, rows in zip(arguments.seeds, found, strict=True):
            file.writelines(json.dumps({**about, "seed": seed, **row}) + "\n" for row in rows.values())
    draw(label, found, Path(arguments.picture or lines.with_suffix(".png")))
    print(f"\n{lines}")


if __name__ == "__main__":
    main()
