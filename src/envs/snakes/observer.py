"""One name for each way to look at a board: from the arguments of an observation to its arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omagd.config.env_info import EntityLayout
from omagd.envs.snakes.args import ObsName
from omagd.envs.snakes.board import Board
from omagd.envs.snakes.entities import entity_features, entity_layout
from omagd.envs.snakes.features import SCALES, flat_features
from omagd.envs.snakes.near import NEAR_DIM, near_features
from omagd.envs.snakes.planes import PLANES_DIM, plane_features


@dataclass(frozen=True)
class Observer:
    """What a team's snakes see; the fields are those of `SnakesArgs`."""

    obs: ObsName = "26"
    normalise: bool = True
    centred: bool = True
    sight: float | None = None

    @property
    def layout(self) -> EntityLayout | None:
        """Entity layout of "entities"."""
        return entity_layout(self.sight) if self.obs == "entities" else None

    @property
    def obs_dim(self) -> int:
        """Features of one snake's observation."""
        if self.layout is not None:
            return self.layout.obs_dim
        whole = {"planes": PLANES_DIM, "near": NEAR_DIM}
        return whole[self.obs] if self.obs in whole else len(SCALES[self.obs.removesuffix("_raw")])

    def look(self, board: Board, team: np.ndarray, full: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Return what `team` [B] sees, [B, 3, obs_dim] float32, and if `full` the same without a limit, else None."""
        if self.obs == "entities":
            return entity_features(self.sight, board, team, full)
        if self.obs == "planes":
            seen = plane_features(self.centred, board, team)
        elif self.obs == "near":
            seen = near_features(board, team)
        else:
            name = self.obs.removesuffix("_raw")
            seen = flat_features(name, self.normalise and name == self.obs, board, team)
        return seen, seen.copy() if full else None
