"""Figures of many runs at print size, with colours that colour-blind readers can tell apart."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from omagd.lab.analysis.curves import Line, Panel

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333", "#882255")
"""Okabe and Ito's palette without yellow, which is too light for lines on white."""

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
MARKERS = "os^D"
WIDTHS = {"single": 3.5, "double": 7.16}
"""Inches of one and of two columns of a page."""

INK, FAINT, GRID = "#1c2733", "#5c6b7a", "#e3e8ee"
SIZE, SMALL = 8.0, 6.5
"""Points of labels and of notes."""

FEW_POINTS = 15
SETTINGS: Any = {
    "font.size": SIZE, "axes.titlesize": SIZE, "axes.labelsize": SIZE, "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL, "legend.fontsize": SMALL, "axes.linewidth": 0.6, "axes.edgecolor": "#9aa7b4",
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": FAINT, "ytick.color": FAINT, "svg.hashsalt": "omagd",
    "figure.constrained_layout.h_pad": 0.03, "figure.constrained_layout.w_pad": 0.03,
}  # fmt: skip


@dataclass(frozen=True)
class Axes:
    """What the axes of all panels show.

    Attributes:
        kind: curves, final, profile, improvement or gap. x, y: labels. seconds: the x axis is time. unit: values
            are shares from 0 to 1. groups: labels of all groups: a group has one colour in all figures. gap: labels of
            two groups; in `final` the ground from the first one's value up to the second one's is shaded. columns: of
            panels, at most; 0: as many as fit.
    """

    kind: str
    x: str
    y: str
    groups: tuple[str, ...]
    seconds: bool = False
    unit: bool = False
    gap: tuple[str, str] | None = None
    columns: int = 0


def render(panels: Sequence[Panel], axes: Axes, caption: str, width: str, marked: set[str]) -> dict[str, bytes]:
    """Return a figure as PNG (300 dots per inch) and SVG.

    Args:
        caption: what a point and its band are. width: `single` or `double` column. marked: labels with an asterisk.
    """
    with _settings():
        figure = _figure(panels, axes, caption, WIDTHS[width], marked)
        found = {}
        for form, more in (("png", {"dpi": 300}), ("svg", {"metadata": {"Date": None}})):
            picture = io.BytesIO()
            figure.savefig(picture, format=form, facecolor="white", **more)
            found[form] = picture.getvalue()
    return found


@contextmanager
def _settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        yield


