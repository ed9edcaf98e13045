"""The adapter for environments in PyMARL's shape."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from omagd.envs.adapters import AdapterArgs, Foreign, Rewards, imported
from omagd.envs.outputs import as_vector, ends_of, results_of
from omagd.envs.protocol import TRUNCATED
from omagd.utils.errors import nearest


class PyMARLEnv(Foreign):
    """A class in PyMARL's shape: `reset`, `step`, `get_obs`, `get_state`, `get_avail_actions`, `get_env_info`.

    `step` may return (reward, terminated, info) or, as in EPyMARL, (obs, reward, terminated, truncated, info).
    """

    args_model = AdapterArgs
    returns = (3, 5)
    _takes_seed = True  # until a constructor shows that it does not
    _fix = " Give module:Class"

    def _measure(self) -> None:
        if lacking := [name for name in METHODS if not callable(getattr(self.env, name, None))]:
            raise self._wrong(f"it has no {', '.join(lacking)}")
        seed, takes = self._own.get("seed"), inspect.signature(self.env.reset).parameters
        if seed is not None and self._stale and "seed" not in takes:
            fix = "Leave it out, or give env_args.new_each_episode=False"
            raise self._wrong(f"with env_args.seed={seed} every episode starts alike. {fix}")
        self.facts = self._fitting("get_env_info()", lambda: dict(self.env.get_env_info()))
        self._stale = self._stale or self._takes_seed  # it was made before there was a seed

    def _make(self) -> Any:
        module, _, name = self.args.key.partition(":")
        cls = getattr(found := imported(module), name, None)
        if not callable(cls):
            raise self._wrong(f"{module} has no class {name!r}. Give module:Class.{nearest(name, dir(found))}")
        takes = inspect.signature(cls).parameters
        if unread := [key for key in Rewards.model_fields if key in self._own and key not in takes]:
            raise self._wrong(f"{name} has one reward and its own step limit. Leave out {', '.join(unread)}")
        # PyMARL passes a seed to all; a class that passes everything on may end at one that takes none.
        passes = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        self._takes_seed = self._takes_seed and "seed" not in self._own and ("seed" in takes or passes)
        if self._takes_seed:
            try:
                return cls(**self._own, seed=self._seed % 2**31)
            except TypeError:
                if "seed" in takes:
                    raise
                self._takes_seed = False  # asked once: what it has begun is not closed
        return cls(**self._own)

    def _begin(self, seed: int) -> None:
        takes = inspect.signature(self.env.reset).parameters
        self.env.reset(**({"seed": seed % 2**31} if "seed" in takes else {}))

    def _read(self, *returned: Any) -> tuple[float, bool, dict[str, Any]]:
        if len(returned) == 3:
            reward, ended, info = returned
            return float(np.sum(reward)), bool(np.all(ended)), results_of(info or {})
        _, reward, ended, truncated, info = returned
        over, stopped = ends_of(ended, truncated)
        # Classes that do not tell the two apart leave a step limit in the info, as PyMARL's do.
        stopped = stopped or (over and bool((info or {}).get("episode_limit", False)))
        return float(np.sum(reward)), over or stopped, {**results_of(info or {}), TRUNCATED: stopped}

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, obs_dim] float32."""
        return self._fitting(
            "get_obs()", lambda: np.stack([as_vector(seen) for seen in self.env.get_obs()]).astype(np.float32)
        )

    def get_state(self) -> np.ndarray:
        """Return [state_dim] float32."""
        return self._fitting("get_state()", lambda: as_vector(self.env.get_state()).astype(np.float32))

    def get_avail_actions(self) -> np.ndarray:
        """Return [n, A]; what is neither 0 nor 1 is an error later."""
        return self._fitting("get_avail_actions()", lambda: np.asarray(self.env.get_avail_actions()))

    def get_env_info(self) -> dict[str, Any]:
        """Return the environment's own dictionary."""
        own = {"map_name": self.args.key, "has_win": False, "deterministic": self.args.new_each_episode}
        return {**own, **self.facts}


METHODS = ("reset", "step", "get_obs", "get_state", "get_avail_actions", "get_env_info", "close")
"""What a class in PyMARL's shape must have."""
