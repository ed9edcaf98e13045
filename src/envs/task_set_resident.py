"""One map of a task set on a device, in the arrays of the set: see `omagd.envs.task_set_env`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import Outcome, ResidentGame, Seen


class PlacedGame:
    """A map's game that shows and takes arrays of the common shape: see `ResidentGame`.

    Args:
        game: of the map. n_agents: of the map. columns: [obs_dim], [state_dim] int64, places of its numbers in common
            arrays. common: facts of the set.
    """

    def __init__(
        self, game: ResidentGame, n_agents: int, columns: tuple[np.ndarray, np.ndarray], common: EnvInfo
    ) -> None:
        self._game, self._n = game, n_agents
        self.device, self.n_slots, self.results = game.device, game.n_slots, game.results
        self.faults, self.capturable = game.faults, game.capturable
        self._obs, self._state = (torch.from_numpy(each).to(game.device) for each in columns)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros((game.n_slots, *shape), dtype=dtype, device=game.device)

        obs = common.n_agents, common.obs_dim
        avail = zeros(common.n_agents, common.n_actions, dtype=torch.bool)
        avail[..., 0] = True  # the one action of agents that the map does not have
        self._seen = Seen(avail, zeros(*obs), zeros(*obs), zeros(common.state_dim))

    def reset(self, which: Tensor, seeds: Tensor) -> None:
        """Start new episodes in the slots `which` [B] bool, slot b from `seeds[b]` (int64 ≥ 0)."""
        self._game.reset(which, seeds)

    def step(self, actions: Tensor, active: Tensor) -> Outcome:
        """Play `actions` [B, n] int64 in the slots `active` [B] bool; those of absent agents are not used."""
        return self._game.step(actions[:, : self._n], active)

    def observe(self, full: bool = False) -> Seen:
        """Return masks, observations and state, and `full` observations if asked; the next call overwrites them."""
        shown, seen = self._game.observe(full), self._seen
        seen.avail[:, : self._n, : shown.avail.shape[2]] = shown.avail
        for wide, own in ((seen.obs, shown.obs), (seen.full, shown.full))[: 1 + full]:
            wide[:, : self._n].index_copy_(2, self._obs, own)
        seen.state.index_copy_(1, self._state, shown.state)
        return seen
