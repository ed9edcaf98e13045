"""Two tiny environments that show in seconds whether a learner learns: a matrix game and a memory game."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import BatchedEnv, Observation, StepResult, require_available

_CLIMBING = ((11.0, -30.0, 0.0), (-30.0, 7.0, 6.0), (0.0, 0.0, 5.0))
_MONOTONIC = ((0.0, 1.0, 2.0), (1.0, 3.0, 5.0), (2.0, 5.0, 8.0))


class _TinyGame(BatchedEnv):
    """Base of both games: step counters, masks, snapshots of the fields in `_saved`."""

    _saved: ClassVar[tuple[str, ...]]

    def __init__(self, info: EnvInfo, n_slots: int) -> None:
        self.info = info
        self.n_slots = n_slots
        self._t = np.zeros(n_slots, np.int64)

    def _avail(self) -> np.ndarray:
        return np.ones((self.n_slots, self.info.n_agents, self.info.n_actions), bool)

    def _result(self, reward: np.ndarray, won: np.ndarray, active: np.ndarray) -> StepResult:
        """Advance the step counters of the active slots and return the step's results."""
        self._t += active
        terminated = active & (self._t >= self.info.episode_limit)
        return StepResult(
            reward=np.where(active, reward, 0.0).astype(np.float32),
            terminated=terminated,
            truncated=np.zeros(self.n_slots, bool),
            info={"battle_won": (won & terminated).astype(np.float32)},
        )

    def snapshot(self) -> dict[str, Any]:
        """Return the state of all slots."""
        return {name: getattr(self, name).copy() for name in self._saved}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from `snapshot`."""
        for name in self._saved:
            setattr(self, name, np.array(snapshot[name]))


class MatrixGameArgs(BaseModel):
    """Arguments of `matrix_game`.

    Attributes:
        payoff: in "climbing" and "penalty" a safe choice is next to the risky best one; "monotonic" has no risk.
        penalty: payoff of a miscoordination in "penalty".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    payoff: Literal["climbing", "penalty", "monotonic"] = "climbing"
    penalty: float = Field(default=-100.0, le=0.0)


class MatrixGame(_TinyGame):
    """Two agents choose one of three actions simultaneously and get a common payoff; an episode is one step.

    Payoffs after Claus and Boutilier, "The dynamics of reinforcement learning in cooperative multiagent systems", 1998.
    `battle_won`: the best payoff was reached. Observation: the agent's number one-hot, and whether the game is over.
    """

    args_model = MatrixGameArgs
    _saved = ("_t",)

    def __init__(self, args: MatrixGameArgs, n_slots: int) -> None:
        info = EnvInfo(
            name="matrix_game", map_name=args.payoff, n_agents=2, n_actions=3, obs_dim=3, state_dim=1, episode_limit=1,
            scripted_policies=("random",),
        )  # fmt: skip
        super().__init__(info, n_slots)
        k = args.penalty
        penalty = ((10.0, 0.0, k), (0.0, 2.0, 0.0), (k, 0.0, 10.0))
        tables = {"climbing": _CLIMBING, "monotonic": _MONOTONIC, "penalty": penalty}
        self.payoff = np.array(tables[args.payoff], np.float32)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new games in the slots `which`. The game is not random: `seeds` have no effect."""
        self._t[which] = 0

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Pay the payoff of the two actions of each active slot."""
        require_available(self.info.name, self._avail(), actions, active)
        reward = self.payoff[np.where(active, actions[:, 0], 0), np.where(active, actions[:, 1], 0)]
        return self._result(reward, reward >= self.payoff.max(), active)

    def observe(self, full: bool = False) -> Observation:
        """Return the agents' numbers, one-hot, and whether the game is over."""
        over = self._t.astype(np.float32)
        obs = np.zeros((self.n_slots, 2, 3), np.float32)
        obs[:, :, :2] = np.eye(2, dtype=np.float32)
        obs[:, :, 2] = over[:, None]
        return Observation(obs, over[:, None].copy(), self._avail(), obs.copy() if full else None)


class MemoryGameArgs(BaseModel):
    """Arguments of `memory_game`.

    Attributes:
        n_cues: number of different cues.
        n_agents: number of agents, each with its own cue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    n_cues: int = Field(default=2, ge=2, le=16)
    n_agents: int = Field(default=2, ge=1, le=8)


class MemoryGame(_TinyGame):
    """Each agent sees its own cue at step 0 and must name it at step 1, when the cue is hidden.

    At step 0 the only action is 0 (wait); at step 1 actions 1..n_cues name a cue. The reward is 1 if every agent names
    its own cue, else 0: agents without memory get (1 / n_cues) ** n_agents on average. The state shows all cues.
    """

    args_model = MemoryGameArgs
    _saved = ("_t", "_cues")

    def __init__(self, args: MemoryGameArgs, n_slots: int) -> None:
        info = EnvInfo(
            name="memory_game", map_name=f"{args.n_agents}x{args.n_cues}", n_agents=args.n_agents,
            n_actions=1 + args.n_cues, obs_dim=args.n_cues + 2, state_dim=args.n_agents * args.n_cues + 2,
            episode_limit=2, scripted_policies=("random",),
        )  # fmt: skip
        super().__init__(info, n_slots)
        self.n_cues = args.n_cues
        self._cues = np.zeros((n_slots, args.n_agents), np.int64)

    def _avail(self) -> np.ndarray:
        answering = (self._t == 1)[:, None, None]
        is_answer = np.arange(self.info.n_actions) > 0
        return np.broadcast_to(answering == is_answer, (self.n_slots, self.info.n_agents, self.info.n_actions)).copy()

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Draw new cues in the slots `which`, slot b from `seeds[b]`."""
        self._t[which] = 0
        for slot in np.flatnonzero(which):
            self._cues[slot] = np.random.default_rng(int(seeds[slot])).integers(self.n_cues, size=self.info.n_agents)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Wait, then answer."""
        require_available(self.info.name, self._avail(), actions, active)
        right = (self._t == 1) & (actions == self._cues + 1).all(1)
        return self._result(right.astype(np.float32), right, active)

    def observe(self, full: bool = False) -> Observation:
        """Return each agent's cue at step 0, and the step one-hot (all zero after the end)."""
        clock = np.eye(3, dtype=np.float32)[:, :2][self._t]
        cues = np.eye(self.n_cues, dtype=np.float32)[self._cues]
        obs = np.zeros((self.n_slots, self.info.n_agents, self.info.obs_dim), np.float32)
        obs[:, :, : self.n_cues] = cues * (self._t == 0)[:, None, None]
        obs[:, :, self.n_cues :] = clock[:, None]
        state = np.concatenate([cues.reshape(self.n_slots, -1), clock], 1)
        return Observation(obs, state, self._avail(), obs.copy() if full else None)
