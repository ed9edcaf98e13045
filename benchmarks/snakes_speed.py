"""Board steps per second of `snakes_3v3`: engine, opponents, observations; one thread.

    OMP_NUM_THREADS=1 python benchmarks/snakes_speed.py --boards 16 256
    OMP_NUM_THREADS=1 python benchmarks/snakes_speed.py --boards 16 64 256 --rounds 9 --only near

Prints medians and quartiles of the rounds in processor time. A tick of the environment is what a runner makes: observe,
step with random actions, reset what has ended; its reward is `potential`. `network` is a frozen opponent with the
observation of its line and two layers of 256 units.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from omagd.envs.factory import make_env
from omagd.envs.snakes.engine import Engine
from omagd.envs.snakes.opponents import SCRIPTS
from omagd.envs.snakes.snakes_env import prepare

UNITS = 256
Step = Callable[[], None]


def per_second(step: Step, boards: int, seconds: float) -> float:
    """Return board steps per second of processor time of `step`, which plays all boards once."""
    steps, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        step()
        steps += boards
    return steps / (time.process_time() - start)


def engine_steps(script: str | None, boards: int) -> Step:
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


def env_steps(obs: str, opponent: str, boards: int) -> Step:
    """Return a tick of the environment."""
    env = make_env("snakes_3v3", {"obs": obs, "reward": "potential"}, boards, processes=False)
    rng = np.random.default_rng(0)
    if opponent == "network":
        sizes = [env.info.obs_dim, UNITS, UNITS, 4]
        pairs = zip(sizes[1:], sizes[:-1], strict=True)
        layers = [(rng.normal(size=shape) / np.sqrt(shape[1]), np.zeros(shape[0])) for shape in pairs]
        env.set_opponents([env.frozen_opponent("network", layers, sample=False)])  # type: ignore[attr-defined]
    else:
        env.set_opponents([opponent])  # type: ignore[attr-defined]
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


def show(values: np.ndarray) -> str:
    """Return the median and the quartiles."""
    low, middle, high = (f"{value:,.0f}" for value in np.percentile(values, (25, 50, 75)))
    return f"{middle} ({low} to {high})"


def cases() -> dict[str, Callable[[int], Step]]:
    """Return what is measured, by name."""
    found = {"engine, random actions": partial(engine_steps, None)}
    found |= {f"engine, both teams {name}": partial(engine_steps, name) for name in ("random", "l1", "greedy")}
    for obs in ("26", "30", "35", "near", "entities", "planes"):
        found[f"environment, {obs}, greedy"] = partial(env_steps, obs, "greedy")
    found |= {f"environment, {obs}, network": partial(env_steps, obs, "network") for obs in ("26", "near")}
    return found


def main() -> None:
    """Print one line for each case and number of boards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="processor time of a round")
    parser.add_argument("--only", default="", help="measure what has this word in its name")
    args = parser.parse_args()
    prepare()
    for boards in args.boards:
        for name, make in cases().items():
            if args.only in name:
                step = make(boards)
                speeds = np.array([per_second(step, boards, args.seconds) for _ in range(args.rounds)])
                print(f"{boards} boards, {name}: {show(speeds)} board steps/s", flush=True)


if __name__ == "__main__":
    main()
