"""What a plot of many runs shows: test results on a common axis, grouped, per map and over all maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from omagd.lab.analysis.groups import Group, differences, repeated
from omagd.lab.analysis.runs import Run
from omagd.lab.analysis.statistics import AGGREGATES, Interval, interval
from omagd.utils.errors import UserError, nearest

NAMES = {"win_rate": "test_battle_won_mean", "return": "test_return_mean"}
LABELS = {"test_battle_won_mean": "win rate", "test_return_mean": "return", "test_ep_length_mean": "episode length"}
STATISTIC = {"mean": "mean", "iqm": "IQM"}
MOST_POINTS = 400
"""Of a line that is interpolated."""

ALIGNED = 0.5
"""Tests of two runs are one point if their times differ by at most this share of the interval between tests."""


@dataclass(frozen=True)
class Line:
    """One group in a panel.

    Attributes:
        x, y: points [k]; x in steps or seconds. band: ends of their intervals, each [k], if all maps have two seeds.
        seeds: number of runs on each map, smallest and largest. rest: points (x, y) that only some seeds reached.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    band: Interval | None
    seeds: tuple[int, int]
    rest: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def times(self) -> list[np.ndarray]:
        """All x: of the line, and of `rest`."""
        return [self.x] if self.rest is None else [self.x, self.rest[0]]


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        statistic: `mean` or `iqm` of its points. normalised: scores are shares of each map's range. held_out: of maps
            in a set that are not trained on.
    """

    title: str
    lines: tuple[Line, ...]
    statistic: str
    normalised: bool = False
    held_out: bool = False


@dataclass(frozen=True)
class View:
    """The tests that a panel shows: of a place, or of some maps of the set that is played there."""

    title: str
    place: str
    metric: str
    held_out: bool = False

    def runs(self, group: Group) -> list[Run]:
        """Return the runs of a group that have these tests."""
        return [run for run in group.at(self.place) if len(run.test_curve(self.metric)[0])]


def metric_name(name: str | None, runs: Sequence[Run]) -> str:
    """Return the name of a metric in the tests of runs: of the win rate, or the return, if none is given.

    Errors: UserError where no run has it.
    """
    known = dict.fromkeys(key for run in runs for test in run.tests for key in test if key.startswith("test"))
    if not known:
        raise UserError("plot: the runs have no test yet. Wait for the first, or give other runs")
    given = [name] if name else list(NAMES)
    for each in given:
        for full in (each, NAMES.get(each, each), f"test_{each}", f"test_{each}_mean"):
            if full in known:
                return full
    raise UserError(f"--metric {name}: no run has it.{nearest(str(name), known)} Known: {', '.join(known)}")


def usable(runs: Sequence[Run], metric: str) -> tuple[list[Run], list[str]]:
    """Return the runs to plot, and a line on each kind of runs that is left out."""
    notes = []
    kept = [run for run in runs if run.kind == "training"]
    if len(kept) < len(runs):
        notes.append(f"{_count(len(runs) - len(kept), 'evaluation')} left out: they have no curve")
    tested = [run for run in kept if len(run.test_curve(metric)[0])]
    if len(tested) < len(kept):
        names = ", ".join(run.label for run in kept if run not in tested)
        notes.append(f"{_count(len(kept) - len(tested), 'run')} without {metric} left out: {names}")
    if not tested:
        raise UserError(f"plot: no training among the runs has {metric}. Give other runs or another --metric")
    return tested, notes


def without_repeats(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """Return the groups with each seed once on a map, the run with most steps, and a line on the others."""
    found, notes = [], []
    for group in groups:
        best: dict[tuple[str, int | None, str], Run] = {}
        again = {run.folder for run in repeated(group.runs)}
        for run in group.runs:
            key = (run.place, run.seed, str(run.folder) if run.seed is None else "")
            if key not in best or _last_step(run) > _last_step(best[key]):
                best[key] = run
        kept = tuple(run for run in group.runs if run in best.values())
        if out := [run.label for run in group.runs if run.folder in again and run not in kept]:
            notes.append(f"{group.label}: the same map and seed again, left out: {', '.join(out)}")
        found.append(replace(group, runs=kept))
    return found, notes


def _last_step(run: Run) -> float:
    return run.tests[-1]["t_env"] if run.tests else 0.0


def incomparable(groups: Sequence[Group]) -> tuple[set[str], list[str]]:
    """Return the labels of groups whose card differs from the first group's on a map, and a line for each."""
    marked, notes = set(), []
    for place in places(groups):
        there = [(group.label, run) for group in groups for run in group.at(place)]
        for label, run in there[1:]:
            text = differences(run.card or None, there[0][1].card or None)
            if text and label not in marked:
                marked.add(label)
                notes.append(f"* {label} is not comparable with {there[0][0]} on {place}: {text}")
    return marked, notes


def places(groups: Sequence[Group]) -> list[str]:
    """Return environment and map of all runs."""
    return list(dict.fromkeys(run.place for group in groups for run in group.runs))


