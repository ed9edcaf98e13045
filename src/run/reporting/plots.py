"""Plots of a run: curves from `metrics.jsonl`, histograms of an evaluation's episodes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omagd.run.reporting.card import recorded_of
from omagd.utils.storage import STORAGE, read_entry

INK, GRID, FAINT = "#1c2733", "#e3e8ee", "#6b7b8c"
TRAINING = "#8796a5"
PALETTE = ("#0f8b8d", "#e4572e", "#4f5d95", "#c49a00", "#8a4f7d", "#5a8f3c")
CLOCK_LABELS = {"t_env": "environment steps", "epoch": "epoch"}


@dataclass(frozen=True)
class Panel:
    """One small diagram with the metrics `lines` of `stage`, each `(name, legend)`.

    unit: of the y axis. top: its upper end, if fixed. log: logarithmic if all values are positive.
    dashed: legends of lines of maps that are not trained on. by_map: lines may cover each other: the first ones are
        thicker.
    """

    stage: str
    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    top: float | None = None
    log: bool = False
    dashed: frozenset[str] = frozenset({"held-out maps"})
    by_map: bool = False


def _trained(name: str) -> tuple[tuple[str, str], ...]:
    return (f"train/{name}", "training"), (f"eval/{name}", "held out")


def _played(name: str) -> tuple[tuple[str, str], ...]:
    return (f"test_{name}", "greedy test"), (f"test_held_out_{name}", "held-out maps"), (name, "training")


CODES = (("eval/codes_in_use", "in use"), ("eval/perplexity", "perplexity"))
ACCURACIES = (*((f"eval/top{k}", f"top {k}") for k in (1, 3, 5)), ("eval/balanced_accuracy", "dead or alive, balanced"))
ERRORS = (
    ("eval/error", "reconstruction"),
    ("eval/error_ridge", "ridge regression"),
    ("eval/error_map_constant", "map constant"),
    ("eval/error_last_seen_or_mean", "last seen, else mean"),
    ("eval/error_slot_mean", "mean of the node"),
    ("eval/error_last_seen", "last seen"),
)
SEEN_BEFORE = (
    ("eval/error_before", "reconstruction"),
    ("eval/error_ridge_before", "ridge regression"),
    ("eval/error_map_constant_before", "map constant"),
    ("eval/error_last_seen_before", "last seen"),
)
PANELS = (
    Panel("stage1", "Tokenizer: loss", "loss per graph", _trained("graph_loss"), log=True),
    Panel("stage1", "Tokenizer: reconstruction error", "MSE of features", _trained("mse"), log=True),
    Panel("stage1", "Tokenizer: codebook", "codes", CODES),
    Panel("stage2", "Predictor: loss", "nats per unseen node", _trained("graph_loss")),
    Panel("stage2", "Predictor: accuracy on unseen units", "share right", ACCURACIES, top=1.0),
    Panel("stage2", "Feature error, living unseen units", "MSE of features that vary", ERRORS, log=True),
    Panel("stage2", "The same, units seen before", "MSE of features that vary", SEEN_BEFORE, log=True),
    Panel("stage3", "Win rate", "share of battles won", _played("battle_won_mean"), top=1.0),
    Panel("stage3", "Return", "reward per episode", _played("return_mean")),
    Panel("stage3", "TD loss", "loss, reward²", (("loss_td", "loss"),), log=True),
    Panel("stage3", "Policy and value loss", "mean per sample", (("loss_policy", "policy"), ("loss_value", "value"))),
    Panel("stage3", "Entropy of the policy", "nats", (("entropy", "entropy"),)),
    Panel("stage3", "KL divergence from the old policy", "nats", (("kl", "KL"),), log=True),
    Panel("stage3", "Clipped probability ratios", "share of samples", (("clipped_share", "clipped"),)),
    Panel("stage3", "Exploration", "probability", (("epsilon", "epsilon"),), top=1.0),
    Panel("stage3", "Q values", "discounted reward", (("q_taken_mean", "taken"), ("target_mean", "target"))),
    Panel("stage3", "Episode length", "environment steps", _played("ep_length_mean")),
)


MAPS_AT_ONCE = len(PALETTE)


def panels_of_maps(records: Sequence[Mapping[str, Any]], held_out: Sequence[str] = ()) -> list[Panel]:
    """Return panels of the win rate, or of the return, in tests of each map, as many as there are colours in each.

    held_out: maps that are not trained on.
    """
    if not any(key.startswith("test/") for record in records for key in record):
        return []
    from omagd.utils.metrics import of_maps  # imports torch, which reports of other runs do not need

    for name, title, unit, top in (
        ("test/battle_won_mean", "Win rate by map", "share of battles won", 1.0),
        ("test/return_mean", "Return by map", "reward per episode", None),
    ):
        values = {key: 0.0 for record in records for key in record if record.get("stage") == "stage3"}
        maps = [task for task, each in of_maps(values).items() if name in each]
        parts = [maps[i : i + MAPS_AT_ONCE] for i in range(0, len(maps), MAPS_AT_ONCE)]
        if parts:
            more = [f" ({i + 1} of {len(parts)})" if len(parts) > 1 else "" for i in range(len(parts))]
            purpose, short = name.split("/")
            lines = [tuple((f"{purpose}/{task}/{short}", task) for task in part) for part in parts]
            style = {"dashed": frozenset(held_out), "by_map": True}
            return [
                Panel("stage3", title + end, unit, part, top, **style)  # type: ignore[arg-type]
                for end, part in zip(more, lines, strict=True)
            ]
    return []


def read_metrics(jsonl_path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a `metrics.jsonl`; skips the half-written line of a killed run."""
    with Path(jsonl_path).open(encoding="utf-8") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record


