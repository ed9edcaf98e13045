"""What mixers read: the agents' values, the chosen actions and the state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config


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
    action_mask = (avail_actions.to(q.dtype) - 1) * torch.finfo(q.dtype).max
    return (q + action_mask).max(dim=-1).indices
