"""Redraws the two pages of the study of reconstruction, their pictures and the README's summary from the data beside them.

    cp benchmarks/studies/reconstruction_*.jsonl docs/results/reconstruction/    # after runs
    python docs/results/make_reconstruction.py

Reads docs/results/reconstruction/: the results files of the studies (`reconstruction_gate.jsonl` and
`reconstruction_<other>.jsonl`), `beliefs.jsonl` of `omagd beliefs`, and `battle.json.gz`, a recording. It replaces what is
between the markers of the pages and draws PNGs; no run's folder is needed. Tables are the same in every call.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from reconstruction_data import (
    AGAIN, CONTROLS, LEAST_GAP, LONGER, MAPS, MAPS_ASKED, PREDICTOR_SEEDS, RESERVE, SEEDS, Data, by_arm,
)  # fmt: skip

from omagd.run.analysis import belief_tests
from omagd.run.analysis.contrasts import (
    LOWER,
    METHOD,
    METRIC,
    UPPER,
    contrasts,
    cpu_hours,
    cpu_minutes,
    final_tests,
    gate,
    gate_table,
    text_of,
)
from omagd.run.analysis.curves import curve_panels, final_panels
from omagd.run.analysis.figures import Axes, render
from omagd.run.analysis.groups import Group
from omagd.run.analysis.plot import caption
from omagd.run.analysis.predictor_aim import ROWS, conditions, mean_row
from omagd.run.analysis.runs import Run
from omagd.run.analysis.statistics import difference, gap_share, iqm
from omagd.run.watch.moments import write_png
from omagd.run.watch.recording import Recording
from omagd.utils.errors import UserError
from omagd.utils.writing import replace_file

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "results" / "reconstruction.md", ROOT / "README.md"
DETAILS = PAGE.with_name("reconstruction_details.md")
DATA = PAGE.with_suffix("")
BATTLE, BELIEFS_PICTURE = "battle.json.gz", "beliefs.png"

VARIED = ("belief_inputs", "omagd"), ("sample", "omagd"), ("masked_truth", "masked")
"""Each variant, and the arm without what it adds."""

GUESSES = {"predictor": "reconstruction", "ridge": "ridge regression", "last_seen": "last seen",
           "last_seen_or_mean": "last seen, else mean", "map_constant": "map constant"}  # fmt: skip
PREDICTORS = "ridge", "omagd, no deaths", "omagd, linear means", METHOD
"""Names of the predictors that benchmarks/belief_parts.py compares."""

BETTER = "P(better than last_seen)", f"P(better than {LOWER})"
"""The probabilities of improvement that the page shows."""

RIDGE, STAGES = "ridge", ("stage2", "stage3")
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


def table_of_maps(data: Data) -> str:
    """Return the maps with predicted class, census and gate."""
    census = {f"{each['env']} {each['map']}": each for each in data.beliefs if each["test"] == "census"}
    entered = {**dict.fromkeys(CONTROLS, "control"), **{p: "yes" if e else "no" for p, e in data.entered().items()}}
    rows = []
    for place, kind in data.places.items():
        found = census.get(place)
        of_census = ["-"] * 3
        if found is not None:
            unseen, explained = found["units"]["enemy"]["unseen"], (found["inferable"], found["inferable_before"])
            shares = ["-" if share is None else f"{share:.2f}" for share in explained]
            of_census = [found["class"], f"{unseen:.0%}", ", ".join(shares)]
        rows.append([place, kind, *of_census, entered.get(place, "not run yet")])
    head = ["Map", "Predicted class", "Class by census", "Enemies unseen", "Ridge explains: all, before contact", "Enters"]
    return markdown(head, rows)


def table_of_gate(data: Data) -> str:
    """Return the table of the gate."""
    if not (rows := data.gate()):
        return NOT_YET
    found = gate_table(rows, LOWER, UPPER, LEAST_GAP)
    return f"{markdown(found['head'], found['rows'])}\n\n{found['note']}"


def gap_again(data: Data) -> str:
    """Return the table of the gap that is asked for once more, and of all runs after the gate together."""
    if not {LOWER, UPPER} <= {run.arm for run in data.again}:
        return NOT_YET
    rows, table = gate(data.again, LOWER, UPPER, LEAST_GAP), []
    for row in rows:
        asked = [("once more", row.low, row.high)]
        if {LOWER, UPPER} <= (of_study := final_tests(data.study, row.place)).keys():
            both = (np.concatenate([of_study[arm], again]) for arm, again in ((LOWER, row.low), (UPPER, row.high)))
            asked.append(("main study and once more", *both))
        for words, low, high in asked:
            means = [f"{values.mean():.3f}" for values in (low, high)]
            table.append([row.place, words, f"{len(low)}, {len(high)}", *means, text_of(*difference([high], [low]), 3)])
    return markdown(["environment", "runs", "number", f"`{LOWER}`", f"`{UPPER}`", "difference"], table)


def cheap_tests(data: Data) -> str:
    """Return a table of the plug-in tests and of the swap tests: win rates by belief."""
    rows = []
    for each in data.beliefs:
        if each["test"] != "census" and each.get("reconstruction") not in PREDICTORS[:-1]:
            played = [f"{each['beliefs'][name]['win_rate']:.3f}" if name in each["beliefs"] else "-"
                      for name in belief_tests.NAMES]  # fmt: skip
            rows.append([each["test"], f"{each['env']} {each['map']}", each["policy"], f"{each['episodes']:,}", *played])
    return markdown(["test", "map", "who acts", "battles", *belief_tests.NAMES.values()], rows) if rows else NOT_YET


def parts_of_beliefs(data: Data) -> str:
    """Return a table of tests of what wins battles in predictions: `PREDICTORS` beside each other."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for each in data.beliefs:
        if each.get("reconstruction") in PREDICTORS:
            found.setdefault((each["test"], f"{each['env']} {each['map']}"), {})[each["reconstruction"]] = each["beliefs"]
    rows = []
    for (test, place), played in found.items():
        if played.keys() == set(PREDICTORS):
            ends = (played[METHOD][name]["win_rate"] for name in (belief_tests.LOWER, belief_tests.UPPER))
            low, high = (f"{rate:.3f}" for rate in ends)
            each_one = (played[name]["reconstruction"] for name in PREDICTORS)
            shares = [f"{entry['win_rate']:.3f}, {text_of(entry['share'], entry['share_interval'])}" for entry in each_one]
            rows.append([test, place, low, *shares, high])
    head = ["test", "map", "what agents see", *(f"`{name}`" for name in PREDICTORS), "everything"]
    return markdown(head, rows) if rows else NOT_YET


