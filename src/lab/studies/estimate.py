"""`--dry-run` of studies and sweeps: what they would run, and how long, from short probes."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from omagd.config.schema import Config
from omagd.lab.analysis.runs import read_records
from omagd.lab.studies.executors import Job
from omagd.lab.studies.processes import finish, last_error, start_run
from omagd.lab.studies.spec import Study, config_of
from omagd.lab.studies.state import Record
from omagd.lab.studies.study import examine, not_comparable
from omagd.lab.studies.sweep import check_space
from omagd.lab.studies.sweep_spec import Sweep
from omagd.utils.errors import visible
from omagd.utils.logging import duration
from omagd.utils.run_folder import RunFolder
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


@dataclass(frozen=True)
class _Group:
    """Runs that take equally long. title: cells of the table. job: the one that is probed. runs: how many."""

    title: tuple[str, str]
    job: Job
    runs: int


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
    given = [_Group((arm, f"{env} {name}".strip()), jobs[0], len(jobs)) for (arm, env, name), jobs in groups.items()]
    lines, took = _probed(given, "arm", seconds, study.settings)
    hours = sum(_hours(group, stages, study.settings) for group, stages in zip(given, took, strict=True))
    lines.append(f"{len(study.jobs)} runs, about {hours:.2f} core-hours{_but(took)}")
    lines.append(_settings(study.executor, study.settings))
    lines += [f"warning: {line}" for line in not_comparable(records)]
    return "\n".join(lines) + "\n"


def estimate_sweep(sweep: Sweep, seconds: float) -> str:
    """Return a table like `estimate`: half of the runs have the lowest value of each key, half of them the highest one.

    Without pruning all runs are whole. At best it ends all trials that it may end, as soon as it may.
    """
    check_space(sweep)
    runs, seeds = sweep.file.trials * len(sweep.seeds), len(sweep.seeds)
    place = f"{sweep.config.env} {sweep.config.map_name}".strip()
    given = []
    for number, (title, part) in enumerate((("lowest", runs - runs // 2), ("highest", runs // 2))):
        values = {
            p.key: p.choices[-number] if p.choices else p.number(p.high if number else p.low) for p in sweep.space
        }
        if part:
            given.append(_Group((f"{title} values", place), sweep.jobs(number, values)[0], part))
    lines, took = _probed(given, "space", seconds, sweep.settings)
    whole = sum(_hours(group, stages, sweep.settings) for group, stages in zip(given, took, strict=True))
    count = f"{sweep.file.trials} trials x {seeds} seeds = {runs} runs"
    lines.append(f"{count}, about {whole:.2f} core-hours without pruning{_but(took)}")
    lines.append(_with_pruning(given, took, sweep, whole))
    lines.append(_settings(sweep.executor, sweep.settings))
    return "\n".join(lines) + "\n"


def _with_pruning(groups: Sequence[_Group], took: Sequence[Stages | None], sweep: Sweep, whole: float) -> str:
    """Return a line with the least core-hours, where pruning ends all trials as soon as it may."""
    rule = sweep.pruning
    if rule is None or sweep.file.trials <= rule.after_trials:
        return "pruning ends no trial: it is off, or there are too few of them"
    ended = [None if stages is None else _pruned(stages, sweep) for stages in took]
    least = sum(_hours(group, stages, sweep.settings) for group, stages in zip(groups, ended, strict=True))
    kept = rule.after_trials / sweep.file.trials
    return (
        f"with pruning between {kept * whole + (1 - kept) * least:.2f} core-hours (all trials after the first"
        f" {rule.after_trials} end at test {rule.after_tests}) and {whole:.2f} (none does)"
    )


def _pruned(stages: Stages, sweep: Sweep) -> Stages:
    """Return the seconds of the stages of a run that is ended as soon as pruning may end it."""
    assert sweep.pruning is not None
    config, before = sweep.config, {name: took for name, took in stages.items() if name < sweep.file.stage}
    whole = float(config.graph_pretrain_epochs)
    if sweep.file.stage == "stage3":
        whole = config.t_max / max(1, config.test_interval)
    part = min(1.0, sweep.pruning.after_tests / max(1.0, whole))
    return {**before, sweep.file.stage: part * stages.get(sweep.file.stage, 0.0)}


def _probed(
    groups: Sequence[_Group], head: str, seconds: float, settings: Any
) -> tuple[list[str], list[Stages | None]]:
    """Probe each group; return the lines of the table, and the seconds of a run by stage, None where unknown."""
    rows, found = [[head, "environment", "runs", "one run", "core-hours"]], []
    for number, group in enumerate(groups, 1):
        _say(f"probe {number} of {len(groups)}: {' '.join(group.title)}")
        stages, problem = probe(group.job, seconds, _cores(settings))
        found.append(stages)
        cells = [f"unknown: {problem}", "-"]
        if stages is not None:
            cells = [duration(sum(stages.values())), f"{_hours(group, stages, settings):.2f}"]
        rows.append([*group.title, str(group.runs), *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "─" * max(map(len, lines)))
    return lines, found


def _cores(settings: Any) -> int:
    return int(getattr(settings, "cores", 1))


def _hours(group: _Group, stages: Stages | None, settings: Any) -> float:
    """Return the core-hours of a group, 0 where they are unknown."""
    return 0.0 if stages is None else sum(stages.values()) * group.runs * _cores(settings) / HOUR


def _but(took: Sequence[Stages | None]) -> str:
    return ", without those unknown" if None in took else ""


def _settings(executor: str, settings: BaseModel) -> str:
    given = settings.model_dump(exclude_none=True).items()
    return f"executor {executor}: {', '.join(f'{name}={value}' for name, value in given)}"


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


def _say(text: str) -> None:
    sys.stderr.write(visible(text) + "\n")
    sys.stderr.flush()
