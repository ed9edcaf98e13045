"""What a checkpoint saves: registered objects, results of finished stages, and the interface of a stage.

At the end: nested state as tensors and plain values, which can be read without running code.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.controllers.types import Policy
from omagd.run.reporting.log_sinks import EpisodeLog
from omagd.runners.runner import Runner
from omagd.utils.logging import Logger
from omagd.utils.metrics import Counters

Scope = Literal["shared", "rank"]
"""`shared`: equal on all ranks, rank 0 writes it. `rank`: each rank writes and restores its own."""


class Stateful(Protocol):
    """An object that can be registered with a checkpointer.

    An object of scope `rank` may also have `merge(states)`: where the number of ranks has changed, rank 0 calls it with
    the states of all former ranks. Without it, and on the other ranks, the object stays as the stage made it.
    """

    def state_dict(self) -> Any:
        """Return the state: nested dicts, lists and tuples of tensors, arrays, numbers, text, None."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state. Errors: KeyError, RuntimeError, TypeError, ValueError for one that does not fit."""


class Group:
    """Several objects that are registered under one name. members: by their own names."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = members

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every member. Errors: KeyError where one is missing."""
        for name, member in self.members.items():
            member.load_state_dict(state[name])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Merge what former ranks had into every member that can do that."""
        for name, member in self.members.items():
            if hasattr(member, "merge"):
                member.merge([state[name] for state in states])


class Attribute:
    """One attribute of an object, with a plain value. owner: the object. name: of the attribute."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def state_dict(self) -> Any:
        """Return the value."""
        return getattr(self.owner, self.name)

    def load_state_dict(self, state: Any) -> None:
        """Set the value."""
        setattr(self.owner, self.name, state)


def upgraded(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared state of a stage as this version reads it: earlier versions wrote none of these three."""
    return {"health": [0, 0, 0], "opponents": {}, "tested": {}, **shared}


@dataclass(frozen=True)
class StageResult:
    """How a stage ended: `values` are its last and best numbers, `files` its artifacts by name."""

    name: str
    clock: dict[str, int]
    values: dict[str, float]
    files: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)


class Pretrained(Protocol):
    """Pretrained modules and the episodes that the pretraining stages share."""

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the trained modules by name."""

    def buffers(self) -> dict[str, EpisodeBuffer]:
        """Return the shared episodes by name."""


class SavedSession(Protocol):
    """What a checkpoint saves of a session."""

    logger: Logger
    runners: dict[str, Runner]
    episode_log: EpisodeLog
    logged_failures: dict[str, float]

    def resume_counting(self, past: Mapping[str, float]) -> None:
        """Add restarts of earlier starts to the counts."""


class SavedStage(Protocol):
    """What a checkpointer asks of the stage in progress, beside what the stage registers."""

    name: str
    clock_name: str
    clock: Counters

    @property
    def session(self) -> SavedSession: ...  # noqa: D102
    @property
    def pretrained(self) -> Pretrained: ...  # noqa: D102

    def start(self) -> None:
        """Begin at the beginning."""

    def restored(self) -> None:
        """Finish the preparation once the state is there: the beginning, or that of a checkpoint."""

    def renew(self, generation: int) -> None:
        """Begin new streams of random numbers."""

    def episodes_changed(self, *, lost: bool) -> None:
        """Continue with other episodes than this rank had: fewer (`lost`), or redistributed ones."""

    def buffers(self) -> dict[str, EpisodeBuffer]:
        """Return the episodes that belong to the checkpoint, by name."""

    def policies(self) -> dict[str, Policy]:
        """Return the policies of battles in flight, by runner."""

    def now(self) -> int:
        """Return the time of the stage's clock."""

    def done(self) -> bool:
        """Whether the stage is at its end."""

    def urgent(self) -> bool:
        """Whether this iteration should be saved at once."""

    def score(self) -> float | None:
        """Return how good the stage is; higher is better."""

    def so_far(self) -> StageResult:
        """Return the result of a stage that has not ended."""

    def require_sound(self) -> None:
        """Refuse to save values that are not finite. Errors: UserError."""


_ARRAY = "__ndarray__"


def pack(tree: Any) -> Any:
    """Return an independent copy of `tree`: tensors on the CPU, NumPy arrays as marked tensors.

    tree: dicts, lists and tuples of tensors, arrays, numbers, text, bytes, None. Errors: TypeError for anything else.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, np.ndarray):
        return {_ARRAY: torch.from_numpy(tree.copy())}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        return {pack(key): pack(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(pack(value) for value in tree)
    if tree is None or type(tree) in {bool, int, float, str, bytes}:  # an enum is not: its class would be loaded
        return tree
    raise TypeError(f"{type(tree).__name__} has no place in a checkpoint")


def unpack(tree: Any) -> Any:
    """Return what `pack` was given: arrays are arrays again; tensors stay on the CPU."""
    if isinstance(tree, Mapping):
        if tree.keys() == {_ARRAY}:
            return tree[_ARRAY].numpy()
        return {key: unpack(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(unpack(value) for value in tree)
    return tree


def serialized(content: Mapping[str, Any]) -> bytes:
    """Return tensors and plain values as the bytes of a file.

    `torch.save` does not write the file itself: on a full disk it raises an error of another kind than OSError.
    """
    stream = io.BytesIO()
    torch.save(dict(content), stream)
    return stream.getvalue()


def first_not_finite(tree: Any, path: str = "") -> str | None:
    """Return the path of the first tensor in nested dicts and lists that is not finite, None if all are."""
    if isinstance(tree, torch.Tensor):
        return path if tree.is_floating_point() and not bool(tree.isfinite().all()) else None
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    found = (first_not_finite(value, f"{path}.{key}" if path else str(key)) for key, value in items)
    return next((place for place in found if place is not None), None)
