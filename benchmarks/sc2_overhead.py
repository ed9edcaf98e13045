"""What a step of `sc2` costs beside the game, against the published SMAC on the same stand-in for the game.

    python benchmarks/sc2_overhead.py --smac PATH_OF_A_SMAC_CHECKOUT [--maps 3m 27m_vs_30m] [--steps 400]

Both play the same battles with the same random actions, episode by episode in turn. A step is what a runner asks for:
`step`, `get_obs`, `get_state`, `get_avail_actions`. Measured is the processor time of this process; the game's own
process, and waiting for it, do not count. Needs no StarCraft II. Without --smac only our side is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import sc2_stand_in  # noqa: E402

from omagd.envs.battle.args import SmacArgs  # noqa: E402
from omagd.envs.sc2 import client as protocol  # noqa: E402, F401 (before anything of SMAC)
from omagd.envs.sc2.sc2_env import SC2Env  # noqa: E402

BOUNDS = {"3m": 1 / 2, "27m_vs_30m": 1 / 5}


def play(env, rng: np.random.Generator, spent: list[float], steps: int) -> None:
    """Play one episode with random actions and append the seconds of each step, at most `steps` in all."""
    avail, over = np.asarray(env.get_avail_actions()), False
    while not over and len(spent) < steps:
        actions = np.argmax(rng.random(avail.shape) * avail, axis=1)
        start = time.process_time_ns()
        _, over, _ = env.step(actions)
        env.get_obs()
        env.get_state()
        found = env.get_avail_actions()
        spent.append((time.process_time_ns() - start) / 1e9)
        avail = np.asarray(found)


def measure(smac_class, map_name: str, steps: int) -> dict[str, list[float]]:
    """Return the seconds of each step of both; of ours alone if `smac_class` is None."""
    envs = {"omagd": SC2Env(SmacArgs(map_name=map_name, seed=1))}
    if smac_class is not None:
        envs["smac"] = smac_class(map_name=map_name, seed=1)
    spent: dict[str, list[float]] = {name: [] for name in envs}
    streams = {name: np.random.default_rng(0) for name in envs}
    try:
        while min(map(len, spent.values())) < steps:
            for name, env in envs.items():
                env.reset()
                play(env, streams[name], spent[name], steps)
    finally:
        for env in envs.values():
            env.close()
    return spent


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smac", help="checkout of oxwhirl/smac")
    parser.add_argument("--maps", nargs="+", default=list(BOUNDS))
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    smac_class = None
    if options.smac:
        sys.path.insert(0, options.smac)
        from smac.env import StarCraft2Env as smac_class

    print("| map | SMAC, us a step | omagd, us a step | share | wanted |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SC2PATH"] = str(sc2_stand_in.install(Path(folder) / "StarCraftII"))
        for name in options.maps:
            spent = measure(smac_class, name, options.steps)
            ours, smac = (1e6 * float(np.median(spent.get(who, np.nan))) for who in ("omagd", "smac"))
            wanted = f"<= {BOUNDS[name]:.2f}" if name in BOUNDS else ""
            print(f"| {name} | {smac:.0f} | {ours:.0f} | {ours / smac:.2f} | {wanted} |", flush=True)


if __name__ == "__main__":
    main()
