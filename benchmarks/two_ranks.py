"""Two ranks on two cores against one rank on one: samples/s of the updates, environment steps/s of the whole loop.

    python benchmarks/two_ranks.py --maps 5m_vs_6m 3m

Both are timed in one pair of processes, in turns: rank 0 alone (the other one waits), then both together. A third turn
lets both work without a word to each other: what the machine itself allows. Rank r is bound to core r, with one thread.
The configuration is the same for both: two ranks play twice the battles and learn from twice the episodes in an
iteration. Communication is the share of the wall time in which a rank waits for the other one, medians over turns; most
of it is waiting for a slower rank, since `exchange_ms` is what one exchange of all gradients takes when both are there.

`gain` is by the wall, and falls with whatever else the machine does: see `apart`. `gain_undisturbed` is put together
from processor seconds: call by call those of the slower rank, and `exchange_ms` for every exchange;
`apart_undisturbed` in the same way where both work without a word.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from omagd.config.schema import Config
from omagd.run.cli.main import config_from
from omagd.run.run_folder import RunFolder
from omagd.run.training.build import build_session
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.stages.rl import RLStage
from omagd.utils.dist_utils import Dist, cleanup_distributed, open_rendezvous, setup_distributed
from omagd.utils.logging import Logger, setup_logging

TARGETS = {"updates": 1.85, "whole_loop": 1.75}


def work(dist: Dist, asked: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Time all turns on this rank; return them by what was timed."""
    config = stage_config(asked["config"], asked["env"], asked["map"], asked["words"])
    with tempfile.TemporaryDirectory() as folder:
        alone, together = ready_stage(config, Dist(), folder), ready_stage(config, dist, folder)
        out: dict[str, list[dict[str, float]]] = {"updates": [], "whole_loop": []}
        for _ in range(asked["turns"]):
            for name, call in (("updates", lambda stage: stage.update()), ("whole_loop", iterate)):
                out[name].append(turn(dist, alone, together, call, asked["calls"]))
        gradients = torch.zeros(sum(p.numel() for m in together.learner.modules().values() for p in m.parameters()))
        out["exchange"] = [{"ms": 1e3 * exchange(dist, gradients)} for _ in range(20)]
        for stage in (alone, together):
            stage.session.close()
    return out


def exchange(dist: Dist, gradients: torch.Tensor) -> float:
    """Return the seconds of one reduction when both ranks are there."""
    dist.sum_int(0)
    return timed(lambda: dist.sum(gradients), 1)[0]


def turn(dist: Dist, alone: Any, together: Any, call: Any, calls: int) -> dict[str, Any]:
    """Return seconds by the wall and of the processor, environment steps and waiting of one turn of each kind."""
    dist.sum_int(0)  # begin together
    row: dict[str, Any] = {}
    before = alone.clock.t_env
    if dist.rank == 0:
        row["one"], row["one_busy"] = timed(lambda: call(alone), calls)
        row["one_steps"] = alone.clock.t_env - before
    dist.sum_int(0)
    before, waited, syncs = together.clock.t_env, dist.waits.seconds, dist.waits.calls
    row["two"], row["two_busy"] = timed(lambda: call(together), calls)
    row["two_steps"] = together.clock.t_env - before
    row["waited"], row["syncs"] = dist.waits.seconds - waited, dist.waits.calls - syncs
    dist.sum_int(0)
    row["apart"], row["apart_busy"] = timed(lambda: call(alone), calls)
    dist.sum_int(0)
    return row


