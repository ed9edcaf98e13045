"""RLOO: the clipped loss of PPO with the other episodes of a group as the baseline, and without a critic.

Source of the advantage: Kool et al. 2019, "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al. 2024,
arXiv:2402.14740, use it without clipping. A group is K episodes from one start (`group_size`), played with independent
actions.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from omagd.learners.policy_learner import Advantages, PolicyArgs, PolicyLearner
from omagd.modules.agents.agent import AgentInputs
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, td_lambda_targets


class RLOOArgs(PolicyArgs):
    """`learner_args` of RLOO."""

    normalise_advantages: bool = False  # divide by the deviation, and subtract the mean, over the samples of all ranks
    score: Literal["outcome", "return"] = "outcome"  # what is compared: won or not, or the discounted return
    returns_to_go: bool = False  # score=return: compare at each step what was still to come

    @model_validator(mode="after")
    def _of_returns(self) -> RLOOArgs:
        if self.returns_to_go and self.score != "return":
            raise ValueError(f"learner_args.returns_to_go=True: needs learner_args.score=return, not {self.score}")
        return self


class RLOOLearner(PolicyLearner[RLOOArgs]):
    """Trains a controller's agent on groups of episodes that were just collected.

    `normalise_advantages` is over the samples of all ranks (agents at steps with a choice), not over episodes or
    groups: an episode counts by its number of samples.
    """

    args_model: ClassVar[type[Any]] = RLOOArgs
    needs_groups: ClassVar[bool] = True

    def advantages(self, batch: PackedBatch, inputs: AgentInputs, state: Tensor, weight: Tensor) -> Advantages:
        """Return advantages [S, n].

        With the score r of an episode in a group of K, its advantage at each step is, for all agents,

            A_k = r_k - (sum of r_j over j != k) / (K - 1)

        or, with `returns_to_go`, the same of the discounted rewards from that step on, which are 0 after the end of an
        episode. A baseline of other episodes does not depend on the actions of this one, so before clipping and
        normalisation the gradient has no bias. An episode without others in its group has nothing to be compared with:
        its advantage is 0.
        """
        group, others = _groups(batch)
        episode, count = batch.packing.episode, batch.packing.n_episodes
        if self.args.returns_to_go:
            place = group[episode] * batch.packing.n_steps + batch.packing.step
            # At each step, episodes of a group are compared by what was still to come.
            advantage = minus_others(self._to_go(batch, weight), place, others[episode])
        else:  # the first rows of a packing are the first steps of all episodes
            # One score for the whole episode: every action of a battle that was won is as good as that.
            score = self._to_go(batch, weight)[:count] if self.args.score == "return" else self._outcomes(batch, weight)
            advantage = minus_others(score, group, others)[episode.to(score.device, non_blocking=True)]
        return Advantages(self.normalised(advantage.unsqueeze(-1).expand_as(weight), weight))

    def _to_go(self, batch: PackedBatch, like: Tensor) -> Tensor:
        """Return the discounted rewards from each step to the end of its episode, [S]; nothing follows a cut."""
        reward, ended = (batch[name].to(like.dtype) for name in ("reward", "terminated"))
        # Monte Carlo returns: TD(1) with values of 0.
        return td_lambda_targets(reward, ended, torch.zeros_like(reward), batch.packing, self.config.gamma, 1.0)

    def _outcomes(self, batch: PackedBatch, like: Tensor) -> Tensor:
        """Return the outcome of each episode, [B]. Errors: UserError where the environment has reported none."""
        outcomes = [meta.outcome for meta in batch.meta]
        if any(meta.group and math.isnan(meta.outcome) for meta in batch.meta):
            raise UserError(
                f"learner_args.score=outcome: env={self.config.env} has reported no battle_won. Use"
                " learner_args.score=return"
            )
        return torch.tensor(outcomes, dtype=like.dtype).to(like.device, non_blocking=True)


def _groups(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the number of each episode's group, and how many others it has: [B] int64 each, on the CPU.

    Names of groups belong to a rank. With task and seed they stay apart after episodes have changed ranks.
    """
    numbers: dict[object, int] = {}
    names = [(meta.group, meta.seed, meta.task) if meta.group else place for place, meta in enumerate(batch.meta)]
    group = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])
    return group, torch.bincount(group)[group] - 1


def minus_others(score: Tensor, place: Tensor, others: Tensor) -> Tensor:
    """Return each score minus the mean of the others in its place; 0 where there are no others.

    score: [N]. place: [N] int64, equal for scores that are compared. others: [N] int64, number of the others; scores
        that are missing in a place count as 0.
    """
    here = place.to(score.device, non_blocking=True)
    # RLOO (Kool et al. 2019): the mean of the others, as (sum of the group - own) / (K - 1).
    total = score.new_zeros(int(place.max()) + 1).index_add(0, here, score)[here]
    count = others.to(score, non_blocking=True)
    return torch.where(count > 0, score - (total - score) / count.clamp(min=1), 0.0)
