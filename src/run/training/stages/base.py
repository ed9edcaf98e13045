"""Interface of a stage, used by the training loop and by checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from omagd.components.data import DataSource
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.controllers.types import Policy
from omagd.learners.protocol import Trainable
from omagd.run.checkpoint.state import Attribute, Group, Scope, StageResult, Stateful, first_not_finite
from omagd.run.memory_budget import oom_hint
from omagd.run.training.session import Session
from omagd.run.training.stages.health import Health, check_replicas
from omagd.utils.metrics import Counters, Every, Metrics
from omagd.utils.seeding import Generators, seed_everything

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Task:
    """Something done between iterations when it is due; `name` is the phase that its time counts as."""

    name: str
    due: Callable[[], bool]
    run: Callable[[], None]


class Shaper:
    """Something that shapes which episodes stage 3 plays: groups, maps, opponents. See `collection.shapers`.

    The stage calls the same methods in the same order on every rank; here each does nothing.
    """

    def register(self, register: Callable[..., None]) -> None:
        """Save what a resumed run needs: calls `Stage.register`."""

    def start(self) -> None:
        """Begin at the stage's clock, where no checkpoint is loaded."""

    def tasks(self) -> list[Task]:
        """Return what is done between iterations."""
        return []

    def deal(self, data: DataSource) -> None:
        """Begin an iteration."""

    def again(self) -> None:
        """Prepare another round, if `data` wants more in an iteration."""

    def begin(self) -> None:
        """Begin a rollout."""

    def played(self, log: Iterable[Mapping[str, Any]]) -> None:
        """Note the episodes of a rollout, as in `Rollout.log`."""

    def stats(self) -> dict[str, tuple[float, float]]:
        """Return the metrics of an iteration as sums and counts."""
        return {}

    def ready(self, ranks: int, when: str) -> bool | None:
        """Return whether the batches of so many ranks suffice for an update; None: all of them are needed."""
        return None

    def exchanges(self, iteration: int) -> bool:
        """Return whether ranks exchange something after an iteration."""
        return False

    def synchronise(self) -> bool:
        """Exchange what ranks have to tell each other; return whether their batches need other episodes now."""
        return False

    def news(self) -> str:
        """Return what the log says when it changes, empty for nothing new."""
        return ""

    def record(self) -> dict[str, float]:
        """Return values for the log."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return entries of the summary."""
        return {}


@dataclass
class PretrainedModules:
    """What stages hand on: trained modules, and the episodes of stages 1 and 2.

    Attributes:
        train_episodes: to learn from. held_out: validation, to select the best model. test_episodes: for the report
            at the end of stage 2, which is played once there is nothing left to select.
    """

    tokenizer: Tokenizer | None = None
    predictor: nn.Module | None = None
    train_episodes: EpisodeBuffer | None = None
    held_out: EpisodeBuffer | None = None
    test_episodes: EpisodeBuffer | None = None

    def buffers(self) -> dict[str, EpisodeBuffer]:
        """Return the episodes that are there, by the name that checkpoints have for them."""
        found = {"pretrain": self.train_episodes, "held_out": self.held_out, "pretrain_test": self.test_episodes}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    def forget_episodes(self) -> None:
        """Release the memory of all episodes."""
        self.train_episodes = self.held_out = self.test_episodes = None

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules that there are, by name."""
        found = {"tokenizer": self.tokenizer, "predictor": self.predictor}
        return {name: module for name, module in found.items() if module is not None}


class Stage(ABC):
    """One stage of a run on this rank. The same calls in the same order on every rank.

    Args:
        session: what all stages share. pretrained: modules of earlier stages; a stage adds its own.
    """

    name: str
    clock_name: str
    lr_key: str
    tasks: list[Task]
    learner: Trainable

    def __init__(self, session: Session, pretrained: PretrainedModules) -> None:
        self.session = session
        self.pretrained = pretrained
        self.clock = Counters()
        self.tasks = []
        self.dues: dict[str, Every] = {}
        self.metrics: dict[str, Metrics] = {}
        self.health = Health(session.config, self.lr_key)
        self.generators = Generators(session.config.seed, session.dist.rank)
        session.checkpointer.start_stage()
        self.register("clock", self.clock)
        self.register("dues", Group(self.dues))
        self.register("health", self.health)
        self.register("generation", Attribute(self.generators, "generation"), "rank")
        self.register("generators", self.generators, "rank")
        self.register("metrics", Group(self.metrics), "rank")

    def register(self, name: str, stateful: Stateful, scope: Scope = "shared") -> None:
        """Save `stateful` in the checkpoints of this stage: see `Checkpointer.register`."""
        self.session.checkpointer.register(name, stateful, scope)

    def register_learner(self, learner: Trainable) -> None:
        """Train with `learner`, and save its modules, its state, and what it registers itself."""
        self.learner = learner
        self.register("modules", Group(learner.modules()))
        self.register("learner", learner)
        if hasattr(learner, "register_state"):
            learner.register_state(self.register)

    def rng(self, purpose: str) -> np.random.Generator:
        """Return this rank's generator for `purpose`, which checkpoints hold."""
        return self.generators.rng(purpose)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within as a phase. Out-of-memory errors name the key to reduce (UserError)."""
        session = self.session
        with session.profiler.phases(name), oom_hint(session.config, self.name, name, session.dist.device):
            yield

    def inspect(self, learned: bool) -> None:
        """Look at an iteration that has ended, as `profile` and `distributed_debug` ask for.

        learned: whether it had an update.
        """
        session, tracer = self.session, self.session.profiler.tracer
        if tracer is not None:
            with session.profiler.phases("profile"):
                if tracer.step(learned):
                    session.logger.info(f"profile=True: {tracer.iterations} iteration(s) of {self.name}: {tracer.path}")
        if session.config.distributed_debug and learned:
            with session.profiler.phases("debug"):
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
    def title(self) -> str:
        """Return the stage's name, or "training" for runs that have only one stage."""
        return self.name if self.session.config.use_graph_reconstruction else "training"

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
        """Save what was trained, add it to the pre-trained modules, and return the result."""

    def buffers(self) -> dict[str, EpisodeBuffer]:
        """Return the training episodes, which checkpoints include, by name."""
        return self.pretrained.buffers()

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
        """Return the current quality of the stage, higher is better; None if unknown."""
        return None

    def restored(self) -> None:
        """Finish the preparation once the state is there: the beginning, or that of a checkpoint."""
        self.session.profiler.resume_at(self.clock.updates)

    def renew(self, generation: int) -> None:
        """Begin new streams of random numbers. generation: distinguishes them from earlier ones."""
        self.generators.renew(generation)
        seed_everything(self.session.config.seed, f"{self.name} dropout", self.session.dist.rank, generation)

    def episodes_changed(self, *, lost: bool) -> None:  # noqa: B027 most stages need none
        """Continue with other episodes than this rank had: fewer (`lost`), or redistributed. Called on all ranks."""

    def now(self) -> int:
        """Return the time of the stage's clock."""
        return self.clock.epoch if self.clock_name == "epoch" else self.clock.t_env

    def log(self, values: dict[str, float]) -> None:
        """Write one record at the stage's clock."""
        self.session.logger.log(values, stage=self.name, clock=self.clock_name, t=self.now())
