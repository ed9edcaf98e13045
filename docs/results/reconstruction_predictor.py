"""What the pages of the study of reconstruction say of the predictor, and of tests without training, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from reconstruction_data import PREDICTOR_SEEDS, Data

from omagd.run.analysis import belief_tests
from omagd.run.analysis.contrasts import METHOD, text_of
from omagd.run.analysis.predictor_aim import ROWS, Judgement, judged, mean_row
from omagd.run.analysis.runs import Run

GUESSES = {"predictor": "reconstruction", "ridge": "ridge regression", "last_seen": "last seen",
           "last_seen_or_mean": "last seen, else mean", "map_constant": "map constant"}  # fmt: skip
"""Titles of the predictor and of baselines."""

PLACES = [key for key in GUESSES if key != "last_seen_or_mean"]
"""Those whose error of the position the page shows."""

PREDICTORS = "ridge", "omagd, no deaths", "omagd, linear means", METHOD
"""Names of the predictors that benchmarks/belief_parts.py compares."""

RIDGE, STAGES = "ridge", ("stage2", "stage3")
"""An arm with a predictor of its own, and the stages whose summaries have tables of errors."""

OF_UNITS = {"enemy_never": "never seen", "enemy_before": "seen before"}
"""Rows of enemies that the page shows of each map; the page of details has them by steps since the last sight."""

SHOWN = (
    *((name, title, STAGES[0]) for name, title in ROWS.items()), ("ally", "allies, all", STAGES[0]),
    ("enemy", "enemies, all, in battles of the arm's own teams", STAGES[1]),
    ("enemy_before", "enemies, seen before, in battles of the arm's own teams", STAGES[1]),
)  # fmt: skip
"""Name, title and stage of the rows about predictors: those of stage 2 are of battles of scripts."""

NOT_YET = "*Not run yet.*"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cheap_tests(data: Data) -> str:
    """Return a table of the plug-in tests and of the swap tests: win rates by belief."""
    rows = []
    for each in data.beliefs:
        if each["test"] != "census" and each.get("reconstruction") not in PREDICTORS[:-1]:
            played = [f"{each['beliefs'][name]['win_rate']:.3f}" if name in each["beliefs"] else "-"
                      for name in belief_tests.NAMES]  # fmt: skip
            rows.append([each["test"], _place(each), each["policy"], f"{each['episodes']:,}", *played])
    return markdown(["test", "map", "who acts", "battles", *belief_tests.NAMES.values()], rows) if rows else NOT_YET


def _place(record: Mapping[str, Any]) -> str:
    return f"{record['env']} {record['map']}"


def _share(played: Mapping[str, Any]) -> str:
    """Return the share of the difference between both ends, `-` where there is none."""
    share = played["share"]
    return "-" if share is None else text_of(share, played["share_interval"])


def parts_of_beliefs(data: Data) -> str:
    """Return a table of tests of what wins battles in predictions: `PREDICTORS` beside each other."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for each in data.beliefs:
        if each.get("reconstruction") in PREDICTORS:
            found.setdefault((each["test"], _place(each)), {})[each["reconstruction"]] = each["beliefs"]
    rows = []
    for (test, place), played in found.items():
        if played.keys() == set(PREDICTORS):
            ends = (played[METHOD][name]["win_rate"] for name in (belief_tests.LOWER, belief_tests.UPPER))
            low, high = (f"{rate:.3f}" for rate in ends)
            each_one = (played[name]["reconstruction"] for name in PREDICTORS)
            shares = [f"{entry['win_rate']:.3f}, {_share(entry)}" for entry in each_one]
            rows.append([test, place, low, *shares, high])
    head = ["test", "map", "what agents see", *(f"`{name}`" for name in PREDICTORS), "everything"]
    return markdown(head, rows) if rows else NOT_YET


