"""What the study of reconstruction asked and what its results files say: maps, seeds, gate and verdicts.

The rules stand in docs/results/reconstruction.md; make_reconstruction.py draws that page from these numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omagd.run.analysis import belief_tests
from omagd.run.analysis.contrasts import LOWER, UPPER, GateRow, gate
from omagd.run.analysis.curves import without_repeats
from omagd.run.analysis.groups import Group, settings
from omagd.run.analysis.runs import Run, load
from omagd.run.analysis.verdicts import Kind, Verdict, needed_arms, unfinished, verdict
from omagd.utils.errors import UserError

GATE, MAIN, FLOAT32, EQUAL_TIME, VARIANTS = "gate", "main study", "float32", "equal CPU time", "variants"
"""Parts of the study. Only the main study decides verdicts."""

PART_OF: dict[str, str | None] = {
    "reconstruction_gate": GATE,
    "reconstruction_3_agents": MAIN, "reconstruction_5_agents": MAIN,
    "reconstruction_controls": MAIN, "reconstruction_control_8m": MAIN,
    "reconstruction_float32": FLOAT32, "reconstruction_equal_time": EQUAL_TIME, "reconstruction_variants": VARIANTS,
    "reconstruction_short": None,
}  # fmt: skip
"""Results files by name, and the part that each belongs to; None: read by no page."""

ARMS = (
    "ff", "baseline", "last_seen", "map_constant", "team_obs", "omagd", "full_obs", "ma2e", "baseline_truth",
    "map_constant_truth", "ridge",
)  # fmt: skip
"""Order of the arms, which gives their colours."""

MAPS: dict[str, Kind] = {
    "skirmish 3m_mixed_sight6": "b", "skirmish 5m_mixed_sight6": "b", "skirmish 3s_vs_5z_sight5": "b",
    "smax smacv2_5_units": "b", "skirmish 8m": "a", "skirmish 3m_hidden": "c",
}  # fmt: skip
"""The class that was predicted for each map before any run: those of benchmarks/studies/reconstruction_gate.yaml."""

RESERVE: dict[str, Kind] = {
    "skirmish 2s3z_mixed_sight6": "b", "skirmish 2s3z_mixed_sight4": "b", "skirmish 8m_mixed_sight6": "b",
    "smax smacv2_10_units": "b",
}  # fmt: skip
CONTROLS = ("skirmish 8m", "skirmish 3m_hidden")
LEAST_GAP = 0.15
"""Win rates by which `full_obs` must be better in the gate."""

MAPS_ASKED = 2
"""Maps on which class b must hold."""

PREDICTOR_SEEDS = GATE_SEEDS = 3
"""Least numbers of seeds for a judgement of the predictor, and in the gate."""

SEEDS = (5,)
"""How many seeds each arm needs. Two numbers: first a verdict with so many, later one with more; both are shown."""

SEEDS_OF = {
    "skirmish 3m_mixed_sight6": (10,), "skirmish 3s_vs_5z_sight5": (10,), "skirmish 3m_hidden": (10,),
    "skirmish 2s3z_mixed_sight6": (5, 10), "skirmish 2s3z_mixed_sight4": (5, 10),
}  # fmt: skip
"""The same for maps of three agents, and for maps whose number was raised after five seeds had not decided."""


class Data:
    """What the folder holds.

    Attributes:
        parts: the runs of each part of the study. runs: all of them.
        places: the predicted class of each map.
        begun: the arms of the main study with all their runs.
        shown: seeds of each arm that the page shows of a map, once each arm that its verdict needs has them.
        study: the arms of the main study with the first seeds of those maps. Arms that no verdict needs may have as
            many as were planned first; arms with fewer are left out.
        beliefs: records of tests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files: dict[str | None, list[Path]] = {}
        for path in sorted(folder.glob("reconstruction_*.jsonl")):
            if path.stem not in PART_OF:
                raise UserError(f"{path}: belongs to no part of the study. Write it into PART_OF, or remove it")
            files.setdefault(PART_OF[path.stem], []).append(path)
        self.parts = {part: _read(files.get(part, [])) for part in (GATE, MAIN, FLOAT32, EQUAL_TIME, VARIANTS)}
        self.runs = [run for part in self.parts.values() for run in part]
        for part, runs in self.parts.items():
            if again := without_repeats(_arms(runs))[1]:
                raise UserError(f"{folder}: {part}: {again[0]}. Remove the lines of one of them")
        self.beliefs = belief_tests.records(folder)
        for record in self.beliefs:
            if not {"env", "map"} <= record.keys():
                raise UserError(f"{folder / belief_tests.FILE}: a {record['test']} names no map. Remove its line")
        played = {run.place for run in self.runs}
        if unknown := played - MAPS.keys() - RESERVE.keys():
            names = ", ".join(sorted(unknown))
            fix = "Write it into MAPS, or remove the runs"
            raise UserError(f"{folder}: has runs on {names}, of no predicted class. {fix}")
        self.places = {**MAPS, **{place: kind for place, kind in RESERVE.items() if place in played}}
        self.begun = by_arm(self.parts[MAIN])
        self.shown = {place: count for place, kind in self.places.items() for count in seeds_of(place)
                      if not unfinished(self.begun, place, needed_arms(kind), count)}  # fmt: skip
        self.study = by_arm([run for place, most in self.shown.items() for group in self.begun
                             for run in _with_their_seeds(group, place, most)])  # fmt: skip

    def first(self, place: str, count: int) -> list[Group]:
        """Return the first seeds of each arm on a map."""
        # Runs are sorted by seed.
        return [replace(group, runs=tuple(group.at(place)[:count])) for group in self.begun]

    def entered(self) -> dict[str, bool]:
        """Return for each map whose gate is over whether it enters the main study."""
        return {row.place: row.enters for row in self.gate() if row.enters is not None and row.place not in CONTROLS}

    def gate(self) -> list[GateRow]:
        """Return the maps on which both arms of the gate have runs; those with fewer seeds than asked are open."""
        if not {LOWER, UPPER} <= {run.arm for run in self.parts[GATE]}:
            return []
        rows = [row for row in gate(self.parts[GATE], LOWER, UPPER, LEAST_GAP) if row.seeds]
        return [row if row.seeds >= GATE_SEEDS else replace(row, enters=None, why="") for row in rows]

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each map that has entered or is a control, and for each that has no gate yet."""
        entered = self.entered()
        asked = [(place, kind) for place, kind in self.places.items() if entered.get(place, True)]
        return [self.verdict(place, kind) for place, kind in asked]

    def verdict(self, place: str, kind: Kind) -> Verdict:
        """Return the verdict with as many seeds as are shown, and what fewer said; open while more are planned."""
        planned = seeds_of(place)
        found = [verdict(self.first(place, count), place, kind, count)
                 for count in planned if count <= self.shown.get(place, planned[0])]  # fmt: skip
        *earlier, last = found
        words = [f" With the first {count} seeds: {each.state}. {each.why}"
                 for each, count in zip(earlier, planned, strict=False)]  # fmt: skip
        if place in self.shown and self.shown[place] != planned[-1]:
            so_far = f"With {self.shown[place]} of {planned[-1]} planned seeds it {last.state}. "
            last = replace(last, state="open", why=so_far + last.why, short="open")
        return replace(last, why="".join([last.why, *words]))

    def class_b(self) -> str:
        """Return the sentence on class b as a whole."""
        entered = self.entered()
        asked = [each for each in self.verdicts() if each.kind == "b"]
        good = sum(each.state == "holds" and entered.get(each.place, False) for each in asked)  # through the gate
        waiting = sum(each.state != "does not hold" for each in asked) - good
        spare = 0 if sum(entered.values()) >= MAPS_ASKED else len(RESERVE.keys() - entered.keys())  # the gate goes on
        state = "holds" if good >= MAPS_ASKED else "open" if good + waiting + spare >= MAPS_ASKED else "does not hold"
        words = [f"**Class b as a whole: {state}.** Of {len(asked)} map{'s' * (len(asked) != 1)} it holds on {good},"
                 f" {waiting} {'is' if waiting == 1 else 'are'} undecided (asked: at least {MAPS_ASKED})."]  # fmt: skip
        if len(entered) >= len(MAPS.keys() - CONTROLS) and spare:
            words.append(f"Maps of the reserve that are not tried yet: {spare}.")
        if out := [place for place, enters in entered.items() if not enters]:
            words.append(f"Not through the gate: {', '.join(out)}.")
        return " ".join(words)

    def mixed(self) -> list[str]:
        """Return the arms, each with its map, whose runs in a part of the study differ in more than the seed."""
        found: dict[tuple[str, str, str], set[tuple[Any, str]]] = {}
        for part, runs in self.parts.items():
            for run in runs:
                method = json.dumps(settings(run), sort_keys=True, default=str)
                found.setdefault((part, run.arm, run.place), set()).add((run.card.get("id"), method))
        return [f"`{arm}` on {place} ({part})" for (part, arm, place), each in found.items() if len(each) > 1]

    def studied(self) -> list[str]:
        """Return the maps that are finished, in order."""
        played = {run.place for group in self.study for run in group.runs}
        return [place for place in self.places if place in played]


def _read(paths: Sequence[Path]) -> list[Run]:
    return sorted(load(paths, "make_reconstruction"), key=_rank) if paths else []


def _rank(run: Run) -> tuple[int, str, int, str]:
    """Return a key that sorts runs alike in whatever order their lines are: bootstraps depend on the order of seeds."""
    known = [*MAPS, *RESERVE, run.place]
    return known.index(run.place), run.place, run.seed or 0, run.arm


def _with_their_seeds(group: Group, place: str, most: int) -> Sequence[Run]:
    """Return the first runs of an arm at a place: the largest planned number of seeds, up to `most`, that it has."""
    runs = group.at(place)
    return runs[: max((count for count in seeds_of(place) if count <= min(most, len(runs))), default=0)]


def seeds_of(place: str) -> tuple[int, ...]:
    """Return how many seeds each arm of a map needs for its first verdict, and for later ones."""
    return SEEDS_OF.get(place, SEEDS)


def by_arm(runs: Sequence[Run]) -> list[Group]:
    """Return the runs of each arm, in the order of `ARMS`, each seed once on a map."""
    return without_repeats(_arms(runs))[0]


def _arms(runs: Sequence[Run]) -> list[Group]:
    order = dict.fromkeys((*ARMS, *(run.arm for run in runs)))
    found = [Group(arm, {}, tuple(run for run in runs if run.arm == arm)) for arm in order]
    return [group for group in found if group.runs]
