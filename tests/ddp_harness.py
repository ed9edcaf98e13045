"""Run a function on W gloo processes of this host and hand back what each returned."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from omagd.run.launch.processes import MODULES
from omagd.utils.dist_utils import Dist, cleanup_distributed, open_rendezvous, setup_distributed

RankFunction = Callable[[int, Dist, Any], Any]
Phases = Sequence[tuple[int, Any]]


# One import of torch serves all ranks of a test session; each would spend seconds on its own.
HOW = "forkserver" if sys.platform == "linux" else "spawn"
forkserver.set_forkserver_preload([*MODULES])


def _work(
    rank: int, function: RankFunction, phases: Phases, port: int, folder: str, environment: dict[str, str]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment)  # the server has that of its own start
    for number, (world_size, payload) in enumerate(phases):
        if rank >= world_size:
            continue
        setup_distributed(rank, world_size, "gloo", port, timeout_minutes=3, hosted=True, attempt=number)
        try:
            result = function(rank, Dist(rank, world_size), payload)
            torch.save(result, Path(folder) / f"{number}_{rank}.pt")
        finally:
            cleanup_distributed()


def run_phases(function: RankFunction, phases: Phases) -> list[list[Any]]:
    """Return what `function(rank, dist, payload)` returned for each (world size, payload), in rank order.

    One phase follows another in the same processes, each with a process group of its own. `function` must stand at the
    top level of a test module, payloads and results must be picklable. One call costs about a second: put many
    checks into one. Errors: a rank's error, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous, most = open_rendezvous(0), max(world_size for world_size, _ in phases)
        given = function, phases, rendezvous.port, folder, dict(os.environ)
        multiprocessing.start_processes(_work, args=given, nprocs=most, join=True, start_method=HOW)
        return [
            [torch.load(Path(folder) / f"{number}_{rank}.pt", weights_only=False) for rank in range(world_size)]
            for number, (world_size, _) in enumerate(phases)
        ]


def run_ranks(function: RankFunction, payload: Any = None, world_size: int = 2) -> list[Any]:
    """Return the results of the only phase: see `run_phases`."""
    return run_phases(function, [(world_size, payload)])[0]
