"""PQN: Q-learning from the newest episodes alone, without replay and without target networks.

Source: Gallici et al. 2024, "Simplifying deep temporal difference learning", arXiv:2407.04811. Layer normalisation
(`use_layer_norm`) keeps values bounded in place of target networks, and lambda-returns in place of one-step targets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from omagd.config.schema import Config
from omagd.learners.nq_learner import QLearner
from omagd.learners.policy_learner import Minibatches
from omagd.learners.protocol import NO_TARGETS, Data
from omagd.learners.synced_optimizer import Stats, merge
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.mixers.mixer import MixerInputs, greedy_actions, mix
from omagd.modules.ops import autocast_bf16
from omagd.utils.packing import PackedBatch, Packing
from omagd.utils.seeding import generator

TARGET = "target"


class PQNArgs(BaseModel):
    """`learner_args` of PQN."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    epochs: int = Field(default=4, ge=1, le=2**16)  # passes over each batch
    minibatches: int = Field(default=4, ge=1, le=2**16)  # parts of the batch, over all ranks, each with one step


class PQNLearner(QLearner):
    """Trains a controller's agent and a mixer on the episodes that were just collected."""

    data: Data = "on_policy"
    explores: ClassVar[bool] = True
    counts_updates: ClassVar[bool] = True
    unread: ClassVar[dict[str, str]] = NO_TARGETS
    args_model: ClassVar[type[Any]] = PQNArgs

    @classmethod
    def steps_per_batch(cls, config: Config) -> int:
        """Return epochs times minibatches."""
        args = PQNArgs.model_validate(config.learner_args)
        return args.epochs * args.minibatches

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take a step on each minibatch of each epoch; return their merged stats. `episodes` is not used."""
        args = PQNArgs.model_validate(self.config.learner_args)
        # Once, before any step: with weights that move, each minibatch would follow targets of its own.
        batch = replace(batch, data={**batch.data, TARGET: self._lambda_returns(batch)})
        minibatches = Minibatches(batch, self.step.dist)
        merged: Stats = {}
        for _ in range(args.epochs):
            # Keyed by the number of updates, so that a resumed run draws the same minibatches.
            draws = generator(self.config.seed, "minibatches", self.updates)
            for own in minibatches.draw(args.minibatches, draws):
                part = batch.select(own) if own else _closing_row(batch)
                count = torch.tensor(len(part.packing.step) - part.packing.n_episodes)
                merged = merge(merged, self.learn(count, part.split(self.config.accumulate)))
                self.updates += 1
        return merged

    @torch.no_grad()
    def _lambda_returns(self, batch: PackedBatch) -> Tensor:
        """Return the lambda-returns of all rows, [S] or [S, n] as the mixer does, from this network's greedy values."""
        state = batch["state"].to(self.mac.dtype)
        with autocast_bf16(self.device, self.config.precision == "bf16"):
            q = self.mac.agent(self.mac.inputs(batch), batch.packing).to(state.dtype)
            best = greedy_actions(q, batch["avail_actions"])
            # PQN, eq. 5: Q(lambda) with max_a Q of the network that learns (Peng and Williams 1994).
            values = mix(self.mixer, MixerInputs(q, best, batch["avail_actions"], state)).to(state.dtype)
        return self.td_targets(values, batch)

    def targets(self, q: Tensor, inputs: AgentInputs, batch: PackedBatch, state: Tensor) -> Tensor:
        """Return the targets that `update` has put into the batch."""
        return batch[TARGET]


def _closing_row(batch: PackedBatch) -> PackedBatch:
    """Return an episode of no steps: every rank takes part in every step, with or without episodes in it."""
    data = {name: value[:1] for name, value in batch.data.items()}
    return PackedBatch(data, Packing((1,)), batch.sample_index[:1], batch.meta[:1])
