"""Critics: the value of a moment, for learners that do not value actions."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from omagd.utils.registry import Registry

REGISTRY: Registry[Callable[..., nn.Module]] = Registry(
    "critic",
    "omagd.critics",
    lazy={
        "state": "omagd.modules.critics.critic:StateCritic",
        "agent_state": "omagd.modules.critics.critic:agent_state_critic",
        "observation": "omagd.modules.critics.critic:observation_critic",
        "set": "omagd.modules.critics.critic:SetCritic",
    },
    protocol="omagd.modules.critics.critic:Critic",
)
