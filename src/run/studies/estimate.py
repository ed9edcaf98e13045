"""`study --dry-run`: what a study would run, and how long, from a short probe of each arm in each environment."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omagd.config.schema import Config
from omagd.run.analysis.runs import read_records
from omagd.run.studies.executors import Job
from omagd.run.studies.processes import finish, last_error, start_run
from omagd.run.studies.spec import Study, config_of
from omagd.run.studies.state import Record
from omagd.run.studies.study import examine, not_comparable
from omagd.utils.errors import visible
from omagd.utils.progress import duration
from omagd.utils.run_folder import RunFolder

LONGEST_PROBES = 10
"""A probe that has not begun stage 3 is ended after so many times its length."""

PROBE_EPOCHS = 2
HOUR = 3600.0
LOOK_SECONDS = 0.2


@dataclass
class _Stage:
    """What a probe's metrics say about a stage, in seconds. units: steps or epochs. tests: how many."""

    units: float = 0.0
    fixed: float = 0.0
    testing: float = 0.0
    other: float = 0.0
    tests: int = 0


def estimate(study: Study, seconds: float) -> str:
    """Return a table of the runs of a study and of the time that they would take; nothing is left on the disk.

    Args:
        seconds: how long each probe trains. Errors: UserError where a run would be rejected.
    """
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in study.jobs:
        groups.setdefault((job.arm, job.env, job.map), []).append(job)
    examined = examine(study.jobs, study.executor, study.source)
    records = [Record(job, card=examined[job.name]["card"]) for job in study.jobs]
    rows, total, longest, unknown = [["arm", "environment", "runs", "one run", "core-hours"]], 0.0, 0.0, 0
    cores = int(getattr(study.settings, "cores", 1))
    for (arm, env, name), jobs in groups.items():
        _say(f"probe {len(rows)} of {len(groups)}: {arm} {name}")
        took, problem = probe(jobs[0], seconds, cores)
        if took is None:
            unknown += 1
            rows.append([arm, f"{env} {name}".strip(), str(len(jobs)), f"unknown: {problem}", "-"])
            continue
        hours = took * len(jobs) * cores / HOUR
        total, longest = total + hours, max(longest, took)
        rows.append([arm, f"{env} {name}".strip(), str(len(jobs)), duration(took), f"{hours:.2f}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "─" * max(map(len, lines)))
    lines.append(
        f"{len(study.jobs)} runs, about {total:.2f} core-hours" + (", without those unknown" if unknown else "")
    )
    settings = ", ".join(f"{name}={value}" for name, value in study.settings.model_dump(exclude_none=True).items())
    lines.append(f"executor {study.executor}: {settings}")
    lines += [f"warning: {line}" for line in not_comparable(records)]
    return "\n".join(lines) + "\n"


def probe(job: Job, seconds: float, cores: int) -> tuple[float | None, str]:
    """Return the seconds that a run would take, None where a probe cannot tell, and why."""
    config = config_of(job)
    keys = {
        "runner_log_interval": 1, "learner_log_interval": 1, "log_interval": 1, "use_wandb": False,
        "use_tensorboard": False, "save_model": False, "enable_checkpointing": False,
    }  # fmt: skip
    if config.use_graph_reconstruction:
        keys["graph_pretrain_epochs"] = min(PROBE_EPOCHS, config.graph_pretrain_epochs)
    with tempfile.TemporaryDirectory(prefix="omagd_probe_") as place:
        own = [f"{key}={value}" for key, value in keys.items()]
        own += [f"local_results_path={place}", "unique_token=probe", "auto_resume=False"]
        log, folder = Path(place) / "probe.log", RunFolder(Path(place) / "probe")
        command = [sys.executable, "-m", "omagd", "--unobserved", *job.words, *own]
        process = start_run(command, log, threads=cores)
        try:
            until, began = time.monotonic() + LONGEST_PROBES * seconds, None
            while process.poll() is None and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
                if began is None and any(row.get("stage") == "stage3" for row in _rows(folder.metrics_jsonl)):
                    began, until = time.monotonic(), time.monotonic() + seconds
        finally:
            code = process.poll()
            finish(process)
        rows = _rows(folder.metrics_jsonl)
        if code not in {None, 0}:
            return None, last_error(log, code)
    stages = _stages(rows)
    if not stages:
        return None, f"no result within {LONGEST_PROBES * seconds:.0f} s; give a longer --probe-seconds"
    return sum(_whole(name, stage, config) for name, stage in stages.items()), ""


def _rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(metrics))
    except OSError:
        return []


def _stages(rows: Iterable[dict[str, Any]]) -> dict[str, _Stage]:
    found: dict[str, _Stage] = {}
    for row in rows:
        stage = found.setdefault(str(row.get("stage")), _Stage())
        stage.units = max(stage.units, float(row.get("t_env", row.get("epoch", 0)) or 0))
        stage.tests += "test_return_mean" in row
        for name, seconds in row.items():
            if name.startswith("time/") and isinstance(seconds, int | float):
                part = name.removeprefix("time/")
                if part == "test":
                    stage.testing += seconds
                elif part == "collect" and "t_env" not in row:  # the episodes of stages 1 and 2 are collected once
                    stage.fixed += seconds
                else:
                    stage.other += seconds
    return {name: stage for name, stage in found.items() if stage.units > 0}


def _whole(name: str, stage: _Stage, config: Config) -> float:
    """Return the seconds of a whole stage."""
    if name != "stage3":
        return stage.fixed + stage.other / stage.units * config.graph_pretrain_epochs
    tests = stage.testing / max(1, stage.tests) * (config.t_max / max(1, config.test_interval))
    return stage.other / stage.units * config.t_max + tests


def _say(text: str) -> None:
    sys.stderr.write(visible(text) + "\n")
    sys.stderr.flush()
