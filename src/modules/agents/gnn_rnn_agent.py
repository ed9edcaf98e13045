"""The graph agent: every observation is a graph of entities, read by graph convolutions and remembered by a GRU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import Agent
from omagd.modules.agents.checkpointing import unroll
from omagd.modules.agents.inputs import AgentInputs, InputLinear, guess_marks
from omagd.modules.graph_reconstructers.graphs import obs_to_nodes
from omagd.modules.kernels.linear import fast_linear
from omagd.modules.kernels.recurrent import PackedGRU
from omagd.utils.errors import UserError
from omagd.utils.packing import Packing

GRAPHS_AT_ONCE = 512


class FullGraphConv(nn.Module):
    """One convolution on the fully connected graph: (relu(W_s x_i) + relu(sum over j≠i of W_n x_j)) / N.

    Args:
        dim: features of a node, in and out. bf16: whether products are taken in bf16 on a CPU.
    """

    def __init__(self, dim: int, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        self.own = nn.Linear(dim, dim)
        self.others = nn.Linear(dim, dim)

    def forward(self, nodes: Tensor) -> Tensor:
        """Return [..., N, dim] from nodes [..., N, dim]."""
        # relu(a) / N = relu(a / N): the division costs nothing where it is done to the weights.
        share = 1.0 / nodes.shape[-2]
        weight = torch.cat([self.own.weight, self.others.weight]) * share
        bias = torch.cat([self.own.bias, self.others.bias]) * share
        own, sent = fast_linear(nodes, weight, bias, self.bf16).chunk(2, dim=-1)
        received = (sent.sum(dim=-2, keepdim=True) - sent).relu_()
        return F.relu(own) + received


class GNNRNNAgent(Agent):
    """Values of all actions from graphs of entities; weights shared by all agents.

    `gnn_readout=pool`: all values come from the mean over nodes (it cannot tell enemies apart). `entity`: the value of
    "attack i" comes from enemy node i and the memory, the other values from the memory. Where healers aim at allies
    with the same actions (MMM), the enemy's node of that number stands in.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.layout = _layout(config, info)
        self.n_agents = info.n_agents
        self.mark_guesses = config.mark_guesses
        self.checkpointing = config.enable_gradient_checkpointing
        bf16 = config.precision == "bf16"
        self.entity = config.gnn_readout == "entity"
        node_dim, dim, hidden = self.layout.node_dim + config.mark_guesses, config.gnn_hidden_dim, config.rnn_hidden_dim
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

    def init_hidden(self, n_slots: int) -> Tensor:
        """Return the memory at the start of episodes, [B, n, H] zeros."""
        return self.fc2.weight.new_zeros(n_slots, self.n_agents, self.rnn.hidden_dim)

    def forward(self, inputs: AgentInputs, packing: Packing) -> Tensor:
        """Return the values [S, n, A] of whole episodes."""
        return unroll(self._unroll, inputs, packing, self.init_hidden(packing.n_episodes), self.checkpointing)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [B, n, A] of one tick and the new memory [B, n, H]."""
        pooled, enemies = self._read(inputs)
        hidden = self.rnn.step(pooled, hidden)
        return self._values(enemies, hidden), hidden

    def _unroll(self, inputs: AgentInputs, packing: Packing, start: Tensor) -> tuple[Tensor, Tensor]:
        pooled, enemies = self._read(inputs)
        hidden = self.rnn(pooled, packing, start)
        return self._values(enemies, hidden), hidden[-packing.batch_sizes[-1] :]

    def _read(self, inputs: AgentInputs) -> tuple[Tensor, Tensor]:
        """Return the mean over nodes [S, n, dim] and what the readout needs of the enemies [S, n, n_enemies, hidden].

        Some rows at a time, so that a chunk's nodes stay in the processor's cache.
        """
        rows = max(1, GRAPHS_AT_ONCE // self.n_agents)
        marks = guess_marks(inputs, self.layout.n_nodes) if self.mark_guesses else inputs.features[..., :0]
        chunks = zip(*(x.split(rows) for x in (inputs.features, inputs.last_action, marks)), strict=True)
        pooled, enemies = zip(*(self._read_chunk(*chunk) for chunk in chunks), strict=True)
        return torch.cat(pooled), torch.cat(enemies)

    def _read_chunk(self, features: Tensor, last_action: Tensor, marks: Tensor) -> tuple[Tensor, Tensor]:
        nodes = self._nodes(features, last_action, marks)
        enemies = nodes[..., 1 + self.layout.n_allies :, :]
        return nodes.mean(dim=-2), self.attack_node(enemies) if self.entity else enemies[..., :0, :]

    def _nodes(self, features: Tensor, last_action: Tensor, marks: Tensor) -> Tensor:
        """Return the nodes after all convolutions, [S, n, N, dim]."""
        raw = obs_to_nodes(features, self.layout)
        if self.mark_guesses:
            raw = torch.cat([raw, marks.unsqueeze(-1)], dim=-1)
        own, allies, enemies = raw.split([1, self.layout.n_allies, self.layout.n_enemies], dim=-2)
        embedded = [
            self.embed_self(own.squeeze(-2), last_action).unsqueeze(-2),
            self.embed_ally(allies),
            self.embed_enemy(enemies),
        ]
        return self.convolutions(torch.cat(embedded, dim=-2).relu_())

    def _values(self, enemies: Tensor, hidden: Tensor) -> Tensor:
        if not self.entity:
            return self.fc2(hidden)
        joined = F.relu(enemies + self.attack_memory(hidden).unsqueeze(-2))
        return torch.cat([self.fc2(hidden), self.attack_value(joined).squeeze(-1)], dim=-1)


def _layout(config: Config, info: EnvInfo) -> EntityLayout:
    if info.layout is None:
        raise UserError(f"agent={config.agent} needs an environment with an entity layout; env={config.env} has none")
    if config.gnn_readout == "entity" and info.n_normal_actions + info.layout.n_enemies != info.n_actions:
        raise UserError(
            f"gnn_readout=entity needs one attack action for each enemy; env={config.env} has {info.n_actions} actions "
            f"({info.n_normal_actions} normal) and {info.layout.n_enemies} enemies: use gnn_readout=pool"
        )
    return info.layout
