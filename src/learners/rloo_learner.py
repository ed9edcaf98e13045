"""RLOO: the clipped loss of PPO with the other episodes of a group as the baseline, and without a critic.

Source of the advantage: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
arXiv:2402.14740, use it without clipping. A group is K episodes from one start (`group_size`), played with independent
actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from omagd.learners.policy_learner import Advantages, PolicyArgs, PolicyLearner
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.ops import add_at
from omagd.utils.errors import UserError
from omagd.utils.packing import EpisodeMeta, PackedBatch, td_lambda_targets


class RLOOArgs(PolicyArgs):
    """`learner_args` of RLOO."""

    normalise_advantages: bool = False  # divide by the deviation, and subtract the mean, over the samples of all ranks
    score: Literal["outcome", "return"] = "outcome"  # what is compared: won or not, or the discounted return
    returns_to_go: Literal[False] = False  # earlier versions could compare at each step; their runs have this key


class RLOOLearner(PolicyLearner[RLOOArgs]):
    """Trains a controller's agent on groups of episodes that were just collected.

    `normalise_advantages` is over the samples of all ranks (agents at steps with a choice), not over episodes or
    groups: an episode counts by its number of samples.
    """

    args_model: ClassVar[type[Any]] = RLOOArgs
    needs_groups: ClassVar[bool] = True

    def advantages(
        self, batch: PackedBatch, inputs: AgentInputs, state: Tensor, weight: Tensor, *origin: Tensor
    ) -> Advantages:
        """Return advantages [S, n].

        With the score r of an episode in a group of K, its advantage at each step is, for all agents,

            A_k = r_k - (sum of r_j over j != k) / (K - 1)

        A baseline of other episodes does not depend on the actions of this one, so before clipping and
        normalisation the gradient has no bias. An episode without others in its group has nothing to be compared with:
        its advantage is 0.
        """
        group, others, *outcome = origin
        # One score for the whole episode: every action of a battle that was won is as good as that.
        score = outcome[0].to(weight.dtype) if outcome else self._returns(batch, weight)
        episode = batch.packing.episode.to(score.device, non_blocking=True)
        advantage = minus_others(score, group, others)[episode]
        return Advantages(self.normalised(advantage.unsqueeze(-1).expand_as(weight), weight))

    def _returns(self, batch: PackedBatch, like: Tensor) -> Tensor:
        """Return the discounted return of each episode, [B]; nothing follows a cut."""
        reward, ended = (batch[name].to(like.dtype) for name in ("reward", "terminated"))
        # Monte Carlo returns: TD(1) with values of 0.
        to_go = td_lambda_targets(reward, ended, torch.zeros_like(reward), batch.packing, self.config.gamma, 1.0)
        return to_go[: batch.packing.n_episodes]  # the first rows of a packing are the first steps of all episodes

    def origin(self, meta: Sequence[EpisodeMeta]) -> tuple[Tensor, ...]:
        """Return what `_groups` does, and for `score=outcome` the outcome of each episode, [B] float64.

        Errors: UserError where the environment has reported none.
        """
        if self.args.score == "return":
            return _groups(meta)
        if any(each.group and math.isnan(each.outcome) for each in meta):
            raise UserError(
                f"learner_args.score=outcome: env={self.config.env} has reported no battle_won. Use"
                " learner_args.score=return"
            )
        return *_groups(meta), torch.tensor([each.outcome for each in meta], dtype=torch.float64)


def _groups(meta: Sequence[EpisodeMeta]) -> tuple[Tensor, Tensor]:
    """Return the number of each episode's group, and how many others it has: [B] int64 each, on the CPU.

    Names of groups belong to a rank. With task and seed they stay apart after episodes have changed ranks.
    """
    numbers: dict[object, int] = {}
    names = [(each.group, each.seed, each.task) if each.group else place for place, each in enumerate(meta)]
    group = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
    return group, torch.bincount(group)[group] - 1


def minus_others(score: Tensor, group: Tensor, others: Tensor) -> Tensor:
    """Return each score minus the mean of the others in its group; 0 where there are no others.

    score: [B]. group: [B] int64, equal for scores that are compared. others: [B] int64, number of the others.
    """
    # RLOO (Kool et al. 2019): the mean of the others, as (sum of the group - own) / (K - 1).
    total = add_at(torch.zeros_like(score), group, score)[group]
    count = others.to(score.dtype)
    return torch.where(count > 0, score - (total - score) / count.clamp(min=1), 0.0)
