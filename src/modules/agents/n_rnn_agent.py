"""The recurrent agent of PyMARL2: the same network with two options."""

from __future__ import annotations

from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.rnn_agent import RNNAgent

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
