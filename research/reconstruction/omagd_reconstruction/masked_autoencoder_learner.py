"""Stage 2 with `kind: ma2e`: trains the masked autoencoder (masked_autoencoder.py).

Each step of each episode ends a window, which is learned from twice: with all agents masked but one, as in acting, and
with some agents masked. Who is masked takes turns over steps and updates. The loss of a window is the mean over its
tokens, masked or not, of

    mean over features of (observation - reconstruction)² + (action - reconstruction)²
Shapes: S packed rows, V windows, k steps, n agents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.graph_metrics import mean_of
from omagd.learners.pretraining import GraphLearner
from omagd.learners.synced_optimizer import SKIPPED, LossModule, Stats, merge
from omagd.modules.graph_reconstructers.graphs import alive
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, Packing, last_actions
from omagd_reconstruction.masked_autoencoder import MaskedAutoencoder


@dataclass(frozen=True)
class Sample:
    """Windows of some episodes.

    Attributes:
        joined: [S, n, obs_dim + 1], observation and last action. rows: [V, k], rows of each window; -1 before the
            episode. shown: [V, n] bool, agents that are not masked.
    """

    joined: Tensor
    rows: Tensor
    shown: Tensor


def windows(packing: Packing, k: int, device: torch.device) -> Tensor:
    """Return the rows [S, k] of the k steps that end at each row, -1 before its episode."""
    step = packing.step[:, None] - torch.arange(k - 1, -1, -1)
    return torch.where(step >= 0, packing.row(step, packing.episode[:, None]), -1).to(device, non_blocking=True)


class AutoencoderLoss(LossModule):
    """The sum over windows of the loss at the top of this file."""

    def __init__(self, net: MaskedAutoencoder) -> None:
        super().__init__()
        self.net = net

    def forward(self, sample: Sample) -> tuple[Tensor, Stats]:
        """Return the sum, and stats. Without a window it is 0 with gradients of 0."""
        there, rows = sample.rows >= 0, sample.rows.clamp(min=0)
        shown = (there[:, :, None] & sample.shown[:, None])[..., None]
        tokens = self.net.embed(sample.joined)[rows]
        made = self.net(torch.where(shown, tokens, 0.0), shown.shape[1] * shown.shape[2])
        error = (made - sample.joined[rows].flatten(1, 2).to(made.dtype)).square()
        each = error[..., :-1].mean(-1) + error[..., -1]
        counts = there.to(each.dtype).repeat_interleave(self.net.n_agents, dim=1)
        loss = ((each * counts).sum(1) / counts.sum(1).clamp(min=1)).sum()
        return loss, {"graph_loss": (loss.detach(), torch.tensor(float(len(each)), device=loss.device))}


class MaskedAutoencoderLearner(GraphLearner):
    """Trains a masked autoencoder in place, on one rank or several.

    It says nothing of units: it has no `beliefs`, and is measured on what living teammates observe.

    Args:
        predictor: the autoencoder. tokenizer: not read.
    """

    best_metric = "error_allies"  # of what living teammates observe, inferred from an agent's own window alone

    def __init__(
        self, predictor: MaskedAutoencoder, tokenizer: Tokenizer | None, config: Config, info: EnvInfo, dist: Dist
    ) -> None:
        super().__init__("predictor", predictor, AutoencoderLoss(predictor), config, info, dist)
        self.predictor = predictor

    @torch.no_grad()
    def begin(self, batches: Callable[[], Iterable[PackedBatch]]) -> None:
        """Fit the mean observation of each living agent on the episodes of all ranks."""
        n, dim = self.predictor.mean.shape
        sums = torch.zeros(n, dim + 1, dtype=torch.float64, device=self.dist.device)
        for batch in batches():
            obs = batch["obs"][batch.valid_mask].double()
            sums += torch.cat([obs.sum(0), obs.any(-1).sum(0)[:, None]], dim=1)
        sums = self.dist.sum(sums)
        self.predictor.mean.copy_(sums[:, :-1] / sums[:, -1:].clamp(min=1))

    def update(self, batch: PackedBatch) -> Stats:
        """Take an optimizer step on this rank's batch."""
        self._loss.train()
        parts = [self.sample(part) for part in self.parts(batch)]
        count = torch.tensor(float(sum(len(part.rows) for part in parts)), dtype=torch.float64)
        result = self._step(count.to(self.dist.device, non_blocking=True), *((part,) for part in parts))
        self.updates += 1
        return {**result.stats, "grad_norm": result.norm, SKIPPED: result.skipped}

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Stats:
        """Return the loss, and the error of what living agents infer that living teammates observe now."""
        self._loss.eval()
        stats: Stats = {}
        for part in self.parts(batch):
            stats = merge(stats, {**self._loss(self.sample(part))[1], **self._errors(part)})
        return stats

    def parts(self, batch: PackedBatch) -> list[PackedBatch]:
        """Return the batch in parts of whole episodes, as even as the limit on frames at once asks for."""
        frames = len(batch["obs"]) * self.info.n_agents
        return batch.split(max(1, -(-frames // self.config.graph_frames_at_once)))

    @torch.no_grad()
    def sample(self, batch: PackedBatch) -> Sample:
        """Return two windows for each row with a step: first those that show one agent."""
        net, valid = self.predictor, batch.valid_mask
        rows = windows(batch.packing, net.window, batch.device)[valid]
        joined = net.joined(batch["obs"], last_actions(batch["actions"], batch.packing))
        n = net.n_agents
        updates = self.updates if self._loss.training else 0  # evaluations compare: each shows the same
        turn = (batch.packing.step.to(batch.device, non_blocking=True)[valid] + updates)[:, None]
        behind = (torch.arange(n, device=batch.device) - turn) % n  # agents after the one whose turn it is
        more = turn // n % max(1, n - 1)  # as many more are shown, at most n - 2
        return Sample(joined, torch.cat([rows, rows]), torch.cat([behind == 0, behind <= more]))

    def _errors(self, batch: PackedBatch) -> Stats:
        """Return the mean squared error of features of living teammates, of the network and of their mean."""
        net, obs, valid = self.predictor, batch["obs"], batch.valid_mask
        rows = windows(batch.packing, net.window, batch.device)
        tokens = net.embed(net.joined(obs, last_actions(batch["actions"], batch.packing)))[rows.clamp(min=0)]
        tokens = torch.where((rows >= 0)[..., None, None], tokens, 0.0)
        living = alive(obs) & valid[:, None]
        row, agent = living.nonzero(as_tuple=True)
        counted = living[row].clone()
        counted[torch.arange(len(row), device=row.device), agent] = False
        truth = obs[row]
        errors = {
            "error_allies": net.inferred(tokens, row, agent) - truth,
            "error_allies_mean": net.mean - truth,
        }  # fmt: skip
        return {name: mean_of(error.square().mean(-1), counted) for name, error in errors.items()}
