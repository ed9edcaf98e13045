"""What the learners of stages 1 and 2 share: one trained module, its optimizer, and batches in parts.

Updates of fixed shapes gather the units that count; the host knows their number, as it counts them once per episode.
Shapes: S rows, n agents, N units of a frame, B episodes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.protocol import Draw, SavesParts
from omagd.learners.synced_optimizer import Adam, LossModule, SyncedOptimizer, lr_scale
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, few, pack_episodes


def even_parts(count: int, size: int) -> list[slice]:
    """Return slices that cut `count` things into parts of about `size`, at least one part."""
    n_parts = max(1, -(-count // size))
    return [slice(count * i // n_parts, count * (i + 1) // n_parts) for i in range(n_parts)]


def places(marks: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the places [P] of True in `marks`, in order, and which of them count, [P] bool.

    counted: [P] bool, True first; P is then its length, and any place stands where it is False. None: all that are
        True, whose number the host waits for.
    """
    if counted is None:
        found = torch.nonzero(marks.flatten()).flatten()
        return found, torch.ones_like(found, dtype=torch.bool)
    order = marks.flatten().byte().sort(descending=True, stable=True)[1]
    return F.pad(order, (0, len(counted) - len(order))), counted


class GraphLearner(SavesParts):
    """Trains one module on graphs, on one rank or several."""

    loss_name = "graph_loss"

    def __init__(
        self, name: str, module: nn.Module, loss: LossModule, config: Config, info: EnvInfo, dist: Dist
    ) -> None:
        assert info.layout is not None
        self.config, self.info, self.layout, self.dist = config, info, info.layout, dist
        self._modules, self._loss = {name: module}, loss
        lr = config.graph_lr * lr_scale(config, dist.world_size)
        self.optimizer = Adam(module.parameters(), lr=lr)
        self._step = SyncedOptimizer(loss, self.optimizer, dist, config.grad_norm_clip, config.bucket_cap_mb)
        self.device, self.columns = dist.device, GraphTables(info.layout, dist.device)

    @abstractmethod
    def sample(self, batch: PackedBatch) -> Any:
        """Return what the loss reads of a batch. With `marks=`: which frames and units count, for fixed shapes."""

    def steps(self) -> tuple[SyncedOptimizer, ...]:
        """Return what takes optimisation steps."""
        return (self._step,)

    def units(self, batch: PackedBatch) -> Tensor:
        """Return which units of which frames are learned from, [S, n, N] bool."""
        raise NotImplementedError

    def counts(self, batch: PackedBatch) -> Tensor:
        """Return how many frames and units of each episode are learned from, [B, 2]; of a batch of fixed shapes."""
        units = self.units(batch).unflatten(0, (-1, batch.packing.n_episodes))
        return torch.stack([units.any(-1).sum((0, 2)), units.sum((0, 2, 3))], dim=1)

    def fixed_inputs(self, draw: Draw) -> tuple[Tensor, ...]:
        """Return the drawn episodes, [2, B], and which places of each part count: [parts, F] frames, [parts, P] units.

        Parts have about `graph_frames_at_once` frames, at least one episode; F and P fit the largest part.
        """
        counts = draw.counts(self.counts)
        order = counts[:, 0].argsort(descending=True, stable=True)  # dealt by turns: parts of about equal size
        parts = min(len(order), len(even_parts(int(counts[:, 0].sum()), self.config.graph_frames_at_once)))
        sizes = torch.stack([counts[order[part::parts]].sum(0) for part in range(parts)], dim=1)
        return draw.drawn[:, order], *(torch.arange(few(int(size.max()))) < size[:, None] for size in sizes)

    def finish(self, episodes: int) -> None:
        """Do what follows a step: count it."""
        self.updates += 1

    def _fixed_parts(self: Any, draw: Draw, inputs: tuple[Tensor, ...]) -> list[Any]:
        """Return the samples of an update of fixed shapes, part by part."""
        drawn, frames, units = inputs
        self._loss.train()
        batches, sample = draw.batches(drawn, len(frames)), cast(Any, self.sample)
        return [sample(batch, marks=marks) for batch, *marks in zip(batches, frames, units, strict=True)]

    def warm_up(self) -> None:
        """Run discarded forward and backward passes on an episode without steps."""
        closing = torch.zeros(1, self.info.n_agents, self.info.obs_dim)
        idle = torch.zeros(1, self.info.n_agents, dtype=torch.int64)
        batch = pack_episodes([{"obs": closing, "full_obs": closing, "actions": idle}]).to(self.dist.device)
        self._loss.train()
        self._step.warm_up(self.sample(batch))

    def begin(self, batches: Callable[[], Iterable[PackedBatch]]) -> None:  # noqa: B027 most need nothing
        """Prepare on this rank's training episodes, which each call yields; before the first update, by all ranks."""

    def modules(self) -> dict[str, nn.Module]:
        """Return the trained module by name."""
        return self._modules

    def saved(self) -> dict[str, Any]:
        """Return the optimizer."""
        return {"optimizer": self.optimizer}
