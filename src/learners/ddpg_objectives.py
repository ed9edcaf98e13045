"""The two losses of DDPG, each behind a module of its own: what is wrapped for several ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.learners.synced_step import Objective, Stats
from omagd.modules.agents.inputs import AgentInputs
from omagd.modules.linear import lowered

Judge = Callable[[AgentInputs, Tensor], Tensor]
"""From what agents read and vectors over their actions [S, n, A] to values [S, n]."""


class CriticObjective(Objective):
    """Squared error of each agent's value, summed over steps and agents.

    Args:
        critic: what is trained. bf16: products on a GPU in bf16.
    """

    def __init__(self, critic: nn.Module, bf16: bool = False) -> None:
        super().__init__()
        self.critic, self.bf16 = critic, bf16

    def forward(self, inputs: AgentInputs, actions: Tensor, target: Tensor) -> tuple[Tensor, Stats]:
        """Return the sum of squared errors, and stats per step and agent.

        inputs: of S steps. actions: [S, n, A], the vectors that were stored. target: [S, n].
        """
        with lowered(target.device, self.bf16):
            q = self.critic(inputs, actions).to(target.dtype)
        error = q - target
        loss = error.square().sum()
        with torch.no_grad():
            count = torch.full((), float(q.numel()), device=q.device)
            stats = {
                "loss_td": (loss.detach(), count),
                "td_error_abs": (error.abs().sum(), count),
                "q_taken_mean": (q.sum(), count),
                "target_mean": (target.sum(), count),
            }
        return loss, stats


class ActorObjective(Objective):
    """What the agents' own actions are worth, negated, summed over steps and agents.

    The critic is an argument, not a part: its gradients are neither computed nor exchanged here.

    Args:
        actor: what is trained. bf16: products on a GPU in bf16.
    """

    def __init__(self, actor: nn.Module, bf16: bool = False) -> None:
        super().__init__()
        self.actor, self.bf16 = actor, bf16

    def forward(self, inputs: AgentInputs, judge: Judge, noise: Tensor | None) -> tuple[Tensor, Stats]:
        """Return minus the sum of values, and stats per step and agent.

        inputs: of S steps. judge: a frozen critic. noise: [S, n, A] Gumbel noise for straight-through one-hot actions;
            None for the softmax itself.
        """
        with lowered(inputs.features.device, self.bf16):
            logits = self.actor(inputs)
            policy = logits.softmax(-1)
            actions = policy if noise is None else straight_through(logits + noise)
            value = judge(inputs, actions).to(inputs.features.dtype).sum()
        with torch.no_grad():
            count = torch.full((), float(logits[..., 0].numel()), device=value.device)
            entropy = torch.special.entr(policy).sum()
        return -value, {"loss_actor": (-value.detach(), count), "entropy": (entropy, count)}


def straight_through(logits: Tensor) -> Tensor:
    """Return the likeliest action as a one-hot vector, with the gradient of the softmax."""
    soft = logits.softmax(-1)
    return one_hot(logits).to(soft.dtype) + soft - soft.detach()


def one_hot(logits: Tensor) -> Tensor:
    """Return the likeliest action [..., A] as zeros and a one, int64."""
    return F.one_hot(logits.argmax(-1), logits.shape[-1])
