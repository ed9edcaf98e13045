"""Read runs of other programs from the folders of Sacred's FileStorageObserver: PyMARL, EPyMARL and their relatives.

`info.json` has for each value a list, and the list `<value>_T` of environment steps; `metrics.json` has `steps`,
`values` and `timestamps`. `config.json` beside them has `name`, `env`, `env_args` and `seed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from omagd.utils.storage import is_number, read_entry, read_json

FILES = ("metrics.json", "info.json")
LONGEST = 1 << 28
NO_SETTING = frozenset({"name", "seed", "env", "unique_token", "local_results_path", "label", "repeat_id"})
DEEPEST = 5
"""Levels of folders below a path in which such folders are looked for, as in results/sacred/qmix/3m/1."""


def sacred_folders(place: Path) -> list[Path]:
    """Return the folders of such runs below a path."""
    found: set[Path] = set()
    for depth in range(DEEPEST + 1):
        with suppress(OSError):  # a name that is too long, a folder that is closed
            found |= {file.parent for name in FILES for file in place.glob("*/" * depth + name)}
    return sorted(found)


def read_sacred(folder: Path) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]] | None:
    """Return the configuration of a run and its records by environment steps; None if there are none."""
    for name in FILES:
        with suppress(OSError, ValueError):
            content = read_json(folder / name, LONGEST)
            if isinstance(content, dict) and (records := _records(content)):
                return read_entry(folder / "config.json"), records
    return None


def tell_apart(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each configuration the keys in which those of its name and map differ, with its values, as a label."""
    flat = [dict(_flat({key: value for key, value in each.items() if key not in NO_SETTING})) for each in configs]
    labels = []
    for config, own in zip(configs, flat, strict=True):
        about = (config.get("name"), own.get("env_args.map_name"))
        rest = [other for each, other in zip(configs, flat, strict=True)
                if (each.get("name"), other.get("env_args.map_name")) == about]  # fmt: skip
        keys = [key for key in own if key != "env_args.seed" and any(other.get(key) != own[key] for other in rest)]
        labels.append(" ".join(f"{key.rpartition('.')[2]}={own[key]}" for key in keys[:3]))
    return labels


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _records(content: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    by_steps: dict[float, dict[str, Any]] = {}
    began: float | None = None
    for name, found in content.items():
        if isinstance(found, dict):
            steps, values = found.get("steps"), found.get("values")
            times = [_seconds(text) for text in found.get("timestamps") or ()]
        else:
            steps, values, times = content.get(f"{name}_T"), found, []
        if not isinstance(steps, list) or not isinstance(values, list):
            continue
        known = [time for time in times if time is not None]
        began = min([*known, *([] if began is None else [began])], default=None)
        for number, (step, value) in enumerate(zip(map(_plain, steps), map(_plain, values), strict=False)):
            if is_number(step) and is_number(value):
                record = by_steps.setdefault(step, {"stage": "stage3", "t_env": step})
                record[name] = value
                if number < len(times) and times[number] is not None:
                    record.setdefault("wall_seconds", times[number])
    for record in by_steps.values():
        if "wall_seconds" in record and began is not None:
            record["wall_seconds"] -= began
    return tuple(by_steps[step] for step in sorted(by_steps))


def _plain(value: Any) -> Any:
    """Return a number as it is; one of NumPy is a dictionary with `value`."""
    return value.get("value") if isinstance(value, dict) else value


def _seconds(text: Any) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return None
