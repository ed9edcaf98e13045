"""How good beliefs about unseen units are: sums over cases, and the table and metrics that follow from them.

The headline counts living unseen units of living observers, and of their features those that are not constant in
training (`Baselines.varies`). Every row has the same cases for the predictor and for all baselines.
Shapes: M cases, L of them of living units, D features, R rows, C columns, Q reliability bins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from omagd.config.env_info import ALLY, ENEMY, EntityLayout
from omagd.lab.beliefs.baselines import BASELINES, SIMPLE, Baselines, Cases, cases_of
from omagd.modules.graph_reconstructers.reconstructor import Belief
from omagd.modules.ops import add_at
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

NUMBERS_AT_ONCE = 1 << 22
"""Entries of observations that are looked at together: what is computed of them takes up to a hundred times as much."""

BINS = 10
LEAST_SPREAD = 0.01
"""Smallest standard deviation in the likelihood: a distribution over few codes may have none."""

OF_GUESSES = ("error", "place", "place2", "health")
OF_LIVING = ("count", "counted", "health", "health2", "taken", "spreads", "inside", "likelihood")


class Believer(Protocol):
    """A learner of stage 2 that says what its predictor believes."""

    layout: EntityLayout

    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes [S, n, N] bool of a batch, and the belief about each."""


def rows_of(layout: EntityLayout) -> dict[str, tuple[str, str, int]]:
    """Return all rows by name: the kind of node, the age, and the column that is 1 for the type of unit (-1: any)."""
    rows = {"_".join(filter(None, (kind, age))): (kind, age, -1) for kind in KINDS for age in AGES}
    for kind, first in (("ally", layout.ally_types), ("enemy", layout.enemy_types)):
        rows |= {f"{kind}_type{i}": (kind, "", first + i) for i in range(layout.n_types if first >= 0 else 0)}
    return rows


