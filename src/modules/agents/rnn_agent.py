"""The recurrent agent of PyMARL: linear, ReLU, GRU, linear."""

from __future__ import annotations

from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import Agent
from omagd.modules.agents.checkpointing import unroll
from omagd.modules.agents.inputs import AgentInputs, InputLinear, flat_features
from omagd.modules.kernels.linear import FastLinear
from omagd.modules.kernels.recurrent import PackedGRU
from omagd.utils.errors import UserError
from omagd.utils.packing import Packing


class RNNAgent(Agent):
    """Values of all actions from flat observations; weights shared by all agents."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.mark_guesses = config.mark_guesses
        self.n_nodes = _n_nodes(config, info) if config.mark_guesses else 0
        self.n_agents = info.n_agents
        self.checkpointing = config.enable_gradient_checkpointing
        self.fc1 = InputLinear(info.obs_dim + self.n_nodes, config.rnn_hidden_dim, config, info)
        bf16 = config.precision == "bf16"
        self.rnn = PackedGRU(config.rnn_hidden_dim, config.rnn_hidden_dim, bf16)
        self.fc2 = FastLinear(config.rnn_hidden_dim, info.n_actions, bf16=bf16)

    def init_hidden(self, n_slots: int) -> Tensor:
        """Return the memory at the start of episodes, [B, n, H] zeros."""
        return self.fc2.weight.new_zeros(n_slots, self.n_agents, self.rnn.hidden_dim)

    def forward(self, inputs: AgentInputs, packing: Packing) -> Tensor:
        """Return the values [S, n, A] of whole episodes."""
        return unroll(self._unroll, inputs, packing, self.init_hidden(packing.n_episodes), self.checkpointing)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values [B, n, A] of one tick and the new memory [B, n, H]."""
        hidden = self.rnn.step(self._embed(inputs), hidden)
        return self._values(hidden), hidden

    def _unroll(self, inputs: AgentInputs, packing: Packing, start: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.rnn(self._embed(inputs), packing, start)
        return self._values(hidden), hidden[-packing.batch_sizes[-1] :]

    def _embed(self, inputs: AgentInputs) -> Tensor:
        features = flat_features(inputs, self.mark_guesses, self.n_nodes)
        return self.fc1.relu(features, inputs.last_action)

    def _values(self, hidden: Tensor) -> Tensor:
        return self.fc2(hidden)


def _n_nodes(config: Config, info: EnvInfo) -> int:
    if info.layout is None:
        raise UserError(f"mark_guesses=True needs an environment with an entity layout; env={config.env} has none")
    return info.layout.n_nodes


HEAD_GAIN = 0.01  # as in PyMARL2: values start near zero


class NRNNAgent(RNNAgent):
    """`RNNAgent` with a layer norm before the head (`use_layer_norm`) and an orthogonal start (`use_orthogonal`)."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.norm = nn.LayerNorm(config.rnn_hidden_dim) if config.use_layer_norm else nn.Identity()
        if config.use_orthogonal:
            nn.init.orthogonal_(self.fc1.weight)
            nn.init.orthogonal_(self.fc2.weight, gain=HEAD_GAIN)
            nn.init.zeros_(self.fc1.bias)
            nn.init.zeros_(self.fc2.bias)

    def _values(self, hidden: Tensor) -> Tensor:
        return self.fc2(self.norm(hidden))
