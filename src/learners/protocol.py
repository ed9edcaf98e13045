"""Interfaces of learners: all that the training loop, the checkpoints and the divergence check call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.learners import REGISTRY
from omagd.learners.synced_optimizer import Stats, SyncedOptimizer
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import EpisodeMeta, PackedBatch

Data = Literal["replay", "on_policy"]
NO_TARGETS = dict.fromkeys(
    ("double_q", "q_lambda", "target_update_interval", "target_update_updates"), "has no target networks"
)
"""Keys of target networks, and why a learner without them rejects values other than the defaults (`unread`)."""


class Trainable(Protocol):
    """What checkpoints and the divergence check need of every learner, pre-training included.

    Attributes:
        loss_name: name of the loss in the stats of `update`. The run ends with an error when its mean is not finite.
    """

    loss_name: str = "loss_td"

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything else that a resumed run needs: optimizers, target networks, counters."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`. The caller loads the weights of `modules()`."""


class Learner(Trainable, Protocol):
    """A learner of stage 3, built as `cls(mac, config, info, dist)`.

    Optional: `args_model`, a pydantic model of the keys in `learner_args`; a static method
    `how_targets_move(config, environments) -> str`, a few words about target updates for the log;
    `register_state(register)`, which calls `Checkpointer.register` for state that is not the same on all ranks;
    `needs_groups`, True for a learner that cannot have `group_size=1`; `precisions`, the values of the key `precision`
    that it supports, by default all; and `errors() -> Tensor`, those of the last batch's episodes, [B], for `use_per`.

    Attributes:
        data: "replay" learns from batches sampled from the replay buffer; "on_policy" from the episodes that were
            collected last, which are then discarded.
        reads_full_obs: whether batches hold `full_obs` for it, whatever the agents read.
    """

    data: Data = "replay"
    reads_full_obs: bool = False

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None: ...

    def warm_up(self) -> None:
        """Run discarded passes on a made-up batch, before anything is loaded; fixes the order of sums over ranks."""

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take one step on this rank's batch; return (sum, count) pairs by name, `loss_name` among them.

        On-policy learners take all their steps on the batch, the same number on all ranks, and return merged stats.
        episodes: number of episodes collected so far by all ranks.
        """


class Draw(Protocol):
    """Episodes drawn for an update of fixed shapes; the last one of an on-policy batch has no steps."""

    @property
    def drawn(self) -> Tensor:
        """Their places in the replay and their lengths in rows, [2, B] int64 on the CPU."""

    @property
    def rows(self) -> int:
        """T of the batch."""

    @property
    def meta(self) -> tuple[EpisodeMeta, ...]:
        """Their origin, [B], in on-policy batches."""

    def batches(self, drawn: Tensor, parts: int) -> list[PackedBatch]:
        """Return the batch in at most `parts` parts; only launches work. drawn: on the device."""

    def counts(self, of: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Return on the CPU what `of` counts in each drawn episode, [B, k]. of: returns that of a batch.

        All stored episodes are counted at once, and the host waits only then.
        """


class FixedLearner(Protocol):
    """A learner whose updates can have fixed shapes, so that a GPU repeats them as one CUDA graph.

    A subclass that replaces `update` replaces `learn_fixed` as well, or learns from packed batches.
    """

    device: torch.device

    def steps(self) -> tuple[SyncedOptimizer, ...]:
        """Return what takes optimisation steps."""

    def fixed_inputs(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return on the CPU what the host decides about an update: tensors, of few shapes."""

    def learn_fixed(self, draw: Draw, inputs: tuple[Tensor, ...]) -> Stats:
        """Take the steps of `update` on drawn episodes. It only launches work, which depends on shapes alone.

        inputs: those of `fixed_inputs`, on the device.
        """

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take the same steps on packed episodes, and finish."""

    def finish(self, episodes: int) -> None:
        """Do what follows the steps on the host. episodes: collected so far by all ranks."""


def has_fixed_shapes(kind: type) -> bool:
    """Return whether a class of learners is a `FixedLearner` whose `update` is the one that `learn_fixed` repeats."""
    owners = [next((base for base in kind.__mro__ if name in vars(base)), object) for name in ("learn_fixed", "update")]
    return owners[0] is not object and issubclass(*owners)


class SavesParts(ABC):
    """Base of learners: it saves named parts and the number of updates.

    Attributes:
        updates: taken so far.
    """

    updates: int = 0

    @abstractmethod
    def saved(self) -> dict[str, Any]:
        """Return optimizers, modules and tensors by their keys in `state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beside `modules()`."""
        parts = {name: part if isinstance(part, Tensor) else part.state_dict() for name, part in self.saved().items()}
        return {**parts, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; the caller loads the weights of `modules()`."""
        for name, part in self.saved().items():
            if isinstance(part, Tensor):
                part.copy_(state[name])
            else:
                part.load_state_dict(state[name])
        self.updates = int(state["updates"])


class OnPolicyLearner(Learner, Protocol):
    """A learner with `data = "on_policy"`.

    Optional: `counts_updates`, True where `updates` counts the steps that were taken; `unread`, keys that have no
    meaning for the learner, each with the reason.

    Attributes:
        explores: whether actions are explored by the schedule of epsilon, as by learners from replay.
    """

    explores: bool = False

    @staticmethod
    def steps_per_batch(config: Config) -> int:
        """Return the optimisation steps of one `update`: epochs times minibatches.

        A learner that `counts_updates` may take fewer.
        """
        raise NotImplementedError


class PretrainingLearner(Trainable, Protocol):
    """A learner of stage 1 or 2.

    Attributes:
        best_metric: name in the stats of `evaluate` that selects the best model; lower is better.
    """

    best_metric: ClassVar[str]

    def warm_up(self) -> None:
        """Run discarded passes on an episode without steps."""

    def update(self, batch: PackedBatch) -> Stats:
        """Take one step on this rank's batch; return (sum, count) pairs by name."""

    def begin(self, batches: Callable[[], Iterable[PackedBatch]]) -> None:
        """Prepare on this rank's training episodes, which each call yields; before the first update, by all ranks."""

    def evaluate(self, batch: PackedBatch) -> Stats:
        """Return (sum, count) pairs by name on held-out episodes. Called by all ranks."""


def learner_class(name: str) -> type[Any]:
    """Return the learner called `name`; a class without `data` or `loss_name` gets the protocol's.

    Errors: UserError naming what is missing or wrong.
    """
    return REGISTRY.get(name)


def protocol_of(found: Any) -> type:
    """Return the protocol of a learner with its kind of data."""
    return OnPolicyLearner if getattr(found, "data", "") == "on_policy" else Learner


def explores(learner: Any) -> bool:
    """Return whether the actions of a learner, or of its class, are explored by the schedule of epsilon."""
    return bool(learner.data == "replay" or learner.explores)


def records_full_obs(config: Config) -> bool:
    """Return whether the episodes that stage 3 stores hold `full_obs`: for a key, or for the learner."""
    return config.records_truth or bool(learner_class(config.learner).reads_full_obs)


def updates_per_iteration(config: Config) -> int:
    """Return the number of optimisation steps between two collections of episodes."""
    learner = learner_class(config.learner)
    return int(learner.steps_per_batch(config)) if learner.data == "on_policy" else config.updates_per_iteration