def verdict_lines(data: Data) -> str:
    """Return a line for each map, and one on class b as a whole."""
    found, entered = data.verdicts(), data.entered()
    asked = [each for each in found if each.kind == "b"]
    good = sum(each.state == "holds" and entered.get(each.place, False) for each in asked)  # through the gate
    waiting = sum(each.state != "does not hold" for each in asked) - good
    enough = good >= MAPS_ASKED
    spare = 0 if sum(entered.values()) >= MAPS_ASKED else len(RESERVE.keys() - entered.keys())  # the gate goes on
    state = "holds" if enough else "open" if good + waiting + spare >= MAPS_ASKED else "does not hold"
    total = (f"**Class b as a whole: {state}.** Of {len(asked)} map{'s' * (len(asked) != 1)} it holds on {good},"
             f" {waiting} {'is' if waiting == 1 else 'are'} undecided (asked: at least {MAPS_ASKED}).")  # fmt: skip
    if len(entered) >= len(MAPS.keys() - CONTROLS) and spare:
        total += f" Maps of the reserve that are not tried yet: {spare}."
    if out := [place for place, enters in entered.items() if not enters]:
        total += f" Not through the gate: {', '.join(out)}."
    return "\n".join(f"- {line}" for line in (*(each.text for each in found), total))


