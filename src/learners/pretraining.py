"""What the learners of stages 1 and 2 share: one trained module, its optimizer, and batches in parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.protocol import SavesParts
from omagd.learners.synced_optimizer import Adam, LossModule, SyncedOptimizer, lr_scale
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch, pack_episodes


def even_parts(count: int, size: int) -> list[slice]:
    """Return slices that cut `count` things into parts of about `size`, at least one part."""
    n_parts = max(1, -(-count // size))
    return [slice(count * i // n_parts, count * (i + 1) // n_parts) for i in range(n_parts)]


class GraphLearner(SavesParts):
    """Trains one module on graphs, on one rank or several.

    Args:
        name: of the module. module: trained in place. loss: computes its loss. config, info: configuration and
            environment. dist: the ranks.
    """

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

    @abstractmethod
    def sample(self, batch: PackedBatch) -> Any:
        """Return what the loss reads of a batch."""

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
