"""Stage 3: what every reconstructor returns, and what all kinds share: the frame of a step, and reading it again.

At each step a reconstructor fills in what agents do not see, and only that: seen features pass bit for bit. The result
is rounded and stored with the step, and agents act on the stored values, so that learning reads the same bits.

Shapes: B slots, n agents, N nodes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.schema import Config
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    from omagd.components.episode_codec import Spec


class Belief(NamedTuple):
    """Beliefs about M missing nodes (unseen, not the agent itself, of a living observer).

    They are in the order of `torch.nonzero(missing)` over missing [S, n, N].

    Attributes:
        features: [M, D] float32 as the agent receives them, zero where taken for dead. p_dead: [M], in [0, 1].
            taken_for_dead: [M] bool. spread: [M, D], predicted standard deviation, or None.
    """

    features: Tensor
    p_dead: Tensor
    taken_for_dead: Tensor
    spread: Tensor | None


@dataclass(frozen=True)
class Reconstruction:
    """One tick of all slots.

    Attributes:
        fields: what to store with the step, [B, ...] by name: the reconstruction. obs: [B, n, obs_dim] float32, seen
            features unchanged, unseen ones predicted. guessed: [B, n, N] bool, unseen nodes (including those predicted
            dead).
    """

    fields: dict[str, Tensor]
    obs: Tensor
    guessed: Tensor


class Reconstructor(ABC):
    """Fills in features where agents see nothing.

    Kinds of predictors inherit from it and are built as `cls(tokenizer, predictor, config, info)`.

    Args:
        layout: of the observations. device: where agents act.

    Attributes:
        shape_keys: keys of `mask_predictor_config` that determine the weights or their meaning. training_fields: fields
            of episodes that stages 1 and 2 read. pretraining: the stages that train it.
        field: name of the stored field that `restore` reads.
        columns: where units are in observations. seconds, calls, frames: time spent in `step`, its calls, and agents'
            views with a missing node, since construction.
    """

    shape_keys: ClassVar[tuple[str, ...]] = ("kind",)
    training_fields: ClassVar[tuple[str, ...]] = ("obs", "full_obs")
    pretraining: ClassVar[tuple[str, ...]] = ("stage1", "stage2")
    field = "recon"

    def __init__(self, layout: EntityLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.seconds, self.calls, self.frames = 0.0, 0, 0
        self.columns = GraphTables(layout, device)

    @classmethod
    def new_predictor(cls, config: Config, info: EnvInfo) -> nn.Module:
        """Return an untrained predictor; every kind of `mask_predictor_config` has one."""
        raise UserError(
            f"mask_predictor_config.kind={config.mask_predictor_config.kind}: {cls.__name__} has no"
            " new_predictor(config, info). See docs/extending.md"
        )

    @classmethod
    def fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the fields that `step` asks to store, in its order: name -> (type, shape)."""
        assert info.layout is not None
        return {"recon": (torch.float16, (info.n_agents, info.obs_dim))}

    @staticmethod
    def n_inferred(layout: EntityLayout) -> int:
        """Return how many numbers each agent reads beside its observation: 0 where units are filled in."""
        return 0

    def begin(self, n_slots: int) -> None:  # noqa: B027 some remember nothing
        """Start with empty memories in `n_slots` slots, and with the current weights."""

    def reset(self, which: np.ndarray) -> None:  # noqa: B027 some remember nothing
        """Clear the memories of the slots `which` [B] bool, where episodes start."""

    @torch.inference_mode()
    def step(
        self,
        obs: np.ndarray | Tensor,
        step: np.ndarray | Tensor,
        active: np.ndarray | Tensor | None = None,
        last_action: np.ndarray | Tensor | None = None,
    ) -> Reconstruction:
        """Reconstruct one tick: obs [B, n, obs_dim] float32 at `step` [B] of the episodes. Called once per tick.

        active: [B] bool, slots that have made a step; None: all. The other slots keep their memories, and their
            observations pass unchanged.
        last_action: [B, n] int64, -1 at the start of an episode; None: unknown, as if no agent had acted.
        """
        start = time.perf_counter()
        obs = torch.as_tensor(obs, device=self.device)
        now = torch.as_tensor(step, device=self.device).long()
        played = torch.ones(len(obs), dtype=torch.bool) if active is None else torch.as_tensor(active)
        # As at the start of an episode, when nobody has acted.
        unknown = torch.full(obs.shape[:2], -1, device=self.device)
        actions = unknown if last_action is None else torch.as_tensor(last_action, device=self.device)
        made = self._fill(obs, now, played.to(self.device), actions)
        if not isinstance(made, Reconstruction):
            raise TypeError(f"{type(self).__name__}._fill returned {type(made).__name__}, not what `self.made` makes")
        self.frames += int(made.guessed.any(-1).sum())
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return made

    @abstractmethod
    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        """Return the result of `step`. now: [B] int64. played: [B] bool. actions: [B, n] int64."""

    def made(self, obs: Tensor, stored: Tensor, missing: Tensor) -> Reconstruction:
        """Return obs [B, n, obs_dim] with the `stored` field [B, ...] in place of the nodes `missing` [B, n, N]."""
        return Reconstruction({self.field: stored}, self.filled(obs, stored, missing, self.columns), missing)

    def filled(self, obs: Tensor, stored: Tensor, missing: Tensor, columns: GraphTables) -> Tensor:
        """Return obs [..., n, obs_dim] with the `stored` values in place of the nodes `missing` [..., n, N]."""
        # From what is stored, as learning does later: acting and learning read the same bits.
        guessed = self.features_of(stored, missing, columns).to(obs.dtype)
        # Features that are seen are selected, never computed: they pass bit for bit.
        return torch.where(columns.of_nodes(missing), guessed, obs)

    def features_of(self, stored: Tensor, missing: Tensor, columns: GraphTables) -> Tensor:
        """Return the features [..., n, obs_dim] of the `missing` [..., n, N] nodes; others may have any.

        stored: the field, here these features. columns: on its device.
        """
        return stored

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (reconstructed obs [..., n, obs_dim], guessed [..., n, N]), the same bits as `step` gave.

        data: `obs` and the field that `step` asked to store.
        """
        obs = data["obs"]
        columns = self.columns if obs.device == self.device else GraphTables(self.layout, obs.device)
        missing = columns.sight(obs)[1]
        return self.filled(obs, data[self.field], missing, columns), missing

    def snapshot(self) -> dict[str, Tensor]:
        """Return the memories of all slots."""
        return {}

    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:  # noqa: B027 some remember nothing
        """Continue from a `snapshot` of as many slots."""
