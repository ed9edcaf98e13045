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

SAME = 1e-20
"""Less variance than this is rounding."""

INTERVALS = f"95 % interval over seeds: Student's t below {FEW_SEEDS}, else bootstrap"

ENTRIES_AT_ONCE = 4_000_000
"""Numbers of resampled scores in memory at a time."""

Scores = Sequence[np.ndarray]
Statistic = Callable[[Scores], np.ndarray]
Interval = tuple[np.ndarray, np.ndarray]
Estimate = tuple[float, Interval | None]


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
    if any(each.shape[-1] < 2 for each in scores):
        return None
    from scipy.stats import bootstrap

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where there is no gap
        found = bootstrap(
            scores, lambda *each, axis: statistic(each), vectorized=True, axis=-1, method="percentile",
            n_resamples=RESAMPLES, confidence_level=LEVEL, random_state=np.random.default_rng(0),
            batch=max(1, ENTRIES_AT_ONCE // sum(each.size for each in scores)),
        )  # fmt: skip
    low, high = found.confidence_interval
    return np.asarray(low), np.asarray(high)


def estimate(scores: Scores) -> Estimate:
    """Return the mean over maps of the means over seeds, and its 95 % interval; None if a map has a single seed.

    Scores: [seeds] for each map. Student's t with fewer than `FEW_SEEDS` seeds on a map, else the bootstrap.
    """
    few = min(map(len, scores)) < FEW_SEEDS
    return float(mean(scores)), t_interval(scores) if few else interval(mean, scores)


def t_interval(scores: Scores, others: Scores = ()) -> Interval | None:
    """Return Student's interval of `mean`, or with `others` of how much higher it is than theirs.

    Welch and Satterthwaite's degrees of freedom; scores: [seeds] for each map. None where all seeds are equal: so few
    do not show how much others would differ.
    """
    if any(len(each) < 2 for each in (*scores, *others)):
        return None
    from scipy.stats import t

    middle = mean(scores) - (mean(others) if others else 0.0)
    parts = [(np.var(each, ddof=1) / len(each) / len(of) ** 2, len(each) - 1) for of in (scores, others) for each in of]
    variance = sum(part for part, _ in parts)
    if variance < SAME:
        return None
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    half = t.ppf((1 + LEVEL) / 2, freedom) * np.sqrt(variance)
    return np.asarray(middle - half), np.asarray(middle + half)


def lead(own: Scores, others: Scores, paired: bool = False, statistic: Statistic = mean) -> Estimate:
    """Return how much higher a statistic of the first scores is, and its 95 % interval.

    Args:
        own, others: [seeds] for each map. paired: each two have the same seed; means are compared by their differences.
        statistic: with at least `FEW_SEEDS` seeds on each map, else `mean` with Student's t.
    """
    if paired:
        return estimate([mine - theirs for mine, theirs in zip(own, others, strict=True)])

    def between(scores: Scores) -> np.ndarray:
        return statistic(scores[: len(own)]) - statistic(scores[len(own) :])

    both = [*own, *others]
    if min(map(len, both)) < FEW_SEEDS:
        return float(mean(own) - mean(others)), t_interval(own, others)
    return float(between(both)), interval(between, both)


def wins(own: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the probability [...] that a run of the first is better than one of the others. Both: [..., seeds].

    P(X > Y) + P(X = Y) / 2: Mann and Whitney's U over the number of pairs.
    """
    own, others = own[..., :, None], others[..., None, :]
    return np.mean((own > others) + 0.5 * (own == others), axis=(-2, -1))


def improvement(own: np.ndarray, others: np.ndarray) -> Estimate:
    """Return `wins` and its 95 % interval. Both: scores, [seeds]."""
    return float(wins(own, others)), interval(lambda both: wins(*both), [own, others])
