"""What a checkpoint costs training: how long the loop stands still, and how long the thread beside it writes.

    python benchmarks/checkpoint_stall.py [--config qmix] [--map 5m_vs_6m] [--stored 200 1000 5000] [--saves 9]

Stage 3 of one rank with a full replay buffer: an iteration of new episodes, then a save, again and again. `stall_ms` is
the median time for which the loop stands still at a save; `written_ms` the time until the checkpoint is complete, if
nothing else is done meanwhile; `busy_ms` the processor time that it takes. `share_percent` is the loop's stall at the
default `checkpoint_interval`. The first save of a run, which writes all episodes at once, is told apart as `first_`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from growth import fill
from ranks import bind, iterate, ready_stage, stage_config

from omagd.utils.dist_utils import Dist


def measure(config: str, map_name: str, stored: int, saves: int) -> dict[str, Any]:
    """Return the times of the saves of a stage that holds `stored` episodes."""
    given = stage_config(config, "skirmish", map_name, [f"buffer_size={stored}", "batch_size=32"])
    stalls, written, busy = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        stage = ready_stage(given, Dist(), folder)
        fill(stage, stored)
        checkpointer = stage.session.checkpointer
        for _ in range(saves + 1):
            iterate(stage)
            checkpointer.iteration += 1
            before, started = time.process_time(), time.perf_counter()
            checkpointer._begin(stage, stage.buffers())
            stalls.append(1e3 * (time.perf_counter() - started))
            checkpointer.finish()
            written.append(1e3 * (time.perf_counter() - started))
            busy.append(1e3 * (time.process_time() - before))
        found = max((Path(path) for path in stage.session.folder.checkpoints.glob("0*")), key=lambda path: path.name)
        size = sum(entry["bytes"] for entry in json.loads((found / "manifest.json").read_text())["files"].values())
        stage.session.close()
    stall = statistics.median(stalls[1:])
    return {
        "config": config,
        "map": map_name,
        "stored": stored,
        "replay_mb": round(stage.data.buffer.nbytes / 1e6, 1),
        "checkpoint_mb": round(size / 1e6, 1),
        "stall_ms": round(stall, 2),
        "written_ms": round(statistics.median(written[1:]), 1),
        "busy_ms": round(statistics.median(busy[1:]), 1),
        "first_stall_ms": round(stalls[0], 2),
        "first_written_ms": round(written[0], 1),
        "share_percent": round(stall / 1e3 / given.checkpoint_interval * 100, 5) if given.checkpoint_interval else None,
    }


def main() -> None:
    """Measure and print a line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--stored", nargs="+", type=int, default=[200, 1000, 5000])
    parser.add_argument("--saves", type=int, default=9)
    arguments = parser.parse_args()
    bind(0)
    for stored in arguments.stored:
        row = measure(arguments.config, arguments.map, stored, arguments.saves)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
