"""The controller of agents that share weights: inputs, memory, selection."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from omagd.components import action_selectors
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.modules import agents
from omagd.modules.agents.agent import Agent
from omagd.modules.agents.inputs import AgentInputs
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, Packing

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.reconstructor import Reconstructor


class BasicMAC:
    """Acts on flat observations and builds the same inputs again for the learner.

    Args:
        config, info: the run and its environment. device: where the agent is trained; it acts there too, unless
            `cpu_inference` gives it a copy on the CPU that is brought up to date before each round of episodes.
        reconstructor: refused here; graph controllers read it.

    Attributes:
        agent: what is trained; acting uses this very module, or its copy. acting_device: where that one computes.
    """

    reads_reconstructions = False

    def __init__(
        self, config: Config, info: EnvInfo, device: torch.device, reconstructor: Reconstructor | None = None
    ) -> None:
        if reconstructor is not None and not self.reads_reconstructions:
            raise UserError(f"mac={config.mac} reads no reconstructions: use mac=n_graph_mac or mac=gnn_graph_mac")
        self.info = info
        self.device = device
        self.wants_full_obs = config.use_full_obs
        self.agent: Agent = agents.REGISTRY.get(config.agent)(config, info).to(device)
        self.acting_device = torch.device("cpu") if config.cpu_inference else device
        self._actor = self.agent if self.acting_device == device else copy.deepcopy(self.agent).to(self.acting_device)
        self.selector = action_selectors.REGISTRY.get(config.action_selector)()
        self.begin(0)

    @property
    def dtype(self) -> torch.dtype:
        """Float type of the agent."""
        return next(self.agent.parameters()).dtype

    def begin(self, n_slots: int) -> None:
        """Make room for the memory of B slots and forget everything."""
        if self._actor is not self.agent:
            self._actor.load_state_dict(self.agent.state_dict())
        self._hidden: Tensor = self._actor.init_hidden(n_slots)
        self._last_action = torch.full((n_slots, self.info.n_agents), -1, device=self.acting_device)

    def reset(self, which: np.ndarray) -> None:
        """Forget the episodes of the slots `which` ([B] bool): new ones start there."""
        slots = torch.from_numpy(which).to(self.acting_device)
        self._hidden[slots] = 0
        self._last_action[slots] = -1

    @torch.no_grad()
    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Decide for all slots, greedily without `explore`; unavailable actions are never taken."""
        seen = tick.observation
        obs = seen.full_obs if self.wants_full_obs else seen.obs
        if obs is None:
            raise ValueError("a controller that wants full_obs was shown none")
        inputs, extras = self._look(obs, tick.step)
        trains = self._actor.training
        self._actor.eval()
        q, self._hidden = self._actor.step(inputs, self._hidden)
        self._actor.train(trains)
        epsilon, rng = (explore.epsilon, explore.rng) if explore else (0.0, None)
        actions = self.selector.select(q.cpu().numpy(), seen.avail_actions, epsilon, rng)
        self._last_action = torch.tensor(actions, device=self.acting_device)
        return Decision(actions, extras)

    def inputs(self, batch: PackedBatch) -> AgentInputs:
        """Return the inputs of all rows of a batch, as they were when its episodes were played."""
        features, guessed = self._recall(batch)
        return AgentInputs(features.to(self.dtype), last_actions(batch["actions"], batch.packing), guessed)

    def _look(self, obs: np.ndarray, step: np.ndarray) -> tuple[AgentInputs, dict[str, np.ndarray]]:
        """Return the inputs of one tick and what must be kept of them."""
        return AgentInputs(torch.from_numpy(obs).to(self.acting_device, self.dtype), self._last_action), {}

    def _recall(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """Return features [S, n, obs_dim] and guess marks of a batch."""
        return batch["full_obs" if self.wants_full_obs else "obs"], None


def last_actions(actions: Tensor, packing: Packing) -> Tensor:
    """Return each row's previous action in its episode, [S, n] int64 from actions [S, n]; -1 in first rows."""
    # The row before (t, episode) stands one block of batch_sizes[t - 1] rows earlier.
    blocks = torch.tensor([0, *packing.batch_sizes[:-1]])
    before = torch.arange(len(packing.step)) - blocks[packing.step]
    first = packing.batch_sizes[0]
    result = actions[before.to(actions.device)].long()
    result[:first] = -1
    return result
