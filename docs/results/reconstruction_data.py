"""What the study of reconstruction asked and what its results files say: maps, seeds, gate and verdicts.

The rules stand in docs/results/reconstruction.md; make_reconstruction.py draws that page from these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omagd.run.analysis import belief_tests
from omagd.run.analysis.contrasts import LOWER, UPPER, GateRow, gate
from omagd.run.analysis.curves import without_repeats
from omagd.run.analysis.groups import Group
from omagd.run.analysis.runs import Run, load
from omagd.run.analysis.verdicts import Kind, Verdict, needed_arms, unfinished, verdict
from omagd.utils.errors import UserError

GATE, SHORT = "reconstruction_gate", "reconstruction_short"
"""The study of the gate, and the reduced study, which is no part of the page."""

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
LEAST_GAP, MAPS_ASKED, PREDICTOR_SEEDS, GATE_SEEDS = 0.15, 2, 3, 3
VARIANTS = "reconstruction_variants"
"""The study of variants of the method, which decide no verdict."""

AGAIN = "reconstruction_float32"
"""The study that asks once more for the gap of a map, in the precision of the gate. It decides no verdict."""

LONGER = "reconstruction_equal_time"
"""The study that gives `LOWER` as much CPU time as `METHOD` has. It decides no verdict."""

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
        gate_runs, study_runs: of the gate and of the main study.
        again, longer, variants: of those that decide no verdict.
        runs: all of them.
        shown: seeds of each arm that the page shows of a map, once each arm that its verdict needs has them.
        study: the arms of the main study with the first seeds of those maps. Arms that no verdict needs may have as many
            as were planned first; arms with fewer are left out.
        beliefs: records of tests.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = {path.stem: path for path in sorted(folder.glob("reconstruction_*.jsonl"))}
        apart = (GATE, AGAIN, LONGER, VARIANTS)
        self.gate_runs, self.again, self.longer, self.variants = (
            _read([files[name]] if name in files else []) for name in apart
        )
        others = (*apart, SHORT)
        self.study_runs = _read([path for name, path in files.items() if name not in others])
        self.runs = [*self.gate_runs, *self.study_runs, *self.again, *self.longer, *self.variants]
        self.beliefs = belief_tests.records(folder)
        played = {run.place for run in self.runs}
        if unknown := played - MAPS.keys() - RESERVE.keys():
            names = ", ".join(sorted(unknown))
            raise UserError(f"{folder}: has runs on {names}, of no predicted class. Write it into MAPS, or remove the runs")
        self.places = {**MAPS, **{place: kind for place, kind in RESERVE.items() if place in played}}
        self.begun = by_arm(self.study_runs)
        self.shown = {place: count for place, kind in self.places.items() for count in seeds_of(place)
                      if not unfinished(self.begun, place, needed_arms(kind), count)}  # fmt: skip
        self.study = by_arm([run for place, most in self.shown.items() for group in self.begun
                             for run in _with_their_seeds(group, place, most)])  # fmt: skip

    def first(self, place: str, count: int) -> list[Group]:
        """Return the first seeds of each arm on a map."""
        return [replace(group, runs=tuple(group.at(place)[:count])) for group in self.begun]  # runs are sorted by seed

    def entered(self) -> dict[str, bool]:
        """Return for each map whose gate is over whether it enters the main study."""
        return {row.place: row.enters for row in self.gate() if row.enters is not None and row.place not in CONTROLS}

    def gate(self) -> list[GateRow]:
        """Return the maps on which both arms of the gate have runs; those with fewer seeds than asked are open."""
        if not {LOWER, UPPER} <= {run.arm for run in self.gate_runs}:
            return []
        rows = [row for row in gate(self.gate_runs, LOWER, UPPER, LEAST_GAP) if row.seeds]
        return [row if row.seeds >= GATE_SEEDS else replace(row, enters=None, why="") for row in rows]

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each map that has entered or is a control, and for each that has no gate yet."""
        entered = self.entered()
        asked = [(place, kind) for place, kind in self.places.items() if entered.get(place, True)]
        return [self.verdict(place, kind) for place, kind in asked]

    def waits(self, place: str) -> bool:
        """Return whether more seeds of a map are planned than are shown."""
        return self.shown.get(place) != seeds_of(place)[-1]

    def verdict(self, place: str, kind: Kind) -> Verdict:
        """Return the verdict with as many seeds as are shown; it says what fewer said, and how many more are planned."""
        planned = seeds_of(place)
        found = [verdict(self.first(place, count), place, kind, count)
                 for count in planned if count <= self.shown.get(place, planned[0])]  # fmt: skip
        *earlier, last = found
        words = [f" With the first {count} seeds: {each.state}. {each.why}"
                 for each, count in zip(earlier, planned, strict=False)]  # fmt: skip
        if place in self.shown and self.waits(place):
            so_far = f"With {self.shown[place]} of {planned[-1]} planned seeds it {last.state}. "
            last = replace(last, state="open", why=so_far + last.why, short="open")
        return replace(last, why="".join([last.why, *words]))

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
    order = dict.fromkeys((*ARMS, *(run.arm for run in runs)))
    found = [Group(arm, {}, tuple(run for run in runs if run.arm == arm)) for arm in order]
    return without_repeats([group for group in found if group.runs])[0]
