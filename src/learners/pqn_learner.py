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

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.learners.nq_learner import QLearner
from omagd.learners.policy_learner import Epochs
from omagd.learners.protocol import NO_TARGETS, Data, Draw
from omagd.learners.synced_optimizer import Stats, merge, standardised
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.mixers.mixer import MixerInputs, greedy_actions, mix
from omagd.modules.ops import autocast_bf16
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, Packing

TARGET = "target"


class PQNArgs(BaseModel):
    """`learner_args` of PQN."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    epochs: int = Field(default=4, ge=1, le=2**16)  # passes over each batch
    minibatches: int = Field(default=4, ge=1, le=2**16)  # parts of the batch, over all ranks, each with one step
    anneal_lr: bool = False  # let the learning rate fall linearly, to 0 at t_max steps learned from


class PQNLearner(QLearner):
    """Trains a controller's agent and a mixer on the episodes that were just collected."""

    data: Data = "on_policy"
    explores: ClassVar[bool] = True
    counts_updates: ClassVar[bool] = True
    unread: ClassVar[dict[str, str]] = NO_TARGETS
    args_model: ClassVar[type[Any]] = PQNArgs

    def __init__(self, mac: MAC, config: Config, info: EnvInfo, dist: Dist) -> None:
        super().__init__(mac, config, info, dist)
        args = PQNArgs.model_validate(config.learner_args)
        self.epochs = Epochs(args, config, self.optimizer, dist)

    @classmethod
    def steps_per_batch(cls, config: Config) -> int:
        """Return epochs times minibatches."""
        args = PQNArgs.model_validate(config.learner_args)
        return args.epochs * args.minibatches

    def update(self, batch: PackedBatch, *, episodes: int) -> Stats:
        """Take a step on each minibatch of each epoch; return their merged stats. `episodes` is not used."""
        # Once, before any step: with weights that move, each minibatch would follow targets of its own.
        batch = replace(batch, data={**batch.data, TARGET: self._lambda_returns(batch)})
        merged: Stats = {}
        for own in self.epochs.draw(batch.packing.lengths, batch.sample_index, self.updates):
            part = batch.select(own) if own else _closing_row(batch)
            count = torch.tensor(len(part.packing.step) - part.packing.n_episodes)
            merged = merge(merged, self.learn(count, part.split(self.config.accumulate)))
        self.finish(episodes)
        return merged

    def fixed_inputs(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the numbers of the drawn episodes, and the minibatches of all epochs."""
        return draw.drawn, self.epochs.draw_fixed(draw, self.updates)

    def learn_fixed(self, draw: Draw, inputs: tuple[Tensor, ...]) -> Stats:
        """Take the steps of `update` on drawn episodes; only launches work. inputs: `fixed_inputs` on the device."""
        drawn, minibatches = inputs
        (batch,) = draw.batches(drawn, 1)
        targets = self._lambda_returns(batch).unflatten(0, (draw.rows, -1))
        merged: Stats = {}
        for own in minibatches:
            parts = draw.batches(drawn[:, own], self.config.accumulate)
            of_parts = (targets[:, own[i :: len(parts)]].flatten(0, 1) for i in range(len(parts)))
            both = zip(parts, of_parts, strict=True)
            parts = [replace(part, data={**part.data, TARGET: target}) for part, target in both]
            merged = merge(merged, self.learn((drawn[1, own] - 1).sum(), parts))
        return merged

    def finish(self, episodes: int) -> None:
        """Count what was learned from, and the steps that were taken."""
        self.updates += self.epochs.finish(episodes)

    def saved(self) -> dict[str, Any]:
        """Return also the environment steps learned from."""
        return {**super().saved(), "steps": self.epochs.learned_from}

    @torch.no_grad()
    def _lambda_returns(self, batch: PackedBatch) -> Tensor:
        """Return the lambda-returns of all rows, [S] or [S, n] as the mixer does, from this network's greedy values."""
        (batch,) = standardised([batch], self.rewards, self.step.dist)
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
