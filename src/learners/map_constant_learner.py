"""Stage 2 with `kind: map_constant`: fits the means of units that agents do not see; there is nothing to optimise.

The table is the baseline `map_constant` of belief_baselines.py: for each agent, node and step the mean features of
living unseen units in the training episodes of all ranks, of (node, step) and then of the node where few were unseen.
Shapes: S packed rows, n agents, N nodes, M missing nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.belief_baselines import Sums
from omagd.learners.belief_cases import Cases, cases_of
from omagd.learners.graph_metrics import feature_error, mean_of
from omagd.learners.synced_optimizer import Stats
from omagd.modules.graph_reconstructers.belief import Belief
from omagd.modules.graph_reconstructers.graphs import feature_mask
from omagd.modules.graph_reconstructers.map_constant import MapConstant
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import PackedBatch


class MapConstantLearner:
    """Fits a table in place, equal on all ranks. One update ends the stage: it measures what `begin` has fitted.

    Args:
        predictor: the table. tokenizer, config: not read. info, dist: environment and ranks.
    """

    loss_name, best_metric = "graph_loss", "error_all"
    most_updates = 1

    def __init__(
        self, predictor: MapConstant, tokenizer: Tokenizer | None, config: Config, info: EnvInfo, dist: Dist
    ) -> None:
        assert info.layout is not None
        self.predictor, self.config, self.dist = predictor, config, dist
        self.info, self.layout = info, info.layout
        self._real = feature_mask(info.layout).to(dist.device)

    def warm_up(self, batch: PackedBatch | None = None) -> int:
        """Nothing to warm up; count as one pass."""
        return 1

    @torch.no_grad()
    def begin(self, batches: Callable[[], Iterable[PackedBatch]]) -> None:
        """Fit the table on this rank's training episodes and those of the others; called by all ranks."""
        sums = Sums(self.info, self.dist.device)
        for batch in batches():
            sums.add(batch, cases_of(batch, self.layout))
        self.predictor.table.copy_(sums.finish(self.dist)[-1])

    def update(self, batch: PackedBatch) -> Stats:
        """Return the error of living units on a batch of training episodes, and change nothing."""
        cases = cases_of(batch, self.layout)
        return {self.loss_name: mean_of(self._errors(cases), cases.living)}

    def calibrate(self, batches: Iterable[PackedBatch]) -> None:
        """Nothing to choose: nobody is taken for dead."""

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch) -> Stats:
        """Return sums and counts over the unseen nodes of living observers on held-out episodes."""
        cases = cases_of(batch, self.layout)
        error, dead = self._errors(cases), ~cases.living
        return {
            "error_all": mean_of(error), "error_alive": mean_of(error, cases.living),
            "recall_absent": mean_of(torch.zeros_like(error), dead),
            "recall_alive": mean_of(torch.ones_like(error), cases.living),
            "absent_share": mean_of(dead.to(error.dtype)),
        }  # fmt: skip

    @torch.no_grad()
    def beliefs(self, batch: PackedBatch) -> tuple[Tensor, Belief]:
        """Return the missing nodes [S, n, N] bool of a batch, and the belief about each: all are alive."""
        cases = cases_of(batch, self.layout)
        p_dead = torch.zeros(len(cases), device=batch.device)
        return cases.missing, Belief(self._features(cases), p_dead, p_dead.bool(), None)

    def modules(self) -> dict[str, nn.Module]:
        """Return the table by name."""
        return {"predictor": self.predictor}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: everything is in `modules()`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""

    def _features(self, cases: Cases) -> Tensor:
        features: Tensor = self.predictor(cases.agent, cases.node, cases.step)
        return features

    def _errors(self, cases: Cases) -> Tensor:
        return feature_error(self._features(cases), cases.truth, self._real[cases.node])
