"""Win rates of the scripted players on the skirmish maps, as a Markdown table.

python benchmarks/scripted_table.py --episodes 256
python benchmarks/scripted_table.py --maps 3m 8m --policies random kiting
python benchmarks/scripted_table.py --episodes 256 --into docs/skirmish.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from omagd.envs.battle.args import POLICIES, SkirmishArgs
from omagd.envs.battle.maps import MAPS
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


def rows(args: argparse.Namespace) -> Iterator[str]:
    """Yield the table line by line; a cell is the win rate and, in brackets, the mean return and the mean length."""
    for name in args.maps:
        cells = [play(name, policy, args.episodes, args.seed) for policy in args.policies]
        yield (
            f"| {name} | " + " | ".join(f"{won:.2f} ({total:.1f}, {length:.0f})" for won, total, length in cells) + " |"
        )


def parser(description: str | None, episodes: int) -> argparse.ArgumentParser:
    """Return the options that both scripts of this kind have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--episodes", type=int, default=episodes)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--maps", nargs="*", default=list(MAPS), choices=list(MAPS))
    made.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    made.add_argument("--into", type=Path, help="Markdown file that has the two marks for this table")
    return made


def show(lines: Iterator[str], args: argparse.Namespace, mark: str) -> None:
    """Print the table while it grows, then put it between the marks of `args.into`, if there is such a file."""
    start, table = (
        time.perf_counter(),
        [f"| map | {' | '.join(args.policies)} |", "|---|" + "---|" * len(args.policies)],
    )
    sys.stdout.write("\n".join(table) + "\n")
    for line in lines:
        table.append(line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{args.episodes} battles per cell, seed {args.seed}, {time.perf_counter() - start:.0f} s\n")
    if args.into:
        head, _, rest = args.into.read_text().partition(f"<!-- {mark} -->\n")
        _, end, tail = rest.partition(f"<!-- end of {mark} -->\n")
        if not end:
            raise SystemExit(f"{args.into} lacks the marks <!-- {mark} --> and <!-- end of {mark} -->")
        args.into.write_text(f"{head}<!-- {mark} -->\n" + "\n".join(table) + f"\n{end}{tail}")


def main() -> None:
    """Play and show."""
    args = parser(__doc__, episodes=256).parse_args()
    show(rows(args), args, "scripted on skirmish")


if __name__ == "__main__":
    main()
