"""Whether two runs have left the same: every tensor, every logged number, every episode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

MACHINE = re.compile(
    r"^(time|memory|gpu)/|_per_second(_rank\d+)?$|/seconds_per_episode$"
    r"|^(wall_seconds|cpu_seconds|restarts|worker_restarts|communicate_ms_per_sync|reconstruct_(ms|frames)_per_tick)$"
)
"""Values about the machine, which differ between two runs that learn the same."""


def reproducible(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `metrics.jsonl` without values about the machine."""
    return {name: value for name, value in record.items() if not MACHINE.search(name)}


def differences(one: Path, other: Path, skip: tuple[str, ...] = ()) -> list[str]:
    """Return where two run folders differ in weights, metrics or episodes, to the last bit; nothing if nowhere.

    skip: beginnings of relative paths that are not compared.
    """
    found: list[str] = []
    weights = [{str(path.relative_to(run)) for path in (run / "models").rglob("*.th")} for run in (one, other)]
    weights = [{name for name in names if not name.startswith(skip)} for names in weights]
    found += [f"{name} is in one of them only" for name in sorted(weights[0] ^ weights[1])]
    for name in sorted(weights[0] & weights[1]):
        mine, theirs = (
            dict(leaves(torch.load(run / name, map_location="cpu", weights_only=True), name)) for run in (one, other)
        )
        found += sorted(where for where in mine | theirs if mine.get(where) != theirs.get(where))
    records = [reproducible_lines(run) for run in (one, other)]
    if len(records[0]) != len(records[1]):
        found.append(f"metrics.jsonl: {len(records[0])} and {len(records[1])} lines")
    for mine, theirs in zip(*records, strict=False):
        names = sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name))
        if names:
            found.append(f"metrics.jsonl: {mine.get('stage')} {names[:4]}")
    logs = [{path.name: path.read_bytes() for path in (run / "episodes").glob("*.jsonl")} for run in (one, other)]
    return found + [f"episodes/{name}" for name in sorted(logs[0] | logs[1]) if logs[0].get(name) != logs[1].get(name)]


def reproducible_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without values about the machine."""
    return [reproducible(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dictionaries and lists with their place; of a tensor its bits: -0 is not 0."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous().flatten().view(torch.uint8)
        yield where, (value.dtype, value.shape, bits.numpy().tobytes())
    elif isinstance(value, (dict, list, tuple)) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{where}.{key}")
    else:
        yield where, value
