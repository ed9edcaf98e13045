"""Stage 1: the tokenizer learns to name the nodes of fully observed graphs."""

from __future__ import annotations

from typing import Any

from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.graph_reconstructers.meta import describe
from omagd.modules.graph_reconstructers.tokenizer import Tokenizer
from omagd.run.build import new_tokenizer
from omagd.run.stages.base import StageResult
from omagd.run.stages.pretrain import PretrainStage
from omagd.utils.checkpoint import TOKENIZER_FILE


class Stage1(PretrainStage):
    """Trains a fresh tokenizer on `full_obs`."""

    name = "stage1"
    weights_name = TOKENIZER_FILE
    learner: TokenizerLearner

    def make_learner(self) -> TokenizerLearner:
        """Return the learner over a new tokenizer, or over the given one when it is only evaluated."""
        session = self.session
        tokenizer = self.products.tokenizer or new_tokenizer(session.config, session.info, session.dist.device)
        tokenizer.requires_grad_(True)
        return TokenizerLearner(tokenizer, session.config, session.info, session.dist)

    def trained(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.learner.tokenizer

    def describe(self) -> dict[str, Any]:
        """Return the tokenizer's facts."""
        return describe(self.session.config, self.session.info, predictor=False)

    def finish(self) -> StageResult:
        """Hand the best tokenizer on."""
        result = super().finish()
        self.products.tokenizer = self.trained()
        return result
