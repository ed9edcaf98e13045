"""The cases on which beliefs are measured: the nodes that living agents do not see, with truth and last sight.

Shapes: S packed rows, n agents, N nodes, D features, M missing nodes in the order of `torch.nonzero(missing)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.history import last_seen_step
from omagd.utils.packing import PackedBatch

Batches = Callable[[], Iterable[PackedBatch]]
"""Gives the episodes of a purpose, in batches that fit in memory; may be called several times."""

NUMBERS_AT_ONCE = 1 << 22
"""Entries of observations that are looked at together: what is computed of them takes up to a hundred times as much."""


def bounded(batches: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
    """Yield batches, those of many units in parts of whole episodes, so that memory does not grow with the map."""
    for batch in batches:
        yield from batch.split(max(1, -(-batch["obs"].numel() // NUMBERS_AT_ONCE)))


@dataclass(frozen=True)
class Cases:
    """All missing nodes of a batch: unseen, not the agent itself, of a living observer.

    Attributes:
        missing: [S, n, N] bool. row, agent, node: [M] int64, place of each. step: [M], of the episode.
        age: [M] int64, steps since the node was last seen, 0: never. last: [M, D], features then, zeros: never.
        truth: [M, D], zeros for the dead. living: [M] bool. obs: [S, n, obs_dim], observations.
        sights, ages: [S, n, N, D] and [S, n, N], as `last` and `age`, of all nodes, the seen ones included.
    """

    missing: Tensor
    row: Tensor
    agent: Tensor
    node: Tensor
    step: Tensor
    age: Tensor
    last: Tensor
    truth: Tensor
    living: Tensor
    obs: Tensor
    sights: Tensor
    ages: Tensor

    def __len__(self) -> int:
        return len(self.row)


def cases_of(batch: PackedBatch, layout: EntityLayout) -> Cases:
    """Return the cases of a batch with `obs` and `full_obs`. A sight counts if it is from an earlier step."""
    obs, full = batch["obs"], obs_to_nodes(batch["full_obs"], layout)
    nodes, packing = obs_to_nodes(obs, layout), batch.packing
    counts = (alive(obs) & batch.valid_mask[:, None])[..., None]
    hidden = unseen(nodes)
    missing = hidden & counts
    step = packing.step.to(obs.device)
    last = last_seen_step(~hidden & counts, packing)
    rows = packing.row(last, packing.episode[:, None, None])
    agents, places = (torch.arange(size, device=obs.device) for size in nodes.shape[1:3])
    sights = torch.where((last < 0)[..., None], 0.0, nodes[rows, agents[:, None], places])
    ages = torch.where(last < 0, 0, step[:, None, None] - last)
    row, agent, node = torch.nonzero(missing, as_tuple=True)
    at = row, agent, node
    living = ~unseen(full)[at]
    return Cases(missing, *at, step[row], ages[at], sights[at], full[at], living, obs, sights, ages)
