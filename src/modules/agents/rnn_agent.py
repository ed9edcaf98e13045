"""The recurrent agent of PyMARL: linear, ReLU, GRU, linear."""

from __future__ import annotations

from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import AgentInputs, InputLinear, Marks, RecurrentAgent
from omagd.modules.kernels.linear import FastLinear
from omagd.modules.kernels.recurrent import PackedGRU
from omagd.utils.errors import UserError

WIDE = 32  # results of a product from which on rounding its factors to bf16 costs less than bf16 saves
HEAD_GAIN = 0.01  # as in PyMARL2: values start near zero


class RNNAgent(RecurrentAgent):
    """Values of all actions from flat observations; weights shared by all agents."""

    reads_inferences = True

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__(config, info)
        self.marks = Marks(config, info)
        if self.marks.width and info.layout is None:
            raise UserError(f"mark_guesses=True needs an environment with an entity layout; env={config.env} has none")
        self.fc1 = InputLinear(info.obs_dim + self.marks.n, config.rnn_hidden_dim, config, info)
        bf16 = config.precision == "bf16"
        self.rnn = PackedGRU(config.rnn_hidden_dim, config.rnn_hidden_dim, bf16)
        self.fc2 = FastLinear(config.rnn_hidden_dim, info.n_actions, bf16=bf16 and info.n_actions >= WIDE)

    def encode(self, inputs: AgentInputs) -> tuple[Tensor, ...]:
        """Return the GRU's input [S, n, H]."""
        return (self.fc1.relu(self.marks.flat(inputs), inputs.last_action, rounded=True),)

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]."""
        return self.fc2(hidden)


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

    def values(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """Return the values [S, n, A]."""
        return super().values(self.norm(hidden))
