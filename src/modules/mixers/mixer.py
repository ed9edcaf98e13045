"""Mixers, and what they read: the agents' values, the chosen actions and the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.ops import FastLinear, qmix_mix


@dataclass(frozen=True)
class MixerInputs:
    """Values of all agents in S rows.

    Attributes:
        q: [S, n, A], values of all actions. actions: [S, n] int64, the actions to evaluate. avail_actions: [S, n, A], 0
            where an action is unavailable. state: [S, state_dim].
    """

    q: Tensor
    actions: Tensor
    avail_actions: Tensor
    state: Tensor

    @property
    def taken(self) -> Tensor:
        """Values of `actions`, [S, n]."""
        # Q_i(tau_i, u_i): the value of the action that agent i chose.
        return self.q.gather(-1, self.actions.unsqueeze(-1)).squeeze(-1)

    @property
    def greedy(self) -> Tensor:
        """Largest value over the available actions, [S, n]."""
        return self.q.gather(-1, greedy_actions(self.q, self.avail_actions).unsqueeze(-1)).squeeze(-1)


class AnyMixer(Protocol):
    """A module that combines the agents' values, built as `cls(config, info)`."""

    def __init__(self, config: Config, info: EnvInfo) -> None: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters, as `nn.Module` does."""


class Mixer(AnyMixer, Protocol):
    """A mixer of the values of the chosen actions; it must be monotonic in them."""

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint values [S], or [S, n], from `agent_qs` [S, n] and `state` [S, state_dim]."""


class MixerOfAllValues(AnyMixer, Protocol):
    """A mixer that reads the values of all actions: its class sets `reads_all_values = True`."""

    def forward(self, inputs: MixerInputs) -> Tensor:
        """Return the joint values [S] of `inputs.actions`."""


def protocol_of(found: Any) -> type:
    """Return the protocol that a mixer follows."""
    return MixerOfAllValues if getattr(found, "reads_all_values", False) else Mixer


def mix(mixer: nn.Module, inputs: MixerInputs) -> Tensor:
    """Return the joint values [S], or [S, n] without a mixer.

    A mixer whose class sets `reads_all_values = True` is called with the `MixerInputs`, any other one with the values
    of the chosen actions [S, n] and the state.
    """
    joint: Tensor = mixer(inputs) if getattr(mixer, "reads_all_values", False) else mixer(inputs.taken, inputs.state)
    return joint


def greedy_actions(q: Tensor, avail_actions: Tensor) -> Tensor:
    """Return the available action with the largest value, [S, n] int64, from [S, n, A] each."""
    # Adding a large negative number takes a sixth of the time of masked_fill on a CPU.
    # Unavailable actions get the type's least number, so that no argmax takes them.
    action_mask = (avail_actions.to(q.dtype) - 1) * torch.finfo(q.dtype).max
    return (q + action_mask).max(dim=-1).indices


class VDNMixer(nn.Module):
    """Q_tot = sum_i q_i (VDN, Sunehag et al. 2018, arXiv:1706.05296)."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return [S] from agent_qs [S, n]; the state [S, state_dim] is not used."""
        # VDN: the simplest joint value that is monotonic in each agent's.
        return agent_qs.sum(dim=-1)


class NoMixer(nn.Module):
    """No joint value: each agent learns alone, from its own reward where the environment gives one."""

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return agent_qs [S, n]; the state [S, state_dim] is not used."""
        return agent_qs


class QMixer(nn.Module):
    """Q_tot = |w2(s)|^T elu(|W1(s)|^T q + b1(s)) + b2(s), with hypernetworks W1, b1, w2, b2 of the state.

    QMIX (Rashid et al. 2018, arXiv:1803.11485, section 4.1). Absolute weights and a monotonic activation give
    dQ_tot / dq_i >= 0, so each agent's greedy action is part of the greedy joint action. W1, w2 and b2 are networks of
    two layers; all first layers read the same state and are one matrix, `first`: [W1 | w2 | b1 | b2].
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        embed, hyper = config.mixing_embed_dim, config.hypernet_embed
        # One product of the state instead of four; the second layers read their columns.
        self.first = FastLinear(info.state_dim, 2 * hyper + 2 * embed)
        self.weight1 = FastLinear(hyper, info.n_agents * embed)
        self.weight2 = FastLinear(hyper, embed)
        self.bias2 = nn.Linear(embed, 1)

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint value [S] from agent_qs [S, n] and state [S, state_dim]."""
        # QMIX, figure 2: networks of the state make the weights and biases that mix the agents' values.
        return qmix_mix(agent_qs, state, self.first, self.weight1, self.weight2, self.bias2)
