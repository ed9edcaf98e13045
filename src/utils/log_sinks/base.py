"""What all log sinks have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFacts:
    """What a sink may want to know about the run.

    Attributes:
        folder: the run's folder. token: its unique name, which groups the stages.
        name: of the algorithm. env, map_name: what is played. world_size: ranks.
        config: the resolved configuration as plain values.
        totals: where each clock ends, by its name ("t_env", "epoch"), and `episode` where that ends the run.
        card: what the run's result depends on, see `omagd.run.reporting.card`.
        saved: what the sinks said of themselves, by name, in the checkpoint that this run goes on from.
        wandb_project: empty for the published name. wandb_entity: empty for the user's own.
    """

    folder: Path
    token: str = "run"
    name: str = ""
    env: str = ""
    map_name: str = ""
    world_size: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    wandb_project: str = ""
    wandb_entity: str = ""

    @property
    def label(self) -> str:
        """Environment and map, as every result is labelled ("skirmish 3m")."""
        return f"{self.env} {self.map_name}".strip()


@dataclass(frozen=True)
class Record:
    """One log: values by name at time `t` of the clock ("t_env" or "epoch") of a stage.

    `private` names are not sent to Sacred.
    """

    values: dict[str, float]
    stage: str
    clock: str
    t: int
    private: frozenset[str] = frozenset()


class Sink(ABC):
    """A place for records. The public methods stand guard, once for all; subclasses do the work behind them.

    A sink that is not `essential` never stops a training: its first error is one warning, and it is left alone then.
    """

    name: str = "sink"
    essential: bool = False

    def __init__(self) -> None:
        self.alive = True

    def open(self, facts: RunFacts) -> None:
        """Get ready for the records of a run."""
        self._guard(self._open, facts)

    def log(self, record: Record) -> None:
        """Take one record."""
        self._guard(self._log, record)

    def state_dict(self) -> dict[str, Any]:
        """Return what the same sink of a run that goes on from here must know, as plain values."""
        return {}

    def close(self, exit_state: str) -> None:
        """Write out what is left; `exit_state` is "completed", "interrupted" or "failed". May be called twice."""
        self._guard(self._close, exit_state)
        self.alive = False

    def _guard(self, call: Any, argument: Any) -> None:
        if not self.alive:
            return
        try:
            call(argument)
        except Exception as error:
            if self.essential:
                raise
            self.alive = False
            reason = " ".join(str(error).split()) or type(error).__name__
            logging.getLogger("omagd").warning("%s is off from here on: %s", self.name, reason[:300])

    @abstractmethod
    def _open(self, facts: RunFacts) -> None: ...

    @abstractmethod
    def _log(self, record: Record) -> None: ...

    @abstractmethod
    def _close(self, exit_state: str) -> None: ...
