"""Fills in the tables of docs/results/benchmark.md from the results files of its studies.

    for part in lbf mpe smax smax_long skirmish; do omagd study benchmarks/studies/$part.yaml; done
    python benchmarks/make_benchmark.py
    omagd plot benchmarks/results/benchmark_lbf.jsonl --metric return --maps-only -o docs/images/benchmark_lbf

A cell is the interquartile mean of the absolute metric over seeds with its 95 % bootstrap interval, over maps
stratified. Below five seeds it is the mean with Student's interval, since a bootstrap of so few is much too narrow; two
seeds have none. Lines of peers, which `peer_targets.py` writes, name their code; a cell without runs is `-`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from omagd.lab.analysis.comparison import ends_text
from omagd.lab.analysis.statistics import FEW_SEEDS, estimate, interval, iqm
from omagd.run.reporting.report import number_text
from omagd.run.run_folder import read_records

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "results" / "benchmark.md"
IMAGES = HERE.parent / "docs" / "images"
PARTS = dict.fromkeys(("lbf", "mpe"), "return") | dict.fromkeys(
    ("smax", "smax_long", "smax_gpu", "skirmish", "skirmish_gpu"), "win rate"
)
METRICS = {"return": "absolute_return_mean", "win rate": "absolute_battle_won_mean"}
REGION = re.compile(r"(<!-- begin results -->\n).*?(<!-- end results -->)", re.DOTALL)

Lines = list[dict[str, Any]]


def score(line: dict[str, Any], metric: str) -> float:
    """Return the absolute metric of a run."""
    return float(line["summary"]["stages"]["stage3"]["values"][METRICS[metric]])


def cell(scores: list[np.ndarray]) -> str:
    """Return the figure over the seeds of maps, each [seeds], with its interval; `-` if a map has none."""
    if not all(map(len, scores)):
        return "-"
    seeds = min(map(len, scores))
    middle, ends = estimate(scores) if seeds < FEW_SEEDS else (float(iqm(scores)), interval(iqm, scores))
    return f"{number_text(middle)} {ends_text(ends if seeds > 2 else None)}".strip()


def table(lines: Lines, arms: Iterable[str], maps: list[str], metric: str) -> str:
    """Return a row for each learner, and below it one for each peer's; lines of other maps are left out.

    Of lines with the same seed the last counts.
    """
    found: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for line in lines:
        found[line["arm"], line.get("code", "")][line["map"]][line["seed"]] = line
    for (arm, _), of_maps in found.items():
        for where, runs in of_maps.items():
            cards = [line["card"] for line in runs.values() if line.get("card")]
            if len({(card["id"], card["method"]) for card in cards}) > 1:
                raise SystemExit(f"{arm} on {where}: its seeds have different settings. Run the older ones again")
    every = ["all maps"] * (len(maps) > 1)
    head = ["learner", *maps, *every, "runs", "CPU minutes"]
    rows = [head, ["---"] * len(head)]
    for arm in arms:
        codes = sorted({code for name, code in found if name == arm} | {""})
        for code in codes:
            runs = found[arm, code]
            scores = [np.array([score(line, metric) for line in runs[name].values()]) for name in maps]
            cells = [cell([each]) for each in scores] + [cell(scores)] * len(every)
            spent = [line["tests"]["cpu_seconds"][-1] / 60 for name in maps for line in runs[name].values()]
            count = str(len(spent) or "-")
            minutes = f"{np.median(spent):.1f}" if spent else "-"
            rows.append([f"`{arm}`" + f", {code}" * bool(code), *cells, count, minutes])
    return "".join(f"|{'|'.join(row)}|\n" for row in rows)


def part(name: str, targets: Lines) -> str:
    """Return title, table and curves of a part."""
    study = yaml.safe_load((HERE / "studies" / f"{name}.yaml").read_text())
    lines, maps = [*read_records(HERE / "results" / f"benchmark_{name}.jsonl")], list(study["environments"])
    lines += [line for line in targets if line["env"] == name]
    if not lines:
        return f"### {name}: {PARTS[name]}\n\nNo runs yet.\n"
    curves = IMAGES / f"benchmark_{name}.svg"
    shown = f"\n![Curves of {name}](../images/{curves.name})\n" if curves.exists() else ""
    return f"### {name}: {PARTS[name]}\n\n{table(lines, study['arms'], maps, PARTS[name])}{shown}\n"


def main() -> None:
    """Write the page."""
    targets = [*read_records(HERE / "results" / "targets.jsonl")]
    made = "\n".join(part(name, targets).rstrip() + "\n" for name in PARTS)
    PAGE.write_text(REGION.sub(lambda found: f"{found[1]}{made}{found[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
