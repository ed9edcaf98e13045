"""Speed of the runner itself: an environment and a policy that cost nothing, shapes of 5m_vs_6m.

    python benchmarks/rollout_speed.py [--slots 8 64] [--episodes 2000] [--profile]

Prints environment steps per second of one core, with episodes kept (observations, state, masks, and a policy's field of
reconstructed observations in half precision), and the time of one tick of all slots.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import numpy as np
import torch

from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.protocol import BatchedEnv, Observation, StepResult
from omagd.runners.runner import ParallelRunner
from omagd.runners.starts import EpisodeSeeds

MEAN_LENGTH = 31


class NullEnv(BatchedEnv):
    """Shows the same arrays for ever; episodes of 22 to 40 steps, by their seed."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.info = EnvInfo("null", "5m_vs_6m", n_agents=5, n_actions=12, obs_dim=55, state_dim=98, episode_limit=70)
        rng = np.random.default_rng(0)
        obs = rng.normal(size=(n_slots, 5, 55)).astype(np.float32)
        state = rng.normal(size=(n_slots, 98)).astype(np.float32)
        self._seen = Observation(obs, state, np.ones((n_slots, 5, 12), bool), obs)
        self._t = np.zeros(n_slots, np.int64)
        self._length = np.ones(n_slots, np.int64)
        self._reward = np.ones(n_slots, np.float32)
        self._never = np.zeros(n_slots, bool)

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start episodes."""
        self._t[which] = 0
        self._length[which] = MEAN_LENGTH - 9 + seeds[which] % 19

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Count."""
        self._t += active
        ended = active & (self._t >= self._length)
        return StepResult(self._reward, ended, self._never, {"battle_won": ended, "dead_enemies": self._t})

    def observe(self, full: bool = False) -> Observation:
        """Show the same as ever."""
        return self._seen


class NullPolicy:
    """Always takes action 1, and stores a field as large as the reconstructed observations."""

    wants_full_obs = False

    def begin(self, n_slots: int) -> None:
        """Prepare."""
        self._decision = Decision(np.ones((n_slots, 5), np.int64), {"recon": np.ones((n_slots, 5, 55), np.float16)})

    def reset(self, which: np.ndarray) -> None:
        """Remember nothing."""

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Decide as ever."""
        return self._decision


def measure(n_slots: int, episodes: int, keep: bool) -> tuple[float, float]:
    """Return steps per second, and seconds per tick of all slots."""
    config = resolve(config="omagd_small", env_config="skirmish", updates={"env_args.map_name": "5m_vs_6m"})
    env = NullEnv(n_slots)
    runner = ParallelRunner(env, config, env.info, EpisodeSeeds(0, "train"))
    policy = NullPolicy()
    runner.run(policy, explore=None, keep=keep)
    quota = max(1, episodes // n_slots)
    start = time.perf_counter()
    rollout = runner.run(policy, explore=None, episodes_per_slot=quota, keep=keep)
    seconds = time.perf_counter() - start
    return rollout.steps / seconds, seconds * n_slots / rollout.steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for n_slots in options.slots:
        for keep in (True, False):
            speed, tick = measure(n_slots, options.episodes, keep)
            kept = "kept" if keep else "counted only"
            print(f"{n_slots:4d} slots, episodes {kept:12s}: {speed:10,.0f} steps/s, {tick * 1e6:6.0f} us per tick")
    if options.profile:
        with cProfile.Profile() as profile:
            measure(options.slots[-1], options.episodes, True)
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)


if __name__ == "__main__":
    main()
