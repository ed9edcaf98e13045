"""`omagd plot`: figures of many runs, and their results in marl-eval's format."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omagd.lab.analysis import curves
from omagd.lab.analysis.curves import LABELS, STATISTIC, Panel
from omagd.lab.analysis.figures import population
from omagd.lab.analysis.groups import Group, groups
from omagd.lab.analysis.runs import Run, load
from omagd.lab.analysis.statistics import FEW, FEW_SEEDS, LEVEL
from omagd.run.reporting.report import number_text
from omagd.utils.errors import UserError
from omagd.utils.writing import print_out, replace_file

LOG = logging.getLogger("omagd")
KINDS = ("curves", "final", "profile", "improvement", "gap")
UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From how many seconds on, seconds per unit, name."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `plot`."""
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="a run, a folder of runs, a study, or its results file")
    add("--kind", choices=KINDS, help="curves (default); final: the last tests; profile: share of runs above each"
        " score; improvement: probability of being better than the baseline; gap: chosen by --gap")  # fmt: skip
    add("--metric", help="win_rate (default; else return), or any test metric of metrics.jsonl")
    add("--x", choices=("steps", "wall", "cpu"), default="steps", help="environment steps (default) or time")
    add("--stat", choices=tuple(STATISTIC), help="mean or interquartile mean; default: mean on a map, iqm over maps")
    add("--baseline", help="improvement: label of the group to compare with (default: the first)")
    add("--gap", metavar="LOW,HIGH", help="labels of two groups: print and draw the share of the gap between them that"
        " each other group closes; with --kind final: shade this gap")  # fmt: skip
    add("--maps-only", action="store_true", help="curves, final: no panel over all maps")
    add("--width", choices=("single", "double"), help="columns of a page; default: double for several panels")
    add("--out", metavar="PATH", help="path of the pictures without ending (default: <kind>_<metric>)")
    add("--json", metavar="FILE", help="also write the results in marl-eval's format; with --gap the shares")


def main(options: argparse.Namespace) -> int:
    """Draw one figure and print the paths of its files."""
    if not options.runs:
        raise UserError("plot: name runs or a study, as in: omagd plot results/<study>")
    kind = options.kind = options.kind or ("gap" if options.gap else "curves")
    if kind == "gap" and not options.gap or options.gap and kind not in ("gap", "final"):
        raise UserError(f"--kind {kind}: the shares of a gap have a figure of their own. Give --gap=LOW,HIGH alone")
    runs = load(options.runs, "plot")
    metric = curves.metric_name(options.metric, runs)
    kept, notes = curves.usable(runs, metric)
    found, more = curves.without_repeats(groups(kept))
    found, unfinished = _ended(found) if kind != "curves" else (found, [])
    marked, incomparable = curves.incomparable(found)
    panels = _panels(options, found, metric)
    notes += [*more, *unfinished, *incomparable, *_short(panels), *_few(panels)]
    pictures = _rendered(options, panels, found, metric, marked)
    name = f"{kind}_{re.sub(r'[^A-Za-z0-9.-]+', '_', metric)}"
    base = Path(os.path.expanduser(options.out or name))
    base = base.with_suffix("") if base.suffix in (".png", ".svg") else base
    files = {base.with_name(f"{base.name}.{form}"): content for form, content in pictures.items()}
    if options.json:
        data = gap_shares(panels[0], options.gap, metric) if kind == "gap" else marl_eval(found)
        files[Path(os.path.expanduser(options.json))] = (json.dumps(data, indent=1) + "\n").encode()
    for path, content in files.items():
        _write(path, content)
    for note in notes:
        LOG.warning("%s", note)
    print_out("".join(f"{path}\n" for path in files))
    print_out(gap_text(panels[0]) if kind == "gap" else "")
    return 0