def figures(data: Data) -> dict[str, bytes]:
    """Return the pictures by file name: the last tests and the curves of the main study."""
    drawn = {}
    if data.study:
        labels = tuple(group.label for group in data.study)
        final = Axes("final", "win rate of the last test", "", labels, unit=True, gap=(LOWER, UPPER))
        curves = Axes("curves", "environment steps", "win rate", labels, columns=2)
        panels = {"final": (final, final_panels(data.study, METRIC, "iqm", total=False)),
                  "curves": (curves, curve_panels(data.study, METRIC, "steps", "iqm", total=False))}  # fmt: skip
        for kind, (axes, shown) in panels.items():
            ordered = sorted(shown, key=lambda panel: [*data.places, panel.title].index(panel.title))
            ordered = [replace(panel, title=f"{panel.title.split()[-1]} ({data.places[panel.title]})")
                       for panel in ordered]  # fmt: skip
            names = " and ".join(dict.fromkeys(panel.title.split()[0] for panel in shown))
            words = f"Maps of {names}; in brackets: class. {caption(kind, ordered, data.study, axes.gap)}"
            drawn[f"{kind}.png"] = render(ordered, axes, words, "double", set())["png"]
    return drawn


def picture(name: str, words: str, page: Path) -> str:
    """Return the picture of a file beside the data, as seen from a page."""
    return f"![{words}]({(DATA / name).relative_to(page.parent)})"


def final_part(data: Data, page: Path) -> str:
    """Return the picture of the last tests."""
    if not data.study:
        return NOT_YET
    words = ("Win rate of the last test of each arm on each map, interquartile mean over seeds with its 95 % interval;"
             " the gap from baseline up to full_obs is shaded")  # fmt: skip
    return picture("final.png", words, page)


def tables(data: Data) -> str:
    """Return a table for each map of the main study."""
    found = {table["title"]: table for table in contrasts(data.study)}
    parts = []
    for place in data.studied():
        if place in found:
            head = found[place]["head"]
            kept = [i for i, name in enumerate(head) if not name.startswith("P(") or name in BETTER]
            rows = [[row[i] for i in kept] for row in (head, *found[place]["rows"])]
            parts.append(f"### {place}\n\n{markdown(rows[0], rows[1:])}")
    notes = [found[place]["note"] for place in data.studied() if place in found]
    return "\n\n".join([*parts, max(notes, key=len)]) if parts else NOT_YET  # the longest: a map with a gap has all


def each_seed(data: Data) -> str:
    """Return the win rate of the last test of each run, a table for each map."""
    made = []
    for place in data.studied():
        runs = {group.label: {run.seed: run for run in group.at(place)} for group in data.study if group.at(place)}
        seeds = sorted({seed for of_arm in runs.values() for seed in of_arm if seed is not None})
        rows = [[arm, *(_last_test(of_arm.get(seed)) for seed in seeds)] for arm, of_arm in runs.items()]
        made.append(markdown([place, *map(str, seeds)], rows))
    return "\n\n".join(made) or NOT_YET


def _last_test(run: Run | None) -> str:
    values = () if run is None else run.test_curve(METRIC)[2]
    return f"{values[-1]:.3f}" if len(values) else "-"


def curves_part(data: Data) -> str:
    """Return the picture of the curves."""
    words = "Win rate in tests over environment steps, one panel per map, interquartile mean with 95 % bands over seeds"
    return picture("curves.png", words, PAGE) if data.study else NOT_YET


def variants_part(data: Data) -> str:
    """Return a table of the variants beside the arm without what each adds, with all of its seeds."""
    rows = []
    for place in dict.fromkeys(run.place for run in data.variants):
        last = final_tests(by_arm([*data.study_runs, *data.variants]), place)
        for arm, other in VARIED:
            if {arm, other} <= last.keys():
                won, without = last[arm], last[other]
                each = ", ".join(f"{value:.3f}" for value in won)
                gain = text_of(*difference([won], [without], iqm)) if len(won) >= SEEDS[0] else "-"
                beside = f"{len(without)} seeds, {min(without):.3f} to {max(without):.3f}"
                rows.append([place, f"`{arm}`", each, f"`{other}`: {beside}", gain])
    head = ["map", "variant", "last test of each seed", "without it", "difference of IQMs"]
    return markdown(head, rows) if rows else NOT_YET


