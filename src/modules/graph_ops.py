"""Convolutions over an agent's graph of units: a plain expression, and a fast form where one fits, as in `ops.py`.

Letters: S rows, n agents, N nodes of an agent's graph.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EntityLayout
from omagd.modules.agents.agent import AgentInputs, InputLinear
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.kernels import kernels_for
from omagd.modules.kernels.graph_encoder import EncodeGraphs, Graphs
from omagd.modules.ops import fast_linear, is_only

Kinds = tuple[InputLinear, nn.Linear, nn.Linear]
"""Layers for an agent's own node, for its allies and for its enemies."""


class FullGraphConv(nn.Module):
    """One convolution on the fully connected graph of N nodes.

        x_i' = (relu(W_s x_i + b_s) + relu(sum over j != i of (W_n x_j + b_n))) / N

    A graph neural network whose weights tell a node from its neighbours (Morris et al. 2019, arXiv:1810.02244, section
    3, the basic model), with a ReLU for each of both parts, and their mean.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.own = nn.Linear(dim, dim)
        self.others = nn.Linear(dim, dim)

    def shared(self, n_nodes: int) -> tuple[Tensor, Tensor]:
        """Return [W_s | W_n] / N and [b_s | b_n] / N: relu(a) / N = relu(a / N), and nodes are not divided then."""
        weight, bias = torch.cat([self.own.weight, self.others.weight]), torch.cat([self.own.bias, self.others.bias])
        return weight * (1.0 / n_nodes), bias * (1.0 / n_nodes)

    def forward(self, nodes: Tensor) -> Tensor:
        """Return [..., N, dim] from nodes [..., N, dim]."""
        # One product for both maps; each node then hears the sum of all messages but its own.
        own, sent = fast_linear(nodes, *self.shared(nodes.shape[-2])).chunk(2, dim=-1)
        received = (sent.sum(dim=-2, keepdim=True) - sent).relu_()
        return F.relu(own) + received


def encode_graphs(inputs: AgentInputs, layout: EntityLayout, kinds: Kinds, layers: nn.Sequential) -> Tensor:
    """Return the mean over the nodes of each agent's graph after all convolutions, [S, n, dim].

    kinds: the embedding of each kind of node, relu(W x + b). layers: `FullGraphConv`s.
    """
    made = _encode_by_kernels(inputs, layout, kinds, layers)
    if made is not None:
        return made
    (own, ally, enemy), pooled = kinds, []
    for piece in inputs.pieces():  # convolutions read and write each node several times
        # Kinds of units have other features, so each has an embedding of its own before they mix.
        nodes = obs_to_nodes(piece.features, layout).split([1, layout.n_allies, layout.n_enemies], dim=-2)
        embedded = own(nodes[0].squeeze(-2), piece.last_action).unsqueeze(-2), ally(nodes[1]), enemy(nodes[2])
        pooled.append(layers(torch.cat(embedded, dim=-2).relu_()).mean(dim=-2))
    return torch.cat(pooled)


def _encode_by_kernels(inputs: AgentInputs, layout: EntityLayout, kinds: Kinds, layers: nn.Sequential) -> Tensor | None:
    """Return `encode_graphs` with each distinct node computed once; None where the kernels do not fit."""
    (own, ally, enemy), shape, dim = kinds, inputs.last_action.shape, kinds[1].out_features
    # In bf16 the layers multiply. They act, too: its batches are small, and their sizes differ from tick to tick.
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or inputs.features.requires_grad:
        return None
    kernels = kernels_for(inputs.features, inputs.last_action.numel() * layout.n_nodes * dim, "compiled_graphs")
    known = InputLinear, nn.Linear, nn.Sequential, FullGraphConv
    if kernels is None or dim % kernels.LANES or not all(is_only(part, *known) for part in (*kinds, layers)):
        return None
    of_features, table, index = own.lookup(inputs.last_action)
    sizes = of_features.shape[1], len(table)
    # Trained and target network read the same graphs: the one that comes second finds them made.
    graphs = inputs.kept.get(sizes)
    if graphs is None:
        obs = inputs.features.flatten(0, 1)
        graphs = inputs.kept[sizes] = Graphs(kernels, obs, index.flatten(), layout, *sizes)
    embeddings = (p for layer in (ally, enemy) for p in (layer.weight, layer.bias))
    convolutions = (p for layer in layers for p in cast(FullGraphConv, layer).shared(layout.n_nodes))
    pooled = EncodeGraphs.apply(graphs, table, of_features, *embeddings, *convolutions)  # type: ignore[no-untyped-call]
    return cast(Tensor, pooled).unflatten(0, shape)
