"""The graph agent: an observation becomes a graph of entities, read by graph convolutions, then by a GRU."""

from __future__ import annotations

from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs, InputLinear, RecurrentAgent
from omagd.modules.graph_ops import FullGraphConv, encode_graphs
from omagd.modules.ops import PackedGRU


class GNNRNNAgent(RecurrentAgent):
    """Values of all actions from the mean over a graph of entities, after `FullGraphConv`s (Morris et al. 2019).

    Weights are shared by all agents. A mean cannot tell enemies apart.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.layout = info.layout_for(f"agent={config.agent}", config.env)
        node_dim, dim, hidden = self.layout.node_dim, config.gnn_hidden_dim, config.rnn_hidden_dim
        self.embed_self = InputLinear(node_dim, dim, config, info)
        self.embed_ally = nn.Linear(node_dim, dim)
        self.embed_enemy = nn.Linear(node_dim, dim)
        self.convolutions = nn.Sequential(*(FullGraphConv(dim) for _ in range(config.gnn_layer_num)))
        self.rnn = PackedGRU(dim, hidden)
        self.fc2 = nn.Linear(hidden, info.n_actions)

    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the mean over nodes, [S, n, dim]."""
        kinds = self.embed_self, self.embed_ally, self.embed_enemy
        return (encode_graphs(inputs, self.layout, kinds, self.convolutions),)

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]."""
        return self.fc2(hidden)
