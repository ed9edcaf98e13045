"""Typed `env_args` of `snakes_3v3`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

ObsName = Literal["26", "26_raw", "30", "35", "near", "planes", "entities"]


class SnakesArgs(BaseModel):
    """Arguments of `snakes_3v3`.

    Attributes:
        obs: what one snake sees; the columns stand in `features` ("26", "30", "35"), `near`, `planes` and `entities`.
            "26_raw" is "26" without `normalise`.
        normalise: whether "26", "30" and "35" are divided by the size of the board, codes by 7.
        centred: whether "planes" are turned around the torus so that one's own head stands in row 5, column 10.
        sight: up to which distance (cells, on the torus) "entities" shows others; None for all of them.
        reward: "score", the change of the difference between the teams' scores; "potential", that and potential-based
            shaping; "baseline", as published. Formulas stand in `rewards`.
        potential_scale, potential_gamma: price of one step's way to the nearest bean; the learner's own discount.
        reward_win: paid to each snake at the end of a won game, taken at the end of a lost one; not with "baseline",
            which has its own.
        opponent: who plays the other team until `set_opponents` says otherwise.
        side: which team the agents are: "a" snakes 0 to 2, "b" snakes 3 to 5, "both": a with even reset seeds, b with
            odd ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    obs: ObsName = "26"
    normalise: bool = True
    centred: bool = True
    sight: float | None = Field(default=None, gt=0)
    reward: Literal["score", "potential", "baseline"] = "score"
    potential_scale: float = Field(default=0.1, ge=0)
    potential_gamma: float = Field(default=0.99, gt=0, le=1)
    reward_win: float = Field(default=0.0, ge=0)
    opponent: Literal["random", "l1", "l3", "l4", "evasion", "greedy"] = "greedy"
    side: Literal["a", "b", "both"] = "both"

    @field_validator("obs", mode="before")
    @classmethod
    def _number_as_name(cls, value: Any) -> Any:
        """Take 26 for "26", as YAML writes it."""
        return str(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _belong_together(self) -> SnakesArgs:
        """Refuse a key that would change nothing."""
        if self.sight is not None and self.obs != "entities":
            raise ValueError(f"env_args.sight={self.sight:g} needs obs=entities, but obs={self.obs}")
        if self.reward_win and self.reward == "baseline":
            raise ValueError(f"env_args.reward_win={self.reward_win:g} is not for reward=baseline, which pays its own")
        return self