def predictor_part(data: Data) -> str:
    """Return what the predictor knows of the enemies on each map: where they are, and who is dead."""
    where, dead = [], []
    for place in data.studied():
        if (found := _judged(data, place)) is None:
            continue
        of_scripts, of_teams = (partial(_mean, data, place, METHOD, stage=stage) for stage in STAGES)
        every, before, own = of_scripts("enemy"), of_scripts("enemy_before"), of_teams("enemy")
        for name, title in OF_UNITS.items():
            if mean := of_scripts(name):
                cells = (_guess(mean, "position_rms", key, name, 1) for key in PLACES)
                where.append([place, title, f"{mean['count'] / every['count']:.0%}", *cells])
        r2 = ", ".join(_guess(every, "health_r2", key, "", 3) for key in ("predictor", "ridge"))
        shares = [f"{row[key]:.3f}" if key in row else "-" for row, key in (
            (before, "taken_for_dead"), *((row, "recall_dead") for row in (before, every, own)))]  # fmt: skip
        dead.append([place, *shares, r2, found.state + f": {found.worst}" * bool(found.worst)])
    if not where:
        return NOT_YET
    head = ["map", "living, seen before, taken for dead", "dead recognised: seen before", "all",
            "all, in battles of the trained team", "R² of health: reconstruction, ridge regression",
            "meets what was asked"]  # fmt: skip
    of_places = markdown(["map", "living enemies", "share of all", *(GUESSES[key] for key in PLACES)], where)
    return f"{of_places}\n\n{markdown(head, dead)}"


def _guess(row: Mapping[str, Any], measure: str, guess: str, name: str, digits: int) -> str:
    """Return a number of a guess; of the last sight none in rows of units that were never seen."""
    value = None if guess == "last_seen" and name.endswith("never") else row.get(measure, {}).get(guess)
    return "-" if value is None else f"{value:.{digits}f}"


def _mean(data: Data, place: str, arm: str, name: str, stage: str) -> Mapping[str, Any]:
    """Return a row of the errors of an arm's predictor, mean over its seeds."""
    return mean_row([table.get(name, {}) for table in _tables(data, place, arm, stage)])


def _judged(data: Data, place: str) -> Judgement | None:
    """Return whether the predictor is what was asked, by means over its seeds; None where no row has cases."""
    rows = {name: _mean(data, place, METHOD, name, STAGES[0]) for name in ROWS}
    return judged(rows, len(_tables(data, place, METHOD, STAGES[0])), PREDICTOR_SEEDS) if any(rows.values()) else None


def errors_part(data: Data) -> str:
    """Return for each map the errors of the predictor, of the arm `ridge` (means over seeds), and of other guesses."""
    made = []
    for place in data.studied():
        if (found := _judged(data, place)) is not None:
            rows = []
            for name, title, stage in SHOWN:
                mean, of_arm = (_mean(data, place, arm, name, stage) for arm in (METHOD, RIDGE))
                if mean:
                    errors = [_guess(mean, "mse", key, name, 3) for key in GUESSES]
                    rows.append([title, f"{mean['count']:,.0f}", errors[0], _guess(of_arm, "mse", "predictor", "", 3),
                                 *errors[1:]])  # fmt: skip
            heads = list(GUESSES.values())
            table = markdown(["living units, last seen", "cases", heads[0], f"arm `{RIDGE}`", *heads[1:]], rows)
            seeds = len(_tables(data, place, METHOD, STAGES[0]))
            said = f"**Meets what was asked: {found.state}.** {found.words[0].upper()}{found.words[1:]}; {seeds} seeds."
            made.append(f"### Errors on {place}\n\n{table}\n\n{said}")
    return "\n\n".join(made) or NOT_YET


def _tables(data: Data, place: str, arm: str, stage: str) -> list[Mapping[str, Mapping[str, Any]]]:
    """Return the table of each run of an arm that has one."""
    runs = [run for group in data.study if group.label == arm for run in group.at(place)]
    return [table for run in runs if (table := _beliefs(run, stage))]


def _beliefs(run: Run, stage: str) -> Mapping[str, Mapping[str, Any]]:
    found = run.summary.get("stages", {}).get(stage, {}).get("beliefs", {})
    return {row["row"]: row for row in found.get("rows", [])} if isinstance(found, dict) else {}
