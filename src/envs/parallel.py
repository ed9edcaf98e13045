"""An environment with PettingZoo's parallel interface, for use outside of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from omagd.envs.frames import Frame
from omagd.envs.outputs import OutputChecks
from omagd.envs.protocol import BatchedEnv, StepResult
from omagd.utils.errors import import_extra

if TYPE_CHECKING:
    from gymnasium import spaces

try:
    from pettingzoo import ParallelEnv as _Base
except ModuleNotFoundError:  # the interface works without the package; only PettingZoo's wrappers need the base class
    _Base = object

Observations = dict[str, dict[str, np.ndarray]]


class ParallelBattle(_Base):  # type: ignore[misc]
    """One slot of an environment with n agents in PettingZoo's parallel interface.

    Each observation is `{"observation": [obs_dim] float32, "action_mask": [A] int8}`. All agents get the team reward,
    stay in `agents` until the episode ends (a dead unit can only take its no-op) and end together. At the end each
    agent's info holds the results of the episode (`battle_won`, ...). If the environment provides each agent's own
    reward, every info holds it as `agent_reward`. An episode with `lost` in its infos is void because its game process
    died: call reset.

    Args:
        env: an environment with one slot; this object closes it.
        draw: returns pixels of a frame, for `render` (`render_mode` is then `rgb_array`); None: there are no pictures.
    """

    def __init__(self, env: BatchedEnv, draw: Callable[[Frame], np.ndarray] | None = None) -> None:
        if env.n_slots != 1:
            raise ValueError(f"a ParallelBattle has one slot, not {env.n_slots}")
        self.info = env.info
        self.possible_agents = [f"agent_{i}" for i in range(env.info.n_agents)]
        self.agents: list[str] = []
        label = f"{env.info.name}_{env.info.map_name}".rstrip("_")
        self.metadata = {"name": label, "render_modes": ["rgb_array"], "is_parallelizable": True}
        self.render_mode = None if draw is None else "rgb_array"
        self._env, self._draw = env, draw
        self._closed = False
        self._slot, self._checks = np.ones(1, bool), OutputChecks(env.info, 1)
        self._seed, self._step = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._rng = np.random.default_rng()
        self._masks = np.zeros((env.info.n_agents, env.info.n_actions), np.int8)
        self._state = np.zeros(env.info.state_dim, np.float32)
        self._spaces: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, dict[str, dict[str, Any]]]:
        """Start an episode; return observations and infos.

        Args:
            seed: the episode's seed; it also seeds the generator of later resets without a seed.
            options: not used.
        Errors: ValueError once the environment is closed; UserError for observations that no run would take.
        """
        self._require_open()
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        chosen = int(self._rng.integers(2**62)) if seed is None else int(seed)
        self._seed, self._step = np.array([chosen], np.int64), np.zeros(1, np.int64)
        self._env.reset(self._slot, self._seed)
        self.agents = list(self.possible_agents)
        if self._draw is not None:
            self._env.frame(0)  # environments that draw themselves begin to at the start of an episode
        return self._observations(self._slot), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[Observations, dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Play one action of each agent; return observations, rewards, terminations, truncations, infos.

        Errors: RuntimeError before `reset`; ValueError for a missing agent, an action that is not available or a closed
            environment; UserError for results that no run would take.
        """
        self._require_open()
        if not self.agents:
            raise RuntimeError("the episode has ended or not begun: call reset")
        played = self._env.step(self._chosen(actions)[None], self._slot)
        result = self._checks.result(played, self._slot, self._seed, self._step)
        self._step = self._step + 1
        self._checks.lengths(~result.terminated, self._seed, self._step)
        ended, truncated = result.terminated.item(0), result.truncated.item(0) or result.lost.item(0)
        playing, reward, infos = self.agents, result.reward.item(0), self._infos(result)
        seen = self._observations(~result.lost)
        if ended:
            self.agents = []
        return (
            seen,
            dict.fromkeys(playing, reward),
            dict.fromkeys(playing, ended and not truncated),
            dict.fromkeys(playing, ended and truncated),
            infos,
        )

    def render(self) -> np.ndarray | None:
        """Return a picture of this moment, [height, width, 3] uint8; None if it was made without `render_mode`."""
        self._require_open()
        return None if self._draw is None else self._draw(self._env.frame(0))

    def state(self) -> np.ndarray:
        """Return the global state [state_dim] float32."""
        return self._state.copy()

    def full_observations(self) -> np.ndarray:
        """Return the observations without range limit, [n, obs_dim] float32.

        Errors: ValueError once the environment is closed.
        """
        self._require_open()
        full = self._env.observe(full=True).full_obs
        assert full is not None
        return full[0].copy()

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return an agent's observation space. Errors: UserError without gymnasium."""
        return self._spaces_of(agent)[0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return an agent's action space. Errors: UserError without gymnasium."""
        return self._spaces_of(agent)[1]

    @property
    def observation_spaces(self) -> dict[str, spaces.Space[Any]]:
        """Observation spaces by agent. Errors: UserError without gymnasium."""
        return {agent: self.observation_space(agent) for agent in self.possible_agents}

    @property
    def action_spaces(self) -> dict[str, spaces.Space[Any]]:
        """Action spaces by agent. Errors: UserError without gymnasium."""
        return {agent: self.action_space(agent) for agent in self.possible_agents}

    @property
    def state_space(self) -> spaces.Space[Any]:
        """Space of the global state. Errors: UserError without gymnasium."""
        return _gymnasium().Box(-np.inf, np.inf, (self.info.state_dim,), np.float32)

    def close(self) -> None:
        """Close the environment. May be called twice."""
        self.agents, self._closed = [], True
        self._env.close()

    def __str__(self) -> str:
        return str(self.metadata["name"])

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"the environment {self} is closed: make another one with omagd.make")

    def _chosen(self, actions: dict[str, Any]) -> np.ndarray:
        """Return [n] int64 actions, or [n, d] float32 within their bounds. Errors: ValueError."""
        if set(actions) != set(self.agents):
            raise ValueError(f"actions are for {sorted(actions)}: give one to each of {self.agents}")
        if (box := self.info.box) is not None:
            return box.clip(np.array([actions[agent] for agent in self.agents], np.float32))
        for agent, mask in zip(self.agents, self._masks, strict=True):
            if not (0 <= actions[agent] < len(mask) and mask[actions[agent]]):
                allowed = np.flatnonzero(mask).tolist()
                raise ValueError(f"{agent}: action {actions[agent]} is not available now; available: {allowed}")
        return np.array([actions[agent] for agent in self.agents], np.int64)

    def _observations(self, active: np.ndarray) -> Observations:
        """Return copies of each agent's observation and mask; keep masks and state. active: [1], whether to check."""
        seen = self._checks.observation(self._env.observe(), active, self._seed, self._step)
        obs = seen.obs[0].astype(np.float32)
        self._masks, self._state = seen.avail_actions[0].astype(np.int8), seen.state[0].astype(np.float32)
        return {
            agent: {"observation": obs[i], "action_mask": self._masks[i].copy()}
            for i, agent in enumerate(self.possible_agents)
        }

    def _infos(self, result: StepResult) -> dict[str, dict[str, Any]]:
        shared: dict[str, Any] = {}
        if result.terminated.item(0):
            shared = {name: values.item(0) for name, values in result.info.items()}
            shared |= {"lost": True} if result.lost.item(0) else {}
        infos = {agent: dict(shared) for agent in self.possible_agents}
        if result.agent_reward is not None:
            for i, agent in enumerate(self.possible_agents):
                infos[agent]["agent_reward"] = result.agent_reward[0, i].item()
        return infos

    def _spaces_of(self, agent: str) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        """Return an agent's two spaces, the same objects at each call, as the interface requires."""
        if agent not in self.possible_agents:
            raise KeyError(f"{agent} is not one of {self.possible_agents}")
        if agent not in self._spaces:
            make = _gymnasium()
            seen = make.Box(-np.inf, np.inf, (self.info.obs_dim,), np.float32)
            mask = make.Box(0, 1, (self.info.n_actions,), np.int8)
            actions = make.Discrete(self.info.n_actions)
            if (box := self.info.box) is not None:
                actions = make.Box(*(end[self.possible_agents.index(agent)] for end in box.ends), dtype=np.float32)
            self._spaces[agent] = make.Dict({"observation": seen, "action_mask": mask}), actions
        return self._spaces[agent]


def _gymnasium() -> Any:
    """Return gymnasium's spaces. Errors: UserError where it is not installed."""
    return import_extra("PettingZoo's interface", "pettingzoo", "gymnasium.spaces")
