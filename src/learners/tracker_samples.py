"""What the tracker of stage 2 learns from: whole episodes with what is true of the nodes that agents do not see.

Shapes: S packed rows, n agents, N nodes, D features, M missing nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omagd.config.env_info import EntityLayout
from omagd.modules.graph_reconstructers.graphs import alive, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.tracker import Memory, age_class
from omagd.utils.packing import PackedBatch, Packing, last_actions


@dataclass(frozen=True)
class Sample:
    """Whole episodes with what is true of their missing nodes.

    Attributes:
        memory, packing: inputs. node: [M], number of each in its graph. target: [M, D], zeros for the dead. dead: [M]
            bool. ages: [M], class of age. weight: [M], of each node in the loss.
    """

    memory: Memory
    packing: Packing
    node: Tensor
    target: Tensor
    dead: Tensor
    ages: Tensor
    weight: Tensor


@torch.no_grad()
def sample_of(batch: PackedBatch, layout: EntityLayout) -> Sample:
    """Return what the loss reads, with weights of 1. Of dead observers and closing rows no node is missing."""
    nodes, full = obs_to_nodes(batch["obs"], layout), obs_to_nodes(batch["full_obs"], layout)
    living = alive(batch["obs"])[..., None]
    hidden = unseen(nodes)
    missing = hidden & living & batch.valid_mask[:, None, None]
    memory = _memory_of(batch, nodes, ~hidden & living, missing)
    target = full[missing]
    dead = (target == 0).all(-1)
    ages = age_class(memory.age[missing])
    node = torch.nonzero(missing)[:, 2]
    return Sample(memory, batch.packing, node, target, dead, ages, torch.ones_like(target[:, 0]))


def _memory_of(batch: PackedBatch, nodes: Tensor, seen: Tensor, missing: Tensor) -> Memory:
    """Return what agents know at each row of packed episodes; nodes [S, n, N, D], seen and missing [S, n, N] bool."""
    packing, (n_agents, n_nodes) = batch.packing, seen.shape[1:]
    step = packing.step.to(nodes.device)
    at = packing.pad(torch.where(seen, step[:, None, None], -1), -1).cummax(dim=1).values
    last_step = packing.pack(at)
    rows = packing.row(last_step, packing.episode[:, None, None])
    agents, units = torch.arange(n_agents, device=nodes.device)[:, None], torch.arange(n_nodes, device=nodes.device)
    never = last_step < 0
    last = torch.where(never[..., None], 0.0, nodes[rows, agents, units])
    age = torch.where(never, -1, step[:, None, None] - last_step)
    own = nodes[:, :, 0]
    change = own - own[packing.previous_row.to(nodes.device)]
    return Memory(last, age, last_actions(batch["actions"], packing), change, step, missing)
