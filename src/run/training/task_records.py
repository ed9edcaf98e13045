"""Results of maps and of their starts over all ranks: visits, wins and the newest outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from omagd.utils.dist_utils import Dist

LAST = 100
"""Newest outcomes of a map that are kept, and newest starts."""
LAST_OF_START = 16
"""Newest outcomes of a start that are kept."""


@dataclass
class Record:
    """Results of one map or of one start.

    Attributes:
        visits: episodes. wins: won ones. judged: episodes whose outcome is known. last: newest outcomes, 1 won, 0 not.
    """

    visits: int = 0
    wins: int = 0
    judged: int = 0
    last: list[int] = field(default_factory=list)

    def note(self, won: float | None) -> None:
        """Add an episode; None: its outcome is unknown."""
        self.visits += 1
        if won is not None:
            self.judged += 1
            self.wins += int(won > 0)
            self.last.append(int(won > 0))

    def add(self, other: Record, kept: int) -> None:
        """Add the results of `other`, which are newer, and keep the `kept` newest outcomes."""
        self.visits += other.visits
        self.wins += other.wins
        self.judged += other.judged
        self.last = [*self.last, *other.last][-kept:]


@dataclass
class MapRecord(Record):
    """Results of one map.

    Attributes:
        steps: environment steps. seconds: of playing. starts: seed -> results of the `LAST` newest starts.
    """

    steps: int = 0
    seconds: float = 0.0
    starts: dict[int, Record] = field(default_factory=dict)

    def add(self, other: Record, kept: int = LAST) -> None:
        """Add also the steps, seconds and starts of `other`."""
        super().add(other, kept)
        assert isinstance(other, MapRecord)
        self.steps += other.steps
        self.seconds += other.seconds
        for seed, results in other.starts.items():
            known = self.starts.pop(seed, Record())  # the newest one is the last
            known.add(results, LAST_OF_START)
            self.starts[seed] = known
        for seed in list(self.starts)[: max(0, len(self.starts) - LAST)]:
            del self.starts[seed]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MapRecord:
        """Return what `dataclasses.asdict` made."""
        starts = {int(seed): Record(**{**each, "last": list(each["last"])}) for seed, each in state["starts"].items()}
        return cls(**{**state, "last": list(state["last"]), "starts": starts})


class Increments:
    """What this rank has played since the last exchange; part of each rank's own state."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.maps = {name: MapRecord() for name in names}

    def state_dict(self) -> dict[str, Any]:
        """Return plain values by map."""
        return {name: asdict(record) for name, record in self.maps.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.maps = {name: MapRecord.from_state(state[name]) for name in self.names}

    def merge(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Add what the ranks of an earlier start had not exchanged yet."""
        for state in states:
            for name in self.names:
                self.maps[name].add(MapRecord.from_state(state[name]))


class Tally:
    """Results of each map over all ranks. names: of the maps.

    Attributes:
        all: up to the last exchange, equal on all ranks. own: this rank's since then.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.all = {name: MapRecord() for name in names}
        self.own = Increments(names)

    def note(self, name: str, seed: int, length: int, won: float | None) -> None:
        """Add an episode of this rank."""
        record = self.own.maps[name]
        record.note(won)
        record.steps += length
        record.starts.setdefault(seed, Record()).note(won)

    def spend(self, seconds: np.ndarray) -> None:
        """Add the seconds [n] that this rank has spent on each map."""
        for name, spent in zip(self.names, seconds.tolist(), strict=True):
            self.own.maps[name].seconds += spent

    def synchronise(self, dist: Dist) -> tuple[np.ndarray, np.ndarray]:
        """Add the increments of all ranks in rank order; return their seconds and episodes by map, each [n]."""
        parts = dist.gather(self.own.state_dict())
        self.own.load_state_dict(Increments(self.names).state_dict())
        added = Increments(self.names)
        added.merge(parts)
        for name, record in added.maps.items():
            self.all[name].add(record)
        found = added.maps.values()
        return np.array([each.seconds for each in found]), np.array([float(each.visits) for each in found])

    def facts(self) -> dict[str, dict[str, float]]:
        """Return values by map up to the last exchange."""
        return {name: _facts(record) for name, record in self.all.items()}

    def starts(self, name: str) -> dict[str, int]:
        """Return how many of a map's newest starts were visited more than once, and always or never won."""
        again = [each for each in self.all[name].starts.values() if each.judged > 1]
        always, never = sum(each.wins == each.judged for each in again), sum(not each.wins for each in again)
        return {"starts_repeated": len(again), "starts_always_won": always, "starts_never_won": never} if again else {}

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks share."""
        return {name: asdict(record) for name, record in self.all.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.all = {name: MapRecord.from_state(state[name]) for name in self.names}


def _facts(record: MapRecord) -> dict[str, float]:
    """Return the values of a map for logs and the summary."""
    facts: dict[str, float] = {"visits": record.visits}
    if record.judged:
        facts["wins"] = record.wins
        facts["recent_win_rate"] = float(np.mean(record.last))
    if record.visits:
        facts["seconds_per_episode"] = record.seconds / record.visits
    return facts
