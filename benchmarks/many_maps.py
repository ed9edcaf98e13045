"""One policy for the maps of a set, beside specialists of each training map and the scripted players.

    python benchmarks/many_maps.py --sets marine-easy stalker-zealot --steps-per-map 600000 --seeds 1

For each set, one policy (`--config hpn_mappo`) trains on all training maps, and one on each training map alone with
the same agent and the same number of steps per map. Then each plays `--episodes` new greedy battles on every map of the
set. Rows go to `--out` (JSON lines, one for each training and map); what stands there is not played again. The tables
answer:

- Does one policy play the training maps as well as specialists? Their difference in points of the win rate.
- Does it play maps that it has never seen? Its mean over the held-out maps beside two baselines: the best script, and
  the specialist of the nearest training map (fewest units added or removed; of two, the one that is better there).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from runs import MAIN, RunError, play, summary
from scripted import play as play_script

from omagd.envs.battle.args import POLICIES
from omagd.envs.task_sets import task_set
from omagd.run.checkpoint.store import is_finished
from omagd.run.run_folder import RunFolder, read_records

OUT = Path(__file__).resolve().parent / "results" / "many_maps.jsonl"
Row = dict[str, Any]


def army(name: str) -> dict[str, int]:
    """Return the numbers of units by type and team of a map's name, as in 2s4z or 5m_vs_6m."""
    sides = name.split("_vs_")
    teams = {"own": sides[0], "enemy": sides[-1]}
    units = re.compile(r"(\d+)([a-zA-Z])")
    return {f"{team} {kind}": int(count) for team, side in teams.items() for count, kind in units.findall(side)}


def distance(one: str, other: str) -> int:
    """Return how many units have to be added or removed to turn one map into the other."""
    a, b = army(one), army(other)
    return sum(abs(a.get(key, 0) - b.get(key, 0)) for key in {*a, *b})


class Results:
    """The rows of a file: who trained on what, and how it plays a map. path: the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = list(read_records(path))

    def find(self, **wanted: object) -> list[Row]:
        """Return the rows with these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows to the file."""
        new = list(rows)
        self.rows += new
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in new)


def train(results: str, trained_on: str, steps: int, seed: int) -> Path:
    """Train on a map or a set, unless that has been done; return the run's folder."""
    token = f"many_maps_{trained_on}_{steps}_seed{seed}"
    done = RunFolder(Path(results) / token)
    if is_finished(done):
        return done.path
    given = [f"env_args.map_name={trained_on}", f"seed={seed}", f"t_max={steps}", "test_nepisode=32"]
    given += [f"test_interval={max(1, steps // 5)}", f"log_interval={max(1, steps // 20)}", "auto_resume=True"]
    return play(token, results, "hpn_mappo", "skirmish", given)


def evaluate(folder: Path, maps: list[str], episodes: int) -> dict[str, float]:
    """Return the win rate of a run's last policy on each of `maps`, on battles that no training has seen."""
    command = [sys.executable, str(MAIN), "evaluate", str(folder), f"env_args.map_name={','.join(maps)}"]
    command += [f"test_nepisode={episodes}", "seed=1000", f"batch_size_run={min(64, episodes)}"]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run([*command, f"local_results_path={place}"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"evaluate {folder}: exit code {done.returncode}\n{done.stderr[-1500:]}")
        values = summary(next(Path(place).glob("*/summary.json")).parent)["stages"]["stage3"]["values"]
    return {name: float(values[f"test/{name}/battle_won_mean"]) for name in maps}


def missing(options: argparse.Namespace, results: Results, name: str) -> None:
    """Train and play what the file does not hold yet, for one set."""
    tasks = task_set(name)
    assert tasks is not None
    for seed in options.seeds:
        for trained_on, count in [(name, len(tasks.training)), *((one, 1) for one in tasks.training)]:
            steps = options.steps_per_map * count
            key = {"set": name, "trained_on": trained_on, "seed": seed, "t_max": steps}
            if results.find(**key):
                continue
            folder = train(options.results, trained_on, steps, seed)
            won = evaluate(folder, list(tasks.maps), options.episodes)
            results.add({**key, "map": where, "won": rate, "episodes": options.episodes} for where, rate in won.items())
            print(f"{trained_on}, seed {seed}: trained and played", file=sys.stderr, flush=True)
    for script in POLICIES:
        known = {row["map"] for row in results.find(script=script)}
        for where in tasks.maps:
            if where not in known:
                rate, _ = play_script(where, script, options.episodes, 1000)
                results.add([{"script": script, "map": where, "won": rate, "episodes": options.episodes}])


def tables(options: argparse.Namespace, results: Results, name: str) -> str:
    """Return a Markdown table of a set's training maps, and one of its held-out maps if it has any."""
    tasks = task_set(name)
    assert tasks is not None

    def won(trained_on: str, where: str) -> float:
        rows = results.find(set=name, trained_on=trained_on, map=where)
        return mean(row["won"] for row in rows if row["seed"] in options.seeds)

    def script(which: str, where: str) -> float:
        return float(results.find(script=which, map=where)[0]["won"])

    def nearest(where: str) -> str:
        least = min(distance(where, one) for one in tasks.training)
        return max((one for one in tasks.training if distance(where, one) == least), key=lambda one: won(one, where))

    lines = [f"| {name}: training map | one policy | specialist | difference |", "|---|---|---|---|"]
    for where in tasks.training:
        one, alone = won(name, where), won(where, where)
        lines.append(f"| {where} | {one:.3f} | {alone:.3f} | {100 * (one - alone):+.1f} points |")
    if not tasks.held_out:
        return "\n".join(lines)
    best = max(POLICIES, key=lambda which: mean(script(which, where) for where in tasks.held_out))
    lines += ["", f"| {name}: held-out map | one policy | nearest single map | script {best} |", "|---|---|---|---|"]
    for where in tasks.held_out:
        lines.append(f"| {where} | {won(name, where):.3f} | {won(nearest(where), where):.3f} ({nearest(where)}) | "
                     f"{script(best, where):.3f} |")  # fmt: skip
    means = (
        mean(won(name, where) for where in tasks.held_out),
        mean(won(nearest(where), where) for where in tasks.held_out),
        mean(script(best, where) for where in tasks.held_out),
    )
    lines.append(f"| mean over the held-out maps | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Train, play and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["marine-easy", "stalker-zealot"])
    parser.add_argument("--steps-per-map", type=int, default=600_000)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--results", default="results/benchmarks")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    results = Results(options.out)
    for name in options.sets:
        missing(options, results, name)
    for name in options.sets:
        print(tables(options, results, name), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
