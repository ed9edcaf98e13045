"""The environment protocol: the field's single environment, and the batched one that runners play.

Shapes: B battle slots, n agents, A actions. Arrays are NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import EnvInfo

TRUNCATED = "omagd: truncated"
"""The entry of a single environment's info that means truncated whatever `episode_limit` says there."""

AGENT_REWARD = "agent_reward"
"""The entry of a single environment's info that holds [n] who earned what, if its facts say `agent_rewards`."""


LOST_IN_A_ROW = 10
"""Lost episodes of one slot in a row that end a run: what has lost as many will hardly play the next one."""


@dataclass
class Observation:
    """What one tick shows. The arrays belong to the environment and are valid until its next call.

    Attributes:
        obs: [B, n, obs_dim] float32, what each agent sees.
        state: [B, state_dim] float32, for mixers only.
        avail_actions: [B, n, A] bool.
        full_obs: [B, n, obs_dim] float32, the same layout without range limit; None unless asked for.
    """

    obs: np.ndarray
    state: np.ndarray
    avail_actions: np.ndarray
    full_obs: np.ndarray | None = None


@dataclass
class StepResult:
    """What one step of all active slots brought; rows of inactive slots are zero.

    Attributes:
        reward: [B] float32, the team's reward.
        terminated: [B] bool, the episode is over (any reason).
        truncated: [B] bool, it is over only because of the step limit and the target shall bootstrap.
        info: per-episode results, meaningful where `terminated`: name -> [B] array of finite numbers ("battle_won",
            "dead_allies", ...); names that the run's own records use are in `omagd.envs.outputs.RESERVED`.
        lost: [B] bool, where `terminated`: the episode is void, because what played it has died; drop its rows and do
            not count it. By default none is.
        agent_reward: [B, n] float32, who earned what, where the environment tells; its sum over agents is `reward`.
    """

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: dict[str, np.ndarray]
    lost: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    agent_reward: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Fill in `lost` where it was left out; what is not an array is refused where results are checked."""
        if isinstance(self.lost, np.ndarray) and isinstance(self.reward, np.ndarray) and self.lost.size == 0:
            self.lost = np.zeros(self.reward.shape[:1], bool)


class BatchedEnv(ABC):
    """Many battles behind one call. A slot's episode is a function of its reset seed and its actions alone.

    Class attribute `args_model` types `env_args`; construction is `cls(args: args_model, n_slots: int)`. `steps_apart`
    says that some slots can be observed, reset and stepped while others are between `step_start` and `step_finish`, and
    that the arrays of an observation are the caller's for good. `deterministic` is False where the promise above cannot
    be kept. `divisible` says that each slot can also be played by an environment of its own, in another process.
    """

    args_model: ClassVar[type[BaseModel]]
    steps_apart: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    divisible: ClassVar[bool] = True
    info: EnvInfo
    n_slots: int
    _begun: np.ndarray

    @abstractmethod
    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new episodes in the slots `which` ([B] bool), slot b from `seeds[b]` ([B] int64 ≥ 0)."""

    @abstractmethod
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` ([B, n] int) in the slots `active` ([B] bool); the others stand still."""

    def step_start(self, actions: np.ndarray, active: np.ndarray) -> None:
        """Begin `step`, without waiting for it where `steps_apart`; `step_finish` of the same slots comes next."""
        self._begun = actions

    def step_finish(self, active: np.ndarray) -> StepResult:
        """Return what the step brought that was started in the slots `active` ([B] bool)."""
        return self.step(self._begun, active)

    @abstractmethod
    def observe(self, full: bool = False) -> Observation:
        """Return what all slots show now, with `full_obs` if `full`. Slots that have ended show their last moment."""

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions of one of `info.scripted_policies`. Errors: NotImplementedError.

        "random" draws from `rng` for all slots. Slots that are played apart have any other script draw from a generator
        that follows from the seed and the step of the episode; one that draws nothing is the same either way.
        """
        raise NotImplementedError(f"{self.info.name} has no scripted policy {policy}")

    def snapshot(self) -> dict[str, Any]:
        """Return the whole simulation as arrays and plain values. Errors: NotImplementedError without one."""
        raise NotImplementedError(f"{self.info.name} cannot be saved in mid-battle")

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot` of an environment with the same arguments."""
        raise NotImplementedError(f"{self.info.name} cannot be restored in mid-battle")

    def slots_at_work(self) -> dict[int, int]:
        """Return the seeds of the slots that are being reset or stepped, by slot; empty where it is not known."""
        return {}

    def be_patient(self, seconds: float) -> None:  # noqa: B027 (most environments have nobody to wait for)
        """Take a worker process that has not answered for `seconds` as one that died."""

    def get_stats(self) -> dict[str, float]:
        """Return counters since construction (restarts, battles, ...)."""
        return {}

    def save_replay(self, folder: str) -> None:
        """Write a replay of the last episodes into `folder`. Errors: NotImplementedError where there are none."""
        raise NotImplementedError(f"{self.info.name} writes no replays")

    def close(self) -> None:  # noqa: B027 most environments have nothing to release
        """Release processes and memory. May be called twice."""


@runtime_checkable
class ChangingOpponents(Protocol):
    """A batched environment with a team that is played inside, by whom can be said from outside.

    Attributes:
        ladders: orders of opponents by name, each from weak to strong.
    """

    ladders: ClassVar[Mapping[str, tuple[str, ...]]]

    @property
    def opponents(self) -> list[str]:
        """Names of the opponents of the slots' present episodes."""

    def set_opponents(self, opponents: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        """Draw the opponents of episodes that begin from now on from these names and objects, by their `weights`."""

    def frozen_opponent(self, name: str, layers: Sequence[tuple[np.ndarray, np.ndarray]], sample: bool) -> Any:
        """Return an opponent that plays what these layers say: weight [out, in], bias [out], ReLU in between.

        sample: it draws from the softmax of their outputs; else it takes the largest.
        """


class MultiAgentEnv(ABC):
    """The field's single environment, as SMAC defines it. Runs in a worker process, or wrapped in this one.

    Class attribute `args_model` types `env_args`; construction is `cls(args: args_model)`. `deterministic` says that an
    episode is a function of its reset seed and its actions alone, results included: then one whose process has died is
    played again up to where it was, and a running one can be saved. `scripted_policies` names scripts of its own.
    """

    args_model: ClassVar[type[BaseModel]]
    deterministic: ClassVar[bool] = False
    scripted_policies: tuple[str, ...] = ()

    @abstractmethod
    def reset(self, seed: int | None = None) -> None:
        """Start an episode."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play [n] actions; return reward, terminated, info (`battle_won`, `episode_limit`, ...).

        If the facts say `agent_rewards`, each info holds `agent_reward`, [n], whose sum is the reward.
        An episode that cannot go on because the world itself has died is terminated with `lost` = 1 in the info.
        """

    @abstractmethod
    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, obs_dim] float32; without the sight range if `no_range_limit`."""

    @abstractmethod
    def get_state(self) -> np.ndarray:
        """Return [state_dim] float32."""

    @abstractmethod
    def get_avail_actions(self) -> np.ndarray:
        """Return [n, A] bool."""

    def get_scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [n] actions of one of `scripted_policies`. Errors: NotImplementedError."""
        raise NotImplementedError(f"there is no scripted policy {policy}")

    @abstractmethod
    def get_env_info(self) -> dict[str, Any]:
        """Return the field's dictionary: n_agents, n_actions, obs_shape, state_shape, episode_limit, ...

        `agent_rewards` in it says that each step tells each agent's own reward.
        """

    def get_stats(self) -> dict[str, float]:
        """Return counters."""
        return {}

    def save_replay(self, folder: str = "") -> None:
        """Write a replay of the last episodes into `folder`, or where the environment's own arguments say."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Release everything."""
