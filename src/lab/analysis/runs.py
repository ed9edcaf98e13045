"""Read the folders of many runs."""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from omagd.config.env_info import given_map, map_label
from omagd.config.schema import COMPONENT_ARGS
from omagd.run.reporting.card import COVERED, METHOD, Card, flattened, is_card, recorded_of
from omagd.run.run_folder import RUN_FILE, STUDY_FILE, STUDY_RUNS, RunFolder, json_lines, read_entry, read_records
from omagd.utils.errors import UserError, print_out, readable
from omagd.utils.storage import LONGEST_FILE, read_json, replace_file

LOG = logging.getLogger("omagd")
SACRED_FILES = ("metrics.json", "info.json")
NO_SETTING = frozenset({"name", "seed", "env", "unique_token", "local_results_path", "label", "repeat_id"})
DEEPEST = 5
"""Levels of folders below a path in which such folders are looked for, as in results/sacred/qmix/3m/1."""
Curve = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Environment steps, seconds since the stage began, values; one entry for each test."""


def output_option(parser: argparse.ArgumentParser, file: str, default: str) -> None:
    """Add the option that names what a command writes. file, default: which file, and where it lies without it."""
    where = "in the folder of a run or study, beside a file, or beside the first of several"
    words = f"{file}; default: {default} {where}"
    parser.add_argument("-o", "--output", "--out", default="", metavar="FILE", help=words)


def output_path(given: str, sources: Sequence[str], default: str) -> Path:
    """Return the file that a command about `sources` writes: as given, else `default` with them."""
    first = Path(os.path.expanduser(given or sources[0]))
    if given:
        return first
    if len(sources) > 1:
        return first.parent / default
    return first.with_name(f"{first.stem}_{default}") if first.is_file() else first / default


def write_output(path: Path, content: bytes, command: str) -> None:
    """Write a file and print its path. Errors: UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as problem:
        raise UserError(f"{command}: {path} cannot be written ({problem.strerror}). Give another --output") from problem
    print_out(f"{path}\n")