def views(groups: Sequence[Group], metric: str) -> list[View]:
    """Return what to show of each place; after a set of maps its held-out maps together, then each map of the set."""
    found, at = [], places(groups)
    short = metric.removeprefix("test_")
    for place in at:
        found.append(View(place, place, metric))
        maps: dict[str, bool] = {}
        for run in (run for group in groups for run in group.at(place)):
            maps |= run.maps
        parts = [View("held-out maps", place, f"test_held_out_{short}", True)]
        for name, out in maps.items():
            parts.append(View(f"{name} (held out)" if out else name, place, f"test/{name}/{short}", out))
        for part in parts if maps else []:
            if any(part.runs(group) for group in groups):
                found.append(replace(part, title=f"{place}: {part.title}") if len(at) > 1 else part)
    return found


def curve_panels(
    groups: Sequence[Group], metric: str, axis: str, statistic: str | None, total: bool = True
) -> list[Panel]:
    """Return a panel for each of the `views`, and with `total` one over the places where all groups have played.

    Args:
        axis: `steps`, `wall` or `cpu`. statistic: `mean` or `iqm`; None: the mean on a map and the IQM over maps.
    """
    panels = []
    for view in views(groups, metric):
        lines = [_line(group, [view.runs(group)], view.metric, axis, statistic or "mean", None) for group in groups]
        drawn = tuple(line for line in lines if line is not None)
        panels.append(Panel(view.title, drawn, statistic or "mean", held_out=view.held_out))
    common = [place for place in places(groups) if all(group.at(place) for group in groups)]
    if total and len(common) > 1:
        scale = ranges(groups, metric)
        lines = [
            _line(group, [group.at(place) for place in common], metric, axis, statistic or "iqm", scale)
            for group in groups
        ]
        title = f"all {len(common)} maps"
        panels.append(Panel(title, tuple(filter(None, lines)), statistic or "iqm", scale is not None))
    return panels


def ranges(groups: Sequence[Group], metric: str) -> dict[str, tuple[float, float]] | None:
    """Return lowest and highest value of any test on each map; None if all are shares from 0 to 1."""
    found = {}
    for place in places(groups):
        values = np.concatenate([run.test_curve(metric)[2] for group in groups for run in group.at(place)])
        found[place] = (float(values.min()), float(values.max()))
    return None if all(0 <= low <= high <= 1 for low, high in found.values()) else found


def _line(
    group: Group, parts: Sequence[Sequence[Run]], metric: str, axis: str, statistic: str,
    scale: Mapping[str, tuple[float, float]] | None,
) -> Line | None:  # fmt: skip
    """Return the curve of a group over one map or several, `parts`; None if it has no run there."""
    runs = [run for part in parts for run in part]
    if not runs:
        return None
    curves = []
    for run in runs:
        steps, seconds, values = run.test_curve(metric, "wall" if axis == "steps" else axis)
        if axis != "steps" and np.isnan(seconds).any():
            raise UserError(f"--x={axis}: tests of {run.label} have no {axis}_seconds. Use --x=steps")
        if scale is not None:
            low, high = scale[run.place]
            values = (values - low) / (high - low or 1.0)
        curves.append((steps if axis == "steps" else seconds, values))
    x, table = _on_one_axis(curves)
    sizes = [len(part) for part in parts]
    columns = np.split(table, np.cumsum(sizes)[:-1], axis=1)
    whole = ~np.isnan(table).any(axis=1)
    scores = [column[whole] for column in columns]
    function = AGGREGATES[statistic]
    some = ~whole & np.array([all(~np.isnan(row).all() for row in rows) for rows in zip(*columns, strict=True)])
    rest = None
    if len(parts) == 1 and some.any():
        first = whole.nonzero()[0][-1:]  # the dotted part begins where the line ends
        index = np.concatenate([first, some.nonzero()[0]])
        rest = x[index], np.array([function([row[~np.isnan(row)]]) for row in table[index]])
    band = interval(function, scores) if whole.any() else None
    y = function(scores) if whole.any() else np.zeros(0)
    return Line(group.label, x[whole], y, band, (min(sizes), max(sizes)), rest)


def _on_one_axis(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return times [k] and the values of all runs there [k, runs], NaN where a run has none.

    The k-th tests of all runs are one point if their times hardly differ; otherwise values are interpolated linearly
    between the tests of each run.
    """
    longest = max(len(times) for times, _ in curves)
    padded = np.full((2, longest, len(curves)), np.nan)
    for i, (times, values) in enumerate(curves):
        padded[:, : len(times), i] = times, values
    times = padded[0]
    spread = np.nanmax(times, axis=1) - np.nanmin(times, axis=1)
    middle = np.nanmean(times, axis=1)
    gaps = np.diff(middle)
    if len(curves) == 1 or len(gaps) and (spread <= ALIGNED * np.median(gaps)).all() and (gaps > 0).all():
        return middle, padded[1]
    if longest == 1 and np.isfinite(middle).all():
        return middle, padded[1]
    begin = max(np.nanmin(each) for each, _ in curves)
    x = np.unique(times[times >= begin])
    x = x[np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).round().astype(int)]
    table = [np.interp(x, each, values, right=np.nan) for each, values in curves]
    return x, np.array(table).T


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
