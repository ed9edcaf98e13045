"""Whether two runs have left the same: every tensor, every number that was logged, every episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from omagd.utils.run_folder import reproducible


def differences(one: Path, other: Path, skip: tuple[str, ...] = ()) -> list[str]:
    """Return where two run folders differ in weights, metrics or episodes, to the last bit; nothing if nowhere.

    skip: beginnings of relative paths that are not compared.
    """
    found: list[str] = []
    weights = [{str(p.relative_to(run)) for p in (run / "models").rglob("*.th")} for run in (one, other)]
    weights = [{name for name in names if not skip or not name.startswith(skip)} for names in weights]
    found += [f"{name} is in one of them only" for name in sorted(weights[0] ^ weights[1])]
    for name in sorted(weights[0] & weights[1]):
        states = [torch.load(run / name, weights_only=True) for run in (one, other)]
        _compare(states[0], states[1], name, found)
    records = [reproducible_lines(run) for run in (one, other)]
    if len(records[0]) != len(records[1]):
        found.append(f"metrics.jsonl: {len(records[0])} and {len(records[1])} lines")
    for mine, theirs in zip(*records, strict=False):
        names = sorted(name for name in mine | theirs if mine.get(name) != theirs.get(name))
        if names:
            found.append(f"metrics.jsonl: {mine.get('stage')} {names[:4]}")
    logs = [{p.name: p.read_bytes() for p in (run / "episodes").glob("*.jsonl")} for run in (one, other)]
    found += [f"episodes/{name}" for name in sorted(logs[0] | logs[1]) if logs[0].get(name) != logs[1].get(name)]
    return found


def reproducible_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what tells of the machine."""
    return [reproducible(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _compare(mine: Any, theirs: Any, where: str, found: list[str]) -> None:
    if isinstance(mine, torch.Tensor):
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape) or not torch.equal(_bits(mine), _bits(theirs)):
            found.append(where)
    elif isinstance(mine, dict):
        if mine.keys() != theirs.keys():
            found.append(f"{where}: other keys")
        for key in mine.keys() & theirs.keys():
            _compare(mine[key], theirs[key], f"{where}.{key}", found)
    elif isinstance(mine, (list, tuple)):
        if len(mine) != len(theirs):
            found.append(f"{where}: other length")
        for place, (a, b) in enumerate(zip(mine, theirs, strict=False)):
            _compare(a, b, f"{where}[{place}]", found)
    elif mine != theirs:
        found.append(f"{where}: {mine} and {theirs}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)  # where -0 is not 0, and NaN is the same NaN