class BeliefSums:
    """Sums over the cases of some batches.

    Args:
        layout: of the observations. device: of the sums.

    Attributes:
        sums: `living` [R, C] float64, over living units: of each guess squared error, position error in cells, its
            square and squared error of health; then cases, cases with features that count, health and its square, units
            taken for dead; of the others, where the predictor gives its standard deviation: cases with features that
            count, share of features within one of it, negative log-likelihood. `dead` [R, 2]: the dead, and those
            recognised. `bins` [Q, 3]: cases, sum of p(dead), the dead.
    """

    def __init__(self, layout: EntityLayout, device: torch.device) -> None:
        self.layout, self.rows = layout, rows_of(layout)
        columns = len(GUESSES) * len(OF_GUESSES) + len(OF_LIVING)
        sizes = {"living": (len(self.rows), columns), "dead": (len(self.rows), 2), "bins": (BINS, 3)}
        self.sums = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}

    def add(self, cases: Cases, belief: Belief, baselines: Baselines) -> None:
        """Add the cases of a batch."""
        living, marks = cases.living, self._marks(cases)
        # Features that never change would make every predictor look good.
        counts = baselines.varies[cases.node[living]].double()
        share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        guesses = [belief.features.to(cases.truth), *baselines.predictions(cases).values()]
        truth = cases.truth[living].double()
        columns = [column for guess in guesses for column in self._of_guess(guess[living].double() - truth, share)]
        columns += self._of_living(cases, belief, share)
        self.sums["living"] += marks[living].T @ torch.stack(columns, dim=1)
        p, taken, dead = belief.p_dead.double(), belief.taken_for_dead.double(), (~living).double()
        self.sums["dead"] += marks.T @ torch.stack([dead, dead * taken], dim=1)
        # Reliability (Naeini et al. 2015): of units with p(dead) = 0.8, are 80 % dead?
        in_bin = (p * BINS).long().clamp(0, BINS - 1)
        add_at(self.sums["bins"], in_bin, torch.stack([torch.ones_like(p), p, dead], dim=1))

    def _marks(self, cases: Cases) -> Tensor:
        """Return which cases [M, R] belong to each row, as float64. The dead have no type."""
        types = torch.tensor(self.layout.node_types, device=cases.node.device)[cases.node]
        marks = []
        for kind, age, column in self.rows.values():
            low, high = AGES[age]
            mark = (cases.age >= low) & (cases.age <= high)
            mark &= torch.isin(types, torch.tensor(KINDS[kind], device=types.device))
            marks.append(mark if column < 0 else mark & (cases.truth[:, column] > 0.5))
        return torch.stack(marks, dim=1).double()

    def _of_guess(self, off: Tensor, share: Tensor) -> list[Tensor]:
        """Return the columns [L] of a guess that is off by [L, D]. share: weight of each feature, [L, D]."""
        # In cells, so that maps with other sights can be compared.
        place2 = off[:, list(self.layout.position)].square().sum(-1) * self.layout.sight**2
        health = off[:, self.layout.health].square() if self.layout.health >= 0 else torch.zeros_like(place2)
        return [(off.square() * share).sum(-1), place2.sqrt(), place2, health]

    def _of_living(self, cases: Cases, belief: Belief, share: Tensor) -> list[Tensor]:
        """Return the other columns [L].

        The spread is that of a unit if it lives, so units that are taken for dead say nothing of it.
        """
        living = cases.living
        truth, ones = cases.truth[living].double(), torch.ones(len(share), dtype=torch.float64, device=share.device)
        health = truth[:, self.layout.health] if self.layout.health >= 0 else torch.zeros_like(ones)
        taken = belief.taken_for_dead[living].double()
        spreads = inside = likelihood = torch.zeros_like(ones)
        if belief.spread is not None:
            kept = share * (1 - taken)[:, None]
            off, spread = belief.features[living].double() - truth, belief.spread[living].double()
            spread = spread.clamp(min=LEAST_SPREAD)
            # -log of a normal density: also punishes a spread that is too large or too small.
            density = 0.5 * (off / spread).square() + spread.log() + 0.5 * math.log(2 * math.pi)
            spreads, inside = kept.sum(-1), ((off.abs() <= spread) * kept).sum(-1)
            likelihood = (density * kept).sum(-1)
        return [ones, share.sum(-1), health, health.square(), taken, spreads, inside, likelihood]

    def table(self, dist: Dist) -> dict[str, Any]:
        """Return the table over all ranks as plain values; a collective.

        `rows`: those with cases, as dicts. `reliability`: [share of cases, mean p(dead), share of the dead] of each
        bin of p(dead) that has cases. `dead_ece`: the expected calibration error that follows from it (Naeini et al.
        2015), absent without cases.
        """
        living, dead, bins = (dist.sum(self.sums[name]).tolist() for name in ("living", "dead", "bins"))
        entries = [{"row": name, **self._entry(living[i], *dead[i])} for i, name in enumerate(self.rows)]
        table: dict[str, Any] = {"rows": [entry for entry in entries if len(entry) > 1]}
        total = sum(count for count, _, _ in bins)
        table["reliability"] = [[count / total, p / count, found / count] for count, p, found in bins if count]
        if total:
            table["dead_ece"] = sum(share * abs(p - found) for share, p, found in table["reliability"])
        return table

    def _entry(self, sums: list[float], dead: float, found: float) -> dict[str, Any]:
        """Return a row of the table; empty where it has no cases."""
        entry: dict[str, Any] = {"dead": int(dead), "recall_dead": found / dead} if dead else {}
        of = dict(zip(OF_LIVING, sums[-len(OF_LIVING) :], strict=True))
        count = of["count"]
        if not count:
            return entry

        def each(name: str, per: float) -> dict[str, float]:
            values = sums[OF_GUESSES.index(name) : -len(OF_LIVING) : len(OF_GUESSES)]
            return {guess: value / per for guess, value in zip(GUESSES, values, strict=True)}

        entry |= {"count": int(count), "taken_for_dead": of["taken"] / count}
        if of["counted"]:
            entry["mse"] = each("error", of["counted"])
        if spreads := of["spreads"]:
            entry |= {"coverage": of["inside"] / spreads, "nll": of["likelihood"] / spreads}
        entry["position_rms"] = {name: math.sqrt(value) for name, value in each("place2", count).items()}
        entry["position_mean"] = each("place", count)
        # R² = 1 - error / variance: 0 is what the mean would reach.
        variance = of["health2"] / count - (of["health"] / count) ** 2
        if self.layout.health >= 0 and variance > 1e-9:
            entry["health_r2"] = {name: 1 - value / variance for name, value in each("health", count).items()}
        return entry


def judge(believer: Believer, batches: Iterable[PackedBatch], baselines: Baselines, dist: Dist) -> dict[str, Any]:
    """Return the table of a predictor and of the baselines on this rank's `batches` and those of the others."""
    sums, episodes = BeliefSums(believer.layout, dist.device), 0
    # In parts of whole episodes, so that memory does not grow with the map.
    for batch in (part for whole in batches for part in whole.split(-(-whole["obs"].numel() // NUMBERS_AT_ONCE))):
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
