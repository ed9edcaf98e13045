"""The graph agent: an observation becomes a graph of entities, read by graph convolutions, then by a GRU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs, InputLinear, Marks, RecurrentAgent
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.kernels.graph_encoder import EncodeGraphs, Graphs, graph_kernels_for, in_lanes
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
    if kernels is None or not is_only(agent, *kinds):
        return None
    of_features, table, index = agent.embed_self.lookup(inputs.last_action)
    shape, sizes = inputs.last_action.shape, (of_features.shape[1], len(table))
    # Trained and target network read the same graphs: the one that comes second finds them made.
    graphs = inputs.kept.get(sizes)
    if graphs is None:
        obs, marks = inputs.features.flatten(0, 1), agent.marks.of(inputs).flatten(2).flatten(0, 1)
        graphs = inputs.kept[sizes] = Graphs(kernels, obs, marks, index.flatten(), agent.layout, *sizes)
    embeddings = (p for layer in (agent.embed_ally, agent.embed_enemy) for p in (layer.weight, layer.bias))
    convolutions = cast("Iterable[FullGraphConv]", agent.convolutions)
    layers = (p for layer in convolutions for p in layer.shared(agent.layout.n_nodes))
    weights = in_lanes(kernels.LANES, table, of_features, *embeddings, *layers)
    pooled, enemies = EncodeGraphs.apply(graphs, agent.entity, *weights)  # type: ignore[no-untyped-call]
    pooled, enemies = pooled[:, :dim], enemies[..., :dim]
    if agent.entity:
        return pooled.unflatten(0, shape), agent.attack_node(enemies).unflatten(0, shape)
    return pooled.unflatten(0, shape), pooled.new_empty(*shape, 0, dim)


class GNNRNNAgent(RecurrentAgent):
    """Values of all actions from graphs of entities; weights shared by all agents.

    `gnn_readout=pool`: all values come from the mean over nodes, as published; it cannot tell enemies apart.
    `entity`: the value of "attack i" comes from enemy node i and the hidden state, the other values from the hidden
    state. Where healers target allies by the same actions (MMM), the enemy node of that number stands in.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.layout = _layout(config, info)
        self.marks = Marks(config, info)
        self.entity = config.gnn_readout == "entity"
        node_dim, dim, hidden = self.layout.node_dim + self.marks.width, config.gnn_hidden_dim, config.rnn_hidden_dim
        self.embed_self = InputLinear(node_dim, dim, config, info)
        self.embed_ally = nn.Linear(node_dim, dim)
        self.embed_enemy = nn.Linear(node_dim, dim)
        self.convolutions = nn.Sequential(*(FullGraphConv(dim) for _ in range(config.gnn_layer_num)))
        self.rnn = PackedGRU(dim, hidden)
        self.fc2 = nn.Linear(hidden, info.n_normal_actions if self.entity else info.n_actions)
        if self.entity:
            self.attack_node = nn.Linear(dim, hidden)
            self.attack_memory = nn.Linear(hidden, hidden, bias=False)
            self.attack_value = nn.Linear(hidden, 1)

    @faster_by(_encode_by_kernels)
    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the mean over nodes [S, n, dim], and the enemies' part of the readout [S, n, n_enemies, H]."""
        # In pieces that fit the cache: convolutions read and write each node several times.
        rows = max(1, GRAPHS_AT_ONCE // self.n_agents)
        parts = (inputs.features, inputs.last_action, self.marks.of(inputs))
        chunks = zip(*(x.split(rows) for x in parts), strict=True)
        pooled, enemies = zip(*(self._encode_chunk(*chunk) for chunk in chunks), strict=True)
        return torch.cat(pooled), torch.cat(enemies)

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]: under `entity` v(relu(W_e node_i + W_h h)) for "attack i"."""
        if not self.entity:
            return self.fc2(hidden)
        # "Attack i" is valued by enemy i's own node, so enemies in other places have other values.
        joined = F.relu(others[0] + self.attack_memory(hidden).unsqueeze(-2))
        return torch.cat([self.fc2(hidden), self.attack_value(joined).squeeze(-1)], dim=-1)

    def _encode_chunk(self, features: Tensor, last_action: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        nodes = self._nodes(features, last_action, marks)
        enemies = nodes[..., 1 + self.layout.n_allies :, :]
        return nodes.mean(dim=-2), self.attack_node(enemies) if self.entity else enemies[..., :0, :]

    def _nodes(self, features: Tensor, last_action: Tensor, marks: Tensor) -> Tensor:
        """Return the nodes after all convolutions, [S, n, N, dim]."""
        # Kinds of units have other features, so each has an embedding of its own before they mix.
        raw = obs_to_nodes(features, self.layout)
        if self.marks.width:
            raw = torch.cat([raw, marks], dim=-1)
        own, allies, enemies = raw.split([1, self.layout.n_allies, self.layout.n_enemies], dim=-2)
        embedded = [
            self.embed_self(own.squeeze(-2), last_action).unsqueeze(-2),
            self.embed_ally(allies),
            self.embed_enemy(enemies),
        ]
        return self.convolutions(torch.cat(embedded, dim=-2).relu_())


def _layout(config: Config, info: EnvInfo) -> EntityLayout:
    if info.layout is None:
        raise UserError(f"agent={config.agent} needs an environment with an entity layout; env={config.env} has none")
    if config.gnn_readout == "entity" and info.n_normal_actions + info.layout.n_enemies != info.n_actions:
        raise UserError(
            f"gnn_readout=entity needs one attack action for each enemy; env={config.env} has {info.n_actions} actions "
            f"({info.n_normal_actions} normal) and {info.layout.n_enemies} enemies: use gnn_readout=pool"
        )
    return info.layout
