"""Reconstruction without a network (`fill_unseen`): a unit that is not seen stays as it was seen last, or is zeros."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.modules.graph_reconstructers.reconstructor import Reconstruction, Reconstructor


class LastSight(Reconstructor):
    """Fills in each unit's features of its last sight in this episode; those of units never seen stay zero.

    Features are copied as they were: relative to where the agent was then, also those of a unit that has died since.
    As with predictors, the result is rounded and stored with the step, and agents act on the stored values.
    Shapes: B slots, n agents, N nodes.

    Args:
        info: of an environment with a layout. device: where agents act.
    """

    def __init__(self, info: EnvInfo, device: torch.device) -> None:
        assert info.layout is not None
        super().__init__(info.layout, device)
        self._shape = info.n_agents, info.obs_dim
        self.begin(0)

    def begin(self, n_slots: int) -> None:
        """Start without memories in `n_slots` slots."""
        self._last = torch.zeros((n_slots, *self._shape), device=self.device)

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Clear the memories of the slots `which` [B] bool, where episodes start."""
        self._last[torch.as_tensor(which, device=self.device)] = 0

    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        seen, missing = self.columns.sight(obs)
        active = played[:, None, None]
        seen, missing = seen & active, missing & active
        self._last = torch.where(self.columns.of_nodes(seen), obs, self._last)
        stored = torch.where(self.columns.of_nodes(missing), self._last, 0).half()
        return self.made(obs, stored, missing)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the memories of all slots."""
        return {"last": self._last.clone()}

    def load_snapshot(self, snapshot: dict[str, Tensor]) -> None:
        """Continue from a `snapshot` of as many slots."""
        self._last = snapshot["last"].to(self.device).clone()


class Zeros(Reconstructor):
    """Fills in zeros, what an observation shows of such units: nothing. With `truth_until` a baseline of its own.

    Args:
        info: of an environment with a layout. device: where agents act.
    """

    def __init__(self, info: EnvInfo, device: torch.device) -> None:
        assert info.layout is not None
        super().__init__(info.layout, device)

    def _fill(self, obs: Tensor, now: Tensor, played: Tensor, actions: Tensor) -> Reconstruction:
        missing = self.columns.sight(obs)[1] & played[:, None, None]
        return self.made(obs, torch.zeros_like(obs, dtype=torch.float16), missing)


FILLS: dict[str, type[LastSight | Zeros]] = {"last_seen": LastSight, "zeros": Zeros}
"""By `fill_unseen`."""
