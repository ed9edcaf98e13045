"""`omagd plot`: figures of many runs."""

from __future__ import annotations

import argparse
import io
import logging
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from omagd.lab.analysis import curves
from omagd.lab.analysis.curves import LABELS, STATISTIC, Panel
from omagd.lab.analysis.groups import Group, groups
from omagd.lab.analysis.runs import load, output_option, output_path, write_output
from omagd.lab.analysis.statistics import FEW, FEW_SEEDS
from omagd.utils.errors import UserError

LOG = logging.getLogger("omagd")
AXES = {"steps": "environment steps", "wall": "wall-clock", "cpu": "CPU"}
"""What is on the x axis, by the value of `--x`."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333", "#882255")
"""Okabe and Ito's palette without yellow, which is too light for lines on white."""

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
WIDTHS = (3.5, 7.16)
"""Inches of one and of two columns of a page."""

INK, FAINT, GRID = "#1c2733", "#5c6b7a", "#e3e8ee"
SIZE, SMALL = 8.0, 6.5
"""Points of labels and of notes."""

FEW_POINTS = 15
SETTINGS: Any = {
    "font.size": SIZE, "axes.titlesize": SIZE, "axes.labelsize": SIZE, "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL, "legend.fontsize": SMALL, "axes.linewidth": 0.6, "axes.edgecolor": "#9aa7b4",
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": FAINT, "ytick.color": FAINT, "svg.hashsalt": "omagd",
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.6, "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.03, "figure.constrained_layout.w_pad": 0.03,
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plot`."""
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="a run, a folder of runs, a study, or its results file")
    add("--metric", help="win_rate (default; else return), or any test metric of metrics.jsonl")
    add("--x", choices=tuple(AXES), default="steps", help="environment steps (default) or time")
    add("--stat", choices=tuple(STATISTIC), help="mean or interquartile mean; default: mean on a map, iqm over maps")
    add("--maps-only", action="store_true", help="no panel over all maps")
    output_option(parser, "both pictures, without ending", "curves_<metric>")


def main(options: argparse.Namespace) -> int:
    """Draw one figure and print the paths of its files."""
    if not options.runs:
        raise UserError("plot: name runs or a study, as in: omagd plot results/<study>")
    runs = load(options.runs, "plot")
    metric = curves.metric_name(options.metric, runs)
    kept, notes = curves.usable(runs, metric)
    found, more = curves.without_repeats(groups(kept))
    marked, incomparable = curves.incomparable(found)
    panels = curves.curve_panels(found, metric, options.x, options.stat, not options.maps_only)
    notes += [*more, *incomparable, *_short(panels), *_few(panels)]
    base = output_path(options.output, options.runs, f"curves_{re.sub(r'[^A-Za-z0-9.-]+', '_', _label(metric))}")
    base = base.with_suffix("") if base.suffix in (".png", ".svg") else base
    for form, content in drawing(panels, found, metric, marked, options.x).items():
        write_output(base.with_name(f"{base.name}.{form}"), content, "plot")
    for note in notes:
        LOG.warning("%s", note)
    return 0


def _label(metric: str) -> str:
    """Return a metric in words."""
    return LABELS.get(metric, metric.removeprefix("test_").removesuffix("_mean").replace("_", " "))


def _few(panels: Sequence[Panel]) -> list[str]:
    """Return a line if a band rests on few seeds."""
    bands = [line for panel in panels for line in panel.lines if line.band is not None]
    return [FEW] if any(line.seeds[0] < FEW_SEEDS for line in bands) else []


def _short(panels: Sequence[Panel]) -> list[str]:
    """Return a line if some runs have fewer tests than others of their group."""
    labels = dict.fromkeys(line.label for panel in panels for line in panel.lines if line.rest is not None)
    if not labels:
        return []
    return [f"runs of different length ({', '.join(labels)}): bands only where all seeds have data, dotted beyond"]


def drawing(
    panels: Sequence[Panel], found: Sequence[Group], metric: str, marked: set[str], clock: str = "steps"
) -> dict[str, bytes]:
    """Return the figure of panels as PNG (300 dots per inch) and SVG, one column of a page wide, with several two.

    marked: labels with an asterisk. clock: of the x axis, as for `--x`.
    """
    import matplotlib

    unit, labels = curves.ranges(found, metric) is None, tuple(group.label for group in found)
    x, seconds = AXES[clock], 0
    if clock != "steps":
        longest = max(part.max(initial=0) for panel in panels for line in panel.lines for part in line.times)
        name, seconds = ("hours", 3600) if longest >= 2 * 3600 else ("minutes", 60)
        x = f"{x} {name}"
    axes = Axes(x, _label(metric), labels, seconds, unit)
    with matplotlib.rc_context(SETTINGS):
        figure = _figure(panels, axes, caption(panels, found), WIDTHS[len(panels) > 1], marked)
        return {"png": picture(figure, "png", dpi=300), "svg": picture(figure, "svg", metadata={"Date": None})}


def caption(panels: Sequence[Panel], found: Sequence[Group]) -> str:
    """Return what a point of the figure is: the statistic, the number of seeds, the episodes of a test."""
    lines = [line for panel in panels for line in panel.lines]
    kinds = list(dict.fromkeys(STATISTIC[panel.statistic] for panel in panels))
    what = kinds[0] if len(kinds) == 1 else f"{kinds[0]} on a map, {kinds[1]} over maps"
    low, high = min(line.seeds[0] for line in lines), max(line.seeds[1] for line in lines)
    seeds = f"{low} to {high} seeds" if low < high else f"{high} seed{'s' * (high != 1)}"
    several = len(panels) > 1 and len(curves.places(found)) > 1
    episodes = sorted({run.test_episodes for group in found for run in group.runs if run.test_episodes})
    of_set = any(run.maps for group in found for run in group.runs)
    parts = {
        f"{what[0].upper()}{what[1:]}, {seeds}{' per map' if several else ''}": True,
        "band: 95 % stratified bootstrap interval over seeds": any(line.band is not None for line in lines),
        f"tests of {' or '.join(map(str, episodes))} episodes": bool(episodes),
        "over maps: shares of each map's range": any(panel.normalised for panel in panels),
        "dotted: not all seeds": any(line.rest is not None for line in lines),
        "a set of maps: mean over its training maps": of_set,
        "dashed: maps that are not trained on": any(panel.held_out for panel in panels),
    }
    return "; ".join(part for part, holds in parts.items() if holds) + "."


@dataclass(frozen=True)
class Axes:
    """What the axes of all panels show.

    Attributes:
        x, y: labels. groups: labels of all groups: a group has one colour in all figures. seconds: of a unit of
            the x axis, 0 if it is not time. unit: values are shares from 0 to 1.
    """

    x: str
    y: str
    groups: tuple[str, ...]
    seconds: int = 0
    unit: bool = False


def picture(figure: Any, form: str, **more: Any) -> bytes:
    """Return a figure as the content of a file. form: `png` or `svg`."""
    content = io.BytesIO()
    figure.savefig(content, format=form, facecolor="white", **more)
    return content.getvalue()


def _figure(panels: Sequence[Panel], axes: Axes, caption: str, width: float, marked: set[str]) -> Any:
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    order = ((colour, dash) for dash, colour in product(DASHES * 9, COLOURS))  # first all colours with solid lines
    styles = {label: style for label, style in zip(axes.groups, order, strict=False) if label in labels}
    most = 1 if width < 5 else 3 if len(panels) in (5, 6) else 4
    columns = min(most, len(panels))
    rows = -(-len(panels) // columns)
    high = min(2.3, 0.72 * width / columns + 0.15)
    # Bold letters are about .56 of their size wide; labels of groups and axes take a quarter of a column.
    letters = int(0.75 * width / columns * 72 / (0.56 * SIZE))
    titles = [textwrap.wrap(panel.title, letters, break_long_words=False) for panel in panels]
    high += 1.2 * SIZE / 72 * (max(map(len, titles)) - 1)
    figure = Figure(figsize=(width, rows * high + 0.35), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=axes.unit).ravel()
    for axis, panel, title in zip(grid, panels, titles, strict=False):
        _draw_lines(axis, panel, styles, axes)
        axis.set_title("\n".join(title))
    for i, axis in enumerate(grid):
        if i >= len(panels):
            axis.set_visible(False)
        elif i % columns == 0:
            axis.set_ylabel(axes.y)
        if i + columns < len(panels):
            axis.set_xlabel("")  # the panel below has it
    names = {label: f"{label}*" if label in marked else label for label in styles}
    lines = textwrap.wrap(caption, int(width * 72 / (0.56 * SMALL)))
    figure.supxlabel("\n".join(lines), fontsize=SMALL, color=FAINT, x=0.01, ha="left")
    if len(labels) > 1:
        _legend(figure, names, styles)
    return figure


def _draw_lines(axis: Any, panel: Panel, styles: dict[str, tuple[str, Any]], axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for line in panel.lines:
        colour, dash = styles[line.label]
        x, *rest_x = (part / (axes.seconds or 1) for part in line.times)
        if panel.held_out and len(styles) <= len(COLOURS):  # with more groups dashes tell these apart
            dash = DASHES[1]
        marker = "o" if len(x) <= FEW_POINTS else ""
        (drawn,) = axis.plot(x, line.y, color=colour, ls=dash, lw=1.2, marker=marker, ms=2.2)
        if line.band is not None:
            axis.fill_between(x, *line.band, color=colour, alpha=0.16, lw=0)
        if line.rest is not None:
            axis.plot(*rest_x, line.rest[1], color=colour, ls=(0, (1, 2)), lw=0.9)
        drawn.set_zorder(3)
    if axes.unit or panel.normalised:
        axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel(axes.x, color=FAINT, fontsize=SMALL + 0.5)
    axis.tick_params(length=2, width=0.5)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.xaxis.set_major_formatter("{x:g}" if axes.seconds else EngFormatter(sep=""))


def _legend(figure: Any, names: dict[str, str], styles: dict[str, tuple[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, ls=dash, lw=1.4) for colour, dash in styles.values()]
    longest = max(map(len, names.values()))
    fits = max(1, int(figure.get_size_inches()[0] * 72 / (0.55 * SMALL * longest + 34)))
    columns = min(len(names), fits, 6)
    figure.set_figheight(figure.get_figheight() + 1.35 * SMALL / 72 * -(-len(names) // columns))
    figure.legend(
        handles, list(names.values()), loc="outside upper left", ncols=columns,
        handlelength=2.4, columnspacing=1.2, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip
