"""How good beliefs about unseen units are: sums over cases, and the table and metrics that follow from them.

The headline counts living unseen units of living observers, and of their features those that are not constant in
training (`Baselines.varies`). Every row has the same cases for the predictor and for all baselines.
Shapes: M cases, D features, R rows, G predictors (the first is the one that is judged), Q reliability bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from omagd.config.env_info import ALLY, ENEMY, EntityLayout
from omagd.lab.beliefs.baselines import BASELINES, SIMPLE, Baselines, Cases, bounded, cases_of
from omagd.modules.graph_reconstructers.reconstructor import Belief
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch

PREDICTOR = "predictor"
GUESSES = (PREDICTOR, *BASELINES)
AGES = {
    "": (0, math.inf), "never": (0, 0), "before": (1, math.inf), "age1": (1, 1), "age2_3": (2, 3), "age4_7": (4, 7),
    "age8_15": (8, 15), "age16": (16, math.inf),
}  # fmt: skip
"""Rows by steps since the last sight, first to last: `never` seen, seen `before`, then classes of age."""

KINDS = {"": (ALLY, ENEMY), "ally": (ALLY,), "enemy": (ENEMY,)}
LOGGED = ("", "never", "before")
"""Rows by age of which more than the error of the predictor is logged; the table has all."""

BINS = 10
LEAST_SPREAD = 0.01
"""Smallest standard deviation in the likelihood: a distribution over few codes may have none."""

ERROR, PLACE, PLACE2, HEALTH = range(4)
LIVING, COUNTED, HEALTHS, HEALTH2, TAKEN, SPREADS, INSIDE, LIKELIHOOD = range(8)


class Believer(Protocol):
    """A learner of stage 2 that says what its predictor believes."""

    layout: EntityLayout

    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes [S, n, N] bool of a batch, and the belief about each."""


@dataclass(frozen=True)
class Row:
    """A row of the table: cases of some types of nodes, ages and types of units (-1: any)."""

    kind: str
    age: str
    unit_type: int = -1

    @property
    def name(self) -> str:
        """Name in metrics, such as `enemy_age2_3`; empty for all cases."""
        unit_type = f"type{self.unit_type}" if self.unit_type >= 0 else ""
        return "_".join(part for part in (self.kind, self.age, unit_type) if part)


def rows_of(layout: EntityLayout) -> list[Row]:
    """Return all rows; units' types only where the features tell them."""
    rows = [Row(kind, age) for kind in KINDS for age in AGES]
    columns = {"ally": layout.ally_types, "enemy": layout.enemy_types}
    return rows + [
        Row(kind, "", i) for kind, first in columns.items() for i in range(layout.n_types if first >= 0 else 0)
    ]


