"""Census of what is unseen: how much, how far off guesses without a network are, and to which class a map belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from omagd.config.env_info import ALLY, ENEMY, EntityLayout, EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Policy
from omagd.envs.protocol import BatchedEnv
from omagd.learners.belief_baselines import Baselines, fit_baselines
from omagd.learners.belief_cases import cases_of
from omagd.learners.belief_metrics import PREDICTOR, judge
from omagd.modules.graph_reconstructers.belief import Belief
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes, unseen
from omagd.runners.runner import Runner
from omagd.runners.starts import EpisodeSeeds
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, pack_episodes

CONSTANT_CELLS = 2.5
"""Largest error of the map constant, RMS in cells, at which what is unseen counts as a constant of the map."""

INFERABLE, INFERABLE_BEFORE = 0.5, 0.2
"""Share of the map constant's squared error that ridge regression explains on a map of class b: at least so much of
all, or so much while an agent has seen no enemy yet. Chosen on maps of known class (docs/beliefs.md)."""

BEFORE_CONTACT = "before_contact"
"""Row of the enemies while the observer has not seen any enemy in the episode."""

CLASSES = {
    "a": "constants of the map: any policy learns them, reconstruction can only be quicker",
    "b": "specific to the battle and inferable from what is seen: reconstruction can help",
    "c": "specific to the battle and hardly inferable: nothing to gain, and guesses can hurt",
    "-": "hardly anything is unseen",
}
HARDLY = 0.02
"""Share of living enemies unseen below which there is nothing to classify."""

Counter = Callable[[int], None]
"""Called with the number of episodes that have been played since the last call."""


class _Nothing:
    """Believes nothing: the table is then that of the baselines alone."""

    def __init__(self, layout: EntityLayout) -> None:
        self.layout = layout

    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes, and zeros for each."""
        cases = cases_of(batch, self.layout)
        none = torch.zeros(len(cases))
        return cases.missing, Belief(torch.zeros_like(cases.truth), none, none.bool(), None)


def play(
    env: BatchedEnv, config: Config, info: EnvInfo, policy: Policy, purpose: str, wanted: int, counter: Counter
) -> list[PackedBatch]:
    """Play at least `wanted` greedy episodes from starts of their own; one batch for each round of all slots."""
    runner = Runner(env, config, info, EpisodeSeeds(config.seed, f"census/{purpose}"))
    batches = []
    for _ in range(-(-wanted // env.n_slots)):
        batches.append(pack_episodes(runner.run(policy, explore=None, full_obs=True).episodes))
        counter(env.n_slots)
    return batches


def fitted(
    env: BatchedEnv, config: Config, info: EnvInfo, policy: Policy, episodes: int, counter: Counter
) -> Baselines:
    """Return the baselines, fitted on `episodes` episodes and a quarter as many that choose the penalty of ridge."""
    training = play(env, config, info, policy, "training", episodes, counter)
    validation = play(env, config, info, policy, "validation", -(-episodes // 4), counter)
    return fit_baselines(lambda: training, lambda: validation, info, Dist())


def census(
    env: BatchedEnv, config: Config, info: EnvInfo, policy: Policy, episodes: int, counter: Counter
) -> dict[str, Any]:
    """Return what is unseen in `episodes` episodes; the baselines are fitted on others. See `census_of`."""
    baselines = fitted(env, config, info, policy, episodes, counter)
    return census_of(play(env, config, info, policy, "test", episodes, counter), baselines)


def census_of(batches: list[PackedBatch], baselines: Baselines) -> dict[str, Any]:
    """Return `class`, `inferable` and `units`: for enemies and allies what is unseen of the living, by age.

    Each entry of `units` has `living` (pairs of living observer and living unit), `unseen` (share), `before` (share of
    the unseen that was seen before) and `rows`: for all, never seen, seen before and each class of age their number
    and the error of each baseline, RMS in cells.
    """
    layout = baselines.layout
    table = judge(_Nothing(layout), batches, baselines, Dist())
    living = _living(batches, layout)
    found: dict[str, Any] = {"units": {}}
    for kind, total in living.items():
        rows = {}
        for entry in table["rows"]:
            name = entry["row"]
            if "count" in entry and (name == kind or name.startswith(f"{kind}_")) and "_type" not in name:
                cells = {guess: value for guess, value in entry["position_rms"].items() if guess != PREDICTOR}
                rows[name.removeprefix(kind).removeprefix("_") or "all"] = {"count": entry["count"], "cells": cells}
        count = {name: rows[name]["count"] if name in rows else 0 for name in ("all", "before")}
        unseen_share = count["all"] / total if total else 0.0
        before = count["before"] / count["all"] if count["all"] else 0.0
        found["units"][kind] = {"living": total, "unseen": unseen_share, "before": before, "rows": rows}
    found["units"]["enemy"]["rows"] |= _before_contact(batches, baselines)
    return {**found, **classified(found["units"]["enemy"])}


def classified(enemy: dict[str, Any]) -> dict[str, Any]:
    """Return `class` (one of `CLASSES`), `inferable` and `inferable_before` of the entry of the enemies.

    The last two are 1 - ridge² / map constant², over all unseen enemies and before contact; None where there are none.
    """
    if enemy["unseen"] < HARDLY:
        return {"class": "-", "inferable": None, "inferable_before": None}
    rows = enemy["rows"]
    share = _inferable(rows["all"]["cells"])
    before = _inferable(rows[BEFORE_CONTACT]["cells"]) if BEFORE_CONTACT in rows else None
    found = {"inferable": share, "inferable_before": before}
    if rows["all"]["cells"]["map_constant"] <= CONSTANT_CELLS:
        return {"class": "a", **found}
    return {"class": "b" if share >= INFERABLE or (before or 0.0) >= INFERABLE_BEFORE else "c", **found}


def _inferable(cells: dict[str, float]) -> float:
    return 1 - (cells["ridge"] / max(cells["map_constant"], 1e-9)) ** 2


def _before_contact(batches: list[PackedBatch], baselines: Baselines) -> dict[str, Any]:
    """Return the row `BEFORE_CONTACT`; empty where there are no such cases."""
    layout, count, squares = baselines.layout, 0, dict[str, float]()
    enemies, position = torch.tensor(layout.node_types) == ENEMY, list(layout.position)
    for batch in batches:
        cases = cases_of(batch, layout)
        met = ((cases.ages > 0) | ~unseen(obs_to_nodes(batch["obs"], layout)))[..., enemies].any(-1)
        where = cases.living & enemies[cases.node] & ~met[cases.row, cases.agent]
        count += int(where.sum())
        for name, guess in baselines.predictions(cases).items():
            off = guess[where][:, position].double() - cases.truth[where][:, position].double()
            squares[name] = squares.get(name, 0.0) + float(off.square().sum()) * layout.sight**2
    cells = {name: (square / count) ** 0.5 for name, square in squares.items()} if count else {}
    return {BEFORE_CONTACT: {"count": count, "cells": cells}} if count else {}


def _living(batches: list[PackedBatch], layout: EntityLayout) -> dict[str, int]:
    """Return the pairs of living observer and other living unit, by kind of the unit."""
    types = torch.tensor(layout.node_types)
    total = torch.zeros(layout.n_nodes, dtype=torch.int64)
    for batch in batches:
        counts = alive(batch["obs"]) & batch.valid_mask[:, None]
        total += (~unseen(obs_to_nodes(batch["full_obs"], layout)) & counts[..., None]).sum((0, 1))
    total[0] = 0
    return {name: int(total[types == kind].sum()) for name, kind in (("enemy", ENEMY), ("ally", ALLY))}
