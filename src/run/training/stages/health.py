"""Whether a training still computes with finite numbers, and the error that ends it where it does not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from omagd.config.checks import shorten
from omagd.config.schema import Config
from omagd.learners.protocol import Trainable
from omagd.learners.synced_optimizer import SKIPPED, Stats
from omagd.run.checkpoint.weights import (
    checksum,
)
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

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
