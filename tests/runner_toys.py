"""An environment in which every number follows from seed, step and actions; a policy; games of runners over others."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from q_toys import toy_config

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Decision, Exploration, Policy, Tick
from omagd.envs.protocol import BatchedEnv, Observation, StepResult
from omagd.run.checkpoint.store import pack, serialized, unpack
from omagd.runners import REGISTRY
from omagd.runners.rollout import Rollout
from omagd.runners.runner import Runner
from omagd.utils.packing import Episode
from omagd.utils.seeding import EpisodeSeeds

LIMIT, AGENTS, ACTIONS = 9, 2, 4


def length_of(seed: int) -> int:
    return 1 + seed % LIMIT


def seen_at(seed: int, step: int) -> float:
    return float((seed % 1000) + step / 16)


def reward_at(seed: int, step: int, actions: np.ndarray) -> np.float32:
    return np.float32((seed % 7) - step / 8 + actions.sum())


class FakeEnv(BatchedEnv):
    """Episodes of `length_of(seed)` steps; every second length ends by truncation.

    `log`: (slot, seed, step, actions) of each step played. `begun`: (slot, seed) of each episode.
    """

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
        self._scratch[:] = (self.seed % 1000 + self.t / 16)[:, None, None]  # always the same array: users must copy
        state = np.stack([self.seed % 1000, self.t], 1).astype(np.float32)
        return Observation(self._scratch, state, self.avail(), -self._scratch if full else None)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        mask = self.avail()
        self._scratch[:] = -99.0  # the observation given out before is void now
        return mask.argmax(-1) if policy == "low" else highest(mask)


def highest(mask: np.ndarray) -> np.ndarray:
    """Return the index of the last True along the last axis."""
    return mask.shape[-1] - 1 - mask[..., ::-1].argmax(-1)


class LossyEnv(FakeEnv):
    """Every episode whose seed can be divided by four is lost in its middle, with a result that must not be counted."""

    def losing(self) -> np.ndarray:
        return (self.seed % 4 == 0) & (self.t >= (2 + self.seed % LIMIT) // 2)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        lost = active & self.losing()
        self.over |= lost
        result.info["battle_won"][lost] = 1000.0
        return StepResult(result.reward, result.terminated | lost, result.truncated & ~lost, result.info, lost)


class Probe:
    """Takes the highest available action; stores what it was shown and how many ticks its episode has lasted."""

    def __init__(self, wants_full_obs: bool = False) -> None:
        self.wants_full_obs = wants_full_obs
        self.explored: list[Exploration | None] = []
        self.full: list[bool] = []
        self.refreshed = 0

    def refresh(self) -> None:
        self.refreshed += 1

    def begin(self, n_slots: int) -> None:
        self.ticks = np.full(n_slots, -1)

    def reset(self, which: np.ndarray) -> None:
        self.ticks[which] = -1

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        self.explored.append(explore)
        self.full.append(tick.observation.full_obs is not None)
        self.ticks[tick.active] += 1
        assert (self.ticks == tick.step)[tick.active].all()
        note = (tick.observation.obs[:, :, :1] + 0.5).astype(np.float16)
        return Decision(highest(tick.observation.avail_actions), {"note": note, "age": self.ticks.astype(np.int16)})


def runner_of(env: BatchedEnv, purpose: str = "train", name: str = "parallel", rank: int = 0) -> Runner:
    config = resolve(config="omagd_small", env_config="skirmish", updates={"env_args.map_name": "3m", "t_max": 100})
    return REGISTRY.get(name)(env, config, env.info, EpisodeSeeds(11, purpose, rank))


def rounds(env: BatchedEnv, episodes_per_slot: int = 1, **options: bool) -> Rollout:
    """Return what a new parallel runner plays with a new `Probe`."""
    return runner_of(env).run(Probe(), explore=None, episodes_per_slot=episodes_per_slot, **options)


def collected(env: BatchedEnv, name: str, calls: int) -> tuple[Runner, list[Rollout]]:
    """Return a new runner with the rollouts of `calls` iterations and of the drain after them."""
    runner, probe = runner_of(env, name=name), Probe()
    rollouts = [*(runner.collect(probe, explore=None) for _ in range(calls)), runner.drain(probe, explore=None)]
    assert probe.refreshed == (0 if runner.rounds else calls), "those in flight act with the newest weights"
    return runner, rollouts


def same(one: Episode, other: Episode) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def assert_same(one: list[Rollout], other: list[Rollout]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.steps, a.lost, a.stats, a.log) == (b.steps, b.lost, b.stats, b.log)
        assert all(same(*pair) for pair in zip(a.episodes, b.episodes, strict=True))


class Game:
    """A runner over `env` and a policy that explores, by default one of fresh weights; equal ones play the same."""

    def __init__(
        self, env: BatchedEnv, name: str = "stream", policy: Policy | None = None, config: Config | None = None
    ) -> None:
        self.env = env
        self.runner = REGISTRY.get(name)(env, config or toy_config(), env.info, EpisodeSeeds(1, "train"))
        torch.manual_seed(0)
        self.policy = policy or BasicMAC(toy_config(mac="n_mac"), env.info, torch.device("cpu"))
        self.explore = Exploration(0.3, np.random.default_rng(2))

    def collect(self, calls: int, **options: bool) -> list[Rollout]:
        return [self.runner.collect(self.policy, explore=self.explore, **options) for _ in range(calls)]

    def drain(self) -> Rollout:
        return self.runner.drain(self.policy, explore=self.explore)

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.runner.snapshot(), self.explore.rng.bit_generator.state

    def restore(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        """Continue from what another game has `saved`, by way of a file."""
        loaded = torch.load(io.BytesIO(serialized(pack(saved[0]))), weights_only=True)
        self.runner.restore(unpack(loaded))
        self.explore.rng.bit_generator.state = saved[1]


def nothing(game: Game) -> None:
    """Do not interfere."""


def assert_continues(
    make: Callable[[], Game],
    calls: int,
    more: int,
    before: Callable[[Game], None] = nothing,
    after: Callable[[Game], None] = nothing,
) -> None:
    """Check that a game saved after `calls` iterations and `before` goes on unchanged, and so does one restored."""
    expected = make().collect(calls + more)
    game = make()
    found = game.collect(calls)
    before(game)
    saved = game.saved()
    assert_same(found + game.collect(more), expected)
    again = make()
    again.restore(saved)
    after(again)
    assert_same(again.collect(more), expected[calls:])
