"""What the loop knows of a stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.controllers.types import Policy
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.run.checkpoint.serialization import first_not_finite
from omagd.run.memory_budget import oom_hint
from omagd.run.training.replicas import check_replicas
from omagd.run.training.session import Session
from omagd.run.training.stages.health import Health
from omagd.utils.clock import Counters, Every
from omagd.utils.metrics import Metrics
from omagd.utils.seeding import generator, seed_everything


@dataclass(frozen=True)
class Task:
    """Something done between iterations when it is due; `name` is the phase that its time counts as."""

    name: str
    due: Callable[[], bool]
    run: Callable[[], None]


@dataclass
class PretrainedModules:
    """What stages hand on: trained modules, and the episodes that stages 1 and 2 share."""

    tokenizer: Tokenizer | None = None
    predictor: MaskPredictor | None = None
    train_episodes: EpisodeBuffer | None = None
    held_out: EpisodeBuffer | None = None

    def buffers(self) -> dict[str, EpisodeBuffer]:
        """Return the episodes that are there, by the name that checkpoints have for them."""
        found = {"pretrain": self.train_episodes, "held_out": self.held_out}
        return {name: buffer for name, buffer in found.items() if buffer is not None}


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
    lr_key: str
    tasks: list[Task]
    learner: Any

    def __init__(self, session: Session, products: PretrainedModules) -> None:
        self.session = session
        self.products = products
        self.clock = Counters()
        self.tasks = []
        self.dues: dict[str, Every] = {}
        self.generators: dict[str, np.random.Generator] = {}
        self._generation: tuple[int, ...] = ()
        self.metrics: dict[str, Metrics] = {}
        self.health = Health(session.config, self.lr_key)

    def rng(self, purpose: str) -> np.random.Generator:
        """Return this rank's generator for `purpose`, which checkpoints hold."""
        if purpose not in self.generators:
            place = (self.session.dist.rank, *self._generation)
            self.generators[purpose] = generator(self.session.config.seed, purpose, *place)
        return self.generators[purpose]

    def begin(self) -> None:
        """Start to measure this stage."""
        self.session.measures.begin(self.name)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within as a phase; where memory runs out in it, say which key to turn (UserError)."""
        session = self.session
        with session.measures.phases(name), oom_hint(session.config, self.name, name, session.dist.device):
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
                check_replicas(session.dist, self.learner, when)

    def require_sound(self) -> None:
        """Refuse to save what is not finite, and end a training that only skips updates; called before each save.

        The same on all ranks, as weights and counts are. Errors: UserError.
        """
        self.health.require_progress(self.when)
        state = {name: module.state_dict() for name, module in self.learner.modules().items()}
        if broken := first_not_finite({**state, "learner": self.learner.state_dict()}):
            raise self.health.diverged(self.when, f"{broken} holds values that are not finite, so nothing is saved")

    @property
    def when(self) -> str:
        """Return the stage and its time, for messages."""
        return f"{self.name}, {self.clock_name} {self.now():,}"

    @abstractmethod
    def prepare(self) -> None:
        """Do what must be done before anything is loaded, in the same way at each start of a run."""

    def start(self) -> None:  # noqa: B027 most stages begin as they were made
        """Begin at the beginning; called unless a checkpoint is loaded."""

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

    def buffers(self) -> dict[str, EpisodeBuffer]:
        """Return the episodes that the stage learns from, by name, which checkpoints hold."""
        return self.products.buffers()

    def policies(self) -> dict[str, Policy]:
        """Return who plays the battles that may be in flight between two iterations, by the runner's purpose."""
        return {}

    def urgent(self) -> bool:
        """Whether this iteration has reached something that a checkpoint should hold. The same on all ranks."""
        return False

    def standing(self) -> dict[str, float]:
        """Return the last and the best numbers so far."""
        return {}

    def so_far(self) -> StageResult:
        """Return what the stage has reached, for the summary of a run that ends before the stage does."""
        return StageResult(self.name, self.clock.state_dict(), self.standing(), {}, {"unfinished": True})

    def score(self) -> float | None:
        """Return how good the stage is by now, higher is better; None where it cannot be told."""
        return None

    def shared_state(self) -> dict[str, Any]:
        """Return all that is the same on all ranks; subclasses add their own."""
        return {
            "clock": self.clock.state_dict(),
            "dues": {name: due.state_dict() for name, due in self.dues.items()},
            "modules": {name: module.state_dict() for name, module in self.learner.modules().items()},
            "learner": self.learner.state_dict(),
            "health": self.health.state_dict(),
        }

    def load_shared(self, state: dict[str, Any]) -> None:
        """Continue from a `shared_state`. Errors: KeyError, RuntimeError, ValueError for one that does not fit."""
        self.clock.load_state_dict(state["clock"])
        for name, due in self.dues.items():
            due.load_state_dict(state["dues"][name])
        for name, module in self.learner.modules().items():
            module.load_state_dict(state["modules"][name])
        self.learner.load_state_dict(state["learner"])
        self.health.load_state_dict(state.get("health", [0, 0, 0]))  # earlier versions had none
        self.session.measures.resume_at(self.clock.updates)

    def own_state(self) -> dict[str, Any]:
        """Return what this rank alone has: its generators, and what it has measured since the last log."""
        return {
            "generation": list(self._generation),
            "generators": {name: rng.bit_generator.state for name, rng in self.generators.items()},
            "metrics": {name: metrics.state_dict() for name, metrics in self.metrics.items()},
        }

    def load_own(self, state: dict[str, Any]) -> None:
        """Continue from an `own_state`."""
        self._generation = tuple(state["generation"])
        for name, saved in state["generators"].items():
            self.rng(name).bit_generator.state = saved
        for name, metrics in self.metrics.items():
            metrics.load_state_dict(state["metrics"][name])

    def renew(self, everyone: list[dict[str, Any]], generation: int) -> None:
        """Continue among another number of ranks: with new streams of chance, and nothing that was measured lost.

        Args:
            everyone: `own_state` of all ranks there were, none at a stage's beginning. generation: tells the new
                streams from the old ones.
        """
        config, rank = self.session.config, self.session.dist.rank
        self._generation = (generation,)
        before, self.generators = self.generators, {}
        for name, rng in before.items():  # who holds one keeps it
            rng.bit_generator.state = self.rng(name).bit_generator.state
            self.generators[name] = rng
        seed_everything(config.seed, f"{self.name} dropout", rank, generation)
        if self.session.dist.is_main:
            for state in everyone:
                for name, metrics in self.metrics.items():
                    metrics.add(state["metrics"][name])

    def without_episodes(self) -> None:  # noqa: B027 most stages need none
        """Continue from a checkpoint whose episodes could not all be read; called after it is loaded, on all ranks."""

    def now(self) -> int:
        """Return the time of the stage's clock."""
        return self.clock.epoch if self.clock_name == "epoch" else self.clock.t_env

    def log(self, values: dict[str, float]) -> None:
        """Write one record at the stage's clock."""
        self.session.logger.log(values, stage=self.name, clock=self.clock_name, t=self.now())
