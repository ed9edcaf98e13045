"""Win rates of the scripted players on the skirmish maps, as a Markdown table.

    python benchmarks/scripted_table.py --episodes 256
    python benchmarks/scripted_table.py --maps 3m 8m --policies random kiting
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.maps import MAPS
from omagd.envs.battle.scripted import POLICIES
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.utils.seeding import stream_seed


def play(map_name: str, policy: str, episodes: int, seed: int) -> tuple[float, float, float]:
    """Play `episodes` battles side by side; return win rate, mean return, mean length."""
    env = SkirmishEnv(SkirmishArgs(map_name=map_name), episodes)
    rng = np.random.default_rng(stream_seed(seed, "script"))
    active = np.ones(episodes, bool)
    env.reset(active, np.array([stream_seed(seed, "battle", slot) for slot in range(episodes)]))
    won, total, length = np.zeros(episodes, bool), np.zeros(episodes), np.zeros(episodes)
    while active.any():
        length += active
        result = env.step(env.scripted_actions(policy, rng), active)
        won |= result.info["battle_won"]
        total += result.reward
        active &= ~result.terminated
    return float(won.mean()), float(total.mean()), float(length.mean())


def main() -> None:
    """Print the table; each cell is the win rate and, in brackets, the mean return and the mean length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--maps", nargs="*", default=list(MAPS), choices=list(MAPS))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    args = parser.parse_args()
    write = sys.stdout.write
    write(f"| map | {' | '.join(args.policies)} |\n|---|{'---|' * len(args.policies)}\n")
    start = time.perf_counter()
    for name in args.maps:
        cells = [play(name, policy, args.episodes, args.seed) for policy in args.policies]
        row = " | ".join(f"{won:.2f} ({total:.1f}, {length:.0f})" for won, total, length in cells)
        write(f"| {name} | {row} |\n")
        sys.stdout.flush()
    write(f"\n{args.episodes} battles per cell, seed {args.seed}, {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
