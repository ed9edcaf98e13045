"""Interfaces of policies and controllers, and the data that they exchange with runners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.envs.protocol import Observation

if TYPE_CHECKING:
    import torch

    from omagd.components.episode_codec import Spec
    from omagd.modules.agents.agent import Agent, AgentInputs
    from omagd.modules.graph_reconstructers.belief_head import BeliefHead
    from omagd.modules.graph_reconstructers.reconstructor import Reconstructor
    from omagd.utils.packing import PackedBatch


@dataclass
class Tick:
    """Input of a policy at one tick of all slots.

    Attributes:
        observation: of all slots; valid until the environment's next call.
        step: [B] int64, step within each slot's episode.
        active: [B] bool, slots that need a decision. At the closing row of an episode a slot is active too, since the
            policy's extras are stored there; there may be no available action then.
    """

    observation: Observation
    step: np.ndarray
    active: np.ndarray


@dataclass
class Decision:
    """Output of a policy at one tick; rows of inactive slots may hold anything.

    Attributes:
        actions: [B, n] int64.
        extras: name -> [B, ...], stored with the row.
        values: [B, n, A], the agents' outputs from which the actions were chosen, for people to look at; None: unknown.
    """

    actions: np.ndarray
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    values: np.ndarray | None = None


@dataclass
class Exploration:
    """How to explore: share of random actions, and random generator.

    For learners with on-policy data `epsilon` is 0: the policy itself is stochastic.
    """

    epsilon: float
    rng: np.random.Generator


class Policy(Protocol):
    """Chooses actions in an environment: a controller, or scripts."""

    @property
    def wants_full_obs(self) -> bool:
        """Whether it reads `full_obs`."""

    def begin(self, n_slots: int) -> None:
        """Prepare for B = `n_slots` slots."""

    def reset(self, which: np.ndarray) -> None:
        """Reset the memory of the slots `which` [B] bool, where episodes start."""

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Choose actions in all active slots; greedily without `explore`."""

    def refresh(self) -> None:
        """Use the newest weights; the memory of running episodes stays."""

    def snapshot(self) -> dict[str, Any]:
        """Return the memory of all slots."""

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot` of as many slots."""


class MAC(Policy, Protocol):
    """A multi-agent controller, built as `cls(config, info, device, reconstructor)`: a trainable policy.

    Runners and evaluation use it as a `Policy`; learners read `agent`, `dtype` and `inputs`; loaded policies and
    checkpoints `agent` and `info`.

    Attributes:
        agent: the network that is trained; acting uses the same weights. info: facts of the environment.
        head: says what the agent remembers of unseen units, and is trained with it (`belief_loss`); None without.
    """

    agent: Agent
    info: EnvInfo
    head: BeliefHead | None = None

    def __init__(
        self, config: Config, info: EnvInfo, device: torch.device, reconstructor: Reconstructor | None = None
    ) -> None: ...

    @classmethod
    def extra_fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the fields that `Decision.extras` adds to the rows of episodes: name -> (type, shape)."""

    @property
    def dtype(self) -> torch.dtype:
        """Float type of the agent."""

    def inputs(self, batch: PackedBatch) -> AgentInputs:
        """Return the agents' inputs of all rows of a batch, equal to those that were acted on."""
