"""Means over updates, episodes and ranks: sums and counts are collected and divided when they are logged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from omagd.utils.dist_utils import Dist

Number = Tensor | float


class Metrics:
    """Running sums and counts by name. Tensors stay on their device; only `reduce` waits for them."""

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._counts: dict[str, Number] = {}

    def add(self, stats: Mapping[str, tuple[Number, Number]], prefix: str = "") -> None:
        """Add (sum, count) pairs, scalars, under `prefix + name`."""
        for name, (total, count) in stats.items():
            key = prefix + name
            self._sums[key] = _plus(self._sums.get(key), total)
            self._counts[key] = _plus(self._counts.get(key), count)

    def reduce(self, dist: Dist) -> dict[str, float]:
        """Return the means over all ranks by name and clear the sums; a collective, equal on every rank."""
        parts = dist.gather(self.state_dict())
        self.clear()
        return weighted_means(parts)

    def clear(self) -> None:
        """Remove all sums and counts."""
        self._sums.clear()
        self._counts.clear()

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """Return this rank's sums and counts as plain numbers."""
        names = list(self._sums)
        values = _numbers([*(self._sums[n] for n in names), *(self._counts[n] for n in names)])
        return {name: (values[i], values[len(names) + i]) for i, name in enumerate(names)}

    def load_state_dict(self, state: Mapping[str, tuple[float, float]]) -> None:
        """Continue from `state_dict()`."""
        self.clear()
        self.add(state)

    def merge(self, states: Iterable[Mapping[str, tuple[float, float]]]) -> None:
        """Add what other ranks had collected."""
        for state in states:
            self.add(state)


def weighted_means(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Return the sum of all sums over the sum of all counts by name, without names whose count is 0.

    parts: (sum, count) by name, one part for each rank; the names may differ.
    """
    totals: dict[str, list[float]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            both = totals.setdefault(name, [0.0, 0.0])
            both[0] += total
            both[1] += count
    return {name: total / count for name, (total, count) in totals.items() if count != 0}


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of numbers by name; the names may differ between the parts."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def of_maps(values: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the values of single maps, named `train/<map>/<name>` and `test/<map>/<name>`, by map and short name."""
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        purpose, _, rest = name.partition("/")
        task, _, short = rest.rpartition("/")
        if purpose in {"train", "test"} and task:
            found.setdefault(task, {})[f"{purpose}/{short}"] = value
    return found


def _plus(total: Number | None, value: Number) -> Number:
    """Return `total + value` in double precision without waiting for the device."""
    if isinstance(value, Tensor):
        value = value.detach()
        if total is None:
            return value.to(torch.float64, copy=True).reshape(())
        if not isinstance(total, Tensor) or total.device != value.device:
            return value.to(torch.float64).reshape(()) + total
        return total.add_(value.reshape(()))
    if total is None:
        return float(value)
    return total.add_(value) if isinstance(total, Tensor) else total + float(value)


def _numbers(values: list[Number]) -> list[float]:
    """Return the values as floats; waits once per device."""
    out = [0.0] * len(values)
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(i)
        else:
            out[i] = value
    for places in by_device.values():
        together = torch.stack([values[i] for i in places])  # type: ignore[misc]
        for i, number in zip(places, together.tolist(), strict=True):
            out[i] = number
    return out
