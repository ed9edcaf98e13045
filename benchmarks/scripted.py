"""Win rates of the scripted players on the maps of skirmish, as a Markdown table.

    python benchmarks/scripted.py --episodes 256
    python benchmarks/scripted.py --maps 3m 8m --policies random kiting
    python benchmarks/scripted.py --episodes 128 --into docs/skirmish.md

With `--into` the table also goes between its marks on that page.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from omagd.envs.battle.args import POLICIES, SkirmishArgs
from omagd.envs.battle.maps import MAPS
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.utils.seeding import stream_seed


def play(map_name: str, policy: str, episodes: int, seed: int) -> tuple[float, float]:
    """Play `episodes` battles side by side; return win rate and mean return."""
    env = SkirmishEnv(SkirmishArgs(map_name=map_name), episodes)
    rng = np.random.default_rng(stream_seed(seed, "script"))
    active = np.ones(episodes, bool)
    env.reset(active, np.array([stream_seed(seed, "battle", slot) for slot in range(episodes)]))
    won, total = np.zeros(episodes, bool), np.zeros(episodes)
    while active.any():
        result = env.step(env.scripted_actions(policy, rng), active)
        won |= result.info["battle_won"]
        total += result.reward
        active &= ~result.terminated
    return float(won.mean()), float(total.mean())


def main() -> None:
    """Print the table while it grows, then put it between the marks of `--into`, if there is such a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--maps", nargs="*", default=list(MAPS), choices=list(MAPS))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--into", type=Path, help="Markdown file that has the two marks for this table")
    args = parser.parse_args()
    table, start = [f"|map|{'|'.join(args.policies)}|", "|---|" + "---|" * len(args.policies)], time.monotonic()
    print(*table, sep="\n", flush=True)
    for name in args.maps:
        cells = [play(name, policy, args.episodes, args.seed) for policy in args.policies]
        table.append(f"|{name}|" + "|".join(f"{won:.2f} ({total:.1f})" for won, total in cells) + "|")
        print(table[-1], flush=True)
    print(f"\n{args.episodes} battles per cell, seed {args.seed}, {time.monotonic() - start:.0f} s")
    if args.into:
        insert(args.into, "scripted on skirmish", "\n".join(table))


def insert(page: Path, mark: str, table: str) -> None:
    """Put a table between its marks on a page."""
    head, _, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- end of {mark} -->\n")
    if not end:
        sys.exit(f"{page} lacks the marks <!-- {mark} --> and <!-- end of {mark} -->")
    page.write_text(f"{head}<!-- {mark} -->\n{table}\n{end}{tail}")


if __name__ == "__main__":
    main()
