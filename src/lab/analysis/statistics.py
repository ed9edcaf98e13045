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
    return _bootstrap(lambda *samples: statistic(samples), scores)


def improvement(scores: Scores, others: Scores) -> tuple[float, Interval | None]:
    """Return the probability that a run of the first is better than one of the others on the same map.

    The mean over maps of P(X > Y) + P(X = Y) / 2 (Mann and Whitney's U over the number of pairs), and its interval.

    Args:
        scores, others: arrays [seeds], a list with the same maps.
    """

    def share(*samples: np.ndarray) -> np.ndarray:
        pairs = zip(samples[: len(scores)], samples[len(scores) :], strict=True)
        return np.mean([_better(one[..., :, None], other[..., None, :]) for one, other in pairs], axis=0)

    return float(share(*scores, *others)), _bootstrap(share, [*scores, *others])


def _better(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.mean((one > other) + 0.5 * (one == other), axis=(-2, -1))


def difference(scores: Scores, others: Scores, statistic: Statistic = mean) -> tuple[float, Interval | None]:
    """Return how much higher a statistic of the first is than that of the others, and its interval.

    Args:
        scores, others: arrays [seeds], a list with the same maps. The two are resampled independently.
    """

    def between(*samples: np.ndarray) -> np.ndarray:
        return statistic(samples[: len(scores)]) - statistic(samples[len(scores) :])

    return float(between(*scores, *others)), _bootstrap(between, [*scores, *others])


def _bootstrap(statistic: Callable[..., np.ndarray], samples: Scores) -> Interval | None:
    """Return the percentile interval of a statistic of independent samples, each [..., seeds]."""
    if any(each.shape[-1] < 2 for each in samples):
        return None
    from scipy.stats import bootstrap

    points, entries = len(samples[0]) if samples[0].ndim > 1 else 0, sum(each.size for each in samples)
    if points > 1 and entries * RESAMPLES > ENTRIES_AT_ONCE:
        half = points // 2
        parts = [_bootstrap(statistic, [each[i] for each in samples]) for i in (slice(half), slice(half, None))]
        lows, highs = zip(*filter(None, parts), strict=True)
        return np.concatenate(lows), np.concatenate(highs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where there is no gap
        found = bootstrap(
            samples, lambda *each, axis: statistic(*each), vectorized=True, axis=-1, method="percentile",
            n_resamples=RESAMPLES, confidence_level=LEVEL, random_state=np.random.default_rng(0),
            batch=max(1, ENTRIES_AT_ONCE // entries),  # with several samples, it also changes what is drawn
        )  # fmt: skip
    low, high = found.confidence_interval
    return np.asarray(low), np.asarray(high)
