"""Environment steps per second as the runner sees them: one thread, random available actions.

    OMP_NUM_THREADS=1 python benchmarks/env_speed.py --maps 3m 5m_vs_6m 27m_vs_30m --slots 16 256
    OMP_NUM_THREADS=1 python benchmarks/env_speed.py --maps 3m --slots 16 256 --beside smax
    python benchmarks/env_speed.py --env rware --maps tiny-2ag tiny-4ag --slots 8 --beside bare --clock processor

Each tick observes (observations, full observations, state, masks) and steps all slots; an ended battle starts again.
Choosing the actions is not timed. `bare` is the loop over one environment of the package behind `lbf`, `mpe` or
`rware`, which has no full observations; then ours are not asked for, either. What is compared takes turns, in this
process: `smax` is JaxMARL's battles with JAX on one CPU thread. Prints the medians and quartiles of the rounds, and of
the ratio of each round. On a shared machine processor seconds (`--clock processor`) say more; what computes in threads
of its own, as SMAX does, needs the wall.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable

import numpy as np

from omagd.envs.factory import make_env
from omagd.envs.protocol import BatchedEnv, random_actions

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Speeds = dict[str, np.ndarray]


class Bare:
    """One environment of the package behind `env`, in the loop that its authors show."""

    n_slots = 1

    def __init__(self, env: str, map_name: str) -> None:
        import gymnasium

        self.parallel = env == "mpe"
        if self.parallel:
            self.env = importlib.import_module(f"mpe2.{map_name}").parallel_env()
        else:
            key = {"lbf": f"lbforaging:Foraging-{map_name}-v3", "rware": f"rware:rware-{map_name}-v2"}[env]
            self.env = gymnasium.make(key, disable_env_checker=True)

    def play_round(self, steps: int, rng: np.random.Generator, clock: Callable[[], float]) -> float:
        """Return environment steps per second of the `clock`."""
        env = self.env
        env.reset(seed=int(rng.integers(2**31)))
        if self.parallel:
            names = list(env.possible_agents)
            counts = [env.action_space(name).n for name in names]
        else:
            counts = [space.n for space in env.action_space]
        drawn = rng.integers(counts, size=(steps, len(counts))).tolist()
        chosen = [dict(zip(names, each, strict=True)) for each in drawn] if self.parallel else drawn
        started = clock()
        for actions in chosen:
            _, _, terminated, truncated, _ = env.step(actions)
            if (not env.agents) if self.parallel else np.all(terminated) or np.all(truncated):
                env.reset(seed=int(rng.integers(2**31)))
        return steps / (clock() - started)

    def close(self) -> None:
        """Close it."""
        self.env.close()


def play_round(
    env: BatchedEnv | Bare, ticks: int, rng: np.random.Generator, clock: Callable[[], float], full: bool = True
) -> float:  # fmt: skip
    """Return environment steps per second of the `clock` over `ticks` ticks."""
    if isinstance(env, Bare):
        return env.play_round(ticks, rng, clock)
    everyone = np.ones(env.n_slots, bool)
    env.reset(everyone, rng.integers(2**31, size=env.n_slots))
    seconds = 0.0
    for _ in range(ticks):
        started = clock()
        seen = env.observe(full=full)
        seconds += clock() - started
        actions = random_actions(seen.avail_actions, rng)
        started = clock()
        ended = env.step(actions, everyone).terminated
        if ended.any():
            env.reset(ended, rng.integers(2**31, size=env.n_slots))
        seconds += clock() - started
    return ticks * env.n_slots / seconds


def measure(names: list[str], map_name: str, slots: int, arguments: argparse.Namespace) -> Speeds:
    """Return the steps per second of each round, by name."""
    envs: dict[str, BatchedEnv | Bare] = {
        name: Bare(names[0], map_name)
        if name == "bare"
        else make_env(name, {"map_name": map_name}, slots, processes=False)
        for name in names
    }
    ticks = {name: max(10, arguments.steps // env.n_slots) for name, env in envs.items()}
    full = "bare" not in names
    rng, clock = np.random.default_rng(0), CLOCKS[arguments.clock]
    for env in envs.values():
        play_round(env, 20, rng, clock, full)
    rounds = [
        {name: play_round(env, ticks[name], rng, clock, full) for name, env in envs.items()}
        for _ in range(arguments.rounds)
    ]
    for env in envs.values():
        env.close()
    return {name: np.array([each[name] for each in rounds]) for name in names}


def show(values: np.ndarray, digits: int = 0) -> str:
    """Return the median and the quartiles."""
    low, middle, high = (f"{value:,.{digits}f}" for value in np.percentile(values, (25, 50, 75)))
    return f"{middle} ({low} to {high})"


def main() -> None:
    """Time several rounds of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="skirmish")
    parser.add_argument("--maps", nargs="+", default=["5m_vs_6m"])
    parser.add_argument("--slots", type=int, nargs="+", default=[64])
    parser.add_argument("--beside", nargs="*", default=[], help="smax, bare, or any registered environment")
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    arguments = parser.parse_args()
    for map_name in arguments.maps:
        for slots in arguments.slots:
            speeds = measure([arguments.env, *arguments.beside], map_name, slots, arguments)
            first = speeds[arguments.env]
            print(f"{arguments.env} {map_name}, {slots} slots: {show(first)} steps/s", flush=True)
            for name in arguments.beside:
                print(f"    {name}: {show(speeds[name])} steps/s; ratio {show(first / speeds[name], 2)}", flush=True)


if __name__ == "__main__":
    main()
