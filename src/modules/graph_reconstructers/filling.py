"""What reconstructors return, and what those share that store features of units, not tokens: the frame of a step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.belief import FIELD, known
from omagd.modules.graph_reconstructers.graphs import GraphTables


@dataclass(frozen=True)
class Reconstruction:
    """One tick of all slots.

    Attributes:
        fields: what to store with the step, [B, ...] by name: the reconstruction, and `belief` (`belief.py`) if agents
            read how sure it is. obs: [B, n, obs_dim] float32, seen features unchanged,
            unseen ones predicted. guessed: [B, n, N] bool, unseen nodes (including those predicted dead).
    """

    fields: dict[str, Tensor]
    obs: Tensor
    guessed: Tensor

    def among(self, obs: Tensor, slots: Tensor) -> Reconstruction:
        """Return the result for all of `obs` [B, n, obs_dim], of which this is that of the slot numbers `slots` [P].

        Nothing is guessed in the others: their stored numbers are 0, and ids -1.
        """

        def spread(part: Tensor) -> Tensor:
            blank = -1 if part.dtype == torch.int16 else 0
            return part.new_full((len(obs), *part.shape[1:]), blank).index_copy_(0, slots, part)

        fields = {name: spread(value) for name, value in self.fields.items()}
        return Reconstruction(fields, obs.index_copy(0, slots, self.obs), spread(self.guessed))

    def with_truth(self, full_obs: Tensor, shown: Tensor, columns: GraphTables) -> Reconstruction:
        """Return the result with what is true in the slots `shown` [B] bool, where nothing is guessed yet.

        full_obs: [B, n, obs_dim] float32. It is rounded as guesses are, so that learning reads the same bits.
        """
        shown, truth = shown.to(self.obs.device)[:, None, None], full_obs.to(self.obs.device)
        seen, missing = columns.sight(self.obs)
        living, missing = seen[..., :1], missing & shown
        features, rounded = columns.of_nodes(missing), truth.half()
        fields = {**self.fields, "recon": torch.where(features, rounded, self.fields["recon"])}
        if FIELD in fields:
            alive = columns.sight(truth)[0] & living
            fields[FIELD] = torch.where(shown[..., None], known(alive), fields[FIELD])
        filled = torch.where(features, rounded.to(self.obs.dtype), self.obs)
        return Reconstruction(fields, filled, self.guessed | missing)


class Filling(ABC):
    """Fills in features where agents see nothing: rounded, stored with the step, and acted on as stored.

    Args:
        layout: of the observations. device: where agents act.

    Attributes:
        columns: where units are in observations. seconds, calls, frames: time spent in `step`, its calls, and agents'
            views with a missing node.
    """

    field = "recon"

    def __init__(self, layout: EntityLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.seconds, self.calls, self.frames = 0.0, 0, 0
        self.columns = GraphTables(layout, device)

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
        unknown = torch.full(obs.shape[:2], -1, device=self.device)
        actions = unknown if last_action is None else torch.as_tensor(last_action, device=self.device)
        made = self._fill(obs, now, played.to(self.device), actions)
        self.frames += int(made.guessed.any(-1).sum())
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return made

    @abstractmethod
    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        """Return the result of `step`. now: [B] int64. played: [B] bool. actions: [B, n] int64."""

    def filled(self, obs: Tensor, stored: Tensor, missing: Tensor) -> Reconstruction:
        """Return obs [B, n, obs_dim] with the features `stored`, float16, of the nodes `missing` [B, n, N]."""
        hidden = self.columns.of_nodes(missing)
        return Reconstruction({self.field: stored}, torch.where(hidden, stored.to(obs.dtype), obs), missing)

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (reconstructed obs [..., n, obs_dim], missing [..., n, N]), the same bits as `step` gave.

        data: `obs` and the field that `step` asked to store.
        """
        obs = data["obs"]
        columns = self.columns if obs.device == self.device else GraphTables(self.layout, obs.device)
        missing = columns.sight(obs)[1]
        return torch.where(columns.of_nodes(missing), data[self.field].to(obs.dtype), obs), missing
