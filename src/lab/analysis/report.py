"""`omagd report`: one HTML page about a run or about many, which needs no network."""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omagd import __version__
from omagd.lab.analysis import curves, run_report
from omagd.lab.analysis.comparison import ends_text, last_values, lead_of
from omagd.lab.analysis.groups import Group, groups, shown, telling
from omagd.lab.analysis.run_report import STAGES, values_of, warnings_of
from omagd.lab.analysis.runs import Run, jobs_of, output_option, output_path, read_runs, studies_at, write_output
from omagd.lab.analysis.statistics import INTERVALS, estimate
from omagd.run.reporting.report import number_text
from omagd.run.run_folder import newest_run
from omagd.utils.errors import readable
from omagd.utils.logging import duration

LOG = logging.getLogger("omagd")
NAME = "report.html"
RESULTS = {"test_battle_won_mean": "Win rate", "test_return_mean": "Return"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run, a folder of runs, a study, or its results file; default: the newest run in results/",
    )
    output_option(parser, "the page", NAME)


def main(options: argparse.Namespace) -> int:
    """Write the page and print its path."""
    sources = options.runs or [newest_run("report")]
    folders = [Path(each).expanduser() for each in sources]
    runs, problems = read_runs(folders, "report")
    content = page(runs, problems, folders)
    write_output(output_path(options.output, sources, NAME), content.encode(), "report")
    for line in problems:
        LOG.warning("left out: %s", readable(line))
    return 0


def page(runs: Sequence[Run], problems: Sequence[str], folders: Sequence[Path]) -> str:
    """Return the page about one run, or about all if they are several or come from a results file.

    Args:
        problems: a line for each folder that could not be read. folders: what the user named.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    one = len(runs) == 1 and not problems and runs[0].given is None
    facts = run_facts(runs[0]) if one else study_facts(runs, problems, folders)
    title = f"{runs[0].place} · {runs[0].name}" if one else ", ".join(readable(f.resolve().name) for f in folders)
    about = {
        "title": title, "version": __version__, "made": time.strftime("%Y-%m-%d %H:%M"),
        "folder": readable(", ".join(str(folder) for folder in folders)),
    }  # fmt: skip
    environment = Environment(
        loader=PackageLoader("omagd.lab.analysis", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html").render(**about, **facts)


def run_facts(run: Run) -> dict[str, Any]:
    """Return what the template shows of one run; a part that cannot be read is empty and a warning."""
    warnings = warnings_of(run)

    def part(name: str, make: Callable[[Run], Any], without: Any) -> Any:
        try:
            return make(run)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as problem:
            warnings.append(f"{name}: cannot be shown ({type(problem).__name__})")
            return without

    preset, differences = part("configuration", run_report.preset_differences, ("", []))
    player, problem = part("recordings", run_report.player, ("", ""))
    warnings += [problem] if problem else []
    return {
        "kind": "run", "subtitle": f"seed {run.seed} · {run.state}" + " · evaluation" * (run.kind == "evaluation"),
        "curves": part("curves", run_report.curves_of, []), "results": part("results", run_report.results, []),
        "preset": preset, "differences": differences,
        "reconstruction": part("reconstruction", run_report.reconstruction, []),
        "times": part("times", run_report.phases, []), "time_note": run_report.time_note(run),
        "card": part("card", run_report.card_rows, []),
        "pictures": part("pictures", run_report.pictures, []), "player": player,
        "warnings": warnings,
    }  # fmt: skip


def study_facts(runs: Sequence[Run], problems: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Return what the template shows of many runs."""
    found = groups(runs)
    jobs = [[readable(part) for part in job] for at in folders for study in studies_at(at) for job in jobs_of(study)]
    marked, incomparable = curves.incomparable(found)
    counted, repeats = curves.without_repeats(found)
    warnings = [f"{name}: failed: {error}" for name, _, state, error in jobs if state == "failed"]
    warnings += [*(f"left out: {readable(problem)}" for problem in problems), *incomparable, *repeats]
    waiting = Counter(state for _, _, state, _ in jobs if state not in ("done", "elsewhere", "failed"))
    warnings += [f"{number} jobs of the study are {state}" for state, number in waiting.items()]
    warnings += [f"{run.label}: {line}" for run in runs for line in warnings_of(run)]
    return {
        "kind": "study", "results": _results(counted), "intervals": INTERVALS,
        "first": found[0].label, "marked": marked, "warnings": warnings,
        "curves": _curves(counted, marked), "keys": _differing_keys(found), "labels": [group.label for group in found],
        "runs": [_run_row(run, group.label) for group in found for run in group.runs],
    }  # fmt: skip


