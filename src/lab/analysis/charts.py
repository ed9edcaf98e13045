"""Charts of a report: where their lines, bands, ticks and bars lie; the template `report.html` draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omagd.lab.analysis.curves import Panel as CurvePanel
from omagd.run.reporting.plots import CLOCK_LABELS
from omagd.run.reporting.plots import Panel as RunPanel
from omagd.utils.storage import is_number

WIDTH, HEIGHT = 400, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 40
"""Units of the picture's view box."""

COLOURS, DASHES = 7, 3
"""Classes of lines in the template: c0 to c6, d0 to d2."""

MOST_POINTS = 400
"""Of one line in a picture; of longer ones every k-th point is drawn, and the last."""


@dataclass(frozen=True)
class Drawn:
    """One line. path: `x,y` pairs. rest: the dotted part that not all seeds reached. band: outline of its interval."""

    label: str
    style: str
    path: str
    dots: list[tuple[float, float]]
    rest: str = ""
    band: str = ""


@dataclass(frozen=True)
class Chart:
    """One diagram. ticks: positions and texts. table: the last value of each line, for readers without pictures."""

    title: str
    x_label: str
    y_label: str
    lines: list[Drawn]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    last: list[tuple[str, str]] = field(default_factory=list)
    note: str = ""

    @property
    def described(self) -> str:
        """What the picture shows, in words."""
        ends = ", ".join(f"{label} {value}" for label, value in self.last)
        return f"{self.title}: {self.y_label} over {self.x_label}; last values: {ends}"


@dataclass(frozen=True)
class Series:
    """Values of one line, each [k]; band: ends of its interval, each [k]."""

    label: str
    x: np.ndarray
    y: np.ndarray
    style: str = ""
    band: tuple[np.ndarray, np.ndarray] | None = None
    rest: tuple[np.ndarray, np.ndarray] | None = None


def style_of(number: int) -> str:
    """Return the classes of the line with this number."""
    return f"c{number % COLOURS} d{number // COLOURS % DASHES}"


def dashed(style: str) -> str:
    """Return the classes of a line of held-out maps: dashed, unless dashes already tell many lines apart."""
    return style.replace("d0", "d1")


def run_chart(panel: RunPanel, records: Iterable[Mapping[str, Any]]) -> Chart | None:
    """Return the chart of a panel of one run's metrics, None if the run has no value of it."""
    mine = [record for record in records if record.get("stage") == panel.stage]
    clock = "epoch" if any("epoch" in record for record in mine) else "t_env"
    series: list[Series] = []
    for name, label in panel.lines:
        rows = [(r[clock], r[name]) for r in mine if is_number(r.get(clock)) and is_number(r.get(name))]
        if rows:
            x, y = np.array(rows, float).T
            quiet = label == "training" and len(panel.lines) > 1
            style = "quiet" if quiet else style_of(len(series))
            if label in panel.dashed:
                label, style = label if "held-out" in label else f"{label} (held out)", dashed(style)
            series.append(Series(label, x, y, style))
    if not series:
        return None
    times = [float(record[clock]) for record in mine if is_number(record.get(clock))]
    return chart(panel.title, CLOCK_LABELS[clock], panel.unit, series, panel.top, panel.log, reach=max(times))


def curve_chart(panel: CurvePanel, y_label: str, styles: Mapping[str, str], top: float | None) -> Chart | None:
    """Return the chart of test results of groups of runs, None if there is no point. styles: by the group's label."""
    if panel.held_out and len(styles) <= COLOURS:
        styles = {label: dashed(style) for label, style in styles.items()}
    series = [Series(line.label, line.x, line.y, styles[line.label], line.band, line.rest) for line in panel.lines]
    series = [each for each in series if len(each.x) or each.rest is not None]
    note = "share of each map's range" if panel.normalised else ""
    return chart(panel.title, "environment steps", y_label, series, top, note=note) if series else None


def chart(
    title: str, x_label: str, y_label: str, series: Sequence[Series], top: float | None = None, log: bool = False,
    note: str = "", reach: float = 0.0,
) -> Chart:  # fmt: skip
    """Return a chart.

    Args:
        top: upper end of the y axis from 0, if fixed. log: logarithmic where all values are positive.
        reach: time that the x axis shows at least.
    """
    xs = np.concatenate([np.concatenate([each.x, each.rest[0]]) if each.rest else each.x for each in series])
    parts = [part for each in series for part in (each.y, *(each.band or ()), *((each.rest[1],) if each.rest else ()))]
    ys = np.concatenate(parts)
    log = log and bool(ys.min() > 0 and ys.max() / ys.min() > 20)
    x_low, x_high = _widened(min(0.0, float(xs.min())), max(reach, float(xs.max())))
    if top is not None:
        y_low, y_high = 0.0, top
    elif log:
        y_low, y_high = _widened(math.log10(ys.min()), math.log10(ys.max()))
    else:
        y_low, y_high = _widened(min(0.0, float(ys.min())), max(0.0, 1.04 * float(ys.max())))

    def across(x: Any) -> Any:
        return LEFT + (np.asarray(x, float) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: Any) -> Any:
        y = np.log10(y) if log else np.asarray(y, float)
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    lines = [_drawn(each, across, down) for each in series]
    values = _powers(y_low, y_high) if log else _ticks(y_low, y_high, 5)
    x_ticks = [(float(across(x)), tick_text(x)) for x in _ticks(x_low, x_high, 4)]
    y_ticks = [(float(down(y)), tick_text(y)) for y in values]
    last = [(each.label, f"{each.y[-1]:.3g}") for each in series if len(each.y)]
    return Chart(title, x_label, y_label, lines, x_ticks, y_ticks, last, note)


def _drawn(each: Series, across: Any, down: Any) -> Drawn:
    step = max(1, -(-len(each.x) // MOST_POINTS))
    index = np.unique(np.append(np.arange(0, len(each.x), step), max(0, len(each.x) - 1)))[: len(each.x)]
    x, y = across(each.x[index]), down(each.y[index])
    dots = [(round(float(u), 1), round(float(v), 1)) for u, v in zip(x, y, strict=True)] if len(x) <= 25 else []
    band = ""
    if each.band is not None and len(x):
        low, high = (down(end[index]) for end in each.band)
        band = _path(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]]))
    rest = _path(across(each.rest[0]), down(each.rest[1])) if each.rest is not None else ""
    return Drawn(each.label, each.style, _path(x, y), dots, rest, band)


def _path(x: np.ndarray, y: np.ndarray) -> str:
    return " ".join(f"{u:.1f},{v:.1f}" for u, v in zip(x, y, strict=True))


def _widened(low: float, high: float) -> tuple[float, float]:
    """Return a range that is not empty."""
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, most: int) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(value) for value in found if low - slack <= value <= high + slack]


def _powers(low: float, high: float) -> list[float]:
    """Return powers of ten between two exponents, with some between them if they are few."""
    steps = (1.0,) if high - low > 2.5 else (1.0, 3.0)
    found = [step * 10.0**k for k in range(math.floor(low), math.ceil(high) + 1) for step in steps]
    return [value for value in found if low <= math.log10(value) <= high]


def tick_text(value: float) -> str:
    """Return a number as short text: 20k, 1.5M, 0.25."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{0.0 if abs(value) < 1e-12 else value:.3g}"
