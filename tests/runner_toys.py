"""A small world whose every number follows from the seed, the step and the actions, and a policy that watches it."""

from __future__ import annotations

from typing import Any

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.protocol import BatchedEnv, Observation, StepResult
from omagd.runners import REGISTRY
from omagd.runners.rollout import EpisodeSeeds
from omagd.runners.runner import Runner

LIMIT, AGENTS, ACTIONS = 9, 2, 4


def length_of(seed: int) -> int:
    return 1 + seed % LIMIT


def seen_at(seed: int, step: int) -> float:
    return float((seed % 1000) + step / 16)


def reward_at(seed: int, step: int, actions: np.ndarray) -> np.float32:
    return np.float32((seed % 7) - step / 8 + actions.sum())


class FakeEnv(BatchedEnv):
    """Episodes of `length_of(seed)` steps; every second length ends by truncation. `log` keeps what was played."""

    def __init__(self, n_slots: int, n_actions: int = ACTIONS, endless: bool = False) -> None:
        self.n_slots = n_slots
        self.info = EnvInfo("fake", "", AGENTS, n_actions, 3, 2, LIMIT, scripted_policies=("high", "low"))
        self.seed = np.full(n_slots, -1, np.int64)
        self.t = np.zeros(n_slots, np.int64)
        self.over = np.ones(n_slots, bool)
        self.endless = endless
        self.ticks = 0
        self.log: list[tuple[int, int, int, list[int]]] = []
        self.begun: list[tuple[int, int]] = []
        self._scratch = np.zeros((n_slots, AGENTS, 3), np.float32)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        assert self.over[which].all(), "a running episode was thrown away"
        self.seed[which], self.t[which], self.over[which] = seeds[which], 0, False
        self.begun += [(int(s), int(seeds[s])) for s in np.flatnonzero(which)]

    def avail(self) -> np.ndarray:
        mask = np.zeros((self.n_slots, AGENTS, self.info.n_actions), bool)
        mask[..., 1] = True
        mask[..., 3] = (self.t % 2 == 0)[:, None]
        mask[self.over] = np.arange(self.info.n_actions) == 0  # after the end, that and nothing else
        return mask

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        assert not (active & self.over).any(), "an ended episode was stepped"
        assert np.take_along_axis(self.avail(), actions[..., None], -1)[active].all()
        assert (actions[~active] == 0).all()
        self.ticks += 1
        reward = np.zeros(self.n_slots, np.float32)
        for s in np.flatnonzero(active):
            self.log.append((int(s), int(self.seed[s]), int(self.t[s]), actions[s].tolist()))
            reward[s] = reward_at(int(self.seed[s]), int(self.t[s]), actions[s])
        self.t += active
        lengths = 1 + self.seed % LIMIT
        ended = active & (self.t >= lengths) & (not self.endless)
        self.over |= ended
        info = {"battle_won": (self.seed % 3 == 0).astype(np.float32), "dead_enemies": (self.seed % 5).astype(float)}
        return StepResult(reward, ended, ended & (lengths % 2 == 0), info)

    def observe(self, full: bool = False) -> Observation:
        self._scratch[:] = (self.seed % 1000 + self.t / 16)[:, None, None]  # one array for ever: users must copy
        state = np.stack([self.seed % 1000, self.t], 1).astype(np.float32)
        return Observation(self._scratch, state, self.avail(), -self._scratch if full else None)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        mask = self.avail()
        self._scratch[:] = -99.0  # the observation given out before is void now
        if policy == "low":
            return mask.argmax(-1)
        return mask.shape[-1] - 1 - mask[..., ::-1].argmax(-1)


class Probe:
    """Takes the highest available action; stores what it was shown and how many ticks its episode has lasted."""

    def __init__(self, wants_full_obs: bool = False) -> None:
        self.wants_full_obs = wants_full_obs
        self.explored: list[Exploration | None] = []
        self.full: list[bool] = []

    def refresh(self) -> None:
        pass

    def begin(self, n_slots: int) -> None:
        self.ticks = np.full(n_slots, -1)

    def reset(self, which: np.ndarray) -> None:
        self.ticks[which] = -1

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        self.explored.append(explore)
        self.full.append(tick.observation.full_obs is not None)
        self.ticks[tick.active] += 1
        assert (self.ticks == tick.step)[tick.active].all()
        avail = tick.observation.avail_actions
        highest = avail.shape[-1] - 1 - avail[..., ::-1].argmax(-1)
        note = (tick.observation.obs[:, :, :1] + 0.5).astype(np.float16)
        return Decision(highest, {"note": note, "age": self.ticks.astype(np.int16)})


def runner_of(env: BatchedEnv, purpose: str = "train", name: str = "parallel", rank: int = 0) -> Runner:
    config = resolve(config="omagd_small", env_config="skirmish", updates={"env_args.map_name": "3m", "t_max": 100})
    return REGISTRY.get(name)(env, config, env.info, EpisodeSeeds(11, purpose, rank))


def identity(episode: Any) -> int:
    return int(episode["state"][0, 0])