def curves(jsonl_path: str | Path, out_png: str | Path) -> Path | None:
    """Draw the values of a run's `metrics.jsonl`; return the path, None if there is nothing to draw.

    The title has environment and map from `env_info.json` in the same folder, configuration, seed and ranks from
    `card.json` there, as far as they exist.
    """
    from matplotlib.figure import Figure

    records = list(read_metrics(jsonl_path))
    facts = read_entry(Path(jsonl_path).with_name("env_info.json"))
    tasks = facts.get("tasks") or []
    panels = (*PANELS, *panels_of_maps(records, tasks[facts.get("n_training", 0) :]))
    found = [(panel, lines) for panel in panels if (lines := _lines(panel, records))]
    if not found:
        return None
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(4.9 * columns, 3.3 * rows + 0.6), dpi=110, facecolor="white", layout="constrained")
    title = _title(Path(jsonl_path))
    size = min(15.0, 500 * columns / len(title))  # points that fit the width
    figure.suptitle(title, fontsize=size, weight="bold", color=INK)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (panel, lines) in zip(axes, found, strict=False):
        _draw(axis, panel, lines)
        axis.set_xlim(*_extent(panel.stage, found))
    for axis in axes[len(found) :]:
        axis.axis("off")
    return save(figure, out_png)


def evaluation(episode_logs: Sequence[Path], out_png: str | Path) -> Path | None:
    """Draw how the episodes of an evaluation ended; return the path, None when there are none.

    Args:
        episode_logs: files with a JSON object per episode (`return`, `length`, `battle_won`); `env_info.json` of their
            run names the environment in the title.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    episodes = [episode for path in episode_logs for episode in read_metrics(path)]
    if not episodes:
        return None
    figure = Figure(figsize=(9.8, 3.9), dpi=110, facecolor="white", layout="constrained")
    label = _label_beside(episode_logs[0].parent)
    groups: dict[str, list[dict[str, Any]]] = {"": episodes}
    share = ""
    if any("battle_won" in episode for episode in episodes):
        groups = {"won": [], "not won": []}
        for episode in episodes:
            groups["won" if episode.get("battle_won") else "not won"].append(episode)
        share = f", {len(groups['won']):,} won ({len(groups['won']) / len(episodes):.1%})"
    title = f"{label}: evaluation, {len(episodes):,} episodes{share}".removeprefix(": ")
    figure.suptitle(title, fontsize=13, weight="bold", color=INK)
    panels = (("return", "Return", "reward per episode"), ("length", "Episode length", "environment steps"))
    for axis, (name, heading, unit) in zip(figure.subplots(1, 2), panels, strict=True):
        values = [[each[name] for each in group if each.get(name) is not None] for group in groups.values()]
        bins = _bins(name, [each for group in values for each in group])
        axis.hist(values, bins=bins, stacked=True, color=PALETTE[: len(groups)], label=list(groups))
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_ylim(0, 1.25 * axis.get_ylim()[1])  # space for the legend
        if name == "length":
            axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        _dress(axis, heading, unit, "episodes", legend=len(groups) > 1)
    return save(figure, out_png)


def save(figure: Any, out_png: str | Path) -> Path:
    """Write a picture through `STORAGE` and return its path."""
    path, picture = Path(out_png), io.BytesIO()
    figure.savefig(picture, format="png", facecolor="auto")
    STORAGE.write(path, picture.getvalue())
    return path


def _label_beside(jsonl_path: Path) -> str:
    facts = read_entry(jsonl_path.with_name("env_info.json"))
    return f"{facts.get('name', '')} {facts.get('map_name', '')}".strip()


def _title(jsonl_path: Path) -> str:
    """Return the title: environment and map, configuration, seed and ranks, as far as they are known."""
    parts = [_label_beside(jsonl_path)]
    facts = recorded_of(read_entry(jsonl_path.with_name("card.json")))
    if {"name", "seed", "ranks"} <= facts.keys():
        parts += [str(facts["name"]), f"seed {facts['seed']}", f"{facts['ranks']} rank{'s' * (facts['ranks'] != 1)}"]
    text = " · ".join(part for part in parts if part)
    return f"{text}: training" if text else "Training"


def _extent(stage: str, found: Sequence[tuple[Panel, Sequence[Line]]]) -> tuple[float, float]:
    """Return the common x range of all panels of a stage: earliest and latest time, with a margin."""
    times = [time for panel, lines in found if panel.stage == stage for line in lines for time in line[2]]
    low, high = min(times), max(times)
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _bins(name: str, values: Sequence[float]) -> int | list[float]:
    """Return the bins of a histogram: 20, or for lengths bins of equally many whole steps."""
    if name != "length" or not values:
        return 20
    low, high = int(min(values)), int(max(values))
    width = -(-(high - low + 1) // 60)
    return [low - 0.5 + width * i for i in range((high - low) // width + 2)]


Line = tuple[str, str, list[float], list[float]]
"""Legend, clock, times, values."""


def _lines(panel: Panel, records: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the lines of a panel that have values."""
    mine = [record for record in records if record.get("stage") == panel.stage]
    clock = "epoch" if any("epoch" in record for record in mine) else "t_env"
    lines: list[Line] = []
    for name, legend in panel.lines:
        found = [r for r in mine if r.get(name) is not None and r.get(clock) is not None]
        if found:
            lines.append((legend, clock, [r[clock] for r in found], [r[name] for r in found]))
    return lines