def _write(path: Path, content: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as problem:
        raise UserError(f"plot: {path} cannot be written ({problem.strerror}). Give another --out") from problem


def _ended(found: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """Return the groups without runs that go on, if any has ended, and a line on these."""
    running = [run for group in found for run in group.runs if not run.finished]
    if not running or len(running) == sum(len(group.runs) for group in found):
        note = ["no run has ended: the last tests so far are used"] if running else []
        return list(found), note
    kept = [replace(group, runs=tuple(run for run in group.runs if run.finished)) for group in found]
    names = ", ".join(run.label for run in running)
    return [group for group in kept if group.runs], [f"not finished, left out: {names}"]


def _panels(options: argparse.Namespace, found: Sequence[Group], metric: str) -> list[Panel]:
    if options.kind == "curves":
        return curves.curve_panels(found, metric, options.x, options.stat, not options.maps_only)
    if options.kind == "final":
        return curves.final_panels(found, metric, options.stat, not options.maps_only)
    if options.kind == "profile":
        return [curves.profile_panel(found, metric)]
    if options.kind == "gap":
        return [curves.gap_panel(found, metric, options.stat, options.gap)]
    return [curves.improvement_panel(found, metric, options.baseline)]


def gap_shares(gap: Panel, ends: str, metric: str) -> dict[str, Any]:
    """Return the shares of a gap as `--json` writes them."""
    shares = {
        line.label: {
            "share": float(line.x[0]), "interval": None if line.band is None else [float(e[0]) for e in line.band],
            "seeds": list(line.seeds),
        }
        for line in gap.lines
    }  # fmt: skip
    return {"gap": ends, "metric": metric, "statistic": gap.statistic, "level": LEVEL, "shares": shares}


def gap_text(gap: Panel) -> str:
    """Return the shares of a gap, one line for each group."""
    lines = [f"share of the gap, {gap.title}"]
    for line in gap.lines:
        share, *ends = (number_text(float(each[0])) for each in (line.x, *(line.band or ())))
        interval = f" [{', '.join(ends)}]" if ends else ""
        lines.append(f"  {line.label}: {share}{interval}, {population([line])}")
    return "\n".join(lines) + "\n"


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


def _rendered(
    options: argparse.Namespace, panels: Sequence[Panel], found: Sequence[Group], metric: str, marked: set[str]
) -> dict[str, bytes]:
    from omagd.lab.analysis.figures import Axes, render

    label = LABELS.get(metric, metric.removeprefix("test_").removesuffix("_mean").replace("_", " "))
    unit, labels = curves.ranges(found, metric) is None, tuple(group.label for group in found)
    if options.kind == "curves":
        x = "environment steps"
        if options.x != "steps":
            panels, x = _in_units(panels, {"wall": "wall-clock", "cpu": "CPU"}[options.x])
        axes = Axes("curves", x, label, labels, options.x != "steps", unit)
    elif options.kind == "final":
        ends = curves.gap_ends(options.gap, found) if options.gap else None
        shaded = None if ends is None else (ends[0].label, ends[1].label)
        axes = Axes("final", f"{label} of the last test", "", labels, unit=unit, gap=shaded)
    elif options.kind == "gap":
        axes = Axes("gap", f"share of the gap in {label}", "", labels)
    elif options.kind == "profile":
        axes = Axes("profile", f"{label} τ", "share of runs above τ", labels)
    else:
        axes = Axes("improvement", "probability of improvement", "", labels)
    width = options.width or ("double" if len(panels) > 1 else "single")
    return render(panels, axes, caption(options.kind, panels, found, axes.gap), width, marked)


def _in_units(panels: Sequence[Panel], clock: str) -> tuple[list[Panel], str]:
    """Return panels with a time axis in readable units, and its label."""
    drawn = [line for panel in panels for line in panel.lines]
    ends = [each[-1:] for line in drawn for each in (line.x, *(line.rest or ())[:1])]
    longest = max((float(end[0]) for end in ends if len(end)), default=0.0)
    _, size, name = next(unit for unit in UNITS if longest >= unit[0])
    scaled = []
    for panel in panels:
        lines = [
            replace(line, x=line.x / size, rest=(line.rest[0] / size, line.rest[1]) if line.rest else None)
            for line in panel.lines
        ]
        scaled.append(replace(panel, lines=tuple(lines)))
    return scaled, f"{clock} {name}"


def caption(kind: str, panels: Sequence[Panel], found: Sequence[Group], gap: tuple[str, str] | None = None) -> str:
    """Return what a point of the figure is: the statistic, the number of seeds, the episodes of a test.

    gap: labels of the groups: from the value of the first up to that of the second the ground is shaded.
    """
    lines = [line for panel in panels for line in panel.lines]
    kinds = list(dict.fromkeys(panel.statistic for panel in panels))
    what = (
        STATISTIC[kinds[0]] if len(kinds) == 1 else f"{STATISTIC[kinds[0]]} on a map, {STATISTIC[kinds[1]]} over maps"
    )
    what = {
        "curves": what,
        "final": f"{what} of the last tests",
        "profile": "Share of runs whose last test is above τ",
        "improvement": "P(better) of the last tests, a tie counts half",
        "gap": f"Share of the gap, {what} of the last tests, all three resampled together",
    }[kind]
    seeds = population(lines)
    several = len(panels) > 1 and len(curves.places(found)) > 1
    parts = [f"{what[0].upper()}{what[1:]}, {seeds}{' per map' if several else ''}"]
    if any(line.band is not None for line in lines):
        parts.append("band: 95 % stratified bootstrap interval over seeds")
    elif any(line.seeds[0] < 2 for line in lines):
        parts.append("no interval: a single seed")
    episodes = {run.test_episodes for group in found for run in group.runs} - {None}
    if episodes:
        counts = " or ".join(str(count) for count in sorted(filter(None, episodes)))
        parts.append(f"tests of {counts} greedy episodes")
    if any(len(scores) > 1 for line in lines for scores in line.values):
        parts.append("strokes: single seeds")
    if gap is not None:
        parts.append(f"shaded: from {gap[0]} up to {gap[1]}")
    if any(panel.normalised for panel in panels):
        parts.append("over maps: shares of each map's range")
    if any(line.rest is not None for line in lines):
        parts.append("dotted: not all seeds")
    if kind in ("curves", "final") and any(run.maps for group in found for run in group.runs):
        parts.append("a set of maps: mean over its training maps")
    if kind == "curves" and any(panel.held_out for panel in panels):
        parts.append("dashed: maps that are not trained on")
    return "; ".join(parts) + "."


def marl_eval(found: Sequence[Group]) -> dict[str, Any]:
    """Return results as marl-eval reads them: environment, task, algorithm, seed, step, metrics.

    Every test is a step with one value for each metric that all tests of all runs of the environment have. The
    absolute metrics are those of the last test.
    """
    data: dict[str, Any] = {}
    runs = [(group.label, run) for group in found for run in group.runs if run.tests]
    for env in dict.fromkeys(run.env for _, run in runs):
        tests = [test for _, run in runs if run.env == env for test in run.tests]
        common = [name for name in tests[0] if name.startswith("test_") and all(_has(test, name) for test in tests)]
        for label, run in runs:
            if run.env == env:
                task = data.setdefault(env, {}).setdefault(run.map_name or env, {})
                task.setdefault(label, {})[f"seed_{run.seed}"] = _steps(run, common)
    return data


def _has(test: dict[str, Any], name: str) -> bool:
    return isinstance(test.get(name), (int, float))


def _steps(run: Run, names: Sequence[str]) -> dict[str, Any]:
    steps: dict[str, Any] = {}
    for i, test in enumerate(run.tests):
        values = {name.removeprefix("test_").removesuffix("_mean"): [float(test[name])] for name in names}
        elapsed = test.get("wall_seconds")
        steps[f"step_{i}"] = {"step_count": int(test["t_env"]), "elapsed_time": float(elapsed or 0.0), **values}
        last = values
    return {**steps, "absolute_metrics": {**last, "elapsed_time": [steps[f"step_{i}"]["elapsed_time"]]}}
