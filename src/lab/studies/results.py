"""The results file: one JSON line per finished run, made to be committed and merged; a study skips what is in it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from omagd.lab.analysis.runs import is_number
from omagd.lab.studies.executors import Job
from omagd.run.reporting.card import recorded_of
from omagd.run.run_folder import RunFolder, json_lines, plain, read_entry, read_records
from omagd.utils.errors import UserError
from omagd.utils.storage import open_lines, opened

Key = tuple[str, str]


def key_of(card: dict[str, Any], identity: str) -> Key:
    """Return what marks a run in the file: its card at the start, and the hash of its configuration with its seed."""
    return str(card.get("id")), identity


def check_file(path: Path) -> None:
    """Raise UserError if a results file can be neither read nor made there."""
    try:
        if not path.exists():
            try_folder(path.parent)
        elif not path.is_file() or not os.access(path, os.R_OK | os.W_OK):
            raise UserError(f"results_file={path}: is no file that can be read and written. Give another name")
    except OSError as problem:
        raise UserError(f"results_file={path}: cannot be written ({problem.strerror}). Give another name") from None


def known_keys(path: Path) -> tuple[set[Key], int]:
    """Return the keys of the runs in a results file, and how many lines could not be read. Errors: OSError."""
    lines = list(json_lines(path)) if path.exists() else []
    good = [line for line in lines if line is not None and {"start_card", "identity"} <= line.keys()]
    return {(str(line["start_card"]), str(line["identity"])) for line in good}, len(lines) - len(good)


def line_of(
    study: str, job: Job, folder: RunFolder, card: dict[str, Any], identity: str, seconds: float = 0.0
) -> dict[str, Any]:
    """Return the line of a finished run. seconds: of all its starts, 0 if not measured."""
    summary = read_entry(folder.summary_json)
    made = summary.get("made_by", {})
    commit = f"{made['commit']}{'-dirty' * bool(made.get('changed'))}" if made.get("commit") else None
    final = read_entry(folder.card_json) or card
    versions = recorded_of(final).get("versions", {})
    skipped = {"card", "folder", "artifacts", "stages", "phases", "made_by"}
    given = summary.get("stages")
    stages = {
        name: _stage(stage)
        for name, stage in (given.items() if isinstance(given, dict) else ())
        if isinstance(stage, dict)
    }
    return {
        "study": study, "job": job.name, "arm": job.arm, "env": job.env, "map": job.map, "seed": job.seed,
        "words": list(job.words), "start_card": card.get("id"), "identity": identity, "finished": time.time(),
        "seconds": round(seconds, 1) or None,
        "summary": {**{name: value for name, value in summary.items() if name not in skipped}, "stages": stages},
        "tests": tests_of(folder.metrics_jsonl), "card": final, "versions": versions, "commit": commit,
    }  # fmt: skip


def _stage(stage: dict[str, Any]) -> dict[str, Any]:
    """Return what the line keeps of a stage; `beliefs`: the errors by class of units; `seconds`: of its last start."""
    phases = stage.get("phases")
    seconds = phases.get("wall") if isinstance(phases, dict) else None
    kept: dict[str, Any] = {part: stage[part] for part in ("clock", "values", "beliefs", "absolute") if part in stage}
    kept |= {part: _shorter(kept[part]) for part in ("beliefs", "absolute") if part in kept}
    return {**kept, **({"seconds": seconds} if is_number(seconds) else {})}


def _shorter(value: Any) -> Any:
    """Return JSON values with five digits: tables of many numbers would make most of the file."""
    if isinstance(value, dict):
        return {key: _shorter(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shorter(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def tests_of(metrics: Path) -> dict[str, list[float | None]]:
    """Return the curve of tests in a run's metrics: a list for `t_env`, both `…_seconds` and each `test_…` value."""
    try:
        rows = [row for row in read_records(metrics) if any(name.startswith("test_") for name in row)]
    except OSError:
        return {}
    more = (name for row in rows for name in row if name == "cpu_seconds" or name.startswith("test_"))
    names = dict.fromkeys(["t_env", "wall_seconds", *more])
    return {name: [row.get(name) for row in rows] for name in names}


def append(path: Path, entry: dict[str, Any]) -> None:
    """Append a line; several processes may do so at a time. Errors: OSError."""
    line = json.dumps(plain(entry), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path.parent, os.O_DIRECTORY) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        with open(open_lines(path), "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def try_folder(folder: Path) -> None:
    """Raise OSError if a folder cannot be made, or nothing can be written in it; leave nothing behind."""
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()
