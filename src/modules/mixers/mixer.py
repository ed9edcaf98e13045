"""Mixers, and what they read: the agents' values, the chosen actions and the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.modules.kernels import kernels_for
from omagd.modules.kernels.linear import Mix
from omagd.modules.ops import FastLinear, faster_by, is_only
from omagd.modules.units import UnitEncoder


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


def _mix_by_kernels(mixer: QMixer, agent_qs: Tensor, state: Tensor) -> Tensor | None:
    """Return `QMixer.forward` by Numba kernels; None where they do not fit."""
    layers = (mixer.first, mixer.weight1, mixer.weight2, mixer.bias2)
    kernels = kernels_for(state, len(state) * mixer.first.out_features)
    if kernels is None or not all(is_only(layer, FastLinear, nn.Linear) for layer in layers):
        return None
    weights = (parameter for layer in layers for parameter in (layer.weight, layer.bias))
    return cast(Tensor, Mix.apply(kernels, agent_qs, state, *weights))  # type: ignore[no-untyped-call]


class QMixer(nn.Module):
    """Q_tot = |w2(s)|^T elu(|W1(s)|^T q + b1(s)) + b2(s), with hypernetworks W1, b1, w2, b2 of the state.

    QMIX (Rashid et al. 2018, arXiv:1803.11485, section 4.1). Absolute weights and a monotonic activation give
    dQ_tot / dq_i >= 0, so each agent's greedy action is part of the greedy joint action. W1, w2 and b2 are networks of
    two layers; all first layers read the same state and are one matrix, `first`: [W1 | w2 | b1 | b2].
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        embed, hyper = config.mixing_embed_dim, config.hypernet_embed
        self.n_agents = info.n_agents
        self.embed_dim = embed
        self.widths = [hyper, hyper, embed, embed]
        # One product of the state instead of four; the second layers read their columns.
        self.first = FastLinear(info.state_dim, sum(self.widths))
        self.weight1 = FastLinear(hyper, info.n_agents * embed)
        self.weight2 = FastLinear(hyper, embed)
        self.bias2 = nn.Linear(embed, 1)

    @faster_by(_mix_by_kernels)
    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint value [S] from agent_qs [S, n] and state [S, state_dim]."""
        for_w1, for_w2, b1, for_b2 = self.first(state).split(self.widths, dim=-1)
        # QMIX, eq. 5: dQ_tot / dq_i >= 0, because weights are absolute and elu rises. Biases may have any sign.
        w1 = self.weight1(F.relu(for_w1)).abs().view(-1, self.n_agents, self.embed_dim)
        w2 = self.weight2(F.relu(for_w2)).abs()
        b2 = self.bias2(F.relu(for_b2)).squeeze(-1)
        # QMIX, figure 2: the state makes the weights, so that it need not enter monotonically.
        hidden = F.elu((w1 * agent_qs.unsqueeze(-1)).sum(dim=1) + b1)
        return (hidden * w2).sum(dim=-1) + b2


class SetQMixer(nn.Module):
    """Q_tot = |w2(g)|^T elu(sum_i |W1(e_i, g)|^T q_i + b1(g)) + b2(g), over the living agents i.

    As in QMIX (Rashid et al. 2018), absolute weights make Q_tot monotonic in every q_i; the weights of agent i come
    from the embedding e_i of its unit and from that of the whole state, g, instead of its place in the state. Dead and
    absent agents do not count. So its size does not depend on the map, and the order of the agents does not matter.
    """

    def __init__(self, config: Config, info: EnvInfo) -> None:
        super().__init__()
        embed, hyper = config.mixing_embed_dim, config.hypernet_embed
        self.embed_dim = embed
        self.units = UnitEncoder(config, info, hyper, f"mixer={config.mixer}")
        self.weight1_unit = FastLinear(hyper, embed)
        self.whole = FastLinear(hyper, 3 * embed)  # [part of W1 | b1 | w2]
        self.bias2 = nn.Sequential(FastLinear(hyper, embed), nn.ReLU(), nn.Linear(embed, 1))

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint value [S] from agent_qs [S, n] and state [S, state_dim]."""
        whole, allies, there = self.units(state)
        for_w1, b1, for_w2 = self.whole(whole).chunk(3, dim=-1)
        # QMIX, eq. 5, for any number of agents: absolute weights, one row for each agent's unit.
        w1 = (self.weight1_unit(allies) + for_w1.unsqueeze(1)).abs()
        # A sum over agents whose weights are functions of their units: any number of them, in any order.
        hidden = F.elu((w1 * (agent_qs.unsqueeze(-1) * there)).sum(dim=1) + b1)
        joint: Tensor = (hidden * for_w2.abs()).sum(dim=-1) + self.bias2(whole).squeeze(-1)
        return joint
