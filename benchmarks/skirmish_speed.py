"""Battle steps per second of processor time, built-in simulator alone: random orders, one thread, no observations.

OMP_NUM_THREADS=1 python benchmarks/skirmish_speed.py --maps 3m,5m_vs_6m,27m_vs_30m --slots 64,256
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from omagd.envs.battle.maps import get_map
from omagd.envs.battle.simulator import Simulator


def random_orders(sim: Simulator, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random orders at random targets, walks of 2 cells."""
    slots, units = sim.units.x.shape
    step = np.array([(2, 0), (-2, 0), (0, 2), (0, -2)])[rng.integers(0, 4, (slots, n))]
    dest = np.stack([sim.units.x[:, :n], sim.units.y[:, :n]], axis=-1) + step
    return rng.integers(1, 4, (slots, n)), rng.integers(n, units, (slots, n)), dest


def measure(map_name: str, slots: int, seconds: float) -> float:
    """Return steps per second of processor time, resets included, the drawing of orders excluded."""
    spec, rng = get_map(map_name), np.random.default_rng(0)
    sim, n, active = Simulator(spec, slots), spec.n_agents, np.ones(slots, bool)
    sim.reset(active, np.arange(slots))
    steps, spent = 0, 0.0
    while spent < seconds:
        orders = random_orders(sim, n, rng)
        start = time.process_time()
        sim.advance(*orders, active)
        over = ~(sim.units.alive[:, :n].any(axis=1) & sim.units.alive[:, n:].any(axis=1))
        if over.any():
            sim.reset(over, np.arange(slots) + steps)
        spent += time.process_time() - start
        steps += slots
    return steps / spent


def main() -> None:
    """Print one line per map and number of slots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maps", default="3m,5m_vs_6m,27m_vs_30m")
    parser.add_argument("--slots", default="64,256")
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    for map_name in args.maps.split(","):
        for slots in (int(part) for part in args.slots.split(",")):
            print(f"{map_name:>12} {slots:4d} slots {measure(map_name, slots, args.seconds):10.0f} steps/s", flush=True)


if __name__ == "__main__":
    main()
