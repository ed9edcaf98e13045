"""Observations by name: `flat`, `near` and `views` list what they contain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from omagd.config.env_info import EntityLayout
from omagd.envs.snakes import flat, near, views
from omagd.envs.snakes.board import N_BEANS, N_SNAKES, N_TEAM, Board

ObsName = Literal["26", "26_raw", "30", "35", "near", "entities"]
EVERYTHING = 10.0  # distances are divided by the sight, or by this without a limit
DIMS = {
    **{name: len(scale) for name, scale in flat.SCALES.items()},
    "26_raw": len(flat.SCALES["26"]), "near": near.NEAR_DIM, "entities": views.ENTITY_DIM,
}  # fmt: skip


def state_features(board: Board, team: np.ndarray) -> np.ndarray:
    """Return the state [B, 66] float32 with `team` [B] first."""
    out = np.empty((len(board), flat.STATE_DIM), np.float32)
    flat.state(board, board.sides(team), out)
    return out


@dataclass(frozen=True)
class Observer:
    """Observations of a team; the fields are those of `SnakesArgs`."""

    obs: ObsName = "26"
    normalise: bool = True
    sight: float | None = None

    @property
    def layout(self) -> EntityLayout | None:
        """Entity layout of "entities". Opponents and beans are its "enemies": everything that is not of the team."""
        unit = views.UNIT_DIM
        sizes = views.MOVE_DIM, N_TEAM + N_BEANS, unit, N_TEAM - 1, unit - 1, views.OWN_DIM
        return EntityLayout(*sizes, sight=self.sight or EVERYTHING) if self.obs == "entities" else None

    @property
    def obs_dim(self) -> int:
        """Features of one snake's observation."""
        return DIMS[self.obs]

    def observe(self, board: Board, team: np.ndarray, full: bool = False) -> tuple[np.ndarray, np.ndarray | None]:
        """Return what `team` [B] sees, [B, 3, obs_dim] float32; if `full`, also without the range limit, else None."""
        seen = self._seen(board, team, self.sight or np.inf)
        if not full:
            return seen, None
        return seen, seen.copy() if self.sight is None else self._seen(board, team, np.inf)

    def _seen(self, board: Board, team: np.ndarray, sight: float) -> np.ndarray:
        side = board.sides(team)
        out = np.empty((len(board), N_TEAM, self.obs_dim), np.float32)
        if self.obs == "entities":
            views.entities(board, side, np.float32(self.sight or EVERYTHING), np.float32(sight), out)
        elif self.obs == "near":
            steps, (far, order) = np.empty((N_SNAKES, N_BEANS), np.int64), np.empty((2, N_SNAKES - 1), np.int64)
            near.near(board, side, steps, far, order, out)
        else:
            name = self.obs.removesuffix("_raw")
            scale = flat.SCALES[name]
            divides = self.normalise and name == self.obs
            flat.flat(board, side, int(name), scale if divides else np.ones_like(scale), out)
        return out
