"""What the loop knows of a stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.run.agreement import require_agreement
from omagd.run.memory import told
from omagd.run.session import Session
from omagd.utils.clock import Clock
from omagd.utils.packing import PackedBatch


@dataclass(frozen=True)
class Task:
    """Something done between iterations when it is due; `name` is the phase that its time counts as."""

    name: str
    due: Callable[[], bool]
    run: Callable[[], None]


@dataclass
class Products:
    """What stages hand on: trained modules, and the episodes that stages 1 and 2 share."""

    tokenizer: Tokenizer | None = None
    predictor: MaskPredictor | None = None
    train_episodes: EpisodeBuffer | None = None
    held_out: PackedBatch | None = None


@dataclass(frozen=True)
class StageResult:
    """How a stage ended: `values` are its last and best numbers, `files` its artifacts by name."""

    name: str
    clock: dict[str, int]
    values: dict[str, float]
    files: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)


class Stage(ABC):
    """One stage of a run on this rank. The same calls in the same order on every rank.

    Args:
        session: what all stages share. products: what earlier stages made; a stage adds its own.
    """

    name: str
    clock_name: str
    tasks: list[Task]
    learner: Any

    def __init__(self, session: Session, products: Products) -> None:
        self.session = session
        self.products = products
        self.clock = Clock()
        self.tasks = []

    def begin(self) -> None:
        """Start to measure this stage."""
        self.session.measures.begin(self.name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within as a phase; where memory runs out in it, say which key to turn (UserError)."""
        session = self.session
        with session.measures.phases(name), told(session.config, self.name, name, session.dist.device):
            yield

    def inspect(self, learned: bool) -> None:
        """Look at an iteration that has ended, as `profile` and `distributed_debug` ask for.

        learned: whether it had an update.
        """
        session, tracer = self.session, self.session.measures.tracer
        if tracer is not None:
            with session.measures.phases("profile"):
                if tracer.step(learned):
                    session.logger.info(f"profile=True: {tracer.iterations} iteration(s) of {self.name}: {tracer.path}")
        if session.config.distributed_debug and learned:
            with session.measures.phases("debug"):
                when = f"in iteration {self.clock.epoch} of {self.name}, after update {self.clock.updates}"
                require_agreement(session.dist, self.learner, when)

    @abstractmethod
    def prepare(self) -> None:
        """Collect or load what must be there before the first iteration."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the stage has reached its end; a function of the clock, so equal on all ranks."""

    @abstractmethod
    def collect(self) -> None:
        """Play this iteration's share of episodes."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether all ranks can give a batch."""

    @abstractmethod
    def update(self) -> None:
        """Learn."""

    @abstractmethod
    def advance(self) -> None:
        """Move the global clock on."""

    @abstractmethod
    def finish(self) -> StageResult:
        """Save what was trained, add it to the products, and say how it went."""

    def log(self, values: dict[str, float]) -> None:
        """Write one record at the stage's clock."""
        now = self.clock.epoch if self.clock_name == "epoch" else self.clock.t_env
        self.session.logger.log(values, stage=self.name, clock=self.clock_name, t=now)
