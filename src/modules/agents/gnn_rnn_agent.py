"""The graph agent: an observation becomes a graph of entities, read by graph convolutions, then by a GRU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs, InputLinear, RecurrentAgent
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.kernels.graph_encoder import EncodeGraphs, Graphs, graph_kernels_for
from omagd.modules.ops import PackedGRU, fast_linear, faster_by, is_only
from omagd.utils.errors import UserError

GRAPHS_AT_ONCE = 512  # graphs that pass together, so that their nodes stay in the cache


class FullGraphConv(nn.Module):
    """One convolution on the fully connected graph of N nodes.

        x_i' = (relu(W_s x_i + b_s) + relu(sum over j != i of (W_n x_j + b_n))) / N

    Args:
        dim: features of a node, in and out.
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


def _encode_by_kernels(agent: GNNRNNAgent, inputs: AgentInputs) -> tuple[Tensor, ...] | None:
    """Return `GNNRNNAgent.encode` with each distinct node computed once; None where the kernels do not fit."""
    n_numbers, dim = inputs.last_action.numel() * agent.layout.n_nodes, agent.embed_ally.out_features
    kernels = graph_kernels_for(inputs.features, n_numbers * dim)
    kinds = GNNRNNAgent, InputLinear, nn.Linear, nn.Sequential, FullGraphConv, PackedGRU
    if kernels is None or dim % kernels.LANES or not is_only(agent, *kinds):
        return None
    of_features, table, index = agent.embed_self.lookup(inputs.last_action)
    shape, sizes = inputs.last_action.shape, (of_features.shape[1], len(table))
    # Trained and target network read the same graphs: the one that comes second finds them made.
    graphs = inputs.kept.get(sizes)
    if graphs is None:
        obs = inputs.features.flatten(0, 1)
        graphs = inputs.kept[sizes] = Graphs(kernels, obs, index.flatten(), agent.layout, *sizes)
    embeddings = (p for layer in (agent.embed_ally, agent.embed_enemy) for p in (layer.weight, layer.bias))
    convolutions = cast("Iterable[FullGraphConv]", agent.convolutions)
    layers = (p for layer in convolutions for p in layer.shared(agent.layout.n_nodes))
    weights = table, of_features, *embeddings, *layers
    pooled: Tensor = EncodeGraphs.apply(graphs, *weights)  # type: ignore[no-untyped-call]
    return (pooled.unflatten(0, shape),)


class GNNRNNAgent(RecurrentAgent):
    """Values of all actions from the mean over the nodes of a graph of entities, as published.

    Weights are shared by all agents. A mean cannot tell enemies apart.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        if info.layout is None:
            raise UserError(
                f"agent={config.agent} needs an environment with an entity layout; env={config.env} has none"
            )
        self.layout = info.layout
        node_dim, dim, hidden = self.layout.node_dim, config.gnn_hidden_dim, config.rnn_hidden_dim
        self.embed_self = InputLinear(node_dim, dim, config, info)
        self.embed_ally = nn.Linear(node_dim, dim)
        self.embed_enemy = nn.Linear(node_dim, dim)
        self.convolutions = nn.Sequential(*(FullGraphConv(dim) for _ in range(config.gnn_layer_num)))
        self.rnn = PackedGRU(dim, hidden)
        self.fc2 = nn.Linear(hidden, info.n_actions)

    @faster_by(_encode_by_kernels)
    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the mean over nodes, [S, n, dim]."""
        # In pieces that fit the cache: convolutions read and write each node several times.
        rows = max(1, GRAPHS_AT_ONCE // self.n_agents)
        chunks = zip(inputs.features.split(rows), inputs.last_action.split(rows), strict=True)
        return (torch.cat([self._nodes(*chunk).mean(dim=-2) for chunk in chunks]),)

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]."""
        return self.fc2(hidden)

    def _nodes(self, features: Tensor, last_action: Tensor) -> Tensor:
        """Return the nodes after all convolutions, [S, n, N, dim]."""
        # Kinds of units have other features, so each has an embedding of its own before they mix.
        raw = obs_to_nodes(features, self.layout)
        own, allies, enemies = raw.split([1, self.layout.n_allies, self.layout.n_enemies], dim=-2)
        embedded = [
            self.embed_self(own.squeeze(-2), last_action).unsqueeze(-2),
            self.embed_ally(allies),
            self.embed_enemy(enemies),
        ]
        return self.convolutions(torch.cat(embedded, dim=-2).relu_())
