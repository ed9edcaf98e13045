"""Run a function on W gloo processes of this host and hand back what each returned."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from omagd.utils.dist_utils import Dist, cleanup_distributed, open_rendezvous, setup_distributed

RankFunction = Callable[[int, Dist, Any], Any]


def _work(rank: int, function: RankFunction, world_size: int, port: int, payload: Any, folder: str) -> None:
    torch.set_num_threads(1)
    setup_distributed(rank, world_size, backend="gloo", port=port, timeout_minutes=1, hosted=True)
    try:
        result = function(rank, Dist(rank, world_size), payload)
        torch.save(result, Path(folder) / f"{rank}.pt")
    finally:
        cleanup_distributed()


def run_ranks(function: RankFunction, payload: Any = None, world_size: int = 2) -> list[Any]:
    """Return what `function(rank, dist, payload)` returned on each rank, in rank order.

    `function` must stand at the top level of a test module, `payload` and the results must be picklable. One call costs
    about four seconds: put many checks into one. Errors: a rank's error, with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = open_rendezvous(0)
        args = (function, world_size, rendezvous.port, payload, folder)
        multiprocessing.spawn(_work, args=args, nprocs=world_size, join=True)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
