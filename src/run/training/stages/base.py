"""What all stages of a run share on one rank; the interface of a stage, used by the training loop and by checkpoints.

`Health`: whether a training still computes with finite numbers, and the error that ends it where it does not.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from omagd.components.data import DataSource
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.checks import shorten
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.envs.protocol import BatchedEnv
from omagd.learners.protocol import Trainable
from omagd.learners.synced_optimizer import SKIPPED, Stats, lr_scale
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.checkpoint.store import Attribute, Group, Scope, StageResult, Stateful, first_not_finite
from omagd.run.checkpoint.weights import checksum
from omagd.run.memory_budget import oom_hint
from omagd.run.reporting.log_sinks import EpisodeLog
from omagd.run.reporting.metrics import Counters, Every, Metrics, added
from omagd.run.reporting.profiling import Profiler
from omagd.run.run_folder import RunFolder
from omagd.runners.runner import Runner
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.logging import Logger
from omagd.utils.seeding import Generators, seed_everything

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.tokenizer import Tokenizer


MOST_SKIPPED = 10
"""Skipped updates in a row that end a run. A rare batch overflows now and then, and the next one is learned from; a
training that has diverged never recovers, as no skipped update changes a weight. Ten separate the two."""

MOST_UNREAD = 4096  # updates between two readings: bounds the memory of the flags


class Health:
    """Counts the updates that were skipped because their gradient was not finite; the same on all ranks.

    The flags of the updates stay on their device until the counts are read.

    Args:
        config: the run. key: of the learning rate. loss_name: of the loss that every update must report; empty where
            a rank may have nothing to report.
    """

    def __init__(self, config: Config, key: str, loss_name: str = "") -> None:
        self.config, self.key, self.loss_name = config, key, loss_name
        self._unread: list[Tensor] = []  # of each update since the last reading: [2], its skipped and all its steps
        self._counts = [0, 0, 0]  # skipped in all, in a row by now, most in a row
        self._losses: dict[str, float] = {}  # as last logged

    def note(self, stats: Stats) -> Stats:
        """Count one update; return its `stats` without the flag `skipped_updates`.

        Errors: UserError where they lack the loss that the learner's `loss_name` names, or are no pairs.
        """
        pairs = stats if isinstance(stats, Mapping) else {"": stats}
        if wrong := [f"{name}={pair}".lstrip("=") for name, pair in pairs.items() if not _is_pair(pair)]:
            fix = "Return a mapping of names to pairs (sum, count) of numbers or scalar tensors"
            raise UserError(f"learner={self.config.learner}: its update returns {shorten(wrong[0])}. {fix}")
        if self.loss_name not in stats and self.loss_name:
            reported = ", ".join(sorted(set(stats) - {SKIPPED})) or "nothing"
            raise UserError(
                f"learner={self.config.learner}: loss_name={self.loss_name} is not reported by its update, which "
                f"reports {reported}. Set loss_name to the name of the loss"
            )
        if SKIPPED not in stats:
            return stats
        self._unread.append(torch.stack(stats[SKIPPED]))
        if len(self._unread) == MOST_UNREAD:
            self._read()
        return {name: pair for name, pair in stats.items() if name != SKIPPED}

    def _read(self) -> list[int]:
        """Return the counts; waits for the device."""
        total, row, most = self._counts
        for skipped, steps in torch.stack(self._unread).tolist() if self._unread else []:
            row = row + int(skipped) if skipped == steps else 0
            total, most = total + int(skipped), max(most, row)
        self._unread, self._counts = [], [total, row, most]
        return self._counts

    def record(self) -> dict[str, float]:
        """Return `skipped_updates` in all for the log, if there were any. Waits for the device."""
        total, _, _ = self._read()
        return {SKIPPED: float(total)} if total else {}

    def require_progress(self, when: str) -> None:
        """End a run that skips one update after another. when: stage and time. Errors: UserError."""
        _, _, most = self._read()
        if most >= MOST_SKIPPED:
            losses = ", ".join(f"{name}={value:.4g}" for name, value in self._losses.items()) or "none"
            reason = f"the gradient was not finite in {most} updates in a row, which changed no weight"
            raise self.diverged(when, f"{reason} (losses last logged: {losses})")

    def require_finite(self, values: Mapping[str, float], when: str, also: str = "") -> None:
        """End a run whose logged `values` hold a loss that is not finite, or the value named `also`. Errors: UserError.

        Losses are what `loss_name` names, and all values with "loss" in their names. when: stage and time.
        """
        self._losses = {
            name: value for name, value in values.items() if "loss" in name.rpartition("/")[2] or name == self.loss_name
        }
        for name, value in values.items():
            if (name in self._losses or name == also) and not math.isfinite(value):
                raise self.diverged(when, f"{name}={value} is not finite")

    def diverged(self, when: str, reason: str) -> UserError:
        """Return the error of a training that has left the finite numbers."""
        config, key = self.config, self.key
        keys = f"{key}={getattr(config, key):g}, grad_norm_clip={config.grad_norm_clip:g}, precision={config.precision}"
        other = "" if config.precision == "float32" else ", or with precision=float32"
        return UserError(f"{when}: {reason}; {keys}. Start again with a smaller {key}{other}")

    def state_dict(self) -> list[int]:
        """Return the counts; waits for the device."""
        return list(self._read())

    def load_state_dict(self, state: list[int]) -> None:
        """Continue from `state_dict()`."""
        self._unread, self._counts = [], [int(count) for count in state]


def _is_pair(pair: Any) -> bool:
    """Return whether `pair` is a pair of scalars."""
    numbers = pair if isinstance(pair, tuple | list) else ()
    return [isinstance(each, Real) or isinstance(each, Tensor) and each.numel() == 1 for each in numbers] == [True] * 2


def held_in_common(learner: Trainable) -> dict[str, torch.Tensor]:
    """Return every tensor that must be the same on all ranks, by name.

    Parameters and buffers of what is trained (a codebook among them), and of the target networks.
    """
    modules: dict[str, Mapping[str, Any]] = {name: module.state_dict() for name, module in learner.modules().items()}
    modules |= {name: part for name, part in learner.state_dict().items() if name.startswith("target")}
    return {f"{module}.{name}": tensor for module, state in modules.items() for name, tensor in state.items()}


def check_replicas(dist: Dist, learner: Trainable, when: str) -> None:
    """Compare everything that the ranks hold in common. Called on every rank.

    when: the iteration, for the message. Errors: UserError, on all ranks, that names the first tensor that differs.
    """
    tensors = held_in_common(learner)
    if len(set(dist.gather(checksum(tensors)))) == 1:
        return
    everyone = dist.gather({name: checksum({name: tensor}) for name, tensor in tensors.items()})
    names = [name for name in tensors if len({part.get(name) for part in everyone}) > 1]
    first = names[0]
    sums = [part.get(first) for part in everyone]
    (common, _), *_ = Counter(sums).most_common(1)
    others = [rank for rank, found in enumerate(sums) if found != common]
    agreeing = [rank for rank, found in enumerate(sums) if found == common]
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    raise UserError(
        f"distributed_debug=True: the ranks have come apart {when}: '{first}'{more} of rank {_list(others)} differs"
        f" from that of rank {_list(agreeing)}; something changes weights on one rank alone"
    )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def require_same_weights(dist: Dist, module: torch.nn.Module, what: str) -> None:
    """Compare a module's weights over all ranks. Errors: UserError on all of them when they differ."""
    if len(set(dist.gather(checksum(module.state_dict())))) != 1:
        raise UserError(f"{what}: the ranks hold different weights; let all of them read the same files")