def battle_part(data: Data) -> str:
    """Return the picture of a battle."""
    words = "Three moments of a battle of a trained team: what an agent sees, what it believes, and what is true"
    return picture(BELIEFS_PICTURE, words, PAGE) if (data.folder / BATTLE).is_file() else NOT_YET


def predictor_part(data: Data) -> str:
    """Return what the predictor knows of the enemies on each map: where they are, and who is dead."""
    where, dead = [], []
    for place in data.studied():
        if not any(judged := _judged(data, place)):
            continue
        of_scripts, of_teams = (partial(_mean, data, place, METHOD, stage=stage) for stage in STAGES)
        for name, title in OF_UNITS.items():
            if mean := of_scripts(name):
                cells = (_number(mean, "position_rms", key, 1) for key in GUESSES if key != "last_seen_or_mean")
                where.append([place, title, f"{mean['count'] / of_scripts('enemy')['count']:.0%}", *cells])
        every, before, own = of_scripts("enemy"), of_scripts("enemy_before"), of_teams("enemy")
        r2 = (_number(every, "health_r2", key, 2) for key in ("predictor", "ridge"))
        shares = [f"{row[key]:.3f}" if key in row else "-" for row, key in (
            (before, "taken_for_dead"), *((row, "recall_dead") for row in (before, every, own)))]  # fmt: skip
        dead.append([place, *shares, ", ".join(r2), _predictor_verdict(*judged).split("**")[1].strip(".").lower()])
    if not where:
        return NOT_YET
    heads = [title for key, title in GUESSES.items() if key != "last_seen_or_mean"]
    of_dead = ["map", "living, seen before, taken for dead", "dead recognised: seen before", "all",
               "all, in battles of the trained team", "R² of health: reconstruction, ridge regression", "what was asked"]  # fmt: skip
    return f"{markdown(['map', 'living enemies', 'share of all', *heads], where)}\n\n{markdown(of_dead, dead)}"


def _number(row: Mapping[str, Any], measure: str, guess: str, digits: int) -> str:
    value = row.get(measure, {}).get(guess)
    return "-" if value is None else f"{value:.{digits}f}"


def _mean(data: Data, place: str, arm: str, name: str, stage: str) -> Mapping[str, Any]:
    """Return a row of the errors of an arm's predictor, mean over its seeds."""
    return mean_row([table.get(name, {}) for table in _tables(data, place, arm, stage)])


def _judged(data: Data, place: str) -> tuple[Mapping[str, Mapping[str, Any]], int]:
    """Return the rows of enemies by name, means over seeds, and the number of seeds; no rows where none has cases."""
    rows = {name: _mean(data, place, METHOD, name, STAGES[0]) for name in ROWS}
    return (rows, len(_tables(data, place, METHOD, STAGES[0]))) if any(rows.values()) else ({}, 0)


def errors_part(data: Data) -> str:
    """Return for each map the errors of the predictor, means over seeds, of the arm `ridge`, and of the simple guesses."""
    made = []
    for place in data.studied():
        if any(judged := _judged(data, place)):
            rows = []
            for name, title, stage in SHOWN:
                mean, of_arm = (_mean(data, place, arm, name, stage) for arm in (METHOD, RIDGE))
                if mean:
                    own = f"{of_arm['mse']['predictor']:.3f}" if of_arm else "-"
                    errors = [f"{mean['mse'][key]:.3f}" for key in GUESSES]
                    rows.append([title, f"{mean['count']:,.0f}", errors[0], own, *errors[1:]])
            heads = list(GUESSES.values())
            table = markdown(["living units, last seen", "cases", heads[0], f"arm `{RIDGE}`", *heads[1:]], rows)
            made.append(f"### Errors on {place}\n\n{table}\n\n{_predictor_verdict(*judged)}")
    return "\n\n".join(made) or NOT_YET


def _tables(data: Data, place: str, arm: str, stage: str) -> list[Mapping[str, Mapping[str, Any]]]:
    """Return the table of each run of an arm that has one."""
    runs = [run for group in data.study if group.label == arm for run in group.at(place)]
    return [table for run in runs if (table := _beliefs(run, stage))]


