"""The graph agent: an observation becomes a graph of entities, read by graph convolutions, then by a GRU."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs, InputLinear, Marks, RecurrentAgent
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.kernels.forms import is_only
from omagd.modules.kernels.graph_encoder import EncodeGraphs, Graphs, graph_kernels_for, in_lanes
from omagd.modules.kernels.linear import fast_linear
from omagd.modules.kernels.recurrent import PackedGRU
from omagd.utils.errors import UserError

GRAPHS_AT_ONCE = 512  # graphs that pass together, so that their nodes stay in the cache


class FullGraphConv(nn.Module):
    """One convolution on the fully connected graph of N nodes.

        x_i' = (relu(W_s x_i + b_s) + relu(sum over j != i of (W_n x_j + b_n))) / N

    Args:
        dim: features of a node, in and out. bf16: whether a CPU multiplies in bf16.
    """

    def __init__(self, dim: int, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        self.own = nn.Linear(dim, dim)
        self.others = nn.Linear(dim, dim)

    def shared(self, n_nodes: int) -> tuple[Tensor, Tensor]:
        """Return [W_s | W_n] / N and [b_s | b_n] / N: relu(a) / N = relu(a / N), and nodes are not divided then."""
        weight, bias = torch.cat([self.own.weight, self.others.weight]), torch.cat([self.own.bias, self.others.bias])
        return weight * (1.0 / n_nodes), bias * (1.0 / n_nodes)

    def forward(self, nodes: Tensor) -> Tensor:
        """Return [..., N, dim] from nodes [..., N, dim]."""
        own, sent = fast_linear(nodes, *self.shared(nodes.shape[-2]), self.bf16).chunk(2, dim=-1)
        received = (sent.sum(dim=-2, keepdim=True) - sent).relu_()
        return F.relu(own) + received


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
        self.bf16 = bf16 = config.precision == "bf16"
        self.entity = config.gnn_readout == "entity"
        node_dim, dim, hidden = self.layout.node_dim + self.marks.width, config.gnn_hidden_dim, config.rnn_hidden_dim
        self.embed_self = InputLinear(node_dim, dim, config, info)
        self.embed_ally = nn.Linear(node_dim, dim)
        self.embed_enemy = nn.Linear(node_dim, dim)
        self.convolutions = nn.Sequential(*(FullGraphConv(dim, bf16) for _ in range(config.gnn_layer_num)))
        self.rnn = PackedGRU(dim, hidden, bf16)
        self.fc2 = nn.Linear(hidden, info.n_normal_actions if self.entity else info.n_actions)
        if self.entity:
            self.attack_node = nn.Linear(dim, hidden)
            self.attack_memory = nn.Linear(hidden, hidden, bias=False)
            self.attack_value = nn.Linear(hidden, 1)

    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the mean over nodes [S, n, dim], and the enemies' part of the readout [S, n, n_enemies, H]."""
        rows = max(1, GRAPHS_AT_ONCE // self.n_agents)
        n_numbers = inputs.last_action.numel() * self.layout.n_nodes * self.embed_ally.out_features
        kernels = None if self.bf16 else graph_kernels_for(inputs.features, n_numbers)
        marks = self.marks.of(inputs)
        if kernels is not None and is_only(self, *KINDS):
            return self._encode_by(kernels, inputs, marks)
        chunks = zip(*(x.split(rows) for x in (inputs.features, inputs.last_action, marks)), strict=True)
        pooled, enemies = zip(*(self._encode_chunk(*chunk) for chunk in chunks), strict=True)
        return torch.cat(pooled), torch.cat(enemies)

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]: under `entity` v(relu(W_e node_i + W_h h)) for "attack i"."""
        if not self.entity:
            return self.fc2(hidden)
        joined = F.relu(others[0] + self.attack_memory(hidden).unsqueeze(-2))
        return torch.cat([self.fc2(hidden), self.attack_value(joined).squeeze(-1)], dim=-1)

    def _encode_by(self, kernels: ModuleType, inputs: AgentInputs, marks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `encode` by kernels, from marks [S, n, N, width]."""
        of_features, table, index = self.embed_self.lookup(inputs.last_action)
        shape, sizes = inputs.last_action.shape, (of_features.shape[1], len(table))
        graphs = inputs.kept.get(sizes)
        if graphs is None:
            obs, of_nodes = inputs.features.flatten(0, 1), marks.flatten(2).flatten(0, 1)
            graphs = inputs.kept[sizes] = Graphs(kernels, obs, of_nodes, index.flatten(), self.layout, *sizes)
        embeddings = (p for layer in (self.embed_ally, self.embed_enemy) for p in (layer.weight, layer.bias))
        convolutions = cast("Iterable[FullGraphConv]", self.convolutions)
        layers = (p for layer in convolutions for p in layer.shared(self.layout.n_nodes))
        weights = in_lanes(kernels.LANES, table, of_features, *embeddings, *layers)
        pooled, enemies = EncodeGraphs.apply(graphs, self.entity, *weights)  # type: ignore[no-untyped-call]
        if (dim := self.embed_ally.out_features) < pooled.shape[-1]:
            pooled, enemies = pooled[:, :dim], enemies[..., :dim]
        if self.entity:
            return pooled.unflatten(0, shape), self.attack_node(enemies).unflatten(0, shape)
        return pooled.unflatten(0, shape), pooled.new_empty(*shape, 0, pooled.shape[-1])

    def _encode_chunk(self, features: Tensor, last_action: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        nodes = self._nodes(features, last_action, marks)
        enemies = nodes[..., 1 + self.layout.n_allies :, :]
        return nodes.mean(dim=-2), self.attack_node(enemies) if self.entity else enemies[..., :0, :]

    def _nodes(self, features: Tensor, last_action: Tensor, marks: Tensor) -> Tensor:
        """Return the nodes after all convolutions, [S, n, N, dim]."""
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


KINDS = GNNRNNAgent, InputLinear, nn.Linear, nn.Sequential, FullGraphConv, PackedGRU
"""What the kernels compute."""


def _layout(config: Config, info: EnvInfo) -> EntityLayout:
    if info.layout is None:
        raise UserError(f"agent={config.agent} needs an environment with an entity layout; env={config.env} has none")
    if config.gnn_readout == "entity" and info.n_normal_actions + info.layout.n_enemies != info.n_actions:
        raise UserError(
            f"gnn_readout=entity needs one attack action for each enemy; env={config.env} has {info.n_actions} actions "
            f"({info.n_normal_actions} normal) and {info.layout.n_enemies} enemies: use gnn_readout=pool"
        )
    return info.layout
