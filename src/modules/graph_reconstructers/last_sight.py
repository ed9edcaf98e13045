"""Reconstruction without a network: a unit that an agent does not see stays as it saw it last (`fill_unseen`)."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction


class LastSight:
    """Fills in each unit's features of its last sight in this episode; those of units never seen stay zero.

    Features are copied as they were: relative to where the agent was then, also those of a unit that has died since.
    As with predictors, the result is rounded and stored with the step, and agents act on the stored values.
    Shapes: B slots, n agents, N nodes.

    Args:
        info: of an environment with a layout. device: where agents act.

    Attributes:
        seconds, calls, frames: time spent in `step`, its calls, and agents' views with a missing node.
    """

    field = "recon"

    def __init__(self, info: EnvInfo, device: torch.device) -> None:
        assert info.layout is not None
        self.layout, self.device, self._shape = info.layout, device, (info.n_agents, info.obs_dim)
        self.seconds, self.calls, self.frames = 0.0, 0, 0
        self._columns = GraphTables(info.layout, device)
        self.begin(0)

    def begin(self, n_slots: int) -> None:
        """Start without memories in `n_slots` slots."""
        self._last = torch.zeros((n_slots, *self._shape), device=self.device)

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Clear the memories of the slots `which` [B] bool, where episodes start."""
        self._last[torch.as_tensor(which, device=self.device)] = 0

    @torch.inference_mode()
    def step(
        self,
        obs: np.ndarray | Tensor,
        step: np.ndarray | Tensor,
        active: np.ndarray | Tensor | None = None,
        last_action: np.ndarray | Tensor | None = None,
    ) -> Reconstruction:
        """Fill in one tick: obs [B, n, obs_dim] float32. Called once per tick.

        active: [B] bool, slots that have made a step; None: all. The other slots keep their memories, and their
            observations pass unchanged. step, last_action: not read.
        """
        start = time.perf_counter()
        obs = torch.as_tensor(obs, device=self.device)
        seen, missing = self._columns.sight(obs)
        if active is not None:
            played = torch.as_tensor(active, device=self.device)[:, None, None]
            seen, missing = seen & played, missing & played
        self._last = torch.where(self._columns.of_nodes(seen), obs, self._last)
        hidden = self._columns.of_nodes(missing)
        stored = torch.where(hidden, self._last, 0).half()
        made = Reconstruction({self.field: stored}, torch.where(hidden, stored.to(obs.dtype), obs), missing)
        self.frames += int(missing.any(-1).sum())
        self.calls += 1
        self.seconds += time.perf_counter() - start
        return made

    @torch.no_grad()
    def restore(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (filled obs [..., n, obs_dim], missing [..., n, N]), the same bits as `step` gave.

        data: `obs` and the field that `step` asked to store.
        """
        obs = data["obs"]
        columns = self._columns if obs.device == self.device else GraphTables(self.layout, obs.device)
        missing = columns.sight(obs)[1]
        return torch.where(columns.of_nodes(missing), data[self.field].to(obs.dtype), obs), missing

    def snapshot(self) -> dict[str, Tensor]:
        """Return the memories of all slots."""
        return {"last": self._last.clone()}

    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._last = snapshot["last"].to(self.device).clone()
