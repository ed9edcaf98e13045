"""Environment steps per second of a batched environment as the runner sees it: one thread, random available actions.

    OMP_NUM_THREADS=1 python benchmarks/env_speed.py --map 5m_vs_6m --slots 16 256
    OMP_NUM_THREADS=1 python benchmarks/env_speed.py --env smax --map 3m --slots 64

Each tick observes (observations, full observations, state, masks) and steps all slots; an ended battle starts again.
Choosing the actions is not timed. Prints the median and the range of the rounds. On a shared machine processor seconds
(`--clock processor`) say more; what computes in threads of its own, as SMAX does, needs the wall.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from omagd.envs.actions import random_actions
from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def play_round(env: BatchedEnv, ticks: int, rng: np.random.Generator, clock: Callable[[], float]) -> float:
    """Return environment steps per second of the `clock` over `ticks` ticks."""
    everyone = np.ones(env.n_slots, bool)
    env.reset(everyone, rng.integers(2**31, size=env.n_slots))
    seconds = 0.0
    for _ in range(ticks):
        started = clock()
        seen = env.observe(full=True)
        seconds += clock() - started
        actions = random_actions(seen.avail_actions, rng)
        started = clock()
        ended = env.step(actions, everyone).terminated
        if ended.any():
            env.reset(ended, rng.integers(2**31, size=env.n_slots))
        seconds += clock() - started
    return ticks * env.n_slots / seconds


def main() -> None:
    """Time several rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--map", default="5m_vs_6m")
    parser.add_argument("--slots", type=int, nargs="+", default=[64])
    parser.add_argument("--ticks", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    arguments = parser.parse_args()
    clock = CLOCKS[arguments.clock]
    for slots in arguments.slots:
        env = make_env(arguments.env, {"map_name": arguments.map}, slots, processes=False)
        rng = np.random.default_rng(0)
        play_round(env, 20, rng, clock)
        speeds = [play_round(env, arguments.ticks, rng, clock) for _ in range(arguments.rounds)]
        name = f"{arguments.env} {arguments.map}, {slots} slots"
        print(f"{name}: {median(speeds):,.0f} steps/s (from {min(speeds):,.0f} to {max(speeds):,.0f})")
        env.close()


if __name__ == "__main__":
    main()