BUILDING, CLOSING, COUNTING = "building the environment", "closing the environment", "reading environment counters"
"""Names of phases outside a stage, as the watchdog reports them."""

RESTARTS = ("restarts", "worker_restarts")
"""Counters of an environment: restarted games and worker processes."""


@dataclass
class Session:
    """One rank's run: configuration, place among the ranks, environment, folder, logs, profiler, checkpoints.

    `runners` play the session's one environment; each purpose ("train", "test", "pretrain", ...) has its own stream of
    episode seeds. `past_failures` are restarts that earlier starts of this run have counted.
    """

    config: Config
    dist: Dist
    env: BatchedEnv
    info: EnvInfo
    folder: RunFolder
    logger: Logger
    runners: dict[str, Runner]
    checkpointer: Checkpointer
    episode_log: EpisodeLog
    profiler: Profiler = field(default_factory=Profiler)
    past_failures: dict[str, float] = field(default_factory=dict)
    logged_failures: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _played: bool = False

    def rounds(self, episodes: int) -> int:
        """Return how many episodes each slot of each rank plays for at least `episodes` in all.

        The same on every rank, and whole rounds, so that no long episode is cut off.
        """
        return math.ceil(episodes / (self.env.n_slots * self.dist.world_size))

    def say_first_episodes(self) -> None:
        """Say, once, how long it took until there were episodes."""
        if not self._played:
            self._played = True
            passed = time.monotonic() - self._began
            self.logger.info(f"first episodes played {passed:.1f} s after the environments were made")

    def failure_counts(self) -> dict[str, float]:
        """Return what has gone wrong in the environments since the start, over all ranks; only what has.

        `lost_episodes` were void and replaced, `restarts` are games and `worker_restarts` processes that had died. A
        collective: every rank calls it, and gets the same.
        """
        stats = self.env_stats()
        counted = {name: float(stats.get(name, 0.0)) + self.past_failures.get(name, 0.0) for name in RESTARTS}
        self.logged_failures = dict(counted)
        counted["lost_episodes"] = float(sum(runner.lost for runner in self.runners.values()))
        return {name: value for name, value in added(self.dist.gather(counted)).items() if value > 0}

    def env_stats(self) -> dict[str, float]:
        """Return the environment's counters."""
        with self.dist.waits.doing(COUNTING):
            return self.env.get_stats()

    def resume_counting(self, past: Mapping[str, float]) -> None:
        """Add restarts of earlier starts, which a checkpoint holds, to the counts."""
        self.past_failures, self.logged_failures = dict(past), dict(past)

    def close(self, patience: float = math.inf) -> None:
        """Release the environment and the files, once what is being saved is saved.

        patience: seconds that the save may still wait for the other ranks, of which one may have ended.
        """
        self.checkpointer.close(patience)
        self.episode_log.close()
        with self.dist.waits.doing(CLOSING):
            self.env.close()


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

    def synchronise(self, iteration: int = 0) -> bool:
        """Exchange what ranks tell each other after this iteration, 0: at the end; return whether batches change."""
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
    """What stages hand on: trained modules, and the episodes of stages 1 and 2 by the purpose that plays them.

    These are "pretrain", to learn from, "held_out", to select the best model, and "pretrain_test", to judge it.
    """

    tokenizer: Tokenizer | None = None
    predictor: nn.Module | None = None
    episodes: dict[str, EpisodeBuffer] = field(default_factory=dict)

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

    def fit_rates(self, ranks: int) -> None:
        """Fit the loaded learning rates, of so many ranks, to the number that there are now (`lr_scaling`)."""
        config, dist = self.session.config, self.session.dist
        for part in getattr(self.learner, "saved", dict)().values():
            for group in getattr(part, "param_groups", ()):
                for name in {"lr", "initial_lr"} & group.keys():
                    group[name] *= lr_scale(config, dist.world_size) / lr_scale(config, ranks)

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
        return f"{self.title}, {self.clock_name} {self.now():,}"

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
        return self.pretrained.episodes

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

    def episodes_changed(self) -> None:  # noqa: B027 most stages need none
        """Continue with other episodes than this rank had: fewer, or redistributed. Called on all ranks."""

    def now(self) -> int:
        """Return the time of the stage's clock."""
        return self.clock.epoch if self.clock_name == "epoch" else self.clock.t_env

    def log(self, values: dict[str, float]) -> None:
        """Write one record at the stage's clock."""
        self.session.logger.log(values, stage=self.name, clock=self.clock_name, t=self.now())
