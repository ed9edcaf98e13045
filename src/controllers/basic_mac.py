"""The controller of agents that share weights: builds inputs, keeps their memory, selects actions."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from omagd.components import action_selectors
from omagd.components.action_selectors import LOG_PROB
from omagd.components.episode_codec import Spec
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Decision, Exploration, Tick
from omagd.envs.protocol import Observation
from omagd.modules import agents
from omagd.modules.agents.agent import Agent, AgentInputs, no_action
from omagd.modules.agents.separate import SeparateAgents
from omagd.modules.graph_reconstructers.graphs import TeamView
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, last_actions

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.belief_head import BeliefHead
    from omagd.modules.graph_reconstructers.reconstructor import Reconstructor


def new_agent(config: Config, info: EnvInfo) -> Agent:
    """Return the configured agent: one network for all agents, or one for each (`share_parameters=False`)."""
    make = partial(agents.REGISTRY.build, config.agent)
    agent: Agent = make(config, info) if config.share_parameters else SeparateAgents(make, config, info)
    return agent


class BasicMAC:
    """Acts on flat observations and builds the same inputs from batches for the learner.

    Args:
        config, info: the run and its environment. device: where the agent is trained. It acts there too, unless
            `cpu_inference` makes a copy on the CPU, which is updated before each round of episodes.
        reconstructor: rejected here; graph controllers use it.

    Attributes:
        agent: is trained. Acting uses a module that shares its weights, or a copy on `acting_device`.
        head: trained with the agent (`belief_loss`); nothing here reads it.
    """

    head: BeliefHead | None = None
    reads_reconstructions = False

    def __init__(
        self, config: Config, info: EnvInfo, device: torch.device, reconstructor: Reconstructor | None = None
    ) -> None:
        if reconstructor is not None and not self.reads_reconstructions:
            raise UserError(f"mac={config.mac} reads no reconstructions: use mac=n_graph_mac or mac=gnn_graph_mac")
        self.info = info
        self.device = device
        self.wants_full_obs = config.use_full_obs or config.use_team_obs
        agent = new_agent(config, info)
        if not any(True for _ in agent.parameters()):
            raise UserError(f"agent={config.agent}: has no parameters, so there is nothing to train")
        self.agent: Agent = agent.to(device)
        self.acting_device = torch.device("cpu") if config.cpu_inference else device
        self._teams = self._views(config, info)
        self._copied = self.acting_device != device
        self._actor = copy.deepcopy(self.agent).to(self.acting_device) if self._copied else _twin(self.agent)
        self._actor.eval()
        self.selector = self.new_selector(config, info)
        self._draws = action_selectors.draws(config.action_selector)
        # Center and half width of the bounds, where they are read: no CUDA graph can copy them from the host.
        scale = () if info.box is None else info.box.scale
        places = device, self.acting_device
        self._scales = {place.type: [torch.from_numpy(part).to(place) for part in scale] for place in places}
        self.begin(0)

    @classmethod
    def extra_fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the fields that `Decision.extras` adds to the rows of episodes: name -> (type, shape).

        Log-probabilities are stored for learners that need them: where the selector draws from the agent's logits.
        """
        draws = action_selectors.draws(config.action_selector)
        return {LOG_PROB: (torch.float32, (info.n_agents,))} if draws else {}

    @staticmethod
    def new_selector(config: Config, info: EnvInfo) -> Any:
        """Return what `select_actions` chooses by."""
        return action_selectors.new_selector(config, info)

    @property
    def outputs_logits(self) -> bool:
        """Whether the agent's outputs are logits of actions, not their values."""
        return self._draws

    @property
    def dtype(self) -> torch.dtype:
        """Float type of the agent."""
        return next(self.agent.parameters()).dtype

    @property
    def actor(self) -> Agent:
        """The agent that acts, on `acting_device`; its weights are the trained ones after `refresh`."""
        return self._actor

    def begin(self, n_slots: int) -> None:
        """Reset the memory to that of B slots at the start of episodes."""
        self.refresh()
        # A copy: a learned start may be one tensor that is expanded over the slots.
        self._hidden: Tensor = self._actor.init_hidden(n_slots).detach().clone()
        self._last_action = no_action(self.info, n_slots, self.acting_device)

    def refresh(self) -> None:
        """Update the acting copy, if there is one; the memory of running episodes stays."""
        if self._copied:
            self._actor.load_state_dict(self.agent.state_dict())

    @torch.inference_mode()
    def reset(self, which: np.ndarray) -> None:
        """Reset the memory of the slots `which` ([B] bool), where episodes start."""
        slots = torch.from_numpy(np.flatnonzero(which)).to(self.acting_device)
        self._hidden[slots] = self._actor.init_hidden(len(slots)).to(self._hidden)
        self._last_action[slots] = no_action(self.info, len(slots), self.acting_device)

    def snapshot(self) -> dict[str, Any]:
        """Return the memory of all slots."""
        return {"hidden": self._hidden.clone(), "last_action": self._last_action.clone()}

    def load_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot` of as many slots."""
        self._hidden = snapshot["hidden"].to(self.acting_device).clone()
        self._last_action = snapshot["last_action"].to(self.acting_device).clone()

    def act(self, tick: Tick, explore: Exploration | None) -> Decision:
        """Choose available actions in the active slots; greedily without `explore`."""
        seen = tick.observation
        inputs, extras = self._build_inputs(tick)
        part = None if tick.active.all() else tick.active.nonzero()[0]
        with torch.inference_mode():
            q = self._values(inputs, part)
        actions, chosen = self.select_actions(q, seen.avail_actions, explore)
        self._update_state(actions, part)
        return Decision(actions, {**extras, **chosen}, q)

    def read(self, seen: Observation) -> np.ndarray:
        """Return what the agents read of an observation, before any reconstruction, [B, n, obs_dim]."""
        if not self.wants_full_obs:
            return seen.obs
        if seen.full_obs is None:
            raise ValueError("use_full_obs=True, use_team_obs=True: the environment returned no full_obs")
        if self._teams is None:
            return seen.full_obs
        parts = (torch.from_numpy(part).to(self.acting_device) for part in (seen.obs, seen.full_obs))
        return self._teams[self.acting_device](*parts).cpu().numpy()

    def _views(self, config: Config, info: EnvInfo) -> dict[torch.device, TeamView] | None:
        """Return what completes observations where agents act and where they learn; None without `use_team_obs`."""
        if not config.use_team_obs:
            return None
        layout = info.layout_for("use_team_obs=True", config.env)
        return {device: TeamView(layout, info.n_agents, device) for device in (self.device, self.acting_device)}

    def select_actions(
        self, q: np.ndarray, available: np.ndarray, explore: Exploration | None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return actions [B, n], and the fields of `extra_fields` that belong to the choice, [B, ...] by name.

        Plug-ins override this. q: [B, n, A], the agent's outputs. available: [B, n, A] bool. explore: None: greedy.
        """
        epsilon, rng = (explore.epsilon, explore.rng) if explore else (0.0, None)
        if not self._draws:
            return self.selector.select(q, available, epsilon, rng), {}
        actions, log_prob = self.selector.choose(q, available, rng)
        return actions, {LOG_PROB: log_prob}

    def _values(self, inputs: AgentInputs, part: np.ndarray | None) -> np.ndarray:
        """Return the agent's outputs [B, n, A] of one tick and update its memory; `part`: of these slots only."""
        if part is None:
            q, self._hidden = self._actor.step(inputs, self._hidden)
            return q.cpu().numpy()
        slots = torch.from_numpy(part).to(self.acting_device)
        q, hidden = self._actor.step(inputs.rows(slots), self._hidden.index_select(0, slots))
        self._hidden.index_copy_(0, slots, hidden)
        values = np.zeros((len(self._hidden), *q.shape[1:]), np.float32)
        values[part] = q.cpu().numpy()
        return values

    def _update_state(self, actions: np.ndarray, part: np.ndarray | None) -> None:
        """Store the `actions` [B, n] as the last ones; `part`: of these slot numbers only."""
        last = self.as_input(torch.from_numpy(actions).to(self.acting_device, copy=True))
        if part is None:
            self._last_action = last
        else:
            slots = torch.from_numpy(part).to(self.acting_device)
            self._last_action.index_copy_(0, slots, last[slots].to(self._last_action))

    def as_input(self, actions: Tensor) -> Tensor:
        """Return actions as agents read them: continuous ones in half widths of their bounds."""
        if self.info.box is None:
            return actions
        center, half = self._scales[actions.device.type]
        return (actions - center) / half

    def inputs(self, batch: PackedBatch) -> AgentInputs:
        """Return the inputs of all rows of a batch, equal to those that were acted on."""
        features, guessed = self._inputs_from_batch(batch)
        actions = self.as_input(batch["actions"])
        return AgentInputs(features.to(self.dtype), last_actions(actions, batch.packing), guessed)

    def _build_inputs(self, tick: Tick) -> tuple[AgentInputs, dict[str, np.ndarray]]:
        """Return the inputs of one tick, and the fields of them that are stored with the row."""
        obs = torch.from_numpy(self.read(tick.observation))
        return AgentInputs(obs.to(self.acting_device, self._hidden.dtype), self._last_action), {}

    def _inputs_from_batch(self, batch: PackedBatch) -> tuple[Tensor, Tensor | None]:
        """Return features [S, n, obs_dim] of a batch, and [S, n, N] bool which nodes are guesses, None for none."""
        if self._teams is not None:
            return self._teams[self.device](batch["obs"], batch["full_obs"]), None
        return batch["full_obs" if self.wants_full_obs else "obs"], None


def _twin(agent: Agent) -> Agent:
    """Return a second module with the same weight tensors: one trains in training mode, the other acts in eval mode."""
    shared = {id(tensor): tensor for tensor in (*agent.parameters(), *agent.buffers())}
    return copy.deepcopy(agent, shared)
