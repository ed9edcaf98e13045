"""What time it is in a run, summed over all ranks, and what is due at that time."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class Counters:
    """The global clock of one stage; the same on every rank, part of the checkpoint.

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
        """Set all counters from `state_dict()`. Errors: KeyError where one is missing."""
        for spec in fields(self):
            setattr(self, spec.name, int(state[spec.name]))


class Every:
    """Whether something that happens every `interval` of a clock is due: a function of the times asked about alone.

    Due at the first time at or after each multiple of the interval, so that what has one interval comes together.

    Args:
        interval: at least 1, in the clock's unit. first: be due at the first question already.
        start: time up to which everything counts as done.
    """

    def __init__(self, interval: int, *, first: bool = False, start: int = 0) -> None:
        if interval < 1:
            raise ValueError(f"interval={interval} is less than 1")
        self.interval = interval
        self.last: int | None = None if first else start

    def due(self, t: int) -> bool:
        """Return True, and remember `t`, when a multiple of `interval` has been passed since it was last due."""
        if self.last is not None and t // self.interval == self.last // self.interval:
            return False
        self.last = int(t)
        return True

    def state_dict(self) -> dict[str, int | None]:
        """Return what has to be remembered."""
        return {"last": self.last}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        """Remember what `state_dict()` returned; the interval stays this object's own."""
        self.last = state["last"]
