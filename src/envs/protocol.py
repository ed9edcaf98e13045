"""Environment protocols: `BatchedEnv`, which runners step, and `MultiAgentEnv`, one environment as in SMAC.

`CanBeResident` is a batched environment that can also be played in a device's memory.

Shapes: B slots (episodes that run side by side), n agents, A actions. Arrays are NumPy, a `ResidentGame`'s are torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import ActionBox, EnvInfo
from omagd.envs.frames import Frame, without_place

if TYPE_CHECKING:  # worker processes load no torch
    import torch
    from torch import Tensor

TRUNCATED = "omagd: truncated"
"""Key in a single environment's info that means truncated; overrides `episode_limit`."""

AGENT_REWARD = "agent_reward"
"""Key in a single environment's info with each agent's reward, [n]; required if its facts say `agent_rewards`."""

LOST_IN_A_ROW = 10
"""Lost episodes of one slot in a row that end a run: the next one would most likely be lost too."""


@dataclass
class Observation:
    """Observations of all slots. The arrays belong to the environment and are valid until its next call.

    Attributes:
        obs: [B, n, obs_dim] float32, what each agent sees.
        state: [B, state_dim] float32, for mixers only.
        avail_actions: [B, n, A] bool.
        full_obs: [B, n, obs_dim] float32, the same layout without range limit; None unless requested.
    """

    obs: np.ndarray
    state: np.ndarray
    avail_actions: np.ndarray
    full_obs: np.ndarray | None = None


