"""Win rates of the scripted players on the maps, as a Markdown table: on skirmish, or on SMAClite beside it.

    python benchmarks/scripted.py --episodes 256
    python benchmarks/scripted.py --maps 3m 8m --policies random kiting
    python benchmarks/scripted.py --episodes 256 --into docs/skirmish.md
    pip install "git+https://github.com/uoe-agents/smaclite"
    python benchmarks/scripted.py --on smaclite --episodes 8

SMAClite, a public simulator of the same maps, plays one battle at a time and starts each in the same place; step limits
are SMAC's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from omagd.envs.battle.actions import Geometry
from omagd.envs.battle.args import POLICIES, SkirmishArgs
from omagd.envs.battle.backend import Units
from omagd.envs.battle.maps import MAPS
from omagd.envs.battle.scripted import Scene, choose
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.battle.units import UNIT_ID
from omagd.utils.seeding import generator, stream_seed

Cell = tuple[float, float]  # win rate, mean return


def play(map_name: str, policy: str, episodes: int, seed: int) -> Cell:
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


def look(env: object, everyone: list, geometry: Geometry) -> Scene:
    """Return SMAClite's battle as the scripts see one. `everyone`: its units, allies first."""
    row = {
        name: np.array([[float(value(unit)) for unit in everyone]], dtype=np.float32)
        for name, value in {
            "x": lambda u: u.pos[0],
            "y": lambda u: u.pos[1],
            "health": lambda u: u.hp,
            "health_max": lambda u: u.max_hp,
            "shield": lambda u: u.shield,
            "shield_max": lambda u: u.max_shield,
            "energy": lambda u: u.energy,
            "cooldown": lambda u: u.cooldown,
        }.items()
    }
    kind = np.array([[UNIT_ID[unit.type.stats.name.lower()] for unit in everyone]])
    # Not health: in SMAClite a unit that has left the battle can still be healed.
    units = Units(**row, type_id=kind, alive=np.array([[unit.id in env.all_units for unit in everyone]]))
    geometry.refresh(units)
    return Scene(units, geometry, np.array([env.get_avail_actions()], dtype=bool))


def play_on_smaclite(env: object, policy: str, limit: int, seed: int) -> tuple[bool, float]:
    """Play one battle; return whether it was won, and the return."""
    env.reset(seed=seed % 2**31)
    everyone = [*env.agents.values(), *env.enemies.values()]
    geometry, rng = Geometry(1, env.n_agents, env.n_enemies), generator(seed, "script")
    total = 0.0
    for _ in range(limit):
        actions = choose(policy, look(env, everyone, geometry), rng)[0]
        _, reward, done, _, info = env.step([int(action) for action in actions])
        total += float(reward)
        if done:
            return bool(info["battle_won"]), total
    return False, total


def on_skirmish(args: argparse.Namespace) -> Iterator[tuple[str, list[Cell]]]:
    """Yield each map with the cells of its policies."""
    for name in args.maps:
        yield name, [play(name, policy, args.episodes, args.seed) for policy in args.policies]


def on_smaclite(args: argparse.Namespace) -> Iterator[tuple[str, list[Cell]]]:
    """Yield the same for each map that both have."""
    from smaclite.env.maps.map import MapPreset
    from smaclite.env.smaclite import SMACliteEnv

    known = {preset.value.name: preset.value for preset in MapPreset}
    seeds = [stream_seed(args.seed, "battle", episode) for episode in range(args.episodes)]
    for name in (name for name in args.maps if name in known):
        env, cells = SMACliteEnv(map_info=known[name], seed=0), []
        for policy in args.policies:
            played = [play_on_smaclite(env, policy, MAPS[name].limit, seed) for seed in seeds]
            cells.append(tuple(np.mean(played, axis=0)))
        yield name, cells


def main() -> None:
    """Print the table while it grows, then put it between the marks of `--into`, if there is such a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=["skirmish", "smaclite"], default="skirmish")
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--maps", nargs="*", default=list(MAPS), choices=list(MAPS))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--into", type=Path, help="Markdown file that has the two marks for this table")
    args = parser.parse_args()
    table, start = [f"|map|{'|'.join(args.policies)}|", "|---|" + "---|" * len(args.policies)], time.monotonic()
    print(*table, sep="\n", flush=True)
    for name, cells in (on_skirmish if args.on == "skirmish" else on_smaclite)(args):
        table.append(f"|{name}|" + "|".join(f"{won:.2f} ({total:.1f})" for won, total in cells) + "|")
        print(table[-1], flush=True)
    print(f"\n{args.episodes} battles per cell, seed {args.seed}, {time.monotonic() - start:.0f} s")
    if args.into:
        insert(args.into, f"scripted on {'skirmish' if args.on == 'skirmish' else 'SMAClite'}", "\n".join(table))


def insert(page: Path, mark: str, table: str) -> None:
    """Put a table between its marks on a page."""
    head, _, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    _, end, tail = rest.partition(f"<!-- end of {mark} -->\n")
    if not end:
        sys.exit(f"{page} lacks the marks <!-- {mark} --> and <!-- end of {mark} -->")
    page.write_text(f"{head}<!-- {mark} -->\n{table}\n{end}{tail}")


if __name__ == "__main__":
    main()
