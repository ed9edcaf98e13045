"""What reconstructors share that store features of units, not tokens: the frame of a step, and reading it again."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction


class Filling(ABC):
    """Fills in features where agents see nothing: rounded, stored with the step, and acted on as stored.

    Args:
        layout: of the observations. device: where agents act.

    Attributes:
        seconds, calls, frames: time spent in `step`, its calls, and agents' views with a missing node.
    """

    field = "recon"

    def __init__(self, layout: EntityLayout, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.seconds, self.calls, self.frames = 0.0, 0, 0
        self._columns = GraphTables(layout, device)

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
        hidden = self._columns.of_nodes(missing)
        return Reconstruction({self.field: stored}, torch.where(hidden, stored.to(obs.dtype), obs), missing)

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (reconstructed obs [..., n, obs_dim], missing [..., n, N]), the same bits as `step` gave.

        data: `obs` and the field that `step` asked to store.
        """
        obs = data["obs"]
        columns = self._columns if obs.device == self.device else GraphTables(self.layout, obs.device)
        missing = columns.sight(obs)[1]
        return torch.where(columns.of_nodes(missing), data[self.field].to(obs.dtype), obs), missing
