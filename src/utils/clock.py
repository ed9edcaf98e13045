"""Counters of a stage over all ranks, and events at regular intervals of them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, fields


@dataclass
class Counters:
    """The counters of one stage, equal on every rank and part of the checkpoint.

    Attributes:
        epoch: updates of a pre-training stage. t_env: environment steps. episodes: episodes played for training.
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
    """Seconds since it was made; a restored one continues from the saved value."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far, earlier starts of the run included."""
        return time.monotonic() - self._started

    def state_dict(self) -> float:
        """Return the seconds so far."""
        return self.seconds()

    def load_state_dict(self, seconds: float) -> None:
        """Continue from `state_dict()`."""
        self._started = time.monotonic() - float(seconds)
