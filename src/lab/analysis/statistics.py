"""Statistics over seeds and maps, as in rliable.

Source: Agarwal et al. 2021, Deep Reinforcement Learning at the Edge of the Statistical Precipice.

Scores are a list with an array for each map, [..., seeds]; the number of seeds may differ. Leading dimensions, such as
points of time, are resampled together. Results are the same in each call: the random numbers are seeded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
FEW_SEEDS = 5
FEW = f"intervals over fewer than {FEW_SEEDS} seeds are much too narrow (one arm, 3 seeds: 75 % in place of 95 %)"
"""What a reader must know of intervals over few seeds: docs/plots.md."""

ENTRIES_AT_ONCE = 4_000_000
"""Numbers of resampled scores in memory at a time."""

Scores = Sequence[np.ndarray]
Statistic = Callable[[Scores], np.ndarray]
Interval = tuple[np.ndarray, np.ndarray]


def mean(scores: Scores) -> np.ndarray:
    """Return the mean over maps of the means over seeds, [...]."""
    return np.mean([np.mean(each, axis=-1) for each in scores], axis=0)


def iqm(scores: Scores) -> np.ndarray:
    """Return the interquartile mean over all seeds of all maps, [...]: without the lowest and highest quarter."""
    from scipy.stats import trim_mean

    return np.asarray(trim_mean(np.concatenate(scores, axis=-1), 0.25, axis=-1))


AGGREGATES: dict[str, Statistic] = {"mean": mean, "iqm": iqm}


def interval(statistic: Statistic, scores: Scores) -> Interval | None:
    """Return the ends of the 95 % interval of a statistic, each [...]; None if a map has a single seed.

    The percentile bootstrap, stratified: seeds are drawn with replacement within each map.
    """
    return bootstrap_interval(lambda *samples: statistic(samples), scores)


def bootstrap_interval(statistic: Callable[..., np.ndarray], samples: Scores) -> Interval | None:
    """Return the percentile interval of a statistic of independent samples, each [..., seeds]."""
    if any(each.shape[-1] < 2 for each in samples):
        return None
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where there is no gap
        found = bootstrap(
            samples, lambda *each, axis: statistic(*each), vectorized=True, axis=-1, method="percentile",
            n_resamples=RESAMPLES, confidence_level=LEVEL, random_state=np.random.default_rng(0),
            batch=max(1, ENTRIES_AT_ONCE // sum(each.size for each in samples)),
        )  # fmt: skip
    low, high = found.confidence_interval
    return np.asarray(low), np.asarray(high)
