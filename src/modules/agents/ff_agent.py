"""The agent without memory of PyMARL's variants: layers over what one sees now."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.agents.agent import Agent
from omagd.modules.agents.inputs import AgentInputs, InputLinear, flat_features
from omagd.modules.kernels.linear import SMALL, FastLinear
from omagd.utils.packing import Packing


class Trunk(nn.Module):
    """Linear, ReLU, linear, ReLU, linear, weights shared by the agents.

    Args:
        n_features, n_out: per agent. config: `rnn_hidden_dim` is the width (H); also the one-hots of `InputLinear`.
        info: sizes. talks: a bidirectional LSTM over the agents in their order (H to 2 H) in place of the second layer.
    """

    def __init__(self, n_features: int, n_out: int, config: Config, info: EnvInfo, talks: bool = False) -> None:
        super().__init__()
        hidden, bf16 = config.rnn_hidden_dim, config.precision == "bf16"
        self.fc1 = InputLinear(n_features, hidden, config, info)
        self.talk = nn.LSTM(hidden, hidden, batch_first=True, bidirectional=True) if talks else None
        self.fc2 = None if talks else FastLinear(hidden, hidden, bf16=bf16)
        self.fc3 = FastLinear(2 * hidden if talks else hidden, n_out, bf16=bf16)

    def forward(self, features: Tensor, last_action: Tensor) -> Tensor:
        """Return [S, n, n_out] from features [S, n, n_features] and last_action [S, n]."""
        if self._plain(features):
            assert self.fc2 is not None, "as `_plain` says"
            parts = (p for layer in (self.fc1, self.fc2, self.fc3) for p in (layer.weight, layer.bias))
            flat = _ThreeLayers.apply(features.reshape(-1, features.shape[-1]), *parts)
            return flat.view(*features.shape[:-1], flat.shape[-1])  # type: ignore[no-any-return]
        hidden = self.fc1.relu(features, last_action)
        if self.talk is not None:
            hidden = self.talk(hidden)[0]
        elif self.fc2 is not None:
            hidden = self.fc2(hidden).relu()
        return self.fc3(hidden)

    def _plain(self, features: Tensor) -> bool:
        """Whether there is nothing to choose: three products on a CPU that are too small for another library."""
        if self.fc2 is None or self.fc1.looks_up or self.fc2.bf16 or features.is_cuda:
            return False
        return 2 * features.shape[:-1].numel() * self.fc2.weight.numel() < SMALL


class _ThreeLayers(torch.autograd.Function):
    """Linear, ReLU, linear, ReLU, linear as one operation: at DDPG's sizes bookkeeping counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor) -> Tensor:
        """Return [R, out] from x [R, in]."""
        first = torch.addmm(b1, x, w1.t()).relu_()
        second = torch.addmm(b2, first, w2.t()).relu_()
        ctx.save_for_backward(x, first, second, w1, w2, w3)
        return torch.addmm(b3, second, w3.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and, where they are asked for, of all weights and biases."""
        x, first, second, w1, w2, w3 = ctx.saved_tensors
        trains = ctx.needs_input_grad[1]
        out: list[Tensor | None] = []
        for read, weight in ((second, w3), (first, w2), (x, w1)):
            out = [grad.t() @ read, grad.sum(0), *out] if trains else [None, None, *out]
            if read is not x:
                grad = grad @ weight
                torch.ops.aten.threshold_backward.grad_input(grad, read, 0, grad_input=grad)
        return grad @ w1 if ctx.needs_input_grad[0] else None, *out


class FFAgent(Agent):
    """A number for each action from one agent's observation alone: its value, or its logit.

    Attributes:
        talks: whether agents hear of each other. samples: whether a frozen copy draws from the softmax of these numbers
            as the agent does in training; else it takes the action with the largest.
    """

    talks: ClassVar[bool] = False
    samples: ClassVar[bool] = False

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        self.n_agents = info.n_agents
        self.mark_guesses = config.mark_guesses
        self.n_nodes = info.layout.n_nodes if config.mark_guesses and info.layout is not None else 0
        self.trunk = Trunk(info.obs_dim + self.n_nodes, info.n_actions, config, info, self.talks)

    def init_hidden(self, n_slots: int) -> Tensor:
        """Return no memory, [B, n, 0]."""
        return self.trunk.fc3.weight.new_zeros(n_slots, self.n_agents, 0)

    def forward(self, inputs: AgentInputs, packing: Packing | None = None) -> Tensor:
        """Return [S, n, A] of all rows; their order says nothing to an agent without memory."""
        return self.trunk(flat_features(inputs, self.mark_guesses, self.n_nodes), inputs.last_action)

    def step(self, inputs: AgentInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return [B, n, A] of one tick and no memory."""
        return self(inputs), hidden

    @classmethod
    def frozen_needs(cls, config: Config) -> tuple[str, ...]:
        """Return what a configuration lacks for `layers` to be all that the agent plays by; nothing where it is so."""
        more = ("obs_last_action", "obs_agent_id", "use_full_obs", "use_graph_reconstruction", "mark_guesses")
        silent = ("an agent that does not talk (agent=ddpg)",) if cls.talks else ()
        return (*silent, *(f"{key}=False" for key in more if getattr(config, key)))

    def layers(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return copies of weight [out, in] and bias [out] of each layer, with ReLU between them.

        Errors: ValueError where agents read more than their observation, or talk.
        """
        trunk = self.trunk
        if trunk.fc2 is None or trunk.fc1.looks_up:
            raise ValueError("this agent is more than layers over an observation")
        parts = (trunk.fc1, trunk.fc2, trunk.fc3)
        return [(_array(part.weight), _array(part.bias)) for part in parts]


def _array(parameter: Tensor) -> np.ndarray:
    return parameter.detach().cpu().float().numpy().copy()
