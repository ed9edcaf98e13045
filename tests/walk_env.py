"""A random walk as a single environment, and whether worker processes are gone. Workers import this module."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.envs.protocol import BatchedEnv, MultiAgentEnv
from omagd.envs.workers.process_envs import ProcessEnvs
from omagd.utils.errors import UserError

N, A = 2, 3
CRASH, END = 2, 1


class WalkArgs(BaseModel):
    """Arguments of the walk."""

    limit: int = 4
    broken: str = ""
    shares: bool = False


class Walk(MultiAgentEnv):
    """A random walk with seeds, full observations, truncation and entries in the info that are no numbers."""

    args_model = WalkArgs

    def __init__(self, args: WalkArgs) -> None:
        if args.broken == "user":
            raise UserError("env_args.broken=user: choose another")
        self.args = args
        self.episodes = 0

    def reset(self, seed: int | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.place = self.rng.random(N)
        self.t = 0

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
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
        return {
            "n_agents": N,
            "n_actions": A,
            "obs_shape": (2,),
            "state_shape": N,
            "episode_limit": self.args.limit,
            "has_win": True,
            "agent_rewards": self.args.shares,
        }

    def get_stats(self) -> dict[str, float]:
        return {"episodes": float(self.episodes), "win_rate": 0.5}


def all_slots(env: BatchedEnv) -> np.ndarray:
    return np.ones(env.n_slots, bool)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def pids_of(env: ProcessEnvs) -> list[int]:
    return [process.pid for process in env._workers.processes]
