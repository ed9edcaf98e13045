"""Runs for benchmarks: one process each, and what stands in their `metrics.jsonl` and `summary.json`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from omagd.run.run_folder import RunFolder, read_entry, read_records

MAIN = Path(__file__).resolve().parents[1] / "src" / "main.py"


class RunError(RuntimeError):
    """A run that ended with another exit code than 0."""


def play(token: str, results: str, config: str, env: str, words: list[str]) -> Path:
    """Play one run to its end and return its folder. Errors: RunError with the end of what it said."""
    where = [f"local_results_path={results}", f"unique_token={token}"]
    command = [sys.executable, str(MAIN), f"--config={config}", f"--env-config={env}", "-u", "with", *where, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(f"{token}: exit code {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")
    return max(Path(results).glob(f"{token}*"), key=lambda path: path.stat().st_mtime)


def summary(folder: Path) -> dict[str, Any]:
    """Return a run's `summary.json`."""
    return read_entry(RunFolder(folder).summary_json)


def tests(folder: Path) -> list[tuple[float, float, float]]:
    """Return (t_env, seconds since the stage began, win rate) of every test of a run."""
    name = "test_battle_won_mean"
    rows = read_records(RunFolder(folder).metrics_jsonl)
    return [(row["t_env"], row["wall_seconds"], row[name]) for row in rows if name in row]


def area(t_env: list[float], won: list[float], t_max: float) -> float:
    """Return the area under the win rate over environment steps up to `t_max`, divided by them: 0 to 1."""
    grid = np.linspace(0, t_max, 201)
    return float(np.trapezoid(np.interp(grid, t_env, won), grid) / t_max)