@dataclass(frozen=True)
class Run:
    """One run, read from its folder.

    Attributes:
        config: every key, empty if it cannot be read. card, summary: empty if they cannot be read.
        finished: whether it has ended and will not be resumed. arm: its name in a study, else "".
        given: its records, if they do not come from `metrics.jsonl`. study: the name of its study, else "".
        foreign: another program's; of its configuration only name, environment, map and seed are read.
    """

    folder: Path
    config: dict[str, Any]
    card: Card
    summary: dict[str, Any]
    finished: bool = False
    arm: str = ""
    given: tuple[dict[str, Any], ...] | None = None
    study: str = ""
    foreign: bool = False

    @property
    def label(self) -> str:
        """The name of the run's folder."""
        return readable(self.folder.name)

    @property
    def name(self) -> str:
        """The name of its configuration."""
        return str(self._fact("name"))

    @property
    def env(self) -> str:
        """The environment."""
        return str(self._fact("env"))

    @property
    def map_name(self) -> str:
        """The map, or the name of the set of maps."""
        args = self.config.get("env_args")
        args = args if isinstance(args, dict) else {}
        return readable(map_label(self.summary.get("map_name") or given_map(self.env, args)))

    @property
    def place(self) -> str:
        """Environment and map, as results are labelled."""
        return f"{self.env} {self.map_name}".strip()

    @property
    def maps(self) -> dict[str, bool]:
        """The maps of a set of maps, each with whether it is held out; empty where the run plays one map."""
        compared = self.card.get("compared", {})
        trained, held_out = (str(compared.get(key) or "").split() for key in ("maps", "held_out_maps"))
        return dict.fromkeys(trained, False) | dict.fromkeys(held_out, True)

    @property
    def seed(self) -> int | None:
        """The seed, None if it is not known."""
        seed = (self.config or self.summary).get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def kind(self) -> str:
        """`training` or `evaluation`."""
        found = "evaluation" if self.config.get("evaluate") else "training"
        return str(self.summary.get("kind") or self.card.get("kind") or found)

    @property
    def state(self) -> str:
        """How the run ended, `unfinished` if it has not."""
        return readable(str(self.summary.get("exit_state") or ("completed" if self.finished else "unfinished")))

    @property
    def test_episodes(self) -> int | None:
        """Episodes of one test, None if not known."""
        found = self.card.get("compared", {}).get("test_episodes") or self.config.get("test_nepisode")
        return found if isinstance(found, int) else None

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The objects of `metrics.jsonl`."""
        return list(self.given) if self.given is not None else list(read_records(RunFolder(self.folder).metrics_jsonl))

    @cached_property
    def tests(self) -> list[dict[str, Any]]:
        """The records of stage 3 that hold a test, in the order of their steps."""
        found = [record for record in self.records if record.get("stage") == "stage3"]
        found = [record for record in found if is_number(record.get("t_env"))]
        tests = [record for record in found if any(name.startswith(("test_", "test/")) for name in record)]
        return sorted(tests, key=lambda record: record["t_env"])

    def test_curve(self, name: str, clock: str = "wall") -> Curve:
        """Return steps, seconds and values of a metric over stage 3; tests without it are left out.

        clock: `wall` or `cpu`; seconds are NaN where a test has none.
        """
        found, key = [record for record in self.tests if is_number(record.get(name))], f"{clock}_seconds"
        seconds_of = [r[key] if is_number(r.get(key)) else math.nan for r in found]
        rows = [(r["t_env"], seconds, r[name]) for r, seconds in zip(found, seconds_of, strict=True)]
        steps, seconds, values = np.array(rows, float).reshape(-1, 3).T
        return steps, seconds, values

    def _fact(self, key: str) -> Any:
        found = (self.config or self.summary).get(key)
        return readable(found) if isinstance(found, str) else ""


def load(paths: Iterable[str | Path], command: str = "load") -> list[Run]:
    """Return the runs in folders, in the order of the paths, those of one folder by name.

    Args:
        paths: each a run, a folder of runs, a study, or the results file of a study (`.jsonl`); or a folder or file of
            Sacred's that another program wrote.
        command: for the message if there is none.
    Errors: UserError where no run can be read. A damaged run among others is one warning.
    """
    runs, problems = read_runs(paths, command)
    for problem in problems:
        LOG.warning("left out: %s", readable(problem))
    return runs


def read_runs(paths: Iterable[str | Path], command: str) -> tuple[list[Run], list[str]]:
    """Return the runs of `load`, and a line on each folder that cannot be read instead of a warning."""
    runs: dict[object, Run] = {}
    problems: list[str] = []
    for path in dict.fromkeys(map(Path, paths)):
        place = Path(os.path.expanduser(path)).absolute()  # unlike Path.expanduser, no error for an unknown user
        if place.suffix == ".jsonl" and os.path.isfile(place):
            problems += _add_lines(runs, path, place)
            continue
        place = place.parent if place.name in SACRED_FILES else place
        folders = folders_of_runs(place) or dict.fromkeys(sacred_folders(place), ("", ""))
        if not folders:
            problems.append(f"{path}: holds no run: no config.json and no summary.json that can be read")
        for folder, study in folders.items():
            run = _read(folder, study)
            if run is None:
                wrong = "neither its config.json nor its summary.json can be read"
                if names := _sacred_files(folder):
                    wrong = f"no values can be read from its {' or '.join(names)}"
                problems.append(f"{folder}: {wrong}")
            else:
                runs.setdefault(folder, run)
                if not run.summary and os.path.isfile(RunFolder(folder).summary_json):
                    problems.append(f"{RunFolder(folder).summary_json}: cannot be read, or holds values of other types")
    if not runs:
        first = problems[0] if problems else "no folder was given"
        raise UserError(f"{command} {first}. Give the folder of a run, a folder of runs, or a study")
    return _foreign_arms(list(runs.values())), problems


def _foreign_arms(runs: list[Run]) -> list[Run]:
    """Return the runs, those of other programs with an arm: the name, and what tells apart those of one name."""
    configs = [run.config for run in runs if run.foreign]
    labels = iter(tell_apart(configs))
    found = []
    for run in runs:
        if run.foreign:
            given = run.config.get("env_args")
            args = given if isinstance(given, dict) else {}
            about = {key: run.config.get(key) for key in ("name", "env", "seed")}
            about["env_args"] = {"map_name": given_map(about["env"], args) or None}
            arm = readable(f"{about['name'] or run.folder.name} (Sacred) {next(labels)}".strip())
            run = replace(run, config=about, arm=arm)
        found.append(run)
    return found


def _add_lines(runs: dict[object, Run], path: Path, place: Path) -> list[str]:
    """Add the runs in the lines of a results file, which studies may share; return a line on each problem.

    Of lines on the same run, as two merged files have them, the last counts.
    """
    lines = bad = again = 0
    folders = {run.folder for run in runs.values()}
    for line in json_lines(place):
        lines += 1
        run = None if line is None else _of_line(place, line)
        if line is None or run is None:
            bad += 1
            continue
        key = tuple(str(line.get(name)) for name in ("study", "job", "start_card", "identity"))
        if key in runs:
            again += 1
            run = replace(run, folder=runs[key].folder)
        elif run.folder in folders:  # the same job with another configuration
            run = replace(run, folder=_unused(run.folder, str(line.get("identity"))[:8], folders))
        folders.add(run.folder)
        runs[key] = run
    problems = [f"{path}: {bad} of {lines} lines hold no result of a study"] if bad or not lines else []
    return problems + ([f"{path}: {again} of {lines} lines repeat a result: the last one counts"] if again else [])


def _unused(folder: Path, mark: str, used: Container[Path]) -> Path:
    """Return a name that no run has yet, with a mark or with a number."""
    marks = (mark, *(f"{mark}, {number}" for number in range(2, 10**6)))
    return next(new for each in marks if (new := folder.with_name(f"{folder.name} ({each})")) not in used)


def studies_at(place: Path) -> list[Path]:
    """Return the studies in a folder that holds no run itself, else the folder."""
    if next(_run_folders(place), None) is None and not os.path.lexists(place / STUDY_FILE):
        with contextlib.suppress(OSError):
            inside = [place / name for name in sorted(os.listdir(place), key=natural)]
            if found := [each for each in inside if os.path.isfile(each / STUDY_FILE)]:
                return found
    return [place]


def folders_of_runs(place: Path) -> dict[Path, tuple[str, str]]:
    """Return the folders of all runs at a path: a run, a folder of runs, a study or a folder of studies.

    The values are the study and the arm of each, "" where there is none.
    """
    return {folder: study for at in studies_at(place) for folder, study in _run_folders(at)}


def _run_folders(place: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield the folders of runs at a path, those of a study in its order, and the study and the arm of each."""
    if _is_run(place):
        study = place.parent.parent
        arm = _arms(study).get(place.name)
        yield place, ("", "") if arm is None else (readable(study.name), arm)
        return
    for parent, arms in ((place, {}), (place / STUDY_RUNS, _arms(place))):
        order = {name: number for number, name in enumerate(arms)}
        try:
            names = sorted(os.listdir(parent), key=lambda name: (order.get(name, len(order)), natural(name)))
        except OSError:
            continue
        for name in filter(lambda name: _is_run(parent / name), names):
            yield parent / name, (readable(place.name), arms[name]) if name in arms else ("", "")


