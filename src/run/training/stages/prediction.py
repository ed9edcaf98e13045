"""Stage 2: trains the predictor of what an agent does not see, and tests it beside the baselines."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

from omagd import learners
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.learners.belief_baselines import Baselines, fit_baselines
from omagd.learners.belief_metrics import belief_values, judge
from omagd.learners.graph_metrics import summarise
from omagd.run.checkpoint.state import Attribute, StageResult
from omagd.run.checkpoint.weights import PREDICTOR_FILE
from omagd.run.training.beliefs import picture, reconstructor_of, saved_baselines, says_of_units
from omagd.run.training.build import new_predictor
from omagd.run.training.session import Session
from omagd.run.training.stages.base import PretrainedModules, Task
from omagd.run.training.stages.pretraining import PretrainStage, in_batches
from omagd.utils.metrics import Metrics

TEST = "pretrain_test"
"""Purpose of the test episodes of stage 2."""


class Stage2(PretrainStage):
    """Trains a fresh predictor, over the frozen tokenizer's tokens where its kind reads them.

    Held-out episodes select the best predictor. Then, and not before, test episodes are played, on which it is reported
    beside the baselines.

    Attributes:
        tested: the table of the test episodes, empty until then.
    """

    name = "stage2"
    module_name, weights_name = "predictor", PREDICTOR_FILE
    learner: Any

    def __init__(self, session: Session, pretrained: PretrainedModules) -> None:
        super().__init__(session, pretrained)
        self.tested: dict[str, Any] = {}
        self.register("tested", Attribute(self, "tested"))
        self.tasks.append(Task("test", self._is_report_due, self.report))

    def make_learner(self) -> Any:
        """Return the learner over a new predictor, or over the given one when it is only evaluated."""
        session, tokenizer = self.session, self.pretrained.tokenizer
        predictor = self.pretrained.predictor or new_predictor(session.config, session.info, session.dist.device)
        predictor.requires_grad_(True)
        kind = learners.PREDICTORS.get(session.config.mask_predictor_config.kind)
        return kind(predictor, tokenizer, session.config, session.info, session.dist)

    def done(self) -> bool:
        """Whether the predictor is trained, selected and tested."""
        return super().done() and bool(self.tested or self.session.config.evaluation_only)

    def collect(self) -> None:
        """Play test episodes when training is over, else as in stage 1."""
        if self._learned_all() and self.last and not self._in_test() and not self.session.config.evaluation_only:
            self._close_bar()
            self._missing = {TEST: self.session.config.graph_pretrain_test_episodes}
        super().collect()

    def episodes_changed(self, *, lost: bool) -> None:
        """Play again what a rank has lost completely."""
        super().episodes_changed(lost=lost)
        begun = TEST in self._missing or (lost and not self.tested and self._in_test())
        if lost and begun and not self.session.dist.all(len(self.buffers()[TEST]) > 0):
            self._missing[TEST] = self.session.config.graph_pretrain_test_episodes

    def measure(self, buffer: EpisodeBuffer) -> dict[str, float]:
        """Return also what is measured on living units, beside the baselines."""
        values = super().measure(buffer)
        if self.baselines is None:
            return values
        batches = in_batches(buffer, self.session.dist.device)
        return {**values, **belief_values(judge(self.learner, batches, self.baselines, self.session.dist))}

    @cached_property
    def baselines(self) -> Baselines | None:
        """The baselines: those of the given predictor's file if it is only evaluated, else fitted ones.

        None for a predictor that says nothing of units. First read by all ranks together.
        """
        session, pretrained = self.session, self.pretrained
        if not says_of_units(self.learner):
            return None
        if session.config.evaluation_only:
            return saved_baselines(session)
        assert pretrained.train_episodes is not None and pretrained.held_out is not None
        training, validation = (
            partial(in_batches, buffer, session.dist.device)
            for buffer in (pretrained.train_episodes, pretrained.held_out)
        )
        return fit_baselines(training, validation, session.info, session.dist)

    def saved_beside(self) -> dict[str, Any]:
        """Return the baselines, beside which the predictor is judged in later runs too."""
        return {} if self.baselines is None else {"baselines": self.baselines.state_dict()}

    def report(self) -> None:
        """Measure the best predictor on the test episodes and log one record."""
        session, module, buffer = self.session, self.trained, self.buffers()[TEST]
        baselines = self.baselines
        last = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(self.best[2])
        metrics = Metrics()
        for batch in in_batches(buffer, session.dist.device):
            metrics.add(self.learner.evaluate(batch))
        values = summarise(metrics.reduce(session.dist))
        table: dict[str, Any] = {}
        if baselines is not None:
            table = judge(self.learner, in_batches(buffer, session.dist.device), baselines, session.dist)
            values |= belief_values(table)
            table["episodes"] = session.dist.sum_int(len(buffer))
        module.load_state_dict(last)
        self.tested = {"values": values, "table": table}
        self.log({f"test/{name}": value for name, value in self.tested["values"].items()})

    def standing(self) -> dict[str, float]:
        """Return also what the best predictor has reached on the test episodes."""
        tested = self.tested.get("values", {})
        return {**super().standing(), **{f"test_{name}": value for name, value in tested.items()}}

    def finish(self) -> StageResult:
        """Save the models, and draw one moment as seen, as reconstructed and as it was."""
        result = super().finish()
        if self.tested.get("table"):
            result.facts["beliefs"] = self.tested["table"]
        if self.session.dist.is_main and says_of_units(self.learner):
            assert self.pretrained.held_out is not None
            held_out = self.pretrained.held_out
            path = picture(
                self.session,
                reconstructor_of(self.session, self.pretrained),
                held_out.batch(range(len(held_out))),
                "beliefs_stage2",
            )
            result.files["picture"] = str(path)
        return result

    def _is_over(self) -> bool:
        """Whether the last evaluation on the held-out episodes is due: it is over when test episodes are played."""
        return self._learned_all() and (self.session.config.evaluation_only or not self._in_test())

    def _is_report_due(self) -> bool:
        return self._learned_all() and self._in_test() and not self.tested

    def _in_test(self) -> bool:
        """Whether any rank has test episodes. A collective."""
        return self.session.dist.sum_int(len(self.buffers()[TEST])) > 0

    def _make_room(self) -> None:
        super()._make_room()
        session = self.session
        room = session.rounds(session.config.graph_pretrain_test_episodes) * session.env.n_slots
        self.pretrained.test_episodes = EpisodeBuffer(room)
