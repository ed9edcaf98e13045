"""Run a function on W gloo processes of this host and hand back what each returned."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from command_harness import PYTHON, Started
from command_server import RANKS

from omagd.utils.dist_utils import Dist, cleanup_distributed, open_rendezvous, setup_distributed

RankFunction = Callable[[int, Dist, Any], Any]
Phases = Sequence[tuple[int, Any]]


def _work(rank: int, function: RankFunction, phases: Phases, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    for number, (world_size, payload) in enumerate(phases):
        if rank >= world_size:
            continue
        setup_distributed(rank, world_size, "gloo", port, timeout_minutes=3, hosted=True, attempt=number)
        try:
            result = function(rank, Dist(rank, world_size), payload)
            torch.save(result, folder / f"{number}_{rank}.pt")
        finally:
            cleanup_distributed()


def run_phases(function: RankFunction, phases: Phases) -> list[list[Any]]:
    """Return what `function(rank, dist, payload)` returned for each (world size, payload), in rank order.

    One phase follows another in the same processes, each with a process group of its own; the module of `function` is
    imported once. It must stand at the top level of a test module, payloads and results must be picklable. One call
    costs about a second: put many checks into one. Errors: a rank's error, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save((function, phases), Path(folder) / "asked.pt")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        ended = Started([PYTHON, RANKS, folder], Path.cwd(), PYTHONPATH=path).wait(600)
        assert ended.code == 0, ended.text
        return [
            [torch.load(Path(folder) / f"{number}_{rank}.pt", weights_only=False) for rank in range(world_size)]
            for number, (world_size, _) in enumerate(phases)
        ]


def run_ranks(function: RankFunction, payload: Any = None, world_size: int = 2) -> list[Any]:
    """Return the results of the only phase: see `run_phases`."""
    return run_phases(function, [(world_size, payload)])[0]


def main(folder: Path) -> None:
    function, phases = torch.load(folder / "asked.pt", weights_only=False)
    rendezvous, most = open_rendezvous(0), max(world_size for world_size, _ in phases)
    torch.multiprocessing.start_processes(_work, (function, phases, rendezvous.port, folder), most, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
