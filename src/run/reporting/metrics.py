"""Counters of a stage, events at regular intervals of them, and means over updates, episodes and ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from omagd.utils.dist_utils import Dist


@dataclass
class Counters:
    """The counters of one stage, equal on every rank and part of the checkpoint.

    Attributes:
        epoch: updates of a pre-training stage, iterations of stage 3. t_env: environment steps.
        episodes: episodes played for training.
        updates: optimisation steps.
    """

    epoch: int = 0
    t_env: int = 0
    episodes: int = 0
    updates: int = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counters as plain integers."""
        return {name: int(value) for name, value in asdict(self).items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore `state_dict()`. Errors: KeyError for a missing counter."""
        for spec in fields(self):
            setattr(self, spec.name, int(state[spec.name]))


class Every:
    """Decides whether an event that happens every `interval` is due.

    It is due at the first time at or after each multiple of the interval: events with the same interval coincide.

    Args:
        interval: at least 1, in the unit of the times. first: also due at the first call.
    """

    def __init__(self, interval: int, *, first: bool = False) -> None:
        self.interval = interval
        self.last: int | None = None if first else 0

    def due(self, t: int) -> bool:
        """Return True, and remember `t`, if a multiple of `interval` has been passed since the last event."""
        if self.last is not None and t // self.interval == self.last // self.interval:
            return False
        self.last = int(t)
        return True

    def state_dict(self) -> dict[str, int | None]:
        """Return the time of the last event."""
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Restore `state_dict()`; the interval is not part of it."""
        self.last = state["last"]


class Stopwatch:
    """Seconds since it was made, and CPU seconds of this process outside `paused`; a restored one continues."""

    def __init__(self) -> None:
        self._started, self._cpu = time.monotonic(), time.process_time()

    def seconds(self) -> float:
        """Return the seconds so far, earlier starts of the run included."""
        return time.monotonic() - self._started

    def cpu_seconds(self) -> float:
        """Return the CPU seconds so far, earlier starts of the run included."""
        return time.process_time() - self._cpu

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the CPU seconds of a block."""
        before = time.process_time()
        try:
            yield
        finally:
            self._cpu += time.process_time() - before

    def state_dict(self) -> list[float]:
        """Return both."""
        return [self.seconds(), self.cpu_seconds()]

    def load_state_dict(self, state: list[float] | float) -> None:
        """Continue from `state_dict()`; earlier versions saved the seconds alone."""
        seconds, cpu = state if isinstance(state, list) else (state, math.nan)
        self._started, self._cpu = time.monotonic() - float(seconds), time.process_time() - float(cpu)


Number = Tensor | float
Counted = Mapping[str, tuple[float, float | str]]
"""(sum, count) by name. count: or the name whose count is meant."""


class Metrics:
    """Running sums and counts by name. Tensors stay on their device; only `reduce` waits for them."""

    def __init__(self) -> None:
        self._sums: dict[str, Number] = {}
        self._counts: dict[str, Any] = {}

    def add(self, stats: Mapping[str, tuple[Number, Number | str]], prefix: str = "") -> None:
        """Add `Counted` scalars, under `prefix + name`."""
        for name, (total, count) in stats.items():
            key = prefix + name
            self._sums[key] = _plus(self._sums.get(key, 0.0), total)
            found = self._counts.get(key, 0.0)
            self._counts[key] = prefix + count if isinstance(count, str) else _plus(found, count)

    def reduce(self, dist: Dist) -> dict[str, float]:
        """Return the means over all ranks by name and clear the sums; a collective, equal on every rank."""
        parts = dist.gather(self.state_dict())
        self.clear()
        return weighted_means(parts)

    def clear(self) -> None:
        """Remove all sums and counts. Names that share another's count stay: as 0, wherever that has one."""
        self._counts = {name: count for name, count in self._counts.items() if isinstance(count, str)}
        self._sums = dict.fromkeys(self._counts, 0.0)

    def state_dict(self) -> dict[str, tuple[float, float | str]]:
        """Return this rank's sums and counts as plain numbers."""
        names = list(self._sums)
        values = _numbers([*(self._sums[n] for n in names), *(self._counts[n] for n in names)])
        return {name: (values[i], values[len(names) + i]) for i, name in enumerate(names)}

    def load_state_dict(self, state: Counted) -> None:
        """Continue from `state_dict()`."""
        self._sums, self._counts = {}, {}
        self.add(state)

    def merge(self, states: Iterable[Counted]) -> None:
        """Add what other ranks had collected."""
        for state in states:
            self.add(state)


def weighted_means(parts: Iterable[Counted]) -> dict[str, float]:
    """Return the sum of all sums over the sum of all counts by name, without names whose count is 0.

    parts: one for each rank; the names may differ.
    """
    parts = list(parts)
    sums = added({name: total for name, (total, _) in part.items()} for part in parts)
    counts = added({name: n for name, (_, n) in part.items() if not isinstance(n, str)} for part in parts)
    counts |= {name: counts.get(n, 0.0) for part in parts for name, (_, n) in part.items() if isinstance(n, str)}
    return {name: total / counts[name] for name, total in sums.items() if counts[name] != 0}


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of numbers by name; the names may differ between the parts."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _plus(total: Number, value: Number) -> Number:
    """Return `total + value` in double precision without waiting for the device."""
    if not isinstance(value, Tensor):
        return total + float(value)
    value = value.detach().reshape(())
    if isinstance(total, Tensor) and total.device == value.device:
        return total.add_(value)
    return value.to(torch.float64) + total


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Return the values, tensors as floats; waits once per device."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    read = {
        device: iter(torch.stack([tensor for tensor in tensors if tensor.device == device]).tolist())
        for device in {tensor.device for tensor in tensors}
    }
    return [next(read[value.device]) if isinstance(value, Tensor) else value for value in values]
