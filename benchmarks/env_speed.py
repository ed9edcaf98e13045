"""Environment steps per second of a batched environment as the runner sees it: one thread, random available actions.

    OMP_NUM_THREADS=1 python benchmarks/env_speed.py --map 5m_vs_6m --slots 64
    OMP_NUM_THREADS=1 python benchmarks/env_speed.py --env smax --map 3m --slots 64

Each tick observes (observations, full observations, state, masks) and steps all slots; an ended battle starts anew.
Choosing the actions is not timed. Prints the median and the range of the rounds.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from omagd.envs.actions import random_actions
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv


def play_round(env: BatchedEnv, ticks: int, rng: np.random.Generator) -> float:
    """Return environment steps per second over `ticks` ticks."""
    everyone = np.ones(env.n_slots, bool)
    env.reset(everyone, rng.integers(2**31, size=env.n_slots))
    seconds = 0.0
    for _ in range(ticks):
        started = time.perf_counter()
        seen = env.observe(full=True)
        seconds += time.perf_counter() - started
        actions = random_actions(seen.avail_actions, rng)
        started = time.perf_counter()
        ended = env.step(actions, everyone).terminated
        if ended.any():
            env.reset(ended, rng.integers(2**31, size=env.n_slots))
        seconds += time.perf_counter() - started
    return ticks * env.n_slots / seconds


def main() -> None:
    """Time several rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--ticks", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    env = make_env(arguments.env, {"map_name": arguments.map}, arguments.slots, processes=False)
    rng = np.random.default_rng(0)
    play_round(env, 20, rng)
    speeds = [play_round(env, arguments.ticks, rng) for _ in range(arguments.rounds)]
    name = f"{arguments.env} {arguments.map}, {arguments.slots} slots"
    print(f"{name}: {median(speeds):,.0f} steps/s (from {min(speeds):,.0f} to {max(speeds):,.0f})")
    env.close()


if __name__ == "__main__":
    main()
