"""How update time, memory and rollout speed grow with agents, stored episodes, batch and ranks: a table and a picture.

    python benchmarks/growth.py --picture docs/images/growth.png
    python benchmarks/growth.py --only batch ranks

Every point is a process of its own with one thread: stage 3 of `--config` on skirmish, after its first updates. Times
are medians over a few calls, in processor seconds, so that other work on the machine does not count; memory is what the
process holds after them. For several ranks the update is that of the slowest one, and the steps are those of all ranks
together if each has a core to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ranks import ready_stage, run_ranks, stage_config

from omagd.run.memory_budget import resident_bytes
from omagd.run.reporting.profiling import MEGABYTE
from omagd.utils.dist_utils import Dist

MAPS = ("3m", "5m_vs_6m", "8m", "27m_vs_30m")
USUAL = {"map": "5m_vs_6m", "batch": 64, "stored": 200, "ranks": 1}
AXES: dict[str, tuple[Any, ...]] = {
    "map": MAPS,
    "batch": (16, 32, 64, 128, 256),
    "stored": (200, 1000, 3000, 5000),
    "ranks": (1, 2, 4),
}
LABELS = {"map": "agents", "batch": "episodes per update and rank", "stored": "stored episodes", "ranks": "ranks"}
PANELS = (
    ("update_ms", "ms per update"),
    ("rss_mb", "resident MB per rank"),
    ("steps_per_second", "rollout steps/s, all ranks"),
)
INK, GRID, LINE = "#1c2733", "#e3e8ee", "#0f8b8d"


def point(dist: Dist, asked: dict[str, Any]) -> dict[str, float]:
    """Return what one rank measures at one point."""
    words = [f"batch_size={asked['batch']}", "updates_per_iteration=1", f"buffer_size={max(asked['stored'], 300)}"]
    config = stage_config(asked["config"], "skirmish", asked["map"], words)
    with tempfile.TemporaryDirectory() as folder:
        stage = ready_stage(config, dist, folder)
        fill(stage, asked["stored"])
        updates, rollouts = [], []
        for _ in range(asked["calls"]):
            before, started = stage.clock.t_env, time.process_time()
            stage.collect()
            stage.ready()
            stage.advance()
            rollouts.append((stage.clock.t_env - before) / (time.process_time() - started))
            started = time.process_time()
            stage.update()
            updates.append(1e3 * (time.process_time() - started))
        stage.session.close()
    return {
        "agents": stage.session.info.n_agents,
        "update_ms": round(statistics.median(updates), 1),
        "rss_mb": round(resident_bytes() / MEGABYTE, 1),
        "steps_per_second": round(statistics.median(rollouts)),  # the clock counts the steps of all ranks
    }


def fill(stage: Any, stored: int) -> None:
    """Fill the buffer up to `stored` episodes: the same ones again and again."""
    episodes = stage.session.runners["train"].run(stage.mac, explore=None, full_obs=False).episodes
    while len(stage.data.buffer) < stored:
        stage.data.buffer.add(episodes)


def measure(names: list[str], config: str, calls: int) -> list[dict[str, Any]]:
    """Return a row for each point of the named axes; say each at once."""
    rows = []
    for axis in names:
        for value in AXES[axis]:
            asked = {**USUAL, axis: value, "config": config, "calls": calls}
            asked["stored"] = max(asked["stored"], asked["batch"])
            mine = run_ranks(point, asked, asked["ranks"])
            row = {"axis": axis, "value": value, **mine[0]}
            row["update_ms"] = max(rank["update_ms"] for rank in mine)
            row["steps_per_second"] = min(rank["steps_per_second"] for rank in mine)
            rows.append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw a row of panels for each measure, a column for each axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axes_names = list(dict.fromkeys(row["axis"] for row in rows))
    figure, panels = pyplot.subplots(
        len(PANELS), len(axes_names), figsize=(3.4 * len(axes_names), 7.6), squeeze=False, layout="constrained"
    )
    for column, axis in enumerate(axes_names):
        mine = [row for row in rows if row["axis"] == axis]
        x = [row["agents"] if axis == "map" else row["value"] for row in mine]
        for number, (key, label) in enumerate(PANELS):
            panel, y = panels[number][column], [row[key] for row in mine]
            panel.plot(x, y, "o-", color=LINE, linewidth=2, markersize=5)
            panel.set_ylim(0, 1.15 * max(y))
            panel.grid(color=GRID)
            panel.set_axisbelow(True)
            panel.spines[["top", "right"]].set_visible(False)
            panel.set_xticks(x if len(x) < 5 else np.unique(x)[[0, -2, -1]])
            panel.tick_params(colors=INK, labelsize=8)
            if column == 0:
                panel.set_ylabel(label, color=INK)
            if number == len(PANELS) - 1:
                panel.set_xlabel(LABELS[axis], color=INK)
    usual = f"{USUAL['map']}, batch {USUAL['batch']}, {USUAL['stored']} stored episodes, one rank"
    figure.suptitle(f"Growth around: {usual} ({os.cpu_count()} cores, one thread per rank)", color=INK, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qmix")
    parser.add_argument("--only", nargs="+", default=list(AXES), choices=list(AXES))
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--rows", type=Path, help="draw these lines of an earlier output instead of measuring")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    if arguments.rows:
        rows = [json.loads(line) for line in arguments.rows.read_text().splitlines() if line.startswith("{")]
    else:
        rows = measure(arguments.only, arguments.config, arguments.calls)
    if arguments.picture:
        draw(rows, arguments.picture)


if __name__ == "__main__":
    main()
