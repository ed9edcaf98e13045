"""Figures of one run: the curves of all its stages; of an evaluation, how its episodes ended."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from omagd.lab.analysis.plot import COLOURS, SETTINGS, picture
from omagd.lab.analysis.runs import Run, is_number
from omagd.run.run_folder import RunFolder, read_records

CLOCKS = {"t_env": "environment steps", "epoch": "epoch"}
TRAINING = "#8796a5"
MARKED = 25
"""Most points of a line that have marks."""

GUESSES = {
    "predictor": "reconstruction", "ridge": "ridge regression", "map_constant": "map constant",
    "last_seen_or_mean": "last seen, else mean", "last_seen": "last seen", "slot_mean": "mean of the node",
    "zeros": "zeros",
}  # fmt: skip
"""Predictor and baselines of a table of beliefs."""


@dataclass(frozen=True)
class Panel:
    """One small diagram with the metrics `lines` of `stage`, each `(name, legend)`.

    unit: of the y axis. top: its upper end, if fixed. log: logarithmic if all values are positive and differ much.
    """

    stage: str
    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    top: float | None = None
    log: bool = False


def _trained(name: str) -> tuple[tuple[str, str], ...]:
    return (f"train/{name}", "training"), (f"eval/{name}", "held out")


def _played(name: str) -> tuple[tuple[str, str], ...]:
    return (f"test_{name}", "test"), (f"test_held_out_{name}", "held-out maps"), (name, "training")


CODES = (("eval/codes_in_use", "in use"), ("eval/perplexity", "perplexity"))
ACCURACIES = (*((f"eval/top{k}", f"top {k}") for k in (1, 3, 5)), ("eval/balanced_accuracy", "dead or alive, balanced"))
ERRORS = tuple(
    (f"eval/error_{name}".removesuffix("_predictor"), GUESSES[name])
    for name in ("predictor", "ridge", "map_constant", "last_seen_or_mean", "slot_mean", "last_seen")
)
PANELS = (
    Panel("stage1", "Tokenizer: loss", "loss per graph", _trained("graph_loss"), log=True),
    Panel("stage1", "Tokenizer: reconstruction error", "MSE of features", _trained("mse"), log=True),
    Panel("stage1", "Tokenizer: codebook", "codes", CODES),
    Panel("stage2", "Predictor: loss", "nats per unseen node", _trained("graph_loss")),
    Panel("stage2", "Predictor: accuracy on unseen units", "share right", ACCURACIES, top=1.0),
    Panel("stage2", "Feature error, living unseen units", "MSE of features that vary", ERRORS, log=True),
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

Line = tuple[str, str, list[float], list[float]]
"""Legend, clock, times, values."""


def panels_of_maps(run: Run) -> list[Panel]:
    """Return panels of the win rate, or of the return, in tests of each map, as many as there are colours in each."""
    most = len(COLOURS)
    for name, title, unit, top in (
        ("battle_won_mean", "Win rate by map", "share of battles won", 1.0),
        ("return_mean", "Return by map", "reward per episode", None),
    ):
        maps = [task for task in run.maps if any(f"test/{task}/{name}" in record for record in run.records)]
        if maps:
            lines = [tuple((f"test/{m}/{name}", m) for m in maps[i : i + most]) for i in range(0, len(maps), most)]
            return [Panel("stage3", title, unit, part, top) for part in lines]
    return []


def curves(run: Run) -> bytes | None:
    """Return the values of a run's `metrics.jsonl` as a PNG, None if there is nothing to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    found = [(panel, lines) for panel in (*PANELS, *panels_of_maps(run)) if (lines := lines_of(panel, run.records))]
    if not found:
        return None
    held_out = {"held-out maps", *(name for name, out in run.maps.items() if out)}
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(3.6 * columns, 2.6 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, (panel, lines) in zip(axes, found, strict=False):
            _draw(axis, panel, lines, held_out)
        for axis in axes[len(found) :]:
            axis.axis("off")
        return picture(figure, "png", dpi=150)


def lines_of(panel: Panel, records: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return the lines of a panel that have values."""
    lines: list[Line] = []
    for name, legend in panel.lines:
        found = [r for r in records if r.get("stage") == panel.stage and is_number(r.get(name))]
        clock = "epoch" if any("epoch" in record for record in found) else "t_env"
        if found := [record for record in found if is_number(record.get(clock))]:
            lines.append((legend, clock, [r[clock] for r in found], [r[name] for r in found]))
    return lines


def _draw(axis: Any, panel: Panel, lines: Sequence[Line], held_out: Container[str]) -> None:
    """Draw one panel: marks if there are few points, dashes for maps that are not trained on."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    colours = cycle(COLOURS)
    for legend, _, times, values in lines:
        colour = TRAINING if legend == "training" and len(lines) > 1 else next(colours)
        style, mark = "--" if legend in held_out else "-", "o" if len(times) <= MARKED else ""
        axis.plot(times, values, style, color=colour, lw=1.2, marker=mark, ms=2.5, label=legend)
    values = [value for line in lines for value in line[3]]
    if panel.log and min(values) > 0 and max(values) / min(values) > 20:
        axis.set_yscale("log")
    elif panel.top is not None:
        axis.set_ylim(-0.03 * panel.top, 1.03 * panel.top)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    clock = lines[0][1]
    time = CLOCKS[clock] + (f" ({panel.stage})" if clock == "epoch" else "")
    axis.set(title=panel.title, xlabel=time, ylabel=panel.unit)
    if len(lines) > 1:
        axis.legend()


def evaluation(run: Run) -> bytes | None:
    """Return how the episodes of an evaluation ended as a PNG, None when there are none."""
    import matplotlib
    from matplotlib.figure import Figure

    episodes = [episode for log in RunFolder(run.folder).episode_logs() for episode in read_records(log)]
    if not episodes:
        return None
    groups: dict[str, list[dict[str, Any]]] = {}
    for episode in episodes:
        label = ("won" if episode["battle_won"] else "not won") if "battle_won" in episode else "episodes"
        groups.setdefault(label, []).append(episode)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        panels = (("return", "Return", "reward per episode"), ("length", "Episode length", "environment steps"))
        for axis, (name, title, unit) in zip(figure.subplots(1, 2), panels, strict=True):
            values = [[each[name] for each in group if is_number(each.get(name))] for group in groups.values()]
            axis.hist(values, bins=20, stacked=True, color=COLOURS[: len(groups)], label=list(groups))
            axis.set(title=title, xlabel=unit, ylabel="episodes")
            if len(groups) > 1:
                axis.legend()
        return picture(figure, "png", dpi=150)
