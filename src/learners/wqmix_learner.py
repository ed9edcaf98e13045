"""Weighted QMIX: a loss that counts joint actions more whose value a monotonic mixer underestimates.

Source: Rashid et al. 2020, "Weighted QMIX", arXiv:2006.10800. A second agent and a mixer without constraints learn
Q*, which values the next states, so that what Q_tot cannot represent does not reach its targets.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.basic_mac import new_agent
from omagd.controllers.types import MAC
from omagd.learners.belief_loss import BeliefCases
from omagd.learners.nq_learner import MakeTargets, NQLearner, QLoss, Transitions
from omagd.learners.synced_optimizer import Stats
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.mixers.mixer import MixerInputs, greedy_actions, mix
from omagd.modules.ops import autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError


class WQMIXArgs(BaseModel):
    """`learner_args` of weighted QMIX."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    weighting: Literal["optimistic", "central"] = "optimistic"  # OW-QMIX | CW-QMIX
    alpha: float = Field(default=0.5, gt=0.0, le=1.0)  # weight of the other joint actions
    central_hidden: int = Field(default=128, ge=1, le=2**16)  # width of the mixer of Q*


class CentralMixer(nn.Module):
    """Q*(s, a) = f(s, q_1, ..., q_n) + V(s) by two networks without constraints (appendix B of the paper)."""

    def __init__(self, info: EnvInfo, hidden: int) -> None:
        super().__init__()
        self.f = nn.Sequential(
            nn.Linear(info.state_dim + info.n_agents, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, 1),
        )  # fmt: skip
        self.v = nn.Sequential(nn.Linear(info.state_dim, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, agent_qs: Tensor, state: Tensor) -> Tensor:
        """Return the joint value [S] from agent_qs [S, n] and state [S, state_dim]."""
        joint: Tensor = (self.f(torch.cat([agent_qs, state], dim=-1)) + self.v(state)).squeeze(-1)
        return joint


class WeightedLoss(QLoss):
    """L = 1/2 sum_t w_t (Q_tot(s_t, a_t) - y_t)^2 + 1/2 sum_t (Q*(s_t, a_t) - y_t)^2 over the valid steps.

    Optimistic: w is 1 where Q_tot < y, else alpha (eq. 8). Central: w is 1 where a is the greedy joint action a^ of
    Q_tot, or where y > Q*(s, a^), else alpha (eq. 7).

    Args:
        agent, mixer: of Q_tot. central, central_mixer: of Q*. args: the weighting. bf16: as in `QLoss`.
    """

    def __init__(
        self, agent: nn.Module, mixer: nn.Module, central: nn.Module, central_mixer: nn.Module, args: WQMIXArgs,
        bf16: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(agent, mixer, bf16)
        self.central, self.central_mixer, self.args = central, central_mixer, args
        self._heavy: Tensor | None = None  # of this forward: which steps have the weight 1 (central), [S] bool

    def forward(
        self, inputs: AgentInputs, taken: Transitions, targets: MakeTargets, cases: BeliefCases | None = None
    ) -> tuple[Tensor, Stats]:
        """Return the sum of the loss, and its stats, as `QLoss` does; loss_central is that of Q*, per step."""
        with autocast_bf16(taken.state.device, self.bf16):
            q = self.central(inputs, taken.packing)
            joint = self._joint(q, taken.actions, taken)
        kept: list[Tensor] = []

        def targets_and_weights(q_tot: Tensor) -> Tensor:
            kept.append(targets(q_tot))
            if self.args.weighting == "central":
                best = greedy_actions(q_tot, taken.avail_actions)
                self._heavy = (kept[0] > self._joint(q, best, taken)) | (best == taken.actions).all(dim=-1)
            return kept[0]

        loss, stats = super().forward(inputs, taken, targets_and_weights, cases)
        weights = taken.weights(joint.dtype)
        error = (joint - kept[0]) * taken.valid_mask.to(joint.dtype)
        # Q* has no constraint, so it can fit every joint action: its loss needs no weights of actions.
        central = 0.5 * (error.square() * weights).sum()
        both = loss + central if loss.dim() == 0 else torch.stack([loss[0] + central, loss[1]])
        return both, {**stats, "loss_central": (central.detach(), weights.sum())}

    def _joint(self, q: Tensor, actions: Tensor, taken: Transitions) -> Tensor:
        values = MixerInputs(q, actions, taken.avail_actions, taken.state)
        return mix(self.central_mixer, values).to(taken.state.dtype)

    def error_loss(self, error: Tensor, values: MixerInputs) -> Tensor:
        """Return the weighted loss of each TD error, [S]."""
        # Q_tot cannot fit all actions: the weights say where it must, at those that may be the best ones.
        heavy = error < 0 if self._heavy is None else self._heavy
        return torch.where(heavy, 1.0, self.args.alpha).to(error.dtype) * super().error_loss(error, values)


class WQMIXLearner(NQLearner):
    """Q-learning with a weighted loss, and a central Q* that values the next states."""

    args_model: ClassVar[type[Any]] = WQMIXArgs

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        given = f"learner={config.learner}"
        if not config.double_q:
            raise UserError(f"double_q=False: {given} values the greedy actions of Q_tot. Use double_q=True")
        if config.mixer == "none":
            raise UserError(f"mixer=none: {given} weighs joint actions. Use mixer=qmix")
        super().__init__(mac, config, info, dist)

    def make_loss(self) -> WeightedLoss:
        """Return the loss, which holds the networks of Q_tot and of Q*."""
        args = WQMIXArgs.model_validate(self.config.learner_args)
        self.central: nn.Module = new_agent(self.config, self.info)
        self.central_mixer: nn.Module = CentralMixer(self.info, args.central_hidden)
        for module in (self.central, self.central_mixer):
            module.to(self.device, self.mac.dtype)
        bf16 = self.config.precision == "bf16"
        return WeightedLoss(self.mac.agent, self.mixer, self.central, self.central_mixer, args, bf16)

    def valuing(self) -> tuple[nn.Module, nn.Module]:
        """Return agent and mixer of Q*."""
        return self.central, self.central_mixer

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained modules by the names of their weight files."""
        return {**super().modules(), "central": self.central, "central_mixer": self.central_mixer}
