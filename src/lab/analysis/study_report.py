"""What a report says about many runs: arms and environments with intervals, curves, differing keys, all runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omagd.lab.analysis import belief_tests, curves
from omagd.lab.analysis.charts import Chart, curve_chart, style_of
from omagd.lab.analysis.groups import Group, groups, shown, telling
from omagd.lab.analysis.run_report import (
    SLOWEST_SHARE,
    STAGES,
    phase_seconds,
    pictures,
    player,
    time_note,
    values_of,
    warnings_of,
)
from omagd.lab.analysis.runs import LONGEST_STUDY, Run, studies_at
from omagd.lab.analysis.statistics import FEW, FEW_SEEDS, interval, mean
from omagd.run.reporting.report import SHOWN, number_text
from omagd.utils.errors import readable
from omagd.utils.logging import duration
from omagd.utils.run_folder import STUDY_FILE
from omagd.utils.storage import read_json

PICTURES_BYTES = 5 << 19
"""Bytes of all pictures and of the player in the page of a study."""

MOST_PICTURES = 6


def results(found: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a table of arms and environments for each result: win rate, return."""
    places, tables = curves.places(found), []
    for metric, title in (
        ("test_battle_won_mean", "Win rate of the last test"),
        ("test_return_mean", "Return of the last test"),
    ):
        scores = {(group.label, place): _last(group.at(place), metric) for group in found for place in places}
        if not any(len(each) for each in scores.values()):
            continue
        best = {place: max((each.mean() for (_, at), each in scores.items() if at == place and len(each)), default=0.0)
                for place in places}  # fmt: skip
        rows = []
        for group in found:
            cells = [_cell(scores[group.label, place], best[place]) for place in places]
            rows.append((group.label, cells))
        share = metric == "test_battle_won_mean"
        tables.append({"title": title, "places": places, "rows": rows, "share": share})
    return tables


def _last(runs: Sequence[Run], metric: str) -> np.ndarray:
    ends = [run.test_curve(metric)[2][-1:] for run in runs if run.kind == "training"]
    return np.concatenate(ends) if ends else np.zeros(0)


def _cell(scores: np.ndarray, best: float) -> dict[str, Any]:
    """Return mean, interval and number of seeds, as text and as numbers."""
    if not len(scores):
        return {}
    found = interval(mean, [scores])
    low, high = (float(scores.mean()),) * 2 if found is None else (float(found[0]), float(found[1]))
    middle = float(scores.mean())
    ends = "" if found is None else f"{number_text(low)} to {number_text(high)}"
    return {"mean": number_text(middle), "interval": ends, "n": len(scores), "best": middle >= best,
            "low": low, "high": high, "value": middle}  # fmt: skip


def charts(found: Sequence[Group]) -> tuple[list[tuple[str, list[Chart]]], list[tuple[str, str]]]:
    """Return the curves of win rate and return with bands over seeds, and the style and label of each group."""
    styles = {group.label: style_of(number) for number, group in enumerate(found)}
    sections = []
    for metric, title in (("test_battle_won_mean", "Win rate"), ("test_return_mean", "Return")):
        with_tests = [group for group in _kept(found, metric) if group.runs]
        if not with_tests:
            continue
        top = 1.0 if curves.ranges(with_tests, metric) is None and metric == "test_battle_won_mean" else None
        panels = curves.curve_panels(with_tests, metric, "steps", None)
        label = curves.LABELS[metric]
        drawn = [curve_chart(p, label, styles, 1.0 if p.normalised else top) for p in panels]
        sections.append((title, [each for each in drawn if each is not None]))
    return sections, [(style, label) for label, style in styles.items()]


def _kept(found: Sequence[Group], metric: str) -> list[Group]:
    """Return the groups with only their trainings that have tests of a metric, each seed once on a map."""
    kept = [
        Group(group.label, group.values, tuple(run for run in group.runs if _has_curve(run, metric)))
        for group in found
    ]  # fmt: skip
    return curves.without_repeats(kept)[0]


def _has_curve(run: Run, metric: str) -> bool:
    return run.kind == "training" and len(run.test_curve(metric)[0]) > 0


