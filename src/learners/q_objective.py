"""The loss of value decomposition with double Q-learning: what is wrapped for several ranks in stage 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omagd.learners.synced_step import Objective, Stats
from omagd.modules.agents.inputs import AgentInputs
from omagd.modules.linear import lowered, whole
from omagd.utils.packing import Packing

MakeTargets = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Played:
    """What was done in the rows of a batch.

    Args:
        actions: [S, n] int64. state: [S, state_dim]. happened: [S] bool, False in closing rows. packing: of the rows.
    """

    actions: Tensor
    state: Tensor
    happened: Tensor
    packing: Packing


class QObjective(Objective):
    """Half the squared error of the joint value of the actions taken, summed over the steps that happened.

    The half is PyMARL2's and PyMARL3's, so that `grad_norm_clip` cuts the same gradient here as there.

    Args:
        agent, mixer: what is trained; every parameter takes part in every forward.
        bf16: products on a GPU in bf16 (on a CPU the modules see to it themselves).
    """

    def __init__(self, agent: nn.Module, mixer: nn.Module, bf16: bool = False) -> None:
        super().__init__()
        self.bf16 = bf16
        self.agent = agent
        self.mixer = mixer

    def forward(self, inputs: AgentInputs, played: Played, targets: MakeTargets) -> tuple[Tensor, Stats]:
        """Return half the sum of squared errors, and stats over the steps that happened.

        targets: called once, without gradients, with the values [S, n, A] of this forward (double Q-learning chooses
            actions by them); returns targets, [S] or [S, n] as the mixer does. Target networks live behind it, outside
            this module. Whole precision: small rewards would vanish beside large values in bf16's 8 bits.
        Stats as PyMARL3 logs them: loss_td per step; td_error_abs, which is the same number there too; q_taken_mean
            and target_mean per step and agent.
        """
        with lowered(played.state.device, self.bf16):
            q = self.agent(inputs, played.packing)
            with torch.no_grad(), whole(played.state.device):
                target = targets(q.detach().to(played.state.dtype))
            taken = q.gather(-1, played.actions.unsqueeze(-1)).squeeze(-1)
            joint = self.mixer(taken, played.state).to(played.state.dtype)
        happened = played.happened.to(joint.dtype).view(-1, *[1] * (joint.dim() - 1))
        error = (joint - target) * happened
        values = joint.shape[1:].numel()  # of a row: 1, or one of each agent, over which is averaged
        loss = 0.5 * error.square().sum() / values
        with torch.no_grad():
            count = happened.sum()
            shares = count * taken.shape[1]
            stats = {
                "loss_td": (loss.detach(), count),
                "td_error_abs": (loss.detach(), count),
                "q_taken_mean": ((joint * happened).sum(), shares),
                "target_mean": ((target * happened).sum(), shares),
            }
        return loss, stats