def summarise(name: str, ranks: list[dict[str, list[dict[str, float]]]]) -> dict[str, float]:
    """Return the medians over turns."""
    first, second = (rank[name] for rank in ranks)
    middle = statistics.median
    exchange_ms = middle(row["ms"] for row in ranks[0]["exchange"])
    gains, undisturbed, ceilings, quiet, shares = [], [], [], [], []
    for mine, other in zip(first, second, strict=True):
        two, apart = max(mine["two"], other["two"]), max(mine["apart"], other["apart"])
        done = (1, 2) if name == "updates" else (mine["one_steps"], mine["two_steps"])
        gains.append((done[1] / two) / (done[0] / mine["one"]))
        slowest = sum(map(max, mine["two_busy"], other["two_busy"])) + mine["syncs"] * exchange_ms / 1e3
        undisturbed.append((done[1] / slowest) / (done[0] / sum(mine["one_busy"])))
        ceilings.append(2 * mine["one"] / apart)
        quiet.append(2 * sum(mine["one_busy"]) / sum(map(max, mine["apart_busy"], other["apart_busy"])))
        shares.append((mine["waited"] / mine["two"] + other["waited"] / other["two"]) / 2)
    figures = {
        "gain": middle(gains),
        "gain_undisturbed": middle(undisturbed),
        "exchange_ms": exchange_ms,
        "apart": middle(ceilings),
        "apart_undisturbed": middle(quiet),
        "communication_share": middle(shares),
    }
    if name == "whole_loop":
        figures["steps_per_second_of_one"] = middle(row["one_steps"] / row["one"] for row in first)
        figures["steps_per_second_of_two"] = middle(row["two_steps"] / row["two"] for row in first)
    return {key: round(value, 3) for key, value in figures.items()}


def run_ranks(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what `work` returned on each of two ranks; rank r has core r to itself."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = open_rendezvous(0)
        multiprocessing.spawn(_rank, args=(asked, rendezvous.port, folder), nprocs=2, join=True)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _rank(rank: int, asked: dict[str, Any], port: int, folder: str) -> None:
    bind(rank)
    setup_distributed(rank, 2, backend="gloo", port=port, timeout_minutes=5, hosted=True)
    try:
        torch.save(work(Dist(rank, 2), asked), Path(folder) / f"{rank}.pt")
    finally:
        cleanup_distributed()


def bind(rank: int) -> None:
    """Keep this process on one core, with one thread."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def stage_config(config: str, env: str, map_name: str, words: list[str]) -> Config:
    """Return a configuration for a stage that is timed."""
    given = [f"env_args.map_name={map_name}", "use_cuda=False", "torch_threads=1", "t_max=100000000", *words]
    return config_from([f"--config={config}", f"--env-config={env}", "with", *given])


def ready_stage(config: Config, dist: Dist, folder: str) -> RLStage:
    """Return stage 3 of this rank after its first updates, with a buffer that gives batches, ready to be timed."""
    path = RunFolder.create(folder, f"rank{dist.rank}of{dist.world_size}")
    session = build_session(config, dist, path, Logger(setup_logging(None, rank=1), minimal=True))
    stage = RLStage(session, PretrainedModules())
    stage.session.profiler.begin(stage.name)
    stage.prepare()
    learned = 0
    while learned < 2:
        learned += iterate(stage)
    return stage


def iterate(stage: RLStage) -> bool:
    """Run one iteration; return whether it had an update."""
    phases = stage.session.profiler.phases
    with phases("collect"):
        stage.collect()
    learned = stage.ready()
    if learned:
        with phases("update"):
            stage.update()
    stage.advance()
    return learned


def timed(work: Callable[[], object], times: int) -> tuple[float, list[float]]:
    """Return the seconds that `times` calls take by the wall, and those of the processor, call by call."""
    started, busy = time.perf_counter(), []
    for _ in range(times):
        before = time.process_time()
        work()
        busy.append(time.process_time() - before)
    return time.perf_counter() - started, busy


def main() -> None:
    """Measure every map and print a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--maps", nargs="+", default=["5m_vs_6m", "3m"])
    parser.add_argument("--batch", type=int, default=128, help="episodes of an update, per rank")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2, help="iterations of a turn")
    arguments, words = parser.parse_known_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two cores are needed")
    for name in arguments.maps:
        asked = {"config": arguments.config, "env": arguments.env, "map": name, "turns": arguments.turns}
        asked |= {"calls": arguments.calls, "words": [f"batch_size={arguments.batch}", *words]}
        ranks = run_ranks(asked)
        for what, target in TARGETS.items():
            line = {"work": f"two ranks, {what}, {name}", **summarise(what, ranks), "target": target}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
