"""`omagd report`: one HTML page about a run or about many, which needs no network."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omagd import __version__
from omagd.lab.analysis import belief_tests, run_report, study_report
from omagd.lab.analysis.runs import Run, read_runs
from omagd.run.reporting.report import number_text
from omagd.utils.errors import UserError, readable
from omagd.utils.logging import duration
from omagd.utils.writing import print_out, replace_file

LOG = logging.getLogger("omagd")
NAME = "report.html"
TEMPLATE = "report.html"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run, a folder of runs, a study, or its results file")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"path of the page (default: {NAME} in the folder, <file>_{NAME} beside a results file)",
    )


def main(options: argparse.Namespace) -> int:
    """Write the page and print its path."""
    if not options.runs:
        raise UserError("report: name a run or a study, as in: omagd report results/<run>")
    folders = [Path(each).expanduser() for each in options.runs]
    runs, problems = read_runs(folders, "report")
    content = page(runs, problems, folders)
    out = Path(options.out).expanduser() if options.out else _default(folders)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, content.encode())
    except OSError as problem:
        raise UserError(f"report: {out} cannot be written ({problem.strerror}). Give another --out") from problem
    for line in problems:
        LOG.warning("left out: %s", readable(line))
    print_out(f"{out}\n")
    return 0


def _default(folders: Sequence[Path]) -> Path:
    """Return the path of a page: in the folder, beside a results file; of several the current folder."""
    if len(folders) > 1:
        return Path(NAME)
    place = folders[0]
    return place.with_name(f"{place.stem}_{NAME}") if place.is_file() else place / NAME


def page(runs: Sequence[Run], problems: Sequence[str], folders: Sequence[Path]) -> str:
    """Return the page about one run, or about all if they are several.

    Args:
        problems: a line for each folder that could not be read. folders: what the user named.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    one = len(runs) == 1 and not problems
    facts = run_facts(runs[0]) if one else study_report.study_facts(runs, problems, folders)
    title = f"{runs[0].place} · {runs[0].name}" if one else ", ".join(readable(f.resolve().name) for f in folders)
    about = {
        "title": title, "version": __version__, "made": time.strftime("%Y-%m-%d %H:%M"),
        "folder": readable(", ".join(str(folder) for folder in folders)),
    }  # fmt: skip
    environment = Environment(
        loader=PackageLoader("omagd.lab.analysis", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(TEMPLATE).render(**about, **facts)


def run_facts(run: Run) -> dict[str, Any]:
    """Return what the template shows of one run; a part that cannot be read is empty and a warning."""
    warnings = run_report.warnings_of(run)

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
        "tiles": part("results", _tiles, []), "charts": part("curves", run_report.charts_by_stage, []),
        "results": part("results", run_report.results, []), "preset": preset, "differences": differences,
        "reconstruction": part("reconstruction", run_report.reconstruction, []),
        "belief_tests": part("tests of beliefs", lambda of: belief_tests.tables(belief_tests.records(of.folder)), []),
        "codebook": part("codebook", run_report.codebook, []), "times": part("times", run_report.phases, []),
        "time_note": run_report.time_note([run]), "rank_note": run_report.rank_note(run),
        "ranks": part("ranks", run_report.ranks, []), "card": part("card", run_report.card_rows, []),
        "battles": {"pictures": part("pictures", run_report.pictures, []), "player": player},
        "configuration": run_report.configuration(run), "files": run_report.saved_files(run),
        "log_lines": part("logs", run_report.log_lines, []), "warnings": warnings,
    }  # fmt: skip


def _tiles(run: Run) -> list[tuple[str, str]]:
    """Return the headline numbers: label and value."""
    values = run_report.values_of(run, "stage3")
    clock = run_report.stages_of(run).get("stage3", {}).get("clock", {})
    found = [
        ("win rate, last test", values.get("test_battle_won_mean")),
        ("best win rate", values.get("best_test_battle_won_mean")),
        ("return, last test", values.get("test_return_mean")),
        ("environment steps", clock.get("t_env") or (run.tests[-1]["t_env"] if run.tests else None)),
        ("ranks", run.summary.get("world_size")),
    ]
    seconds = run.summary.get("wall_seconds")
    tiles = [
        (label, f"{value:,}" if isinstance(value, int) else number_text(value))
        for label, value in found
        if value is not None
    ]
    return [*tiles, *([("time", duration(seconds))] if seconds is not None else [])]
