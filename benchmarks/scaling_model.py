"""A model of one iteration for many ranks, from measured constants; checked against two ranks; where scaling ends.

    python benchmarks/scaling_model.py --picture docs/images/scaling.png
    python benchmarks/scaling_model.py --gpu-update 0.015 --gpu-collect 0.35

An iteration of W ranks takes

    T(W) = E[largest of W collect times] + u (E[largest of W update times] + exchange(W))

with u updates an iteration. Collect and update times are drawn from log-normal distributions with the mean and the
spread that were measured on one rank, alone; a rank waits for the slowest one at the first gradient exchange and at
every one after it. An exchange of n bytes is a ring: 2 (W - 1) (latency + n / (W bandwidth)); over several nodes the
rings of the nodes come first, then one between them. Bytes follow from the number of parameters. Overlap with backward
is left out: these networks fit into one bucket.

Checked: the same formula, fed with latency and bandwidth measured between the two processes of this machine, against
two ranks that really run. `apart`, measured as well, is the wall time of two processes that only share the machine over
the processor time of one alone; the prediction for this machine takes it in, the table does not.

Assumptions, not measurements: the links in LINKS. `--gpu-update` and `--gpu-collect` give seconds measured on a card.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ranks import ready_stage, run_ranks, stage_config

from omagd.utils.dist_utils import Dist

DRAWS = 4000
RANKS = (1, 2, 4, 8, 16, 32, 64)
PER_NODE = 8
INK, GRID = "#1c2733", "#e3e8ee"
COLOURS = ("#0f8b8d", "#4f5d95", "#e4572e", "#c49a00")


@dataclass(frozen=True)
class Link:
    """What connects two ranks. latency: seconds of one message. bandwidth: bytes/s in one direction."""

    latency: float
    bandwidth: float


LINKS = {
    "NVLink": Link(1.0e-5, 2.0e11),
    "PCIe 4": Link(2.0e-5, 2.0e10),
    "100 GbE": Link(4.0e-5, 1.0e10),
}
"""Assumed: latency of one step of a ring, launch of its kernel included; what of the nominal bandwidth is reached."""


@dataclass(frozen=True)
class Measured:
    """What one rank takes.

    collect: seconds of an iteration's episodes, mean and standard deviation. update: the same of one update.
    updates: per iteration. n_bytes: of all gradients. steps: environment steps of an iteration, mean.
    """

    collect: tuple[float, float]
    update: tuple[float, float]
    updates: int
    n_bytes: int
    steps: float


def exchange(ranks: int, n_bytes: int, link: Link) -> float:
    """Return the seconds of one ring reduction of `n_bytes` over `ranks`."""
    return 2 * (ranks - 1) * (link.latency + n_bytes / (ranks * link.bandwidth)) if ranks > 1 else 0.0


def exchange_over_nodes(ranks: int, n_bytes: int, inside: Link, between: Link) -> float:
    """Return the same where only PER_NODE ranks share a node: a ring in each, then one between the nodes."""
    nodes = -(-ranks // PER_NODE)
    return exchange(min(ranks, PER_NODE), n_bytes, inside) + exchange(nodes, n_bytes, between)


def iteration(ranks: int, measured: Measured, reduction: float, rng: np.random.Generator) -> dict[str, float]:
    """Return the expected seconds of one iteration by part: slowest collect, slowest updates, exchanges."""
    collect = slowest(ranks, measured.collect, rng)
    update = slowest(ranks, measured.update, rng) * measured.updates
    return {"collect": collect, "update": update, "exchange": measured.updates * reduction}


def slowest(ranks: int, spread: tuple[float, float], rng: np.random.Generator) -> float:
    """Return the expected largest of `ranks` draws from a log-normal distribution of that mean and deviation."""
    mean, deviation = spread
    sigma = np.sqrt(np.log1p((deviation / mean) ** 2))
    draws = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, (DRAWS, ranks))
    return float(draws.max(1).mean())


def spread_of(seconds: Iterable[float]) -> tuple[float, float]:
    """Return median and standard deviation, the latter from the quartiles: one interruption must not count."""
    low, middle, high = np.percentile(list(seconds), [25, 50, 75])
    return float(middle), float((high - low) / 1.349)


def measure(dist: Dist, asked: dict[str, Any]) -> dict[str, Any]:
    """Measure on each of two ranks: alone, both at once without a word, together; and the exchange itself."""
    config = stage_config(asked["config"], "skirmish", asked["map"], [f"batch_size={asked['batch']}", *asked["words"]])
    with tempfile.TemporaryDirectory() as folder:
        single, pair = ready_stage(config, Dist(), folder), ready_stage(config, dist, folder)
        out: dict[str, Any] = {"alone": [], "apart": [], "together": [], "busy": [], "steps": []}
        for _ in range(asked["iterations"]):
            for kind, stage in (("alone", single), ("apart", single), ("together", pair)):
                dist.sum_int(0)
                if kind != "alone" or dist.rank == 0:
                    wall, busy = timed_iteration(stage)
                    out[kind].append(wall)
                    out["busy"] += [busy] * (kind == "alone")
            out["steps"].append(single.clock.t_env / max(single.clock.epoch, 1))
        out["n_bytes"] = sum(4 * p.numel() for module in pair.learner.modules().values() for p in module.parameters())
        out["exchanges"] = {n: exchange_seconds(dist, n) for n in (4, out["n_bytes"], 16 * out["n_bytes"])}
        for stage in (single, pair):
            stage.session.close()
    return {**out, "updates": config.updates_per_iteration}


def timed_iteration(stage: Any) -> tuple[list[float], list[float]]:
    """Return seconds by the wall and of the processor, each: of collecting, then of every update with its sampling."""

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    moments = [now()]
    stage.collect()
    stage.ready()
    learn = type(stage.learner).update.__get__(stage.learner)

    def update(*args: Any, **named: Any) -> Any:
        result = learn(*args, **named)
        moments.append(now())
        return result

    moments.append(now())
    stage.learner.update = update
    stage.update()
    stage.advance()
    del stage.learner.update
    wall, busy = np.diff(np.array(moments), axis=0).T.tolist()
    return wall, busy


def exchange_seconds(dist: Dist, n_bytes: int, times: int = 20) -> float:
    """Return the median seconds of one reduction of `n_bytes` when both ranks are there."""
    values = torch.zeros(n_bytes // 4)
    seconds = []
    for _ in range(times):
        dist.sum_int(0)
        started = time.perf_counter()
        dist.sum(values)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def link_of(exchanges: dict[int, float]) -> Link:
    """Return latency and bandwidth of a ring of two from what messages of three sizes took."""
    sizes = sorted(exchanges)
    small, large = exchanges[sizes[0]], exchanges[sizes[-1]]
    return Link(small / 2, (sizes[-1] - sizes[0]) / max(large - small, 1e-9))


def check(ranks: list[dict[str, Any]]) -> tuple[Measured, dict[str, float]]:
    """Return the measured constants of one rank, and predicted beside measured for two."""
    first, second = ranks
    alone, apart, together = (np.array(first[kind]) for kind in ("alone", "apart", "together"))
    both = np.maximum(together.sum(1), np.array(second["together"]).sum(1))
    busy = np.array(first["busy"])  # of the processor: what else runs on the machine is no part of the spread
    common = {"updates": first["updates"], "n_bytes": first["n_bytes"], "steps": float(np.mean(first["steps"]))}
    measured = Measured(spread_of(busy[:, 0]), spread_of(busy[:, 1:].flat), **common)
    shared = np.concatenate([apart, np.array(second["apart"])])
    slower = float(np.median(shared.sum(1)) / np.median(busy.sum(1)))
    link = link_of(first["exchanges"])
    reduction = exchange(2, first["n_bytes"], link)
    alike = on_cards(measured, measured.update[0] * slower, measured.collect[0] * slower)
    predicted = sum(iteration(2, alike, reduction, np.random.default_rng(0)).values())
    seen, one = float(np.median(both)), float(np.median(alone.sum(1)))
    figures = {
        "one_rank_s": one, "apart": slower, "predicted_s": predicted, "measured_s": seen,
        "predicted_over_measured": predicted / seen, "predicted_gain": 2 * one / predicted,
        "measured_gain": 2 * one / seen, "latency_us": 1e6 * link.latency,
        "bandwidth_MB_per_s": link.bandwidth / 1e6, "exchange_ms": 1e3 * reduction,
        "gradient_kB": first["n_bytes"] / 1e3, "collect_spread": measured.collect[1] / measured.collect[0],
        "update_spread": measured.update[1] / measured.update[0],
    }  # fmt: skip
    return measured, {name: round(value, 3) for name, value in figures.items()}


def on_cards(measured: Measured, update: float | None, collect: float | None) -> Measured:
    """Return the same with other means, where they are given; the spread stays what it was relative to the mean."""

    def scaled(spread: tuple[float, float], mean: float | None) -> tuple[float, float]:
        return spread if mean is None else (mean, spread[1] * mean / spread[0])

    return replace(measured, collect=scaled(measured.collect, collect), update=scaled(measured.update, update))


def table(measured: Measured) -> list[dict[str, Any]]:
    """Return a row for each kind of link and number of ranks."""
    rows = []
    ways = {
        "NVLink in a node": (LINKS["NVLink"], LINKS["100 GbE"]),
        "PCIe in a node": (LINKS["PCIe 4"], LINKS["100 GbE"]),
        "no network at all": (Link(0.0, 1e30), Link(0.0, 1e30)),
    }
    for name, (inside, between) in ways.items():
        rng = np.random.default_rng(1)
        first = sum(iteration(1, measured, 0.0, rng).values())
        for ranks in RANKS:
            parts = iteration(ranks, measured, exchange_over_nodes(ranks, measured.n_bytes, inside, between), rng)
            whole = sum(parts.values())
            row = {"link": name, "ranks": ranks, **{key: round(value, 4) for key, value in parts.items()}}
            gain = ranks * first / whole
            row |= {"gain": round(gain, 2), "efficiency": round(gain / ranks, 3), "lost_to": lost(parts, measured)}
            rows.append(row | {"steps_per_second": round(ranks * measured.steps / whole)})
    return rows


def lost(parts: dict[str, float], measured: Measured) -> str:
    """Return what costs most of the time that one rank alone would not need."""
    own = {"collect": measured.collect[0], "update": measured.updates * measured.update[0], "exchange": 0.0}
    over = {name: seconds - own[name] for name, seconds in parts.items()}
    return max(over, key=lambda name: over[name])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the gain over the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 4.0), layout="constrained")
    left.plot(RANKS, RANKS, "--", color=INK, linewidth=1, label="ideal")
    for colour, name in zip(COLOURS, dict.fromkeys(row["link"] for row in rows), strict=False):
        mine = [row for row in rows if row["link"] == name]
        left.plot(RANKS, [row["gain"] for row in mine], "o-", color=colour, label=name, markersize=4)
        right.plot(RANKS, [row["efficiency"] for row in mine], "o-", color=colour, label=name, markersize=4)
    left.set_yscale("log", base=2)
    left.set_ylabel("gain over one rank, predicted")
    right.set_ylabel("efficiency, predicted")
    right.set_ylim(0, 1.05)
    for panel in (left, right):
        panel.set_xscale("log", base=2)
        panel.set_xlabel(f"ranks ({PER_NODE} to a node)")
        panel.grid(color=GRID)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, check, predict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--gpu-update", type=float, help="seconds of one update on a card")
    parser.add_argument("--gpu-collect", type=float, help="seconds of collecting an iteration's episodes there")
    parser.add_argument("--picture", type=Path)
    arguments, words = parser.parse_known_args()
    asked = {"config": arguments.config, "map": arguments.map, "batch": arguments.batch, "words": words}
    measured, figures = check(run_ranks(measure, {**asked, "iterations": arguments.iterations}, 2))
    sys.stdout.write(json.dumps({"work": f"scaling model, two ranks, {arguments.map}", **figures}) + "\n")
    rows = table(on_cards(measured, arguments.gpu_update, arguments.gpu_collect))
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    if arguments.picture:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
