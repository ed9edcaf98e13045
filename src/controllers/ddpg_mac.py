"""The controller of DDPG: the agent outputs a distribution over actions, from which actions are drawn, or an action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from omagd.components import action_selectors
from omagd.components.action_selectors import draw
from omagd.components.episode_codec import Spec
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import BasicMAC
from omagd.controllers.types import Exploration
from omagd.modules.agents.agent import AgentInputs
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch

if TYPE_CHECKING:
    from omagd.modules.graph_reconstructers.reconstructor import Reconstructor

BARRED = -1e9  # in place of the logit of an unavailable action
TAKEN = "action_probs"
"""The field with the vectors [S, n, A] that actions were drawn from."""


class DDPGMAC(BasicMAC):
    """Draws actions from the softmax of the agent's logits and stores the softmax (`action_probs`).

    With probability epsilon, one draw for each slot, all its agents draw from random weights, uniform on [0, 1], as in
    the published code. With `gumbel_softmax`, one-hot actions are stored, and exploration is uniform over actions.
    Without `explore` the most likely action is taken. Unavailable actions are never drawn. `action_selector` is unused.

    Continuous actions are tanh of the agent's output in half widths of their bounds. To explore, normal noise with the
    deviation epsilon is added there, and what is then beyond a bound is the bound.
    """

    def __init__(
        self, config: Config, info: EnvInfo, device: torch.device, reconstructor: Reconstructor | None = None
    ) -> None:
        if config.obs_last_action:
            raise UserError("obs_last_action=True: mac=ddpg_mac learns from single steps; use obs_last_action=False")
        if not config.share_parameters:
            raise UserError("share_parameters=False: mac=ddpg_mac has one network; use share_parameters=True")
        if info.box is not None and config.gumbel_softmax:
            raise UserError("gumbel_softmax=True: is for discrete actions; use gumbel_softmax=False")
        if info.box is not None and not info.box.bounded:
            raise UserError(
                f"mac=ddpg_mac: env={config.env} has actions that are not bounded on both sides. Use --config=mappo"
            )
        self._one_hot = config.gumbel_softmax
        super().__init__(config, info, device, reconstructor)

    @classmethod
    def extra_fields(cls, config: Config, info: EnvInfo) -> Spec:
        """Return the field of the vectors; continuous actions are vectors themselves."""
        return {} if info.box is not None else {TAKEN: (torch.float32, (info.n_agents, info.n_actions))}

    @staticmethod
    def new_selector(config: Config, info: EnvInfo) -> Any:
        """Return the selector, which is unused."""
        return action_selectors.REGISTRY.build(config.action_selector)

    @property
    def outputs_logits(self) -> bool:
        """True."""
        return True

    def inputs(self, batch: PackedBatch) -> AgentInputs:
        """Return the inputs of all rows of a batch, without last actions."""
        features, guessed = self._inputs_from_batch(batch)
        nothing = torch.full(features.shape[:2], -1, device=features.device)
        return AgentInputs(features.to(self.dtype), nothing, guessed)

    def taken(self, batch: PackedBatch) -> Tensor:
        """Return the vectors that the critic reads, [S, n, A]: as stored, or continuous actions in half widths."""
        return batch[TAKEN] if self.info.box is None else self.as_input(batch["actions"])

    def select_actions(
        self, q: np.ndarray, available: np.ndarray, explore: Exploration | None
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return actions [B, n] and the vectors that are stored; `q` are logits [B, n, A].

        Every call with `explore` draws the same number of random numbers. Continuous actions are [B, n, d] float32.
        """
        if (box := self.info.box) is not None:
            noise = 0.0 if explore is None else explore.epsilon * explore.rng.standard_normal(q.shape)
            # DDPG, eq. 7, with uncorrelated noise, as in TD3.
            part = np.where(available[..., : box.dim], (np.tanh(q) + noise).clip(-1.0, 1.0), 0.0)
            return (box.scale[0] + box.scale[1] * part).astype(np.float32), {}
        q = np.where(available, q, BARRED)
        vectors, actions = softmax(q), q.argmax(axis=-1)
        if explore is not None:
            explores = explore.rng.random(len(q)) < explore.epsilon
            drawn = 1 - explore.rng.random(q.shape)  # never 0, which all weights could be
            vectors = np.where(explores[:, None, None], 1.0 if self._one_hot else drawn, vectors).astype(np.float32)
            vectors *= available
            actions = draw(vectors, explore.rng.random(q.shape[:2]))
        if self._one_hot:
            vectors = np.eye(q.shape[-1], dtype=np.float32)[actions]
        return actions, {TAKEN: vectors}


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis, float32."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
