"""Updates of fixed shapes on two ranks as graphs, with sums between them; without graphs: test_ddp.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ddp_harness import run_ranks
from fixed_toys import CPU, METHODS, draws, replay
from q_toys import equal, make_learner, state_of, toy_config
from simulated_gpu import DEVICE, simulated_graphs
from torch import nn

from omagd.resident.updates import WARM_UP, FixedUpdates
from omagd.utils.dist_utils import Dist

pytestmark = pytest.mark.processes
LONGEST = (6, 12)  # so ranks have other shapes, and make graphs at other times


class Simulated(Dist):
    """Ranks on simulated GPUs, for which DDP has no gradients."""

    def wrap(self, module: nn.Module, bucket_cap_mb: float = 25.0) -> nn.Module:
        return module


def learn(updates: FixedUpdates, buffer: Any, drawn: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """Return the learner's state after the first update and after the last."""
    states = []
    for number, indices in enumerate(drawn, start=1):
        stats = updates.update(buffer.fixed(indices), episodes=0)
        if number in {1, len(drawn)}:
            states.append({name: value.to(CPU) for name, value in state_of(updates._learner).items()})
    return [*states, {name: total.to(CPU) for name, (total, _) in stats.items()}]


def as_graphs(rank: int, dist: Dist, kinds: tuple[str, ...]) -> Any:
    """Learn without graphs, with them, and where one rank can make none."""
    found: dict[Any, Any] = {}
    there = Simulated(rank, dist.world_size, DEVICE, dist.waits)
    with simulated_graphs():
        buffer, drawn = replay(DEVICE, LONGEST[rank], rank=rank), draws(2 * WARM_UP + 4, rank)
        for kind in kinds:
            for how in ("plain", "graphs", "one gives up"):
                updates = FixedUpdates(make_learner(toy_config(**METHODS[kind]), there, device=DEVICE))
                if how == "plain":
                    updates._capture = lambda shape, draw, inputs, updates=updates: updates._aside(draw, inputs)
                elif how == "one gives up" and rank == 1:
                    updates._made = fails
                before = dist.waits.entered
                found[kind, how] = learn(updates, buffer, drawn)
                found[kind, how, "exchanges"] = dist.waits.entered - before
                found[kind, how, "graphs"] = sum(shape.graph is not None for shape in updates._shapes.values())
    return found


def fails(*_: Any) -> Any:
    raise RuntimeError("no memory")


def test_graphs_of_two_ranks_learn_the_same_bits_and_wait_for_no_rank_without_one():
    kinds = ("all beliefs in parts",)
    ranks = run_ranks(as_graphs, kinds)
    for kind in kinds:
        plain = ranks[0][kind, "plain"]
        for rank, found in enumerate(ranks):
            for how in ("graphs", "one gives up"):
                assert all(map(equal, found[kind, how][:2], plain[:2])), (kind, how, rank)
                assert found[kind, how, "exchanges"] == ranks[0][kind, "plain", "exchanges"]
            assert found[kind, "graphs", "graphs"] > 0
            assert equal(found[kind, "graphs"][2], found[kind, "plain"][2]), "statistics of the rank"
            assert (found[kind, "one gives up", "graphs"] > 0) == (rank == 0)