class BeliefSums:
    """Sums over the cases of some batches.

    Args:
        layout: of the observations. device: of the sums.

    Attributes:
        values: [R, G, 4] float64: squared error, position error and its square in cells, squared error of health.
        living: [R, 8]: cases, cases with features that count, health and its square, living units taken for dead; of
            the others: cases with features that count, share of features within one predicted standard deviation,
            negative log-likelihood.
        dead: [R, 2]: the dead, and those recognised. bins: [Q, 3]: cases, sum of p(dead), the dead.
        spread: [1], batches whose predictor gave its standard deviation.
    """

    def __init__(self, layout: EntityLayout, device: torch.device) -> None:
        self.layout, self.rows = layout, rows_of(layout)
        sizes = {
            "values": (len(self.rows), len(GUESSES), 4), "living": (len(self.rows), 8), "dead": (len(self.rows), 2),
            "bins": (BINS, 3), "spread": (1,),
        }  # fmt: skip
        self.sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}

    def add(self, cases: Cases, belief: Belief, baselines: Baselines) -> None:
        """Add the cases of a batch."""
        living = cases.living
        marks = self._marks(cases)
        guesses = [belief.features.to(cases.truth), *baselines.predictions(cases).values()]
        # Features that never change would make every predictor look good.
        counts = baselines.varies[cases.node[living]].double()
        share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        truth = cases.truth[living].double()
        errors = [self._errors(guess[living].double() - truth, share) for guess in guesses]
        of_living = marks[living]
        self.sums["values"] += torch.einsum("mr,mgv->rgv", of_living, torch.stack(errors, dim=1))
        self.sums["living"] += of_living.T @ self._of_living(cases, belief, share)
        found = torch.stack([torch.ones_like(belief.p_dead), belief.taken_for_dead.to(belief.p_dead)], dim=1)
        self.sums["dead"] += marks[~living].T @ found[~living].double()
        p = belief.p_dead.double()
        # Reliability (Naeini et al. 2015): of units with p(dead) = 0.8, are 80 % dead?
        in_bin = (p * BINS).long().clamp(0, BINS - 1)
        self.sums["bins"].index_add_(0, in_bin, torch.stack([torch.ones_like(p), p, (~living).double()], dim=1))
        self.sums["spread"] += float(belief.spread is not None)

    def _marks(self, cases: Cases) -> Tensor:
        """Return which cases [M, R] belong to each row, as float64. The dead have no type."""
        types = torch.tensor(self.layout.node_types, device=cases.node.device)[cases.node]
        marks = []
        for row in self.rows:
            low, high = AGES[row.age]
            mark = (cases.age >= low) & (cases.age <= high)
            mark &= torch.isin(types, torch.tensor(KINDS[row.kind], device=types.device))
            if row.unit_type >= 0:
                first = self.layout.ally_types if row.kind == "ally" else self.layout.enemy_types
                mark &= cases.truth[:, first + row.unit_type] > 0.5
            marks.append(mark)
        return torch.stack(marks, dim=1).double()

    def _errors(self, off: Tensor, share: Tensor) -> Tensor:
        """Return squared error, position error in cells, its square, squared error of health of errors [M, D]."""
        # In cells, so that maps with other sights can be compared.
        place2 = off[:, list(self.layout.position)].square().sum(-1) * self.layout.sight**2
        health = off[:, self.layout.health].square() if self.layout.health >= 0 else torch.zeros_like(place2)
        return torch.stack([(off.square() * share).sum(-1), place2.sqrt(), place2, health], dim=1)

    def _of_living(self, cases: Cases, belief: Belief, share: Tensor) -> Tensor:
        """Return what `living` sums, [living M, 8].

        The spread is that of a unit if it lives, so units that are taken for dead say nothing of it.
        """
        living = cases.living
        truth, ones = cases.truth[living].double(), torch.ones(len(share), dtype=torch.float64, device=share.device)
        health = truth[:, self.layout.health] if self.layout.health >= 0 else torch.zeros_like(ones)
        taken = belief.taken_for_dead[living].double()
        share_kept = share * (1 - taken)[:, None]
        inside = likelihood = torch.zeros_like(ones)
        if belief.spread is not None:
            off, spread = belief.features[living].double() - truth, belief.spread[living].double()
            spread = spread.clamp(min=LEAST_SPREAD)
            inside = ((off.abs() <= spread) * share_kept).sum(-1)
            # -log of a normal density: also punishes a spread that is too large or too small.
            density = 0.5 * (off / spread).square() + spread.log() + 0.5 * math.log(2 * math.pi)
            likelihood = (density * share_kept).sum(-1)
        columns = [ones, share.sum(-1), health, health.square(), taken, share_kept.sum(-1), inside, likelihood]
        return torch.stack(columns, dim=1)

    def table(self, dist: Dist) -> dict[str, Any]:
        """Return the table over all ranks as plain values; a collective.

        `rows`: those with cases, as dicts. `reliability`: [share of cases, mean p(dead), share of the dead] of each
        bin of p(dead) that has cases. `dead_ece`: the expected calibration error that follows from it (Naeini et al.
        2015), absent without cases.
        """
        sums = {name: dist.sum(value).cpu() for name, value in self.sums.items()}
        has_spread = bool(sums["spread"] > 0)
        made = [self._entry(i, row, sums, has_spread) for i, row in enumerate(self.rows)]
        table: dict[str, Any] = {"rows": [entry for entry in made if len(entry) > 1], "reliability": []}
        total = float(sums["bins"][:, 0].sum())
        for count, p, dead in sums["bins"].tolist():
            if count:
                table["reliability"].append([count / total, p / count, dead / count])
        if total:
            table["dead_ece"] = sum(share * abs(p - dead) for share, p, dead in table["reliability"])
        return table

    def _entry(self, at: int, row: Row, sums: dict[str, Tensor], has_spread: bool) -> dict[str, Any]:
        """Return a row of the table; only its name where it has no cases."""
        entry: dict[str, Any] = {"row": row.name}
        values, living = sums["values"][at].tolist(), sums["living"][at].tolist()
        dead, found = sums["dead"][at].tolist()
        if dead and row.unit_type < 0:
            entry |= {"dead": int(dead), "recall_dead": found / dead}
        count, counted = living[LIVING], living[COUNTED]
        if not count:
            return entry
        entry |= {"count": int(count), "taken_for_dead": living[TAKEN] / count}

        def each(of: int, per: float) -> dict[str, float]:
            return {name: value[of] / per for name, value in zip(GUESSES, values, strict=True)}

        if counted:
            entry["mse"] = each(ERROR, counted)
            if has_spread and (spreads := living[SPREADS]):
                entry |= {"coverage": living[INSIDE] / spreads, "nll": living[LIKELIHOOD] / spreads}
        entry["position_rms"] = {name: math.sqrt(value) for name, value in each(PLACE2, count).items()}
        entry["position_mean"] = each(PLACE, count)
        # R² = 1 - error / variance: 0 is what the mean would reach.
        variance = living[HEALTH2] / count - (living[HEALTHS] / count) ** 2
        if self.layout.health >= 0 and variance > 1e-9:
            entry["health_r2"] = {name: 1 - value / variance for name, value in each(HEALTH, count).items()}
        return entry


