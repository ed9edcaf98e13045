"""`omagd compare FOLDER …`: the results of several runs in one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omagd.run.card import read_card
from omagd.run.report import runs_table
from omagd.utils.errors import UserError, readable
from omagd.utils.owned_folder import read_entry
from omagd.utils.run_folder import RunFolder


def comparison(folders: Sequence[str]) -> str:
    """Return a table of what the runs in `folders` reached. Errors: UserError where a folder holds no run."""
    if not folders:
        raise UserError("compare: name the folders of runs, as in: omagd compare results/<run> results/<other run>")
    return runs_table([_summary(folder) for folder in folders]) + "\n"


def _summary(folder: str) -> dict[str, Any]:
    path = RunFolder(Path(folder).expanduser()).summary_json
    known = {key: value for key, value in read_entry(path).items() if value is not None}
    try:
        summary: dict[str, Any] = _one_line({"card": read_card(path.parent), **known, "folder": str(path.parent)})
        runs_table([summary])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        known = {}
    if not known:
        raise UserError(f"compare {folder}: holds no summary.json that can be read. Give a run's folder")
    return summary


def _one_line(value: Any) -> Any:
    """Return what a file says with all text as single lines that a terminal shows as they are."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, dict):
        return {readable(str(name)): _one_line(item) for name, item in value.items()}
    return [_one_line(item) for item in value] if isinstance(value, list) else value