def _figure(panels: Sequence[Panel], axes: Axes, caption: str, width: float, marked: set[str]) -> Any:
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    styles = {label: style for label, style in zip(axes.groups, _styles(), strict=False) if label in labels}
    most = 1 if width < 5 else 3 if len(panels) in (5, 6) else 4
    columns = min(axes.columns or most, len(panels))
    rows = -(-len(panels) // columns)
    of_groups = axes.kind in ("final", "improvement", "gap")
    high = 0.5 + 0.17 * max(len(panel.lines) for panel in panels) if of_groups else _height(width / columns)
    # Bold letters are about .56 of their size wide; labels of groups and axes take a quarter of a column.
    letters = int(0.75 * width / columns * 72 / (0.56 * SIZE))
    titles = [textwrap.wrap(panel.title, letters, break_long_words=False) for panel in panels]
    high += 1.2 * SIZE / 72 * (max(map(len, titles)) - 1)
    figure = Figure(figsize=(width, rows * high + 0.35), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=of_groups or axes.unit).ravel()
    for axis, panel, title in zip(grid, panels, titles, strict=False):
        draw = _draw_points if of_groups else _draw_lines
        draw(axis, panel, styles, axes)
        _dress(axis, panel, axes)
        axis.set_title("\n".join(title), loc="left", fontweight="bold")
    for i, axis in enumerate(grid):
        if i >= len(panels):
            axis.set_visible(False)
        elif i % columns == 0 and not of_groups:
            axis.set_ylabel(axes.y)
        if i + columns < len(panels):
            axis.set_xlabel("")  # the panel below has it
    names = {label: f"{label}*" if label in marked else label for label in styles}
    if of_groups:
        _name_groups(grid, panels, names)
    lines = textwrap.wrap(caption, int(width * 72 / (0.56 * SMALL)))
    figure.supxlabel("\n".join(lines), fontsize=SMALL, color=FAINT, x=0.01, ha="left")
    direct = rows == 1 and axes.kind == "curves"  # profiles all end at the same place
    if not of_groups and len(labels) > 1 and not (direct and _label_lines(figure, grid[columns - 1], names, styles)):
        _legend(figure, names, styles)
    return figure


def _height(width: float) -> float:
    return min(2.3, 0.72 * width + 0.15)


def _styles() -> Iterator[tuple[str, Any]]:
    """Yield colour and dashes: first all colours with solid lines."""
    return ((colour, dash) for dash, colour in product(DASHES * 9, COLOURS))


def _draw_lines(axis: Any, panel: Panel, styles: dict[str, tuple[str, Any]], axes: Axes) -> None:
    for line in panel.lines:
        colour, dash = styles[line.label]
        if panel.held_out and len(styles) <= len(COLOURS):  # with more groups dashes tell these apart
            dash = DASHES[1]
        marker = "o" if len(line.x) <= FEW_POINTS and axes.kind == "curves" else ""
        (drawn,) = axis.plot(line.x, line.y, color=colour, ls=dash, lw=1.2, marker=marker, ms=2.2, gid=line.label)
        if line.band is not None:
            axis.fill_between(line.x, *line.band, color=colour, alpha=0.16, lw=0)
        if line.rest is not None:
            axis.plot(*line.rest, color=colour, ls=(0, (1, 2)), lw=0.9)
        drawn.set_zorder(3)
    if axes.unit or axes.kind == "profile" or panel.normalised:
        axis.set_ylim(-0.03, 1.03)
    if axes.kind == "profile":
        axis.set_xlim(0, 1)


def _draw_points(axis: Any, panel: Panel, styles: dict[str, tuple[str, Any]], axes: Axes) -> None:
    """Draw a row for each group: its value, the interval, and the values of single seeds."""
    rows = {label: i for i, label in enumerate(styles)}
    for line in panel.lines:
        colour, y = styles[line.label][0], rows[line.label]
        for scores in line.values:
            axis.plot(scores, np.full(len(scores), y + 0.28), "|", color=colour, ms=3.5, mew=0.6, alpha=0.8)
        if line.band is not None:
            axis.plot([line.band[0][0], line.band[1][0]], [y, y], color=colour, lw=2.0, alpha=0.45)
        axis.plot(line.x, [y], MARKERS[y // len(COLOURS) % len(MARKERS)], color=colour, ms=4)
    found = {line.label: line.x[0] for line in panel.lines}
    low, high = (found.get(label) for label in axes.gap or ("", ""))
    if low is not None and high is not None and low < high:
        axis.axvspan(low, high, color=GRID, lw=0, zorder=0)
    for value in {"improvement": (0.5,), "gap": (0.0, 1.0)}.get(axes.kind, ()):
        axis.axvline(value, color=FAINT, lw=0.7, ls=(0, (2, 2)), zorder=1)
    if axes.kind == "improvement" or axes.unit or panel.normalised:
        axis.set_xlim(-0.03, 1.03)


def _name_groups(grid: Any, panels: Sequence[Panel], names: dict[str, str]) -> None:
    shown = [label for label in names if any(line.label == label for panel in panels for line in panel.lines)]
    for axis in grid:
        axis.set_yticks(range(len(shown)), [names[label] for label in shown])
        axis.set_ylim(len(shown) - 0.4, -0.6)
        axis.grid(axis="y", visible=False)


def _dress(axis: Any, panel: Panel, axes: Axes) -> None:
    from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

    axis.set_xlabel(axes.x, color=FAINT, fontsize=SMALL + 0.5)
    axis.grid(color=GRID, lw=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(length=2, width=0.5)
    if axes.kind == "curves":
        axis.xaxis.set_major_locator(MaxNLocator(4))
        axis.xaxis.set_major_formatter(FuncFormatter(_plain_number) if axes.seconds else EngFormatter(sep=""))


def _plain_number(value: float, _: int) -> str:
    return f"{value:g}"


def _label_lines(figure: Any, axis: Any, names: dict[str, str], styles: dict[str, tuple[str, Any]]) -> bool:
    """Write the labels beside the ends of the lines of the last panel; return whether they fit there."""
    drawn = {line.get_gid(): line for line in axis.get_lines() if line.get_gid() in names and len(line.get_xdata())}
    height = figure.get_size_inches()[1] * 72 * 0.62
    longest = max(map(len, names.values())) * 0.55 * SMALL / 72
    if len(names) > len(COLOURS) or len(drawn) < len(names):
        return False
    if 1.25 * SMALL * len(names) > height or longest > 0.28 * figure.get_size_inches()[0]:
        return False
    texts = []
    for label, line in drawn.items():
        x, y = (np.asarray(each, float)[-1] for each in line.get_data())
        colour = styles[label][0]
        text = axis.annotate(
            names[label], (x, y), (1.05, 0.5), textcoords="axes fraction", va="center", fontsize=SMALL,
            color=colour, arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5, "shrinkA": 1, "shrinkB": 2,
                        "relpos": (0.0, 0.5)},
        )  # fmt: skip
        texts.append((y, text))
    figure.draw_without_rendering()
    size = axis.get_window_extent()
    least = 1.25 * SMALL * figure.dpi / 72 / size.height
    ends = [axis.transAxes.inverted().transform(axis.transData.transform((0, y)))[1] for y, _ in texts]
    for place, (_, text) in zip(_apart(ends, least), texts, strict=True):
        text.set_position((1.05, place))
    return True


def _apart(places: Sequence[float], least: float) -> list[float]:
    """Return places from 0 to 1 in the same order, as near as possible, at least `least` apart."""
    order = np.argsort(places, kind="stable")
    moved = np.array(places, float)[order]
    for _ in range(200):
        gaps = np.diff(moved)
        close = np.flatnonzero(gaps < least - 1e-6)
        if not len(close):
            break
        for i in close:
            shift = (least - (moved[i + 1] - moved[i])) / 2
            moved[i] -= shift
            moved[i + 1] += shift
        moved = np.clip(moved, 0.0, None) if moved[0] < 0 else moved
    found = np.empty_like(moved)
    found[order] = moved
    return [float(each) for each in found]


def _legend(figure: Any, names: dict[str, str], styles: dict[str, tuple[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colour, ls=dash, lw=1.4) for colour, dash in styles.values()]
    longest = max(map(len, names.values()))
    fits = max(1, int(figure.get_size_inches()[0] * 72 / (0.55 * SMALL * longest + 34)))
    columns = min(len(names), fits, 6)
    figure.set_figheight(figure.get_figheight() + 1.35 * SMALL / 72 * -(-len(names) // columns))
    figure.legend(
        handles, list(names.values()), loc="outside upper left", ncols=columns,
        frameon=False, handlelength=2.4, columnspacing=1.2, labelspacing=0.3, borderaxespad=0.2,
    )  # fmt: skip


def population(lines: Sequence[Line]) -> str:
    """Return the number of seeds of lines, such as `3 seeds` or `2 to 5 seeds`."""
    low, high = min(line.seeds[0] for line in lines), max(line.seeds[1] for line in lines)
    return f"{low} to {high} seeds" if low < high else f"{high} seed{'s' * (high != 1)}"
