"""Stage 2: the predictor learns to fill in what an agent does not see."""

from __future__ import annotations

from typing import Any

from omagd.learners.predictor_learner import PredictorLearner
from omagd.modules.graph_reconstructers.meta import describe
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.run.beliefs import picture
from omagd.run.build import new_predictor
from omagd.run.stages.base import StageResult
from omagd.run.stages.pretrain import PretrainStage
from omagd.utils.checkpoint import PREDICTOR_FILE


class Stage2(PretrainStage):
    """Trains a fresh predictor over the frozen tokenizer's tokens."""

    name = "stage2"
    weights_name = PREDICTOR_FILE
    learner: PredictorLearner

    def make_learner(self) -> PredictorLearner:
        """Return the learner over a new predictor, or over the given one when it is only evaluated."""
        session, tokenizer = self.session, self.products.tokenizer
        assert tokenizer is not None, "stage 2 runs after stage 1 or with its file"
        predictor = self.products.predictor or new_predictor(session.config, session.info, session.dist.device)
        predictor.requires_grad_(True)
        return PredictorLearner(predictor, tokenizer, session.config, session.info, session.dist)

    def trained(self) -> MaskPredictor:
        """Return the predictor."""
        return self.learner.predictor

    def describe(self) -> dict[str, Any]:
        """Return the predictor's facts."""
        return describe(self.session.config, self.session.info, predictor=True)

    def finish(self) -> StageResult:
        """Hand the best predictor on and draw one moment as seen, as reconstructed and as it was."""
        result = super().finish()
        self.products.predictor = self.trained()
        if self.session.dist.is_main:
            assert self.products.held_out is not None
            held_out = self.products.held_out
            path = picture(self.session, self.products, held_out.batch(range(len(held_out))), "beliefs_stage2")
            result.files["picture"] = str(path)
        return result
