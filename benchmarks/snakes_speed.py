"""Board steps per second of processor time of `snakes_3v3`, one thread: engine, opponents, observations.

OMP_NUM_THREADS=1 python benchmarks/snakes_speed.py --boards 256 --seconds 3
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from omagd.envs.factory import make_env
from omagd.envs.snakes.engine import Engine
from omagd.envs.snakes.opponents import SCRIPTS


def per_second(step: Callable[[], None], boards: int, seconds: float) -> float:
    """Return board steps per second of processor time of `step`, which plays all boards once."""
    steps, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        step()
        steps += boards
    return steps / (time.process_time() - start)


def engine_steps(boards: int, script: str | None) -> Callable[[], None]:
    """Return a step of the engine: both teams by `script`, or actions that were drawn before; resets included."""
    engine, rows, rng = Engine(boards), np.arange(boards), np.random.default_rng(0)
    drawn = rng.integers(0, 4, (64, boards, 6))
    one, other = np.zeros(boards, np.int64), np.ones(boards, np.int64)
    engine.reset(rows, rows)
    state = {"n": 0}

    def step() -> None:
        state["n"] += 1
        if script is None:
            actions = drawn[state["n"] % 64]
        else:
            actions = np.concatenate([SCRIPTS[script].act(engine.board, team) for team in (one, other)], 1)
        over = engine.step(actions, rows).over
        if over.any():
            engine.reset(rows[over], rows[over] + state["n"])

    return step


def env_steps(boards: int, **env_args: object) -> Callable[[], None]:
    """Return a tick as a runner makes it: look, act at random, step, reset what has ended."""
    env, rng = make_env("snakes_3v3", env_args, boards, processes=False), np.random.default_rng(0)
    everyone, seeds = np.ones(boards, bool), np.arange(boards)
    drawn = rng.integers(0, 4, (64, boards, 3))
    env.reset(everyone, seeds)
    state = {"n": 0}

    def step() -> None:
        state["n"] += 1
        env.observe()
        over = env.step(drawn[state["n"] % 64], everyone).terminated
        if over.any():
            env.reset(over, seeds + state["n"])

    return step


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boards", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    cases = {"engine, random actions": engine_steps(args.boards, None)}
    cases |= {f"engine, both teams {name}": engine_steps(args.boards, name) for name in SCRIPTS}
    for obs in ("26", "30", "35", "near", "entities", "planes"):
        cases[f"environment, obs={obs}, greedy opponent"] = env_steps(args.boards, obs=obs, opponent="greedy")
    for name, step in cases.items():
        print(f"{name:45} {per_second(step, args.boards, args.seconds):10,.0f} board steps/s", flush=True)


if __name__ == "__main__":
    main()