def stage_values(found: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a table for each stage: a row for each arm and environment, with the mean over seeds of every result."""
    tables = []
    for stage, title in STAGES.items():
        rows = []
        for group in found:
            for place in curves.places([group]):
                values = [values_of(run, stage) for run in group.at(place)]
                rows.append((group.label, place, {key: [v[key] for v in values if key in v] for key in SHOWN}))
        keys = [key for key in SHOWN if any(row[2][key] for row in rows)]
        if keys:
            body = [
                [label, place, *(number_text(float(np.mean(v[key]))) if v[key] else "-" for key in keys)]
                for label, place, v in rows if any(v.values())
            ]  # fmt: skip
            tables.append({"title": title, "head": ["arm", "environment", *(SHOWN[key] for key in keys)], "rows": body})
    return tables


def times(found: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the time of each arm by phase over all stages, mean over its runs."""
    rows = []
    for group in found:
        total: Counter[str] = Counter()
        walls = []
        for run in group.runs:
            parts = list(phase_seconds(run).values())
            wall = sum(part.pop("wall", 0.0) for part in parts)
            if wall > 0:
                walls.append(wall)
                for part in parts:
                    total.update(part)
        if walls:
            shares = [
                (name, duration(s / len(walls)), 100 * s / sum(walls))
                for name, s in total.most_common()
                if s >= SLOWEST_SHARE * sum(walls)
            ]
            rows.append({"title": group.label, "wall": duration(float(np.mean(walls))), "parts": shares})
    return rows


def differing_keys(found: Sequence[Group]) -> list[list[str]]:
    """Return a row for each key in which arms differ, with its value in each arm."""
    keys = telling([group.values for group in found])
    keys += [key for key in dict.fromkeys(key for group in found for key in group.values) if key not in keys]
    return [[key, *(shown(group.values, key) for group in found)] for key in keys]


def run_rows(found: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row for each run."""
    rows = []
    for group in found:
        for run in group.runs:
            values = values_of(run, "stage3") or next((v for s in STAGES if (v := values_of(run, s))), {})
            steps = run.tests[-1]["t_env"] if run.tests else None
            seconds = run.summary.get("wall_seconds")
            rows.append({
                "name": run.label, "arm": group.label, "place": run.place, "seed": run.seed, "state": run.state,
                "won": number_text(values.get("test_battle_won_mean")), "steps": number_text(steps),
                "best": number_text(values.get("best_test_battle_won_mean")),
                "returned": number_text(values.get("test_return_mean")),
                "time": "-" if seconds is None else duration(seconds), "card": str(run.card.get("id", "-")),
                "warnings": warnings_of(run),
            })  # fmt: skip
    return rows


def study_jobs(folder: Path) -> list[tuple[str, str, str]]:
    """Return name, state and error of the jobs of a study that have not ended well."""
    try:
        entries = read_json(folder / STUDY_FILE, LONGEST_STUDY)["jobs"]
        jobs = [(entry["job"]["name"], entry["state"], entry.get("error", "")) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [tuple(readable(str(part)) for part in job) for job in jobs if job[1] not in ("done", "elsewhere")]  # type: ignore[misc]


def battles(found: Sequence[Group]) -> dict[str, Any]:
    """Return pictures of battles of the arms and the player of one recording, as many as the page may hold."""
    left, page, problems = PICTURES_BYTES, "", list[str]()
    shown_pictures: list[tuple[str, str]] = []
    for group in found:
        for run in group.runs:
            if not page:
                page, problem = player(run)
                page = page if len(page) <= left else ""
                left -= len(page)
                problems += [f"{run.label}: {problem}"] if problem else []
        first = next(((run, each) for run in group.runs for each in pictures(run)[:1]), None)
        if first is not None and len(first[1][1]) <= left and len(shown_pictures) < MOST_PICTURES:
            run, (caption, data) = first
            shown_pictures.append((f"{group.label}, {run.label}: {caption}", data))
            left -= len(data)
    return {"pictures": shown_pictures, "player": page, "problems": problems}


def study_facts(runs: Sequence[Run], problems: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Return what the template shows of many runs."""
    found = groups(runs)
    jobs = [job for folder in folders for study in studies_at(folder) for job in study_jobs(study)]
    failed = [f"{name}: {state}" + (f": {error}" if error else "") for name, state, error in jobs if state == "failed"]
    waiting = Counter(state for _, state, _ in jobs if state != "failed")
    marked, incomparable = curves.incomparable(found)
    counted, repeats = curves.without_repeats(found)
    rows = run_rows(found)
    seen = battles(found)
    warnings = [*(f"left out: {readable(problem)}" for problem in problems), *incomparable, *repeats, *seen["problems"]]
    warnings += [f"{number} jobs of the study are {state}" for state, number in waiting.items()]
    warnings += [f"{row['name']}: {line}" for row in rows for line in row["warnings"]]
    sections, legend = charts(found)
    states = Counter(run.state for run in runs)
    seeds = len({run.seed for run in runs})
    tables = results(counted)
    cells = [cell for table in tables for _, row in table["rows"] for cell in row]
    few = any(cell and cell["interval"] and cell["n"] < FEW_SEEDS for cell in cells)
    sizes = {"run": len(runs), "arm": len(found), "environment": len(curves.places(found)), "seed": seeds}
    return {
        "kind": "study", "runs": rows, "arms": len(found), "places": curves.places(found), "results": tables,
        "few": FEW if few else "", "belief_tests": _belief_tests(runs, folders, warnings),
        "charts": sections, "legend": legend, "keys": differing_keys(found),
        "labels": [group.label for group in found], "stage_values": stage_values(counted),
        "times": times(counted), "time_note": time_note(runs),
        "failed": failed, "warnings": warnings, "battles": seen, "marked": marked,
        "tiles": [*(_count(noun, number) for noun, number in sizes.items()),
                  *((state, str(number)) for state, number in states.most_common())],
    }  # fmt: skip


def _belief_tests(runs: Sequence[Run], folders: Sequence[Path], warnings: list[str]) -> list[belief_tests.Table]:
    """Return the tests of beliefs in the folders that the user named, then those of the runs, each once.

    Beside a results file are those of other studies, too: of these only the maps of the runs are shown.
    """
    named = {folder.absolute(): None for folder in (*folders, *(run.folder for run in runs)) if not folder.is_file()}
    beside = {folder.absolute().parent: {run.place for run in runs} for folder in folders if folder.is_file()}
    made = []
    for folder, places in {**beside, **named}.items():
        try:
            found = belief_tests.records(folder)
        except OSError as problem:
            warnings.append(f"{folder / belief_tests.FILE}: cannot be read ({problem.strerror})")
            continue
        found = [each for each in found if places is None or f"{each.get('env')} {each.get('map')}" in places]
        shown = belief_tests.tables(found)
        made += shown
        if lost := len(found) - len(shown):
            warnings.append(f"{folder / belief_tests.FILE}: {lost} of {len(found)} tests cannot be shown")
    return made


def _count(noun: str, number: int) -> tuple[str, str]:
    return noun + "s" * (number != 1), str(number)
