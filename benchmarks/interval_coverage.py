"""How often 95 % bootstrap intervals over seeds hold the true value, and how often a look at more seeds finds too much.

Normal scores. The intervals are those of `omagd compare`, of `omagd report` and of the study of reconstruction:
percentiles of resampled means or interquartile means (IQM).

    python benchmarks/interval_coverage.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np

from omagd.run.analysis.statistics import AGGREGATES, RESAMPLES

AT_ONCE = 100
Average = Callable[[np.ndarray], np.ndarray]


def intervals(average: Average, samples: list[np.ndarray], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the interval of an average, of two samples that of its difference, [trials].

    samples: one or two arrays [trials, seeds], resampled apart.
    """
    lows, highs = [], []
    for first in range(0, len(samples[0]), AT_ONCE):
        drawn = []
        for sample in samples:
            part = sample[first : first + AT_ONCE]
            chosen = rng.integers(part.shape[1], size=(len(part), RESAMPLES, part.shape[1]))
            drawn.append(average(np.take_along_axis(part[:, None], chosen, axis=2)))
        low, high = np.percentile(drawn[0] - (drawn[1] if len(drawn) > 1 else 0), [2.5, 97.5], axis=1)
        lows.append(low)
        highs.append(high)
    return np.concatenate(lows), np.concatenate(highs)


def coverage(trials: int, rng: np.random.Generator) -> Iterator[str]:
    """Yield a line for each statistic and number of seeds: how often the interval holds the true value."""
    for name, aggregate in AGGREGATES.items():
        for seeds in (3, 5, 10):
            shares = []
            for arms in (1, 2):
                scores = [rng.normal(size=(trials, seeds)) for _ in range(arms)]
                low, high = intervals(lambda values, of=aggregate: of([values]), scores, rng)
                shares.append(np.mean((low <= 0) & (high >= 0)))
            yield f"{name:<5} {seeds:>2} seeds   of one arm {shares[0]:.1%}   of a difference {shares[1]:.1%}"


def second_look(trials: int, rng: np.random.Generator) -> str:
    """Return how often a difference that is not there is found above 0: by five seeds, by ten, by either."""
    scores = [rng.normal(size=(trials, 10)) for _ in range(2)]
    found = []
    for seeds in (5, 10):
        low, _ = intervals(lambda values: AGGREGATES["iqm"]([values]), [each[:, :seeds] for each in scores], rng)
        found.append(low > 0)
    shares = {"five seeds": found[0], "ten": found[1], "either": found[0] | found[1]}
    words = (f"{name} {each.mean():.1%}" for name, each in shares.items())
    return f"found above 0 although equal, IQM: {', '.join(words)}"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000, help="simulated comparisons for each line (4000)")
    trials, rng = parser.parse_args().trials, np.random.default_rng(1)
    for line in coverage(trials, rng):
        print(line, flush=True)
    print(second_look(trials, rng))


if __name__ == "__main__":
    main()
