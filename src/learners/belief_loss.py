"""The loss of the belief head: agents learn to remember what says something of the units that they do not see.

For a living agent, each unit that it does not see now (or each unit at all, `belief_units: all`) is a case. Its truth
is in `full_obs`, which is read here and nowhere else. The loss of a case is, with `belief_loss: features`,

    [u lives] mean over varying features of (z_u - (x_u - m_u) / s_u)²  +  binary cross-entropy of "u lives"

and with `tokens` the cross-entropy of the code that stage 1 gives the unit, or of ABSENT. The total loss is

    L = L_RL + belief_weight * (mean over the cases of all ranks)

and its gradient reaches the agent through the hidden state. `belief_every: k` reads every k-th step of an episode.
Shapes: S rows of a batch, R of them that are read, n agents, U other units, D features, N = U + 1 nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.learners.synced_optimizer import RunningMoments, Stats, sums_of
from omagd.modules.agents.agent import Remembers
from omagd.modules.agents.separate import SeparateAgents
from omagd.modules.graph_reconstructers.belief_head import BeliefHead
from omagd.modules.graph_reconstructers.graphs import GraphTables, feature_mask
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, Packing
from omagd.utils.registry import faults, overridden_alone

HEAD = "belief_head"  # name of the head's weight file
VARIES = 1e-3  # smallest deviation of a feature that is predicted; features are of order 1


@dataclass(frozen=True)
class BeliefCases:
    """What the head is asked in R rows of a batch.

    Attributes:
        rows: [R] int64, their places among the S rows; None: all rows in order.
        counted: [R, n, U] bool, the cases. living: [R, n, U] bool. truth: features [R, n, U, D], or codes [R, n, U].
    """

    rows: Tensor | None
    counted: Tensor
    living: Tensor
    truth: Tensor

    def among(self, which: Tensor, places: Tensor | None) -> BeliefCases:
        """Return those of the rows `which` [S'], which become rows of another packing. places: `rows_read` of that."""
        which = which if places is None else which[places]
        return BeliefCases(places, self.counted[which], self.living[which], self.truth[which])


def counts(count: Tensor, found: Sequence[BeliefCases]) -> Tensor:
    """Return the samples of the other losses, followed by the cases of a batch that comes in parts."""
    asked = torch.stack([cases.counted.sum() for cases in found]).sum()
    return torch.cat([count.to(asked.device, non_blocking=True).view(-1), asked.to(count.dtype).view(1)])


def rows_read(packing: Packing, every: int, device: torch.device) -> Tensor | None:
    """Return the rows [R] of every `every`-th step of all episodes; None for all of them.

    It follows from the step alone, so ranks read what one process with all episodes reads, and shapes are fixed.
    """
    if every == 1:
        return None
    if packing.lengths[-1] == packing.n_steps:  # equal lengths: nothing is copied into a CUDA graph
        return torch.arange(sum(packing.lengths), device=device).view(packing.n_steps, -1)[::every].flatten()
    return torch.nonzero(packing.step % every == 0).flatten().to(device, non_blocking=True)


class BeliefLoss(nn.Module):
    """Holds the head, and returns the summed loss of its cases.

    Args:
        head: trained. config: weight, which units count, which rows are read.

    Attributes:
        running: moments of the features of living units.
    """

    real: Tensor

    def __init__(self, head: BeliefHead, config: Config) -> None:
        super().__init__()
        self.head, self.layout, self.every = head, head.layout, config.belief_every
        self.weight, self.all_units = config.belief_weight, config.belief_units == "all"
        device = next(head.parameters()).device
        self.running = RunningMoments(device, (head.n_units, head.dim), least=0.0)
        self.register_buffer("real", feature_mask(self.layout)[1:, : head.dim].to(device), persistent=False)
        self._columns = GraphTables(self.layout, device)

    @torch.no_grad()
    def cases(self, batch: PackedBatch, every: int = 0) -> BeliefCases:
        """Return the cases of a batch. every: in place of `belief_every`."""
        rows = rows_read(batch.packing, every or self.every, batch.device)
        parts = batch["obs"], batch["full_obs"], batch.valid_mask
        obs, full, valid = (part if rows is None else part[rows] for part in parts)
        seen, missing = self._columns.sight(obs)  # neither for a dead observer
        # A case is a unit that a living agent does not see: what it sees it need not remember.
        counted = seen[..., :1].expand_as(seen) if self.all_units else missing
        counted, living = counted[..., 1:] & valid[:, None, None], self._columns.sight(full)[0][..., 1:]
        if self.head.padded:  # a map of a set may lack units, which nobody sees at its start
            exists = self._columns.sight(batch["full_obs"][: batch.packing.n_episodes])[0].any(1)[:, None, 1:]
            episode = batch.packing.episode.to(batch.device, non_blocking=True)
            counted = counted & exists[episode if rows is None else episode[rows]]
        truth = self._columns.nodes(full)[..., 1:, :]
        if self.head.tokens:
            return BeliefCases(rows, counted, living, self.head.codes_of(truth, living))
        return BeliefCases(rows, counted, living, truth[..., : self.head.dim])

    def blank(self, n_rows: int, n_agents: int, like: Tensor) -> BeliefCases:
        """Return no case in `n_rows` rows, with the float type and device of `like`."""
        none = torch.zeros(n_rows, n_agents, self.head.n_units, dtype=torch.bool, device=like.device)
        truth = none.long() if self.head.tokens else like.new_zeros(*none.shape, self.head.dim)
        return BeliefCases(None, none, none, truth)

    @torch.no_grad()
    def observe(self, found: Sequence[BeliefCases], dist: Dist) -> None:
        """Let mean and deviation follow the living units of an update's cases, of all ranks. A collective."""
        if self.head.tokens:
            return
        of_cases = (sums_of(each.truth, (each.counted & each.living).unsqueeze(-1), (0, 1)) for each in found)
        # Running moments: features have other scales on every map, and change as agents learn.
        self.running.add(dist.sum(torch.stack([*of_cases]).sum(0)))
        mean, deviation = self.running.scale
        self.head.mean.copy_(mean)
        varies = (self.running.moments[0] > 0) & (deviation > VARIES) & self.real
        self.head.deviation.copy_(deviation.where(varies, 0.0))

    def forward(self, hidden: Tensor, cases: BeliefCases) -> tuple[Tensor, Stats]:
        """Return the loss of the cases, summed and weighted, from hidden states [S, n, H], and stats per case."""
        read = hidden if cases.rows is None else hidden.index_select(0, cases.rows)
        told = [part.to(self._kind) for part in self.head(read)]
        counted = cases.counted.to(self._kind)
        if self.head.tokens:
            # As in BERT (Devlin et al. 2019): a distribution over codes can say that a unit is here or there.
            each = F.cross_entropy(told[0].flatten(0, -2), cases.truth.flatten(), reduction="none")
            parts = {"loss_belief": (each * counted.flatten()).sum()}
        else:
            lives = cases.living.to(self._kind)
            # -log p of whether the unit lives; a dead one has no features to say.
            alive = F.binary_cross_entropy_with_logits(told[0], lives, weight=counted, reduction="sum")
            # Squared error of standardised features: -log of a normal density with deviation s, up to a constant.
            z, weight = self._standardised(cases.truth, counted * lives)
            error = ((told[1] - z).square() * weight).sum()
            parts = {"loss_belief": alive + error, "belief_alive": alive, "belief_features": error}
        count = counted.sum()
        return self.weight * parts["loss_belief"], {name: (part.detach(), count) for name, part in parts.items()}

    @torch.no_grad()
    def _standardised(self, truth: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features that the head should say, and the weight of each error, [R, n, U, D].

        Weights sum to 1 over the features of a unit that vary. counted: [R, n, U], 1 for living units that count.
        """
        varies = self.head.deviation > 0
        scale = torch.where(varies, 1 / self.head.deviation.clamp(min=VARIES), 0.0)
        # Each unit counts once, however many of its features vary.
        share = varies.to(self._kind) / varies.sum(-1, keepdim=True).clamp(min=1)
        return (truth.to(self._kind) - self.head.mean) * scale, counted.unsqueeze(-1) * share

    @property
    def _kind(self) -> torch.dtype:
        return self.head.hidden.weight.dtype


def belief_loss(config: Config, mac: MAC) -> BeliefLoss | None:
    """Return the loss of the controller's head, None without one. Errors: UserError for an agent without memory."""
    if mac.head is None:
        return None
    given = f"belief_loss={config.belief_loss}: agent={config.agent}"
    for kind in {type(agent) for agent in (mac.agent.each if isinstance(mac.agent, SeparateAgents) else [mac.agent])}:
        if wrong := faults(kind, Remembers):
            raise UserError(
                f"{given} has no memory that a loss could read ({'; '.join(wrong)}). Use agent=n_rnn, or see Remembers"
                " in docs/extending_networks.md"
            )
        if above := overridden_alone(kind, "forward", "unroll"):
            raise UserError(
                f"{given}: {kind.__name__} has a forward of its own, but would train with the unroll of"
                f" {above.__name__}. Override encode or values, which both call, or unroll too"
            )
    return BeliefLoss(mac.head, config)