def judge(believer: Believer, batches: Iterable[PackedBatch], baselines: Baselines, dist: Dist) -> dict[str, Any]:
    """Return the table of a predictor and of the baselines on this rank's `batches` and those of the others."""
    sums, episodes = BeliefSums(believer.layout, dist.device), 0
    for batch in bounded(batches):
        episodes += batch.packing.n_episodes
        cases = cases_of(batch, believer.layout)
        missing, belief = believer.beliefs(batch)
        if not torch.equal(missing, cases.missing):
            raise ValueError(
                f"{type(believer).__name__}.beliefs is about {int(missing.sum())} nodes, not about the {len(cases)}"
                " unseen ones of living agents in rows with a step (lab/beliefs/baselines.py)"
            )
        sums.add(cases, belief, baselines)
    return {**sums.table(dist), "episodes": dist.sum_int(episodes)}


def belief_values(table: dict[str, Any]) -> dict[str, float]:
    """Return the values of a table that are logged, by name.

    Names are `<value>`, then `_<baseline>` for one, then `_<row>` for one that is not all cases.
    """
    out: dict[str, float] = {}
    for entry in table["rows"]:
        name, row = entry["row"], f"_{entry['row']}" if entry["row"] else ""
        broad = name.rpartition("_")[2] in (*LOGGED, *KINDS)
        for value, short in (("mse", "error"), ("position_rms", "position"), ("health_r2", "health_r2")):
            for guess, number in entry.get(value, {}).items():
                if (broad or guess == PREDICTOR) if value == "mse" else name in LOGGED:
                    out[f"{short}{'' if guess == PREDICTOR else f'_{guess}'}{row}"] = number
        out |= {f"{of}{row}": entry[of] for of in ("taken_for_dead", "recall_dead") if of in entry and name in AGES}
        out |= {of: entry[of] for of in ("coverage", "nll") if of in entry and not row}
    if "dead_ece" in table:
        out["dead_ece"] = table["dead_ece"]
    if "error" in out:
        out["error_simple"] = min(out[f"error_{name}"] for name in SIMPLE)
        out["ratio_simple"] = out["error"] / max(out["error_simple"], 1e-12)
        out["ratio_ridge"] = out["error"] / max(out["error_ridge"], 1e-12)
    return out
