"""Walks: single environments that fail as their arguments say. Worker processes import this module."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel
from sockets import running as is_running
from sockets import wait_until

from omagd.envs.protocol import BatchedEnv, MultiAgentEnv
from omagd.envs.workers.process_envs import ProcessEnvs
from omagd.utils.errors import UserError

N, A = 2, 3
CRASH, END = 2, 1


class WalkArgs(BaseModel):
    """limit: steps of an episode. shares: whether agents have rewards. broken: "user" or "shares", a wrong result.

    fail_in: calls that fail: "reset", "step", "step 3" (of this process), "show", "stats", "replay"; if `marks` names
        a folder, one after another, each in one process. how: "kill", "leave" (sys.exit), or hang: "stop", "hang".
    """

    limit: int = 4
    shares: bool = False
    broken: str = ""
    fail_in: list[str] = []
    marks: str = ""
    how: str = "kill"


class Walk(MultiAgentEnv):
    """A random walk with seeds, full observations, truncation and entries in the info that are no numbers."""

    args_model = WalkArgs

    def __init__(self, args: WalkArgs) -> None:
        if args.broken == "user":
            raise UserError("env_args.broken=user: choose another")
        self.args = args
        self.episodes = self.calls = 0

    def _enter(self, call: str) -> None:
        """Fail if `call` has to."""
        if call not in self.args.fail_in:
            return
        if self.args.marks:
            if self.args.fail_in.index(call) != len(os.listdir(self.args.marks)):
                return
            try:
                Path(self.args.marks, call).touch(exist_ok=False)
            except FileExistsError:
                return
        if self.args.how == "leave":
            sys.exit(0)
        while self.args.how == "hang":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGSTOP if self.args.how == "stop" else signal.SIGKILL)

    def reset(self, seed: int | None = None) -> None:
        self._enter("reset")
        self.rng = np.random.default_rng(seed)
        self.place = self.rng.random(N)
        self.t = 0

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        self.calls += 1
        self._enter("step")
        self._enter(f"step {self.calls}")
        if actions[0] == CRASH:
            raise RuntimeError("the ground gave way")
        self.place += self.rng.random(N) + actions
        self.t += 1
        limit = self.t == self.args.limit
        ended = bool(actions[1] == END)
        self.episodes += ended or limit
        info: dict[str, Any] = {"battle_won": ended, "steps": self.t, "comment": "not a number"}
        if limit and not ended:
            info["episode_limit"] = True
        if self.args.shares:
            info["agent_reward"] = self.place[: N - (self.args.broken == "shares")]
        return float(self.place.sum()), ended or limit, info

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        if no_range_limit:
            self._enter("show")
        total = self.place.sum() if no_range_limit else 0.0
        return np.stack([self.place, np.full(N, total)], 1).astype(np.float32)

    def get_state(self) -> np.ndarray:
        return self.place.astype(np.float32)

    def get_avail_actions(self) -> np.ndarray:
        mask = np.ones((N, A), bool)
        mask[:, CRASH] = False
        mask[:, END] = self.t >= 1
        return mask

    def get_env_info(self) -> dict[str, Any]:
        sizes = {"n_agents": N, "n_actions": A, "obs_shape": (2,), "state_shape": N}
        return {**sizes, "episode_limit": self.args.limit, "has_win": True, "agent_rewards": self.args.shares}

    def get_stats(self) -> dict[str, float]:
        self._enter("stats")
        return {"episodes": float(self.episodes), "restarts": float(self.episodes), "win_rate": 0.5}

    def save_replay(self, folder: str = "") -> None:
        self._enter("replay")
        super().save_replay(folder)


class SteadyArgs(WalkArgs):
    """Longer episodes."""

    limit: int = 6


class SteadyWalk(Walk):
    """A deterministic walk with a scripted policy, which draws."""

    args_model = SteadyArgs
    deterministic = True
    scripted_policies = ("random", "wander")

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        assert actions.dtype == np.int64
        return super().step(actions)

    def get_scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        assert policy == "wander"
        return rng.integers(2, size=N) * (self.t >= 1)

    def get_env_info(self) -> dict[str, Any]:
        return {**super().get_env_info(), "scripted_policies": list(self.scripted_policies)}


def all_slots(env: BatchedEnv) -> np.ndarray:
    return np.ones(env.n_slots, bool)


def gone(pids: list[int]) -> bool:
    return wait_until(lambda: not any(map(is_running, pids)))


def pids_of(env: ProcessEnvs) -> list[int]:
    return [process.pid for process in env._workers.processes]
