"""Memory of the replay buffer: 5,000 episodes in shapes of 5m_vs_6m, mean length 31, then many overwritten.

    python benchmarks/replay_memory.py [--episodes 5000] [--overwrites 4] [--no-recon]

Prints the bytes of the values, and what the process's resident memory grew by: when full, and after each further
`--episodes` episodes (growth there is fragmentation). With it the time of a sample of 128 episodes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import Observation
from omagd.runners.recorder import Recorder
from omagd.utils.packing import Episode

SLOTS = 8
MB = 1e6


def resident() -> int:
    """Return this process's resident bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Source:
    """Episodes as a runner makes them: through a recorder, lengths from 5 to 70 with mean 31."""

    def __init__(self, recon: bool) -> None:
        self._info = EnvInfo("null", "5m_vs_6m", n_agents=5, n_actions=12, obs_dim=55, state_dim=98, episode_limit=70)
        self._rng = np.random.default_rng(0)
        self._recorder = Recorder(self._info, SLOTS, full_obs=False)
        self._extras = {"recon": np.ones((SLOTS, 5, 55), np.float16)} if recon else {}
        slots = np.arange(SLOTS)
        obs, state = np.ones((SLOTS, 5, 55), np.float32), np.ones((SLOTS, 98), np.float32)
        seen = Observation(obs, state, np.ones((SLOTS, 5, 12), bool))
        self._recorder.begin()
        for t in range(71):
            steps = np.full(SLOTS, t)
            self._recorder.saw(slots, steps, seen)
            self._recorder.chose(slots, steps, np.ones((SLOTS, 5), np.int64), self._extras)

    def episode(self) -> Episode:
        """Return one more episode."""
        length = 5 + round(65 * self._rng.beta(1.5, 2.25))
        return self._recorder.take(int(self._rng.integers(SLOTS)), length)


def main() -> None:
    """Fill, overwrite, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--overwrites", type=int, default=4, help="times the whole buffer")
    parser.add_argument("--no-recon", action="store_true", help="without reconstructed observations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, rng = Source(not options.no_recon), np.random.default_rng(1)
    buffer = EpisodeBuffer(options.episodes)
    buffer.add(source.episode() for _ in range(10))
    buffer.sample(10, rng)
    buffer.clear()
    before = resident()
    for turn in range(options.overwrites + 1):
        for _ in range(0, options.episodes, SLOTS):
            buffer.add([source.episode() for _ in range(SLOTS)])
        grown = resident() - before
        name = "full" if turn == 0 else f"after {turn} x"
        print(f"{name:10s}: {buffer.nbytes / MB:7.1f} MB of values, resident memory grew by {grown / MB:7.1f} MB")
    rows = sum(len(buffer.batch([i])["reward"]) for i in range(len(buffer)))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        buffer.sample(min(128, len(buffer)), rng)
        times.append(time.perf_counter() - start)
    print(f"{len(buffer)} episodes, mean length {rows / len(buffer) - 1:.1f}")
    print(f"sample of 128 episodes: {np.median(times) * 1e3:.1f} ms; afterwards {(resident() - before) / MB:.1f} MB")


if __name__ == "__main__":
    main()
