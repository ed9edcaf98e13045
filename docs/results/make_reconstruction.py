"""Redraws the two pages of the study of reconstruction, their pictures and the README's summary from their data.

    cp benchmarks/studies/reconstruction_*.jsonl docs/results/reconstruction/    # after runs
    python docs/results/make_reconstruction.py

Reads docs/results/reconstruction/: the results files of the studies, `beliefs.jsonl` of `omagd beliefs`, and
`battle.json.gz`, a recording. It replaces what is between the markers of the pages and draws PNGs; no run's folder is
needed. Tables are the same in every call.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from reconstruction_data import CONTROLS, EQUAL_TIME, FLOAT32, LEAST_GAP, MAIN, SEEDS, VARIANTS, Data, by_arm
from reconstruction_predictor import (
    NOT_YET,
    cheap_tests,
    errors_part,
    markdown,
    parts_of_beliefs,
    predictor_part,
)

from omagd.run.analysis.contrasts import (
    LOWER,
    METHOD,
    METRIC,
    UPPER,
    contrasts,
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
from omagd.run.analysis.runs import Run
from omagd.run.analysis.statistics import difference, gap_share, iqm
from omagd.run.analysis.verdicts import median_steps
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

BETTER = "P(better than last_seen)", f"P(better than {LOWER})"
"""The probabilities of improvement that the page shows."""


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
    head = [
        "Map",
        "Predicted class",
        "Class by census",
        "Enemies unseen",
        "Ridge explains: all, before contact",
        "Enters",
    ]
    return markdown(head, rows)


def table_of_gate(data: Data) -> str:
    """Return the table of the gate."""
    if not (rows := data.gate()):
        return NOT_YET
    found = gate_table(rows, LOWER, UPPER, LEAST_GAP)
    return f"{markdown(found['head'], found['rows'])}\n\n{found['note']}"


def gap_in_float32(data: Data) -> str:
    """Return the table of the gap that is asked for once more, and of all runs after the gate together."""
    if not {LOWER, UPPER} <= {run.arm for run in data.parts[FLOAT32]}:
        return NOT_YET
    rows, table = gate(data.parts[FLOAT32], LOWER, UPPER, LEAST_GAP), []
    for row in rows:
        asked = [("float32", row.low, row.high)]
        if {LOWER, UPPER} <= (of_study := final_tests(data.study, row.place)).keys():
            both = (np.concatenate([of_study[arm], again]) for arm, again in ((LOWER, row.low), (UPPER, row.high)))
            asked.append(("float32 and main study, runs counted singly", *both))
        for words, low, high in asked:
            means = [f"{values.mean():.3f}" for values in (low, high)]
            table.append([row.place, words, f"{len(low)}, {len(high)}", *means, text_of(*difference([high], [low]), 3)])
    return markdown(["environment", "runs", "number", f"`{LOWER}`", f"`{UPPER}`", "difference"], table)


def verdict_lines(data: Data) -> str:
    """Return a line for each map, and one on class b as a whole."""
    return "\n".join(f"- {line}" for line in (*(each.text for each in data.verdicts()), data.class_b()))


def figures(data: Data) -> dict[str, bytes]:
    """Return the pictures by file name: the last tests and the curves of the main study."""
    drawn = {}
    if data.study:
        labels = tuple(group.label for group in data.study)
        final = Axes("final", "win rate of the last test", "", labels, unit=True, gap=(LOWER, UPPER))
        curves = Axes("curves", "environment steps", "win rate", labels, columns=2, unit=True)
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
             " the gap from baseline up to full_obs is shaded; no mark: not run")  # fmt: skip
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
    for place in dict.fromkeys(run.place for run in data.parts[VARIANTS]):
        last = final_tests(by_arm([*data.parts[MAIN], *data.parts[VARIANTS]]), place)
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


def cost(data: Data) -> str:
    """Return how many runs there are, what they took, and which code each arm ran with."""
    if not data.runs:
        return NOT_YET
    hours = sum(run.cpu_seconds or 0.0 for run in data.runs) / 3600
    unknown = sum(run.cpu_seconds is None for run in data.runs)
    lines = [f"{len(data.runs)} runs, {hours:.1f} core-hours" + f" ({unknown} runs without a figure)" * bool(unknown)]
    commits: dict[str, dict[tuple[str, str], int]] = {}
    for part, runs in data.parts.items():
        prefix = "" if part == MAIN else f"{part}, "
        for run in runs:
            name = run.commit[:12] + "-dirty" * run.commit.endswith("-dirty") or "unknown"
            counts = commits.setdefault(name, {})
            counts[prefix + run.place, run.arm] = counts.get((prefix + run.place, run.arm), 0) + 1
    for name, counts in commits.items():
        places = [f"{place}: " + ", ".join(f"`{arm}` {n}" for (at, arm), n in counts.items() if at == place)
                  for place in dict.fromkeys(place for place, _ in counts)]  # fmt: skip
        lines.append(f"Commit `{name}`, {sum(counts.values())} runs. {'; '.join(places)}")
    lines += [f"**Runs of different settings are one arm**: {each}" for each in data.mixed()]
    return "\n".join(f"- {line}." for line in lines)


def equal_time(data: Data) -> str:
    """Return a table of what `LOWER` wins with as much CPU time as `METHOD`, of maps that are finished."""
    rows, name = [], f"{LOWER}, more steps"
    for place in data.studied():
        if longer := [run for run in data.parts[EQUAL_TIME] if run.place == place]:
            found = [*data.study, Group(name, {}, tuple(longer))]
            last, minutes = final_tests(found, place), {group.label: cpu_minutes(group.at(place)) for group in found}
            rates = [f"{float(iqm([last[label]])):.2f} ({minutes[label]:.0f})" for label in (LOWER, METHOD, name)]
            steps, seeds = longer[0].tests[-1]["t_env"] / 1e6, f"{len(last[METHOD])}, {len(last[name])}"
            gain = text_of(*difference([last[METHOD]], [last[name]], iqm))
            reached = median_steps(longer, float(iqm([last[METHOD]]))) / 1e6
            sooner = (
                f"{reached:.1f} million ({minutes[name] * reached / steps:.0f})" if math.isfinite(reached) else "never"
            )
            rows.append([place, seeds, *rates, f"{steps:.0f} million", gain, sooner])
    arms = f"`{LOWER}`", f"`{METHOD}`", f"`{LOWER}` with more steps"
    head = ["map", "seeds", *arms, "steps of it", "`omagd` - that", "reaches `omagd` after"]
    return markdown(head, rows) if rows else NOT_YET


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
            share = text_of(*gap_share([last[METHOD]], [low], [last[UPPER]], iqm), 3)
        rates = [f"{float(iqm([last[arm]])):.2f}" if arm in last else "-" for arm in (LOWER, METHOD, UPPER)]
        gain = text_of(*difference([last[METHOD]], [low], iqm))
        short = data.verdict(place, kind).short
        rows.append([f"{place} ({kind})", str(len(low)), *rates, gain, share, _cost(data, place), short])
    arms = (f"`{arm}`" for arm in (LOWER, METHOD, UPPER))
    head = ["map (class)", "seeds", *arms, f"`{METHOD}` - `{LOWER}`", "share of the gap",
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
            "answer": answer(data), "final": final_part(data, PAGE), "curves": curves_part(data),
            "tables": tables(data), "verdicts": verdict_lines(data), "parts": parts_of_beliefs(data),
            "equal_time": equal_time(data), "predictor": predictor_part(data), "battle": battle_part(data),
            "maps": table_of_maps(data),
        },
        DETAILS: {
            "gate": table_of_gate(data), "float32": gap_in_float32(data), "tests": cheap_tests(data),
            "variants": variants_part(data), "seeds": each_seed(data), "errors": errors_part(data), "cost": cost(data),
        },
        README: {"reconstruction": summary(data)},
    }  # fmt: skip


def filled(page: Path, made: Mapping[str, str]) -> str:
    """Return a page with other content between its markers. Errors: UserError for a marker that it does not have."""
    text = page.read_text(encoding="utf-8")
    for name, content in made.items():
        pattern = rf"(<!-- begin {name}: .*? -->\n).*?(<!-- end {name} -->)"
        if len(re.findall(pattern, text, re.DOTALL)) != 1:
            marker = f"<!-- begin {name}: ... -->"
            raise UserError(f"{page}: needs one marker {marker} and its end. Put it where the part belongs")
        text = re.sub(pattern, lambda found, new=content: f"{found[1]}{new}\n{found[2]}", text, flags=re.DOTALL)
    return text


def pages(data: Data) -> dict[Path, str]:
    """Return the text of the pages."""
    return {page: filled(page, made) for page, made in parts(data).items()}


def main() -> None:
    """Write the pictures and the pages; nothing if one of them cannot be made."""
    data = Data(DATA)
    drawn, texts = figures(data), pages(data)
    if (data.folder / BATTLE).is_file():
        write_png(Recording.read(data.folder / BATTLE), DATA / BELIEFS_PICTURE)
    for name, content in drawn.items():
        replace_file(DATA / name, content)
    for page, text in texts.items():
        replace_file(page, text.encode())
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(2)
