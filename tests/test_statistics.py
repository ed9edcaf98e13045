"""Statistics over seeds and maps: against rliable, and against cases computed by hand."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from omagd.lab.analysis.statistics import interval, iqm, lead, mean, t_interval

REPS = 2000


@pytest.fixture(scope="module")
def rliable():
    """Return rliable's (library, metrics); arch 7, which it imports, calls a decorator as pandas 2 had it."""
    from pandas.util import _decorators

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_decorators, "deprecate_kwarg", lambda *_, **__: lambda function: function)
        return importlib.import_module("rliable.library"), importlib.import_module("rliable.metrics")


def random_scores(seeds=5, tasks=4, seed=0):
    """Return scores [seeds, tasks] in rliable's layout: two groups of unequal quality per task, with ties."""
    return np.random.default_rng(seed).beta(2, 1 + seed, (seeds, tasks)).round(2)


def columns(scores):
    return list(scores.T)


def test_intervals_are_those_of_rliable(rliable):
    """Both are estimates from random resamples: equal within their own error."""
    library, metrics = rliable
    scores = random_scores(8)
    np.random.seed(0)
    for name, mine in (("aggregate_iqm", iqm), ("aggregate_mean", mean)):
        theirs = getattr(metrics, name)
        assert mine(columns(scores)) == pytest.approx(theirs(scores))
        _, wanted = library.get_interval_estimates({"x": scores}, lambda s, f=theirs: np.array([f(s)]), reps=REPS)
        assert np.array(interval(mine, columns(scores))) == pytest.approx(wanted["x"][:, 0], abs=0.012)


def test_small_cases_by_hand():
    assert iqm([np.array([0.0, 1.0, 3.0, 100.0])]) == 2.0, "the lowest and the highest quarter are left out"
    assert mean([np.array([1.0, 3.0]), np.array([10.0])]) == 6.0, "each map counts once, whatever its seeds"
    two = interval(mean, [np.array([1.0, 3.0])])
    assert two is not None and tuple(map(float, two)) == (1.0, 3.0), "of two seeds the interval is their range"


def test_intervals_of_few_seeds_and_of_differences_are_those_of_scipy():
    one, other = np.array([0.1, 0.4, 0.5]), np.array([0.3, 0.9, 0.7, 0.6])
    gap, ends = lead([one], [other], statistic=iqm)  # of few seeds it is the mean
    welch = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert (gap, *map(float, ends)) == pytest.approx((one.mean() - other.mean(), *welch))
    gap, ends = lead([one], [other[:3]], paired=True)
    assert tuple(map(float, ends)) == pytest.approx(tuple(stats.ttest_rel(one, other[:3]).confidence_interval(0.95)))
    assert t_interval([one[:1]]) is None and lead([one], [one - 0.1], paired=True)[1] is None, "no spread, no interval"
    many = np.random.default_rng(2).normal(size=(2, 9))
    wanted = stats.bootstrap((many[0] - many[1],), np.mean, method="percentile", n_resamples=20_000).confidence_interval
    assert tuple(map(float, lead(many[:1], many[1:], paired=True)[1])) == pytest.approx(tuple(wanted), abs=0.08)


def test_points_of_time_are_resampled_together_and_equal_single_calls():
    curve = np.random.default_rng(3).random((7, 4))
    low, high = interval(mean, [curve])
    assert low.shape == (7,) and (low < curve.mean(1)).all() and (curve.mean(1) < high).all()
    alone = interval(mean, [curve[2]])
    assert (low[2], high[2]) == pytest.approx((float(alone[0]), float(alone[1])))


def test_one_seed_has_no_interval_and_every_call_gives_the_same():
    assert interval(iqm, [np.array([0.5]), np.array([0.1, 0.2])]) is None
    scores = columns(random_scores())
    first, second = interval(iqm, scores), interval(iqm, scores)
    assert first == second


def test_intervals_hold_the_true_mean_as_often_as_the_documentation_says():
    """As docs/plots.md says of five seeds on one map: the percentile bootstrap is too narrow with few seeds."""
    draws = np.random.default_rng(5).normal(size=(1000, 5))
    low, high = interval(mean, [draws])
    page = (Path(__file__).parents[1] / "docs" / "plots.md").read_text(encoding="utf-8")
    said = page.partition("3, 5 and 10 on one map ")[2].partition(", ")[2].split()[0]
    assert np.mean((low <= 0) & (high >= 0)) == pytest.approx(float(said) / 100, abs=0.035)