def _is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / name) for name in ("config.json", "summary.json", RUN_FILE))


def _arms(study: Path) -> dict[str, str]:
    """Return the arm of each run of a study, by the run's name, in the order of the study."""
    return {name: readable(arm) for name, arm, *_ in jobs_of(study)}


def jobs_of(study: Path) -> list[tuple[str, ...]]:
    """Return name, arm, state and error of the jobs of a study; nothing where its file cannot be read."""
    try:
        entries = read_json(study / STUDY_FILE, LONGEST_FILE)["jobs"]
        jobs = [
            (each["job"]["name"], each["job"]["arm"], each.get("state", "done"), each.get("error", ""))
            for each in entries
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return [tuple(map(str, job)) for job in jobs]


def _sacred_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that another program may have recorded a run in."""
    return [name for name in SACRED_FILES if os.path.isfile(folder / name)]


def _read(folder: Path, of: tuple[str, str]) -> Run | None:
    """Return the run in a folder, None if neither its configuration nor its summary can be read. of: study, arm."""
    files = RunFolder(folder)
    config, summary = read_entry(files.config_json), read_entry(files.summary_json)
    summary = summary if _is_summary(summary) else {}
    if not os.path.lexists(files.metrics_jsonl) and _sacred_files(folder):
        if (other := read_sacred(folder)) is None:
            return None
        config, records = other
        values = {name: value for record in records for name, value in record.items()}
        stages = {"stage3": {"values": values, "clock": {"t_env": values["t_env"]}}}
        return Run(folder, {"name": folder.name, **config}, {}, {"stages": stages}, True, given=records, foreign=True)
    if not config and not summary:
        return None
    card = read_entry(files.card_json) or summary.get("card")
    finished = read_entry(folder / RUN_FILE).get("finished") is True
    study, arm = of
    known = card if is_card(card) and isinstance(card, dict) else {}
    return Run(folder, config, known, summary, finished, arm, study=study)


def _of_line(file: Path, line: Mapping[str, Any]) -> Run | None:
    """Return the run that a line of a study's results file describes, None if it is none."""
    card, summary, tests = (line.get(key) for key in ("card", "summary", "tests"))
    if not is_card(card) or not isinstance(summary, dict) or not isinstance(tests, dict) or not _is_summary(summary):
        return None
    facts = recorded_of(card)
    compared = card["compared"] if isinstance(card, dict) else {}
    about = {key: line.get(key) for key in ("env", "seed")} | {"env_args": {"map_name": line.get("map")}}
    over_all_ranks = {key: compared[name] for key, name in COVERED.items() if name in compared}
    budget = {key: compared[key] for key in ("t_max", "max_episodes") if key in compared}
    settings = facts["settings"] if isinstance(facts.get("settings"), dict) else {}
    method = {key: facts[key] for key in (*METHOD, *COMPONENT_ARGS) if key in facts}
    config = {**method, **settings, **over_all_ranks, **budget, **about}
    columns = {name: values for name, values in tests.items() if isinstance(values, list)}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]
    records = tuple({"stage": "stage3", **row} for row in rows)
    known = dict(card) if isinstance(card, dict) else {}
    study, arm = (readable(str(line.get(key, ""))) for key in ("study", "arm"))
    folder = file.parent / Path(study).name / Path(str(line.get("job"))).name
    return Run(folder, config, known, summary, True, arm, records, study)


