"""Memory of the replay buffer: 5,000 episodes of 5m_vs_6m's shapes, mean length 31, then many overwritten.

    python benchmarks/replay_memory.py [--episodes 5000] [--overwrites 4] [--fields recon|tokens|none] [--no-full-obs]

Prints bytes of what is stored, bytes per step, and what the process's resident memory grew by: when full, and after
each further `--episodes` episodes (growth there is fragmentation). With it the time of a sample of 128 episodes, with
decoding, beside the time that the same episodes take to pack when they lie ready as plain tensors. Every bit of
a sample is compared with what was put in. PyMARL3 keeps 767 MB for the same episodes without full observations and
reconstructions, the original method 1,139 MB. Exit code 1 where more than 400 MB or 2.2 kB per step are stored.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import Observation, StepResult
from omagd.run.training.device import keep_freed_memory
from omagd.runners.rollout import Recorder
from omagd.utils.packing import Episode, pack_episodes

SLOTS = 8
MB = 1e6
INFO = EnvInfo("null", "5m_vs_6m", n_agents=5, n_actions=12, obs_dim=55, state_dim=98, episode_limit=70)
EXTRAS = {"recon": ((5, 55), np.float16), "tokens": ((5, 11), np.int16)}


def resident() -> int:
    """Return this process's resident bytes (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Source:
    """Episodes as a runner makes them: through a recorder, lengths from 5 to 70 with mean 31, units seen half the time.

    Args:
        extra: name of the reconstructor's field, or "none". full_obs: whether `full_obs` is recorded too.
    """

    def __init__(self, extra: str, full_obs: bool) -> None:
        self._rng = rng = np.random.default_rng(0)
        self._recorder = Recorder(INFO, SLOTS, full_obs=full_obs)
        slots = np.arange(SLOTS)
        for t in range(71):
            full = rng.normal(size=(SLOTS, 5, 11, 5)).astype(np.float32)
            obs = np.where(rng.random((SLOTS, 5, 11, 1)) < 0.5, full, 0).astype(np.float32)
            state = rng.normal(size=(SLOTS, 98)).astype(np.float32)
            avail = rng.random((SLOTS, 5, 12)) < 0.5
            seen = Observation(obs.reshape(SLOTS, 5, 55), state, avail, full.reshape(SLOTS, 5, 55))
            extras = {name: rng.integers(-1, 99, (SLOTS, *EXTRAS[name][0])) for name in EXTRAS if name == extra}
            steps = np.full(SLOTS, t)
            self._recorder.record_observations(slots, steps, seen)
            made = {name: value.astype(EXTRAS[name][1]) for name, value in extras.items()}
            self._recorder.record_actions(slots, steps, rng.integers(0, 12, (SLOTS, 5)), made)
            goes_on = np.zeros(SLOTS, bool)
            self._recorder.record_results(slots, steps, StepResult(rng.normal(size=SLOTS), goes_on, goes_on, {}))

    def episode(self) -> Episode:
        """Return one more episode."""
        length = 5 + round(65 * self._rng.beta(1.5, 2.25))
        return self._recorder.take(int(self._rng.integers(SLOTS)), length)


def median_ms(what: list[float]) -> float:
    """Return the median of seconds in milliseconds."""
    return float(np.median(what) * 1e3)


def fill(buffer: EpisodeBuffer, source: Source, overwrites: int, before: int) -> None:
    """Fill and overwrite the buffer, and print what it takes each time."""
    for turn in range(overwrites + 1):
        seconds = 0.0
        for _ in range(0, buffer.capacity, SLOTS):
            made = [source.episode() for _ in range(SLOTS)]
            start = time.perf_counter()
            buffer.add(made)
            seconds += time.perf_counter() - start
        grown = resident() - before
        name = "full" if turn == 0 else f"after {turn} x"
        each = f"adding: {seconds / buffer.capacity * 1e6:.0f} us per episode"
        print(f"{name:10s}: {buffer.nbytes / MB:6.1f} MB stored, resident memory grew by {grown / MB:6.1f} MB; {each}")


def compare(buffer: EpisodeBuffer, source: Source, rng: np.random.Generator) -> None:
    """Time sampling with and without decoding, and compare all bits. Errors: AssertionError."""
    made = [source.episode() for _ in range(min(1000, buffer.capacity))]
    known = EpisodeBuffer(len(made))
    known.add(made)
    times: dict[str, list[float]] = {"sample": [], "plain": []}
    for _ in range(30):
        drawn = known.draw(min(128, len(made)), rng)
        start = time.perf_counter()
        batch = known.batch(drawn)
        middle = time.perf_counter()
        plain = pack_episodes([made[i] for i in drawn])
        times["plain"].append(time.perf_counter() - middle)
        times["sample"].append(middle - start)
        assert batch.packing == plain.packing
        for name, value in plain.data.items():
            assert batch[name].dtype == value.dtype
            assert batch[name].numpy().tobytes() == value.numpy().tobytes(), name
    ours, theirs = (median_ms(times[name]) for name in ("sample", "plain"))
    times_text = f"{ours:.1f} ms, from plain tensors {theirs:.1f} ms"
    print(f"sample of {len(drawn)} episodes: {times_text}; all bits equal in 30 samples")


def main() -> None:
    """Fill, overwrite, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--overwrites", type=int, default=4, help="times the whole buffer")
    parser.add_argument("--fields", choices=["recon", "tokens", "none"], default="recon", help="of the reconstructor")
    parser.add_argument("--no-full-obs", action="store_true", help="without full observations")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as runs do
    source, rng = Source(options.fields, not options.no_full_obs), np.random.default_rng(1)
    buffer = EpisodeBuffer(options.episodes)
    buffer.add(source.episode() for _ in range(10))
    buffer.sample(10, rng)
    buffer.clear()
    fill(buffer, source, options.overwrites, resident())
    steps = sum(len(episode["reward"]) - 1 for episode in buffer.episodes)
    each = buffer.nbytes / steps
    print(f"{len(buffer)} episodes, mean length {steps / len(buffer):.1f}: {each:.0f} bytes per step")
    compare(buffer, source, rng)
    sys.exit(int(buffer.nbytes > 400 * MB * options.episodes / 5000 or each > 2200))


if __name__ == "__main__":
    main()