@dataclass
class StepResult:
    """Results of one step of the active slots; rows of inactive slots are zero.

    Attributes:
        reward: [B] float32, team reward.
        terminated: [B] bool, the episode has ended for any reason.
        truncated: [B] bool, it has ended only because of the step limit, and the target bootstraps.
        info: results of the episode, name -> [B] array of finite numbers ("battle_won", "dead_allies", ...); valid
            where `terminated`. Names used by the run's own records are in `omagd.envs.outputs.RESERVED`.
        lost: [B] bool, where `terminated`: the process behind the environment died, the episode is discarded and not
            counted. Default: none.
        agent_reward: [B, n] float32, each agent's reward, if the environment provides it; sums to `reward`.
    """

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    info: dict[str, np.ndarray]
    lost: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    agent_reward: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Fill in a missing `lost`; `OutputChecks` rejects values that are not arrays."""
        if isinstance(self.lost, np.ndarray) and isinstance(self.reward, np.ndarray) and self.lost.size == 0:
            self.lost = np.zeros(self.reward.shape[:1], bool)


class BatchedEnv(ABC):
    """Many episodes behind one call. An episode is a function of its reset seed and its actions alone.

    Construction: `cls(args: args_model, n_slots: int)`.

    Attributes:
        args_model: type of `env_args`.
        steps_apart: some slots can be observed, reset and stepped while others are between `step_start` and
            `step_finish`, and the caller may keep the arrays of an observation.
        deterministic: False if the promise above cannot be kept.
        divisible: each slot can also be played by an environment with one slot, in another process.
        info: sizes and names. n_slots: B.
    """

    args_model: ClassVar[type[BaseModel]]
    steps_apart: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    divisible: ClassVar[bool] = True
    info: EnvInfo
    n_slots: int
    _begun: np.ndarray

    def __init__(self, args: BaseModel | None = None, n_slots: int = 1) -> None:
        """Do nothing with the arguments; subclasses use them."""
        super().__init__()

    @abstractmethod
    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new episodes in the slots `which` ([B] bool), slot b from `seeds[b]` ([B] int64 ≥ 0)."""

    @abstractmethod
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the slots `active` ([B] bool); the other slots do not change.

        actions: [B, n] int; with `info.box` [B, n, d] float32, within its bounds.
        """

    def step_start(self, actions: np.ndarray, active: np.ndarray) -> None:
        """Start a step, without waiting for it if `steps_apart`; `step_finish` of the same slots comes next."""
        self._begun = actions

    def step_finish(self, active: np.ndarray) -> StepResult:
        """Return the results of the step started in the slots `active` ([B] bool)."""
        return self.step(self._begun, active)

    @abstractmethod
    def observe(self, full: bool = False) -> Observation:
        """Return the current observations, with `full_obs` if `full`. Ended slots show their last moment."""

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions of one of `info.scripted_policies`; here: of "random". Errors: NotImplementedError.

        "random" draws from `rng` for all slots. In worker processes, other policies get a generator that follows from
        the episode's seed and step; policies that draw nothing are the same either way.
        """
        if policy == "random" and policy in self.info.scripted_policies:
            return random_actions(self.observe().avail_actions, rng, self.info.box)
        raise NotImplementedError(f"{self.info.name} has no scripted policy {policy}")

    def snapshot(self) -> dict[str, Any]:
        """Return the simulation state as arrays and plain values. Errors: NotImplementedError."""
        raise NotImplementedError(f"{self.info.name} cannot be saved in mid-battle")

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot` of an environment with the same arguments. Errors: NotImplementedError."""
        raise NotImplementedError(f"{self.info.name} cannot be restored in mid-battle")

    def busy_slots(self) -> dict[int, int]:
        """Return slot -> seed for the slots that are being reset or stepped; empty if unknown."""
        return {}

    def set_worker_timeout(self, seconds: float) -> None:  # noqa: B027 (most environments have no workers)
        """Treat a worker process that has not answered for `seconds` as dead."""

    def get_stats(self) -> dict[str, float]:
        """Return counters since construction (restarts, battles, ...)."""
        return {}

    def frame(self, slot: int) -> Frame:
        """Return the units of a slot at this moment, for pictures; here: of an environment whose agents have no place.

        Called between a reset or step and the next one; changes nothing.
        """
        return without_place(self.info.n_agents)

    def save_replay(self, folder: str) -> None:
        """Write a replay in the environment's own format into `folder`. Errors: NotImplementedError."""
        raise NotImplementedError(f"{self.info.name} has no replays of its own")

    def close(self) -> None:  # noqa: B027 (most environments have nothing to release)
        """Release processes and memory. May be called twice."""


@runtime_checkable
class ChangingOpponents(Protocol):
    """A batched environment with a built-in opposing team that can be chosen from outside.

    Attributes:
        ladders: sequences of opponents by name, each from weak to strong.
    """

    ladders: ClassVar[Mapping[str, tuple[str, ...]]]

    @property
    def opponents(self) -> list[str]:
        """Names of the opponents in the current episodes, by slot."""

    def set_opponents(self, opponents: Sequence[Any]) -> None:
        """Draw the opponents of future episodes from these names and objects, all equally often."""

    def frozen_opponent(self, name: str, layers: Sequence[tuple[np.ndarray, np.ndarray]], sample: bool) -> Any:
        """Return an opponent that plays a network: per layer weight [out, in] and bias [out], ReLU in between.

        sample: draw from the softmax of the outputs; otherwise take the largest.
        """


@runtime_checkable
class ManyTasks(Protocol):
    """A batched environment whose slots play the tasks `info.tasks`, in arrays of one shape.

    Attributes:
        seconds: [tasks] float64 seconds spent on each task so far.
    """

    seconds: np.ndarray

    def set_tasks(self, which: np.ndarray, tasks: np.ndarray) -> None:
        """Choose the `tasks` [B] int64 of the next episodes of the slots `which` [B] bool."""


class Seen(NamedTuple):
    """What is shown: avail [B, n, A] bool; obs, full [B, n, obs_dim], state [B, state_dim] float32."""

    avail: Any
    obs: Any
    full: Any
    state: Any


class Outcome(NamedTuple):
    """Results of a step, on the device; zero where no step was played. All are overwritten by the next step.

    Attributes:
        reward: [B] float32. over: [B] bool. truncated: [B] bool, over only because of the step limit, and the target
            bootstraps. won, draw, limit: [B] bool. dead: [2, B] int64, allies and enemies. score: [B] float32, of games
            that have one.
    """

    reward: Tensor
    over: Tensor
    truncated: Tensor
    won: Tensor
    draw: Tensor
    limit: Tensor
    dead: Tensor
    score: Tensor | None = None

    def results(self) -> dict[str, Tensor]:
        """Return the results of episodes by the names of `StepResult.info`, [B] each."""
        allies, enemies = self.dead
        return {
            "battle_won": self.won, "battle_draw": self.draw, "episode_limit": self.limit, "dead_allies": allies,
            "dead_enemies": enemies, **({} if self.score is None else {"score": self.score}),
        }  # fmt: skip


class ResidentGame(Protocol):
    """Episodes in B slots of one device. The tensors that it returns stay where they are from call to call.

    Call `observe` before each `step`. No call reads a value of the device.

    Attributes:
        device: of all tensors. n_slots: B. results: names of the results that episodes have.
        faults: [B] bool, slots that were given an action that was not available since it was last set to zero.
        capturable: a CUDA graph can hold all calls; otherwise they run between graphs.
    """

    device: torch.device
    n_slots: int
    results: tuple[str, ...]
    faults: Tensor
    capturable: bool

    def reset(self, which: Tensor, seeds: Tensor) -> None:
        """Start new episodes in the slots `which` [B] bool, slot b from `seeds[b]` (int64 ≥ 0)."""

    def step(self, actions: Tensor, active: Tensor) -> Outcome:
        """Play `actions` [B, n] int64 in the slots `active` [B] bool; the other slots do not change."""

    def observe(self, full: bool = False) -> Seen:
        """Return masks, observations and state, and `full` observations if asked."""


@runtime_checkable
class CanBeResident(Protocol):
    """A batched environment whose episodes can be played on a device, with the same results."""

    @staticmethod
    def why_not_resident(args: Any, on_gpu: bool) -> str:
        """Return why these arguments cannot be played on the CPU or a GPU, and the fix; empty if they can."""

    def resident(self, device: torch.device, n_slots: int) -> ResidentGame:
        """Return episodes of the same arguments in `n_slots` slots on a device."""


class MultiAgentEnv(ABC):
    """One environment with the methods of SMAC's `MultiAgentEnv`. Runs in a worker process or in this one.

    Construction: `cls(args: args_model)`.

    Attributes:
        args_model: type of `env_args`.
        deterministic: an episode, results included, is a function of its reset seed and its actions. Then an episode
            is replayed after its process died, and running episodes can be saved.
        scripted_policies: names of the environment's own scripted policies.
    """

    args_model: ClassVar[type[BaseModel]]
    deterministic: ClassVar[bool] = False
    scripted_policies: tuple[str, ...] = ()

    def __init__(self, args: BaseModel | None = None) -> None:
        """Do nothing with the arguments; subclasses use them."""
        super().__init__()

    @abstractmethod
    def reset(self, *, seed: int) -> Any:
        """Start an episode. What it returns is ignored (SMAC's observations and state)."""

    @abstractmethod
    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play [n] actions, or [n, d]; return reward, terminated, info (`battle_won`, `episode_limit`, ...).

        If the facts say `agent_rewards`, each info holds `agent_reward`, [n], which sums to the reward. An episode
        that cannot continue because the game process died is terminated, with `lost` = 1 in the info.
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
        """Return SMAC's dictionary: n_agents, n_actions, obs_shape, state_shape, episode_limit, ...

        `agent_rewards`: True if each step reports each agent's own reward. `action_bounds`: (low, high), [n, d] each,
        of continuous actions; then n_actions = 2 d, and masks are ones.
        """

    def get_stats(self) -> dict[str, float]:
        """Return counters."""
        return {}

    def get_frame(self) -> Frame | None:
        """Return the units at this moment, for pictures; None where agents have no place."""
        return None

    def save_replay(self, folder: str = "") -> None:
        """Write a replay in the environment's own format into `folder`, or where the environment's arguments say.

        Errors: NotImplementedError.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027
        """Release everything."""


def protocol_of(found: Any) -> type:
    """Return the base class that an environment has, or comes nearest to: `BatchedEnv` or `MultiAgentEnv`."""
    single = isinstance(found, type) and issubclass(found, MultiAgentEnv)
    return BatchedEnv if not single and hasattr(found, "observe") else MultiAgentEnv


def random_actions(avail_actions: np.ndarray, rng: np.random.Generator, box: ActionBox | None = None) -> np.ndarray:
    """Return [..., n] int64 actions, each drawn uniformly from the available ones of `avail_actions` [..., n, A].

    box: of continuous actions, which are [..., n, d] float32.
    """
    if box is not None:
        return box.uniform(avail_actions.shape[:-2], rng)
    return np.where(avail_actions, rng.random(avail_actions.shape), -1.0).argmax(-1)


def require_available(name: str, avail_actions: np.ndarray, actions: np.ndarray, active: np.ndarray) -> None:
    """Raise ValueError unless every action of the active slots is available.

    avail_actions: [B, n, A] bool. actions: [B, n] int. active: [B] bool.
    """
    n_actions = avail_actions.shape[-1]
    first = n_actions * np.arange(actions.size).reshape(actions.shape)  # each agent's action 0 in the flattened mask
    allowed = avail_actions.reshape(-1).take(first + actions, mode="clip")
    allowed &= actions.astype(np.uint64) < n_actions  # negative numbers become huge ones
    if allowed.all():
        return
    wrong = np.argwhere(~allowed & active[:, None])
    if len(wrong):
        slot, agent = wrong[0].tolist()
        raise ValueError(f"{name}: slot {slot}, agent {agent}: action {int(actions[slot, agent])} is not available")