def _beliefs(run: Run, stage: str) -> Mapping[str, Mapping[str, Any]]:
    found = run.summary.get("stages", {}).get(stage, {}).get("beliefs", {})
    return {row["row"]: row for row in found.get("rows", [])} if isinstance(found, dict) else {}


def _predictor_verdict(rows: Mapping[str, Mapping[str, Any]], seeds: int) -> str:
    """Return whether the predictor is what was asked, the conditions that it misses first; open where one is unknown."""
    states = {False: "does not hold", None: "open", True: "holds"}  # the worst comes first
    found = sorted(conditions(rows), key=lambda each: list(states).index(each.met))
    state = "open" if seeds < PREDICTOR_SEEDS else states[found[0].met]
    words = "; ".join(each.words for each in found)
    return f"**{state.capitalize()}.** {words[0].upper()}{words[1:]}; {seeds} seed{'s' * (seeds != 1)}."


def cost(data: Data) -> str:
    """Return how many runs there are, what they took, and which code each arm ran with."""
    if not data.runs:
        return NOT_YET
    hours, unknown = cpu_hours(data.runs), sum(run.cpu_seconds is None for run in data.runs)
    lines = [f"{len(data.runs)} runs, {hours:.1f} core-hours" + f" ({unknown} runs without a figure)" * bool(unknown)]
    commits: dict[str, dict[tuple[str, str], int]] = {}
    kinds = ("gate, ", "", "float32, ", "equal CPU time, ", "variants, ")
    for part, runs in zip(kinds, (data.gate_runs, data.study_runs, data.again, data.longer, data.variants), strict=True):
        for run in runs:
            name = run.commit[:12] + "-dirty" * run.commit.endswith("-dirty") or "unknown"
            counts = commits.setdefault(name, {})
            counts[part + run.place, run.arm] = counts.get((part + run.place, run.arm), 0) + 1
    for name, counts in commits.items():
        places = [f"{place}: " + ", ".join(f"`{arm}` {n}" for (at, arm), n in counts.items() if at == place)
                  for place in dict.fromkeys(place for place, _ in counts)]  # fmt: skip
        lines.append(f"Commit `{name}`, {sum(counts.values())} runs. {'; '.join(places)}")
    lines += [f"**Runs of different settings are one arm**: {each}" for each in mixed(data)]
    return "\n".join(f"- {line}." for line in lines)


def mixed(data: Data) -> list[str]:
    """Return the arms, each with its map, whose runs in the main study differ in more than the seed."""
    cards: dict[tuple[str, str], set[tuple[Any, Any]]] = {}
    for run in data.study_runs:
        cards.setdefault((run.arm, run.place), set()).add((run.card.get("id"), run.card.get("method")))
    return [f"`{arm}` on {place}" for (arm, place), found in cards.items() if len(found) > 1]


def equal_time(data: Data) -> str:
    """Return a table of what `LOWER` wins with as much CPU time as `METHOD`, of maps that are finished; empty without."""
    rows = []
    for place in data.studied():
        if longer := [run for run in data.longer if run.place == place]:
            last = final_tests([*data.study, Group(LONGER, {}, tuple(longer))], place)
            minutes = {group.label: cpu_minutes(group.at(place)) for group in data.study} | {LONGER: cpu_minutes(longer)}
            rates = [f"{float(iqm([last[label]])):.2f} ({minutes[label]:.0f})" for label in (LOWER, METHOD, LONGER)]
            steps, seeds = longer[0].tests[-1]["t_env"] / 1e6, f"{len(last[METHOD])}, {len(last[LONGER])}"
            gain = text_of(*difference([last[METHOD]], [last[LONGER]], iqm))
            rows.append([place, seeds, *rates, f"{steps:.0f} million", gain])
    head = ["map", "seeds", f"`{LOWER}`", f"`{METHOD}`", f"`{LOWER}` with more steps", "steps of it", "`omagd` - that"]
    words = f"What `{LOWER}` wins with as much CPU time, by more steps. In brackets: CPU minutes of a run.\n\n"
    return words + markdown(head, rows) if rows else ""


