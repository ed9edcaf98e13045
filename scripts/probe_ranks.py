#!/usr/bin/env python3
"""What a rank finds of the others: who they are, whether sums over them are right, what a sum costs. Run by torchrun.

Rank 0 prints one line for each fact; the exit code is 0 where all of them are right.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time

import torch

from omagd.run.cli.main import config_from
from omagd.run.launchers import make_plan
from omagd.utils.dist_utils import Dist, cleanup_distributed, setup_distributed

SMALL, LARGE = 1, 4 << 20
"""Numbers in the sums that tell latency and bandwidth."""


def seconds_of_sum(dist: Dist, numbers: int, repeats: int) -> float:
    """Return the median time of one sum of `numbers` float32 over all ranks."""
    values = torch.ones(numbers, device=dist.device)
    times = []
    for _ in range(repeats):
        dist.all(True)
        started = time.perf_counter()
        float(dist.sum(values)[0])
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def look(dist: Dist, backend: str) -> list[tuple[bool, str]]:
    """Return (right?, fact) for each thing looked at, the same on all ranks."""
    world = dist.world_size
    seen = dist.gather((dist.rank, socket.gethostname(), str(dist.device), torch.__version__))
    versions = sorted({version for *_, version in seen})
    total = dist.sum(torch.arange(1000, dtype=torch.float64, device=dist.device) * (dist.rank + 1))
    right = torch.equal(total.cpu(), torch.arange(1000, dtype=torch.float64) * (world * (world + 1) // 2))
    latency = seconds_of_sum(dist, SMALL, 50)
    bandwidth = 4 * LARGE * 2 * (world - 1) / world / seconds_of_sum(dist, LARGE, 8)
    return [
        (
            [rank for rank, *_ in seen] == list(range(world)),
            f"{world} ranks ({backend}): {', '.join(f'{rank} on {host} {device}' for rank, host, device, _ in seen)}",
        ),
        (len(versions) == 1, f"torch {' and '.join(versions)}"),
        (dist.all(right), "sums over the ranks are right on every rank"),
        (True, f"a sum of one number: {latency * 1e3:.2f} ms"),
        (True, f"a sum of {LARGE * 4 >> 20} MiB: {bandwidth / 1e6:.0f} MB/s each way"),
    ]


def main() -> int:
    """Join the group that torchrun has started, look, say."""
    torch.set_num_threads(1)
    plan = make_plan(config_from(["--config=qmix", "--env-config=skirmish", "with", "run=ddp", *sys.argv[1:]]))
    rank, device = int(os.environ["RANK"]), plan.device(int(os.environ["LOCAL_RANK"]))
    if plan.cuda:
        torch.cuda.set_device(device)
    setup_distributed(rank, plan.world_size, plan.backend, int(os.environ["MASTER_PORT"]), timeout_minutes=1)
    try:
        found = look(Dist(rank, plan.world_size, device), plan.backend)
    finally:
        cleanup_distributed()
    if rank == 0:
        for right, fact in found:
            sys.stdout.write(f"{'ok   ' if right else 'WRONG'} {fact}\n")
    return 0 if all(right for right, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