def _draw(axis: Any, panel: Panel, lines: Sequence[Line]) -> None:
    """Draw one panel: dots if there are few points, a legend if there are several lines."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    colours = iter(PALETTE)
    for place, (legend, _, times, values) in enumerate(lines):
        marker = "o" if len(times) <= 25 else ""
        quiet = legend == "training" and len(lines) > 1
        colour = TRAINING if quiet else next(colours)
        width = 1.5 + 0.8 * (len(lines) - 1 - place) if panel.by_map else 1.3 if quiet else 2.0
        axis.plot(times, values, "--" if legend in panel.dashed else "-", color=colour, lw=width, marker=marker,
                  ms=3.5, label=legend, zorder=2 if quiet else 3)  # fmt: skip
    values = [value for line in lines for value in line[3]]
    if panel.log and min(values) > 0 and max(values) / min(values) > 20:
        axis.set_yscale("log")
    elif panel.top is not None:
        axis.set_ylim(-0.03 * panel.top, 1.03 * panel.top)
    elif min(values) >= 0:
        axis.set_ylim(0, 1.06 * max(values) or 1.0)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    time = f"{CLOCK_LABELS[lines[0][1]]} ({panel.stage})"
    _dress(axis, panel.title, time, panel.unit, legend=len(lines) > 1, below=len(lines) > 3)


def _dress(axis: Any, title: str, x_label: str, y_label: str, legend: bool, below: bool = False) -> None:
    """Set titles, grid, ticks and frame, and a legend if requested, `below` the axes if it would cover lines."""
    axis.set_title(title, fontsize=11.5, weight="bold", color=INK, loc="left")
    axis.set_xlabel(x_label, fontsize=9, color=FAINT)
    axis.set_ylabel(y_label, fontsize=9, color=FAINT)
    axis.grid(color=GRID, lw=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", labelsize=8.5, colors=FAINT, length=0)
    axis.spines[:].set_color("#c5ced8")
    axis.spines[["top", "right"]].set_visible(False)
    if legend:
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncol": 2} if below else {}
        axis.legend(fontsize=8.5, labelcolor=INK, facecolor="white", framealpha=0.75, edgecolor="none", **place)
