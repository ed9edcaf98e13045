"""Win rates of the same scripted players on SMAClite (a public simulator of the same maps), as a Markdown table.

    pip install "git+https://github.com/uoe-agents/smaclite"
    python benchmarks/scripted_smaclite.py --episodes 8

SMAClite plays one battle at a time and starts each in the same place; step limits are SMAC's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from scripted_table import parser, show

from omagd.envs.battle.actions import Geometry
from omagd.envs.battle.backend import Units
from omagd.envs.battle.maps import MAPS
from omagd.envs.battle.scripted import Scene, choose
from omagd.envs.battle.units import UNIT_ID
from omagd.utils.seeding import generator, stream_seed


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


def play(env: object, policy: str, limit: int, seed: int) -> tuple[bool, float, int]:
    """Play one battle; return whether it was won, the return and the length."""
    env.reset(seed=seed % 2**31)
    everyone = [*env.agents.values(), *env.enemies.values()]
    geometry, rng = Geometry(1, env.n_agents, env.n_enemies), generator(seed, "script")
    total = 0.0
    for step in range(1, limit + 1):
        actions = choose(policy, look(env, everyone, geometry), rng)[0]
        _, reward, done, _, info = env.step([int(action) for action in actions])
        total += float(reward)
        if done:
            return bool(info["battle_won"]), total, step
    return False, total, limit


def rows(args: argparse.Namespace) -> Iterator[str]:
    """Yield one line for each map that both have."""
    from smaclite.env.maps.map import MapPreset
    from smaclite.env.smaclite import SMACliteEnv

    known = {preset.value.name: preset.value for preset in MapPreset}
    for name in (name for name in args.maps if name in known):
        env, cells = SMACliteEnv(map_info=known[name], seed=0), []
        for policy in args.policies:
            seeds = [stream_seed(args.seed, "battle", episode) for episode in range(args.episodes)]
            won, total, length = np.mean([play(env, policy, MAPS[name].limit, seed) for seed in seeds], axis=0)
            cells.append(f"{won:.2f} ({total:.1f}, {length:.0f})")
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Play and show."""
    args = parser(__doc__, episodes=8).parse_args()
    show(rows(args), args, "scripted on SMAClite")


if __name__ == "__main__":
    main()
