"""Records of `omagd beliefs`, and the tables that show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omagd.lab.analysis.runs import read_records
from omagd.lab.analysis.statistics import Interval, paired_share, proportion
from omagd.run.reporting.report import number_text
from omagd.utils.errors import readable

FILE = "beliefs.jsonl"
"""In a folder of a run or of a study: a line for each test."""

TITLES = {
    "census": "Census: what is unseen",
    "plug-in": "Plug-in test: one script acts on different beliefs",
    "swap": "Swap test: a team trained on everything acts on different beliefs",
}
ROWS = {
    "all": "all", "never": "never seen", "before": "seen before", "age1": "1 step ago", "age2_3": "2-3",
    "age4_7": "4-7", "age8_15": "8-15", "age16": "16 and more", "before_contact": "before contact",
}  # fmt: skip
NEVER = ("all", "never", "before_contact")
"""Rows with units that were never seen, for which the last sight means nothing."""

GUESSES = {"last_seen": "last seen", "slot_mean": "mean of the node", "map_constant": "map constant", "ridge": "ridge"}
NAMES = {
    "observation": "observation", "last_seen": "last seen", "map_constant": "map constant",
    "reconstruction": "reconstruction", "full": "everything",
}  # fmt: skip
INFERABLE = {"inferable": "over all steps", "inferable_before": "before an agent has seen any enemy"}
LOWER, UPPER = "observation", "full"

Table = dict[str, Any]
"""`title`, `head`, `rows` and `note`, all text."""


def ends(interval: Interval | None) -> list[float] | None:
    """Return an interval as plain numbers; None where there is none or it is not finite."""
    found = None if interval is None else [float(end) for end in interval]
    return None if found is None or not all(map(math.isfinite, found)) else found


def compared(won: Mapping[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """Return for each belief `win_rate`, `interval`, and how much of the difference it carries.

    `share` and `share_interval`: of the difference between `full` and `observation`; None where there is none.
    won: [battles], the same battles in one order, by belief.
    """
    found = {}
    for name, values in won.items():
        share, interval = paired_share(values, won[LOWER], won[UPPER])
        found[name] = {
            "win_rate": float(values.mean()), "interval": ends(proportion(values)),
            "share": share if math.isfinite(share) else None,
            "share_interval": ends(interval) if math.isfinite(share) else None,
        }  # fmt: skip
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the tests that a folder holds, of each kind, map, policy and predictor the last one. Errors: OSError."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in read_records(folder / FILE):
        if str(line.get("test")) in TITLES:
            last[tuple(str(line.get(key)) for key in ("test", "env", "map", "policy", "reconstruction"))] = line
    return list(last.values())


def tables(found: Iterable[Mapping[str, Any]]) -> list[Table]:
    """Return the tables of records; one that cannot be read is left out."""
    made = []
    for record in found:
        try:
            made.append(_census(record) if record["test"] == "census" else _played(record))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            continue
    return made


def _title(record: Mapping[str, Any]) -> str:
    return readable(f"{TITLES[record['test']]}, {record['env']} {record['map']}")


def _census(record: Mapping[str, Any]) -> Table:
    rows = []
    for kind, entry in record["units"].items():
        for name, row in entry["rows"].items():
            cells = [_cells(row["cells"], guess) if guess != "last_seen" or name not in NEVER else "-"
                     for guess in GUESSES]  # fmt: skip
            rows.append([f"{kind}, {ROWS[name]}", f"{row['count'] / entry['living']:.3f}", *cells])
    units = "; ".join(
        f"{kind}: {100 * entry['unseen']:.0f} % unseen, of these {100 * entry['before']:.0f} % seen before"
        for kind, entry in record["units"].items()
    )
    shares = [f"{record[key]:.2f} {words}" for key, words in INFERABLE.items() if record[key] is not None]
    share = f" Of the map constant's squared error ridge regression explains {', '.join(shares)}." if shares else ""
    note = f"Class {record['class']} ({record['class_means']}).{share} {units}. Played: {_battles(record)}."
    head = ["living units, last seen", "share unseen", *(f"{name}, cells" for name in GUESSES.values())]
    return {"title": _title(record), "head": head, "rows": rows, "note": readable(note)}


def _played(record: Mapping[str, Any]) -> Table:
    rows = []
    for name, entry in record["beliefs"].items():
        between = None if name in (LOWER, UPPER) else entry["share_interval"]
        rows.append([NAMES.get(name, readable(name)), _with_ends(entry["win_rate"], entry["interval"]),
                     _with_ends(entry["share"], between)])  # fmt: skip
    note = f"{_battles(record)}, the same for every belief."
    if record.get("reconstruction"):
        note += f" Reconstruction: {record['reconstruction']}."
    return {"title": _title(record), "head": ["belief", "win rate", "share of the difference"], "rows": rows,
            "note": readable(note)}  # fmt: skip


def _battles(record: Mapping[str, Any]) -> str:
    return f"{record['policy']}, {record['episodes']:,} battles, seed {record['seed']}"


def _cells(values: Mapping[str, float], guess: str) -> str:
    return f"{values[guess]:.1f}" if guess in values else "-"


def _with_ends(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None:
        return "-"
    text = number_text(round(value, 3) + 0.0)  # no -0
    return text if interval is None else f"{text} [{interval[0]:.3f}, {interval[1]:.3f}]"