def _results(found: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a table of arms and environments for each result: win rate, return."""
    places, tables = curves.places(found), []
    for metric, title in RESULTS.items():
        arms = {at: [[run for run in group.at(at) if run.kind == "training"] for group in found] for at in places}
        columns = {place: column for place in places if (column := _column(arms[place], metric))}
        if columns:
            rows = zip([group.label for group in found], zip(*columns.values(), strict=True), strict=True)
            tables.append({"title": f"{title} of the last test", "places": [*columns], "rows": list(rows)})
    return tables


def _column(arms: Sequence[Sequence[Run]], metric: str) -> list[dict[str, Any]]:
    """Return for each arm its mean, interval, seeds and lead over the first arm; nothing without any seed.

    `best`: it leads each other arm by more than noise.
    """
    known = [list(last_values(arm, metric).values()) for arm in arms]
    top = max((i for i, scores in enumerate(known) if scores), key=lambda i: np.mean(known[i]), default=0)
    ahead = [lead_of(arms[top], arms[i], metric) for i, scores in enumerate(known) if scores and i != top]
    cells = []
    for i, scores in enumerate(known):
        middle, ends = estimate([np.array(scores)]) if scores else (None, None)
        first = lead_of(arms[i], arms[0], metric) if i else None
        cells.append({
            "mean": number_text(middle), "interval": ends_text(ends), "n": len(scores), "lead": first,
            "best": i == top and bool(ahead) and all(lead and lead.sure for lead in ahead),
        })  # fmt: skip
    return cells if any(known) else []


def _curves(found: Sequence[Group], marked: set[str]) -> list[tuple[str, str]]:
    """Return title and picture of the curves of win rate and return, as `omagd plot` draws them."""
    from omagd.lab.analysis.plot import drawing

    pictures = []
    for metric, title in RESULTS.items():
        kept = [
            Group(g.label, g.values, tuple(r for r in g.runs if r.kind == "training" and len(r.test_curve(metric)[0])))
            for g in found
        ]
        if kept := [group for group in kept if group.runs]:
            panels = curves.curve_panels(kept, metric, "steps", None)
            drawn = drawing(panels, kept, metric, marked)["svg"]
            pictures.append((title, run_report.data_uri(drawn, "svg+xml")))
    return pictures


def _differing_keys(found: Sequence[Group]) -> list[list[str]]:
    """Return a row for each key in which arms differ, with its value in each arm; first those that tell them apart."""
    keys = dict.fromkeys([*telling([group.values for group in found]), *(key for g in found for key in g.values)])
    return [[key, *(shown(group.values, key) for group in found)] for key in keys]


def _run_row(run: Run, label: str) -> list[str]:
    values = values_of(run, "stage3") or next((v for stage in STAGES if (v := values_of(run, stage))), {})
    seconds, steps = run.summary.get("wall_seconds"), run.tests[-1]["t_env"] if run.tests else None
    numbers = [values.get(name) for name in ("test_battle_won_mean", "best_test_battle_won_mean", "test_return_mean")]
    return [
        run.label, label, run.place, "-" if run.seed is None else str(run.seed), run.state,
        *map(number_text, (*numbers, steps)), "-" if seconds is None else duration(seconds),
        str(run.card.get("id", "-")),
    ]  # fmt: skip
