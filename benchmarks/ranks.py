"""Ranks for benchmarks: processes of this host, each bound to a core of its own, with whole stages to time in them."""

from __future__ import annotations

import os
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

RankFunction = Callable[[Dist, Any], Any]


def run_ranks(function: RankFunction, payload: Any, world_size: int, backend: str = "gloo") -> list[Any]:
    """Return what `function(dist, payload)` returned on each rank, in rank order; rank r has core r to itself."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = open_rendezvous(0)
        args = (function, payload, world_size, rendezvous.port, backend, folder)
        multiprocessing.spawn(_work, args=args, nprocs=world_size, join=True)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _work(
    rank: int, function: RankFunction, payload: Any, world_size: int, port: int, backend: str, folder: str
) -> None:
    bind(rank)
    setup_distributed(rank, world_size, backend=backend, port=port, timeout_minutes=5, hosted=True)
    try:
        torch.save(function(Dist(rank, world_size), payload), Path(folder) / f"{rank}.pt")
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