def _is_summary(value: Mapping[str, Any]) -> bool:
    """Return whether the values of a `summary.json` that tables read have their types."""
    stages, seconds = value.get("stages", {}), value.get("wall_seconds", 0.0)
    known = isinstance(stages, dict) and all(isinstance(stage, dict) for stage in stages.values())
    values = [stage.get("values", {}) for stage in stages.values()] if known else []
    numbers = [number for each in values if isinstance(each, dict) for number in each.values()]
    is_time = seconds is None or is_number(seconds)
    typed = all(isinstance(each, dict) for each in values) and all(
        number is None or isinstance(number, float) or is_number(number) for number in numbers
    )
    return known and typed and is_time


def is_number(value: object) -> bool:
    """Return whether a value from a JSON file is a finite number; a whole number that no float can hold is none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with their cells below each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def natural(text: str) -> list[tuple[float, str]]:
    """Return a key that sorts numbers within names by their size: 3m before 10m, lr=0.0003 before lr=0.001."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", text)
    return [(-1.0, part) if i % 2 == 0 else (float(part), "") for i, part in enumerate(parts)]


# Runs of other programs, from the folders of Sacred's FileStorageObserver: PyMARL, EPyMARL and their relatives.
#
# `info.json` has for each value a list, and the list `<value>_T` of environment steps; `metrics.json` has `steps`
# and `values`. `config.json` beside them has `name`, `env`, `env_args` and `seed`.


def sacred_folders(place: Path) -> list[Path]:
    """Return the folders of such runs below a path."""
    found: set[Path] = set()
    for depth in range(DEEPEST + 1):
        with contextlib.suppress(OSError):  # a name that is too long, a folder that is closed
            found |= {file.parent for name in SACRED_FILES for file in place.glob("*/" * depth + name)}
    return sorted(found)


def read_sacred(folder: Path) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]] | None:
    """Return the configuration of a run and its records by environment steps; None if there are none."""
    for name in SACRED_FILES:
        with contextlib.suppress(OSError, ValueError):
            content = read_json(folder / name, LONGEST_FILE)
            if isinstance(content, dict) and (records := _records(content)):
                return read_entry(folder / "config.json"), records
    return None


def tell_apart(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each configuration the keys in which those of its name and map differ, with its values, as a label."""
    flat = [flattened({key: value for key, value in each.items() if key not in NO_SETTING}) for each in configs]
    labels = []
    for config, own in zip(configs, flat, strict=True):
        about = (config.get("name"), own.get("env_args.map_name"))
        rest = [other for each, other in zip(configs, flat, strict=True)
                if (each.get("name"), other.get("env_args.map_name")) == about]  # fmt: skip
        keys = [key for key in own if key != "env_args.seed" and any(other.get(key) != own[key] for other in rest)]
        labels.append(" ".join(f"{key.rpartition('.')[2]}={own[key]}" for key in keys[:3]))
    return labels


def _records(content: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    by_steps: dict[float, dict[str, Any]] = {}
    for name, found in content.items():
        if isinstance(found, dict):
            steps, values = found.get("steps"), found.get("values")
        else:
            steps, values = content.get(f"{name}_T"), found
        if not isinstance(steps, list) or not isinstance(values, list):
            continue
        for step, value in zip(map(_plain, steps), map(_plain, values), strict=False):
            if is_number(step) and is_number(value):
                by_steps.setdefault(step, {"stage": "stage3", "t_env": step})[name] = value
    return tuple(by_steps[step] for step in sorted(by_steps))


def _plain(value: Any) -> Any:
    """Return a number as it is; one of NumPy is a dictionary with `value`."""
    return value.get("value") if isinstance(value, dict) else value