def answer(data: Data) -> str:
    """Return the table of what was found: a line for each finished map."""
    rows = []
    for place in data.studied():
        last = final_tests(data.study, place)
        if not {LOWER, METHOD} <= last.keys():
            continue
        kind, low = data.places[place], last[LOWER]
        share = "-"
        if UPPER in last and iqm([last[UPPER]]) > iqm([low]):
            share = text_of(*gap_share([last[METHOD]], [low], [last[UPPER]], iqm))
        rates = [f"{float(iqm([last[arm]])):.2f}" if arm in last else "-" for arm in (LOWER, METHOD, UPPER)]
        gain = text_of(*difference([last[METHOD]], [low], iqm))
        rows.append([f"{place} ({kind})", str(len(low)), *rates, gain, share, _cost(data, place), data.verdict(place, kind).short])
    head = ["map (class)", "seeds", f"`{LOWER}`", f"`{METHOD}`", f"`{UPPER}`", f"`{METHOD}` - `{LOWER}`", "share of the gap",
            f"CPU time relative to `{LOWER}`", "by the rules"]  # fmt: skip
    return markdown(head, rows) if rows else NOT_YET


def _cost(data: Data, place: str) -> str:
    """Return how many times the CPU time of `LOWER` a run of `METHOD` takes, seed by seed: least and most.

    Runs were made on different machines under different load, so one number would say more than is known.
    """
    took: dict[str, dict[int | None, float]] = {
        group.label: {run.seed: run.cpu_seconds for run in group.at(place) if run.cpu_seconds} for group in data.study
    }
    low, own = (took.get(label, {}) for label in (LOWER, METHOD))
    times = sorted(own[seed] / low[seed] for seed in own.keys() & low.keys())
    return f"{times[0]:.1f} to {times[-1]:.1f}" if times else "-"


def summary(data: Data) -> str:
    """Return the README's lines."""
    if not data.runs:
        return f"{NOT_YET} The question, the maps and the rules are written down."
    return f"{answer(data)}\n\n{final_part(data, README)}"


def parts(data: Data) -> dict[Path, dict[str, str]]:
    """Return what is between the markers of each page."""
    return {
        PAGE: {
            "answer": answer(data), "final": final_part(data, PAGE), "curves": curves_part(data), "tables": tables(data),
            "verdicts": verdict_lines(data), "parts": parts_of_beliefs(data), "longer": equal_time(data),
            "predictor": predictor_part(data), "battle": battle_part(data), "maps": table_of_maps(data),
        },
        DETAILS: {
            "gate": table_of_gate(data), "again": gap_again(data), "tests": cheap_tests(data),
            "variants": variants_part(data), "seeds": each_seed(data), "errors": errors_part(data), "cost": cost(data),
        },
        README: {"reconstruction": summary(data)},
    }  # fmt: skip


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return a page with other content between its markers. Errors: UserError for a marker that it does not have."""
    for name, content in made.items():
        pattern = rf"(<!-- begin {name}: .*? -->\n).*?(<!-- end {name} -->)"
        if len(re.findall(pattern, text, re.DOTALL)) != 1:
            raise UserError(f"the page needs one marker <!-- begin {name}: ... --> and its end. Put it where the part belongs")
        text = re.sub(pattern, lambda found, new=content: f"{found[1]}{new}\n{found[2]}", text, flags=re.DOTALL)
    return text


def pages(data: Data) -> dict[Path, str]:
    """Return the text of the pages."""
    return {page: filled(page.read_text(encoding="utf-8"), made) for page, made in parts(data).items()}


def main() -> None:
    """Write the pictures, then the pages."""
    data = Data(DATA)
    for name, content in figures(data).items():
        replace_file(DATA / name, content)
    if (data.folder / BATTLE).is_file():
        write_png(Recording.read(data.folder / BATTLE), DATA / BELIEFS_PICTURE)
    for page, text in pages(data).items():
        replace_file(page, text.encode())
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(2)
