"""`--dry-run` of studies and sweeps: what they would run, and how long, from short probes."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omagd.config.schema import Config
from omagd.lab.studies.executors import Job
from omagd.lab.studies.local import finish, last_error, start_run
from omagd.lab.studies.spec import Study, config_of
from omagd.lab.studies.state import Record
from omagd.lab.studies.study import examine, not_comparable
from omagd.lab.studies.sweep import check_space
from omagd.lab.studies.sweep_spec import Sweep
from omagd.run.reporting.report import aligned
from omagd.utils.errors import visible
from omagd.utils.logging import duration
from omagd.utils.run_folder import RunFolder, read_records
from omagd.utils.storage import read_entry

LONGEST_PROBES = 10
"""A probe that has not begun stage 3 is ended after so many times its length."""

PROBE_EPOCHS = 2
HOUR = 3600.0
LOOK_SECONDS = 0.2
ONCE = ("prepare", "collect", "replay", "finish")
"""Phases of stages 1 and 2 that do not depend on the number of epochs."""

Stages = dict[str, float]
"""Seconds by the name of the stage."""


Group = tuple[str, str, Job, int]
"""Runs that take equally long: two cells of the table, the job that is probed, how many runs."""


def estimate(study: Study, seconds: float) -> str:
    """Return a table of the runs of a study and of the time that they would take; nothing is left on the disk.

    Args:
        seconds: how long each probe trains. Errors: UserError where a run would be rejected.
    """
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in study.jobs:
        groups.setdefault((job.arm, f"{job.env} {job.map}".strip()), []).append(job)
    examined = examine(study.jobs, study.executor, study.source)
    records = [Record(job, card=examined[job.name]["card"]) for job in study.jobs]
    table = _table("arm", [(*about, jobs[0], len(jobs)) for about, jobs in groups.items()], seconds, study.settings)
    return "\n".join([table, *(f"warning: {line}" for line in not_comparable(records))]) + "\n"


def estimate_sweep(sweep: Sweep, seconds: float) -> str:
    """Return a table like `estimate`, as if no trial were pruned.

    Half of the runs have the lowest value or first choice of each key, half of them the highest or last one.
    """
    check_space(sweep)
    runs = sweep.file.trials * len(sweep.seeds)
    place = f"{sweep.config.env} {sweep.config.map_name}".strip()
    given: list[Group] = []
    for title, end, part in (("lowest values", 0, runs - runs // 2), ("highest values", -1, runs // 2)):
        job = sweep.jobs(0, {key: sweep.ends(key)[end] for key in sweep.space})[0]
        given += [(title, place, job, part)] if part else []
    return _table("space", given, seconds, sweep.settings) + "\n"


def _table(head: str, groups: Sequence[Group], seconds: float, settings: Any) -> str:
    """Probe each group; return a table, and their sum."""
    rows, whole = [[head, "environment", "runs", "one run", "core-hours"]], 0.0
    cores = int(getattr(settings, "cores", 1))
    for number, (title, place, job, runs) in enumerate(groups, 1):
        sys.stderr.write(visible(f"probe {number} of {len(groups)}: {title} {place}") + "\n")
        stages, problem = probe(job, seconds, cores)
        hours = 0.0 if stages is None else sum(stages.values()) * runs * cores / HOUR
        cells = [f"unknown: {problem}", "-"] if stages is None else [duration(sum(stages.values())), f"{hours:.2f}"]
        rows.append([title, place, str(runs), *cells])
        whole += hours
    runs = sum(group[3] for group in groups)
    unknown = ", without those unknown" if any(row[-1] == "-" for row in rows) else ""
    return "\n".join([*aligned(rows), f"{runs} runs, about {whole:.2f} core-hours{unknown}"])


def probe(job: Job, seconds: float, cores: int) -> tuple[Stages | None, str]:
    """Return the seconds that a run would take by stage, None where a probe cannot tell, and why."""
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
        rows, ended = _rows(folder.metrics_jsonl), read_entry(folder.summary_json).get("stages")
        if code not in {None, 0}:
            return None, last_error(log, code)
    stages = _stages(rows, ended, config)
    if not stages:
        return None, f"no result within {LONGEST_PROBES * seconds:.0f} s; give a longer --probe-seconds"
    return stages, ""


def _rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(metrics))
    except OSError:
        return []


def _stages(rows: Iterable[dict[str, Any]], ended: Any, config: Config) -> Stages:
    """Return the seconds of each whole stage, from the records of a probe and the stages that it has ended.

    Records hold shares of the time since the one before (docs/output.md), the summary the seconds of ended stages.
    """
    found: Stages = {}
    for name, about in ended.items() if isinstance(ended, dict) else ():
        if name in {"stage1", "stage2"} and "phases" in about:
            epochs, interval = about["clock"]["epoch"], config.graph_pretrain_eval_interval
            once = sum(about["phases"].get(part, 0.0) for part in ONCE)
            testing = about["phases"].get("test", 0.0)
            per_epoch = (about["phases"]["wall"] - once - testing) / max(1, epochs)
            tested = testing / max(1, -(-epochs // interval)) * -(-config.graph_pretrain_epochs // interval)
            found[name] = once + per_epoch * config.graph_pretrain_epochs + tested
            if epochs < PROBE_EPOCHS:  # it ended by itself
                found[name] = about["phases"]["wall"]
    steps = once = testing = other = before = 0.0
    tests = 0
    for row in rows:
        if row.get("stage") != "stage3" or "wall_seconds" not in row:
            continue
        passed, before = row["wall_seconds"] - before, row["wall_seconds"]
        parts = {name: passed * share for name, share in row.items() if name.startswith("time/")}
        once, testing = once + parts.pop("time/prepare", 0.0), testing + parts.pop("time/test", 0.0)
        steps, other = max(steps, float(row["t_env"])), other + sum(parts.values())
        tests += "test_return_mean" in row
    if steps:
        tested = testing / max(1, tests) * (config.t_max / max(1, config.test_interval))
        found["stage3"] = once + other / steps * config.t_max + tested
    return found
