"""Refresh: stage 3 goes on training the predictor, on the team's own episodes.

Stages 1 and 2 learn from scripts, and the team that learns soon sees other battles. Every `reconstructor_refresh`
environment steps (below 1: every such share of the stage), a copy of the predictor takes
`reconstructor_refresh_updates` updates of stage 2's learner on episodes of the replay, all but the newest; what stage 2
fits before its first update, such as regression, is fitted to them again. On the newest ones it is measured before and
after, and what stage 2 chooses on validation episodes, such as thresholds, is chosen again. Then agents act with its
weights. It happens after tests and never at the end, so the agents of a test have trained with the predictor that they
act with.

No episode is in flight meanwhile, so each is played with one predictor, and no memory is continued by other weights.
Stored reconstructions stay as the agents received them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from omagd import learners, runners
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.schema import Config
from omagd.learners.belief_baselines import Baselines
from omagd.learners.belief_metrics import belief_values, judge
from omagd.learners.graph_metrics import summarise
from omagd.learners.protocol import learner_class
from omagd.modules.graph_reconstructers.pretrained import check, describe
from omagd.run.checkpoint.serialization import first_not_finite
from omagd.run.checkpoint.weights import PREDICTOR_FILE, keep_file, load_file, load_into, load_learner_state
from omagd.run.training.beliefs import saved_baselines, says_of_units
from omagd.run.training.session import Session
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.stages.health import Health, require_same_weights
from omagd.run.training.stages.pretraining import TOGETHER
from omagd.utils.clock import Every
from omagd.utils.errors import together
from omagd.utils.metrics import Metrics
from omagd.utils.packing import PackedBatch

MEASURED = 128
"""Episodes over all ranks, rounded up to rounds of all slots, on which a refresh is measured at most: to be quick."""

LOGGED = (
    "graph_loss", "error_all", "recall_alive", "recall_absent", "error", "ratio_simple", "ratio_ridge",
    "error_allies", "error_allies_mean",
)  # fmt: skip
"""What is logged of the newest episodes before and after a refresh."""


@together
def check_refresh(config: Config) -> Iterator[str]:
    """Reject runs whose agents or episodes do not allow a refresh. Errors: UserError."""
    if not config.reconstructor_refresh or config.evaluate:
        return
    given, kind = f"reconstructor_refresh={config.reconstructor_refresh}", config.mask_predictor_config.kind
    if hasattr(learners.PREDICTORS.get(kind), "most_updates"):
        yield f"{given}: mask_predictor_config.kind={kind} is not trained by updates. Use 0"
    if learner_class(config.learner).data != "replay":
        yield f"{given}: learns from a replay, and learner={config.learner} keeps none. Use 0"
    if runners.REGISTRY.get(config.runner).unit != "episodes":
        yield f"{given}: learns from whole episodes, not with runner={config.runner}. Use runner=parallel"


class Refresh:
    """Trains a copy of the predictor and hands its weights to the reconstructor of the agents.

    Args:
        session: of the run. pretrained: modules of stages 1 and 2. Its predictor is replaced by a copy, since agents
            may act with the object; the copy stays as it is. mac: whose reconstructor acts, with a predictor of its
            own. replay: the team's episodes, with `full_obs`.

    Attributes:
        predictor: the copy. learner: of stage 2, over the copy. count: refreshes so far.
    """

    def __init__(self, session: Session, pretrained: PretrainedModules, mac: Any, replay: EpisodeBuffer) -> None:
        assert pretrained.predictor is not None
        config = session.config
        self.session, self._pretrained, self._replay = session, pretrained, replay
        self._acting = mac.reconstructor.predictor
        pretrained.predictor = copy.deepcopy(pretrained.predictor)  # agents may act with the former object
        self.predictor = copy.deepcopy(pretrained.predictor).requires_grad_(True)
        # Where the learning rate falls over stage 2, it falls over each refresh.
        own = config.model_copy(update={"graph_pretrain_epochs": config.reconstructor_refresh_updates})
        kind = learners.PREDICTORS.get(config.mask_predictor_config.kind)
        self.learner = kind(self.predictor, pretrained.tokenizer, own, session.info, session.dist)
        self._interval = config.reconstructor_refresh
        self._every = Every(max(1, int(self._interval)))
        self._health = Health(config, "graph_lr")
        self._baselines: Baselines | None = None
        self.count = 0

    def prepare(self) -> None:
        """Fix the order of sums, and read the baselines for the files of weights. Called by all ranks."""
        self.learner.warm_up()
        self._baselines = saved_baselines(self.session) if says_of_units(self.learner) else None
        self._act()

    def due(self, t_env: int, end: int) -> bool:
        """Return whether an interval has ended since the last refresh; end: step at which the stage ends."""
        every, last = self._every, self._every.last or 0
        if self._interval < 1:
            every.interval = max(1, round(self._interval * end))
            # With `max_episodes` the end is an estimate: a multiple that moves must not be passed twice.
            estimated = self.session.config.max_episodes is not None
            if estimated and t_env - last < every.interval / 2:
                return False
        return every.due(t_env)

    def run(self, rng: Any, when: str) -> dict[str, float]:
        """Train, hand the weights on, and return what is logged. Called by all ranks while no episode is in flight.

        rng: for the draws. when: stage and time, for messages. Errors: UserError where training has diverged.
        """
        config, replay = self.session.config, self._replay
        count, updates = self.count + 1, config.reconstructor_refresh_updates
        self.session.logger.info(f"{when}: refresh {count} of the predictor, {updates} updates on the team's battles")
        # Whole rounds of all slots, as in stage 2: the last episodes of a round are its longest.
        newest = self.session.rounds(min(MEASURED, config.graph_pretrain_eval_episodes)) * self.session.env.n_slots
        learned_from = len(replay) - min(newest, len(replay) // 2)
        measured_on = self._batch(range(learned_from, len(replay)) if learned_from < len(replay) else [0])
        before, trained = self._measured(measured_on), Metrics()
        self.learner.updates = 0
        self.learner.begin(partial(self._in_batches, learned_from))
        for _ in range(config.reconstructor_refresh_updates):
            size = min(config.graph_pretrain_batch_size, learned_from)
            chosen = rng.choice(learned_from, size=size, replace=False).tolist()
            trained.add(self._health.note(self.learner.update(self._batch(chosen))), prefix="train_")
        self.learner.calibrate([measured_on])
        self.count += 1
        values = {f"{name}_before": value for name, value in before.items()} | self._measured(measured_on)
        values = {f"refresh/{name}": value for name, value in (values | trained.reduce(self.session.dist)).items()}
        self._require_sound(values, when)
        require_same_weights(self.session.dist, self.predictor, "reconstructor_refresh")
        self._act()
        return {**values, "refresh/count": float(self.count)}

    def modules(self) -> PretrainedModules:
        """Return the modules that the agents act with."""
        return replace(self._pretrained, predictor=self.predictor)

    def save(self, folder: Path) -> None:
        """Write the predictor and its learner beside the weights of a step."""
        meta = describe(self.session.config, self.session.info, predictor=True)
        content = {"weights": self.predictor.state_dict(), "meta": meta, "learner": self.learner.state_dict()}
        baselines = {} if self._baselines is None else {"baselines": self._baselines.state_dict()}
        keep_file(folder / PREDICTOR_FILE, {**content, **baselines})

    def load(self, folder: Path, t_env: int) -> None:
        """Load what `save` wrote, if it is there; the next interval begins at `t_env`.

        Errors: UserError for what does not fit.
        """
        self._every.last = t_env
        path, key = folder / PREDICTOR_FILE, "checkpoint_path"
        if not path.is_file():
            return
        content = load_file(path, key)
        check(content.get("meta"), self.session.config, self.session.info, predictor=True, source=f"{key}={path}")
        load_into(self.predictor, content.get("weights", {}), path, key)
        if "learner" in content:
            load_learner_state(self.learner, content["learner"], path)
        require_same_weights(self.session.dist, self.predictor, f"{key}={path}")
        self._act()

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer and counters."""
        parts = {"weights": self.predictor, "learner": self.learner, "every": self._every, "health": self._health}
        return {**{name: part.state_dict() for name, part in parts.items()}, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`."""
        self.predictor.load_state_dict(state["weights"])
        self.learner.load_state_dict(state["learner"])
        self._every.load_state_dict(state["every"])
        self._health.load_state_dict(state["health"])
        self.count = int(state["count"])
        self._act()

    def _act(self) -> None:
        """Let the agents act with the weights of the copy; reconstructors read them when episodes begin."""
        self._acting.load_state_dict(self.predictor.state_dict())

    def _batch(self, indices: Any) -> PackedBatch:
        return self._replay.batch(indices).to(self.session.dist.device)

    def _in_batches(self, count: int) -> Iterator[PackedBatch]:
        """Yield the oldest `count` episodes of this rank."""
        for first in range(0, count, TOGETHER):
            yield self._batch(range(first, min(count, first + TOGETHER)))

    def _measured(self, batch: PackedBatch) -> dict[str, float]:
        """Return what is logged of episodes of all ranks."""
        metrics = Metrics()
        metrics.add(self.learner.evaluate(batch))
        values = summarise(metrics.reduce(self.session.dist))
        if self._baselines is not None:
            values |= belief_values(judge(self.learner, [batch], self._baselines, self.session.dist))
        return {name: values[name] for name in LOGGED if name in values}

    def _require_sound(self, values: Mapping[str, float], when: str) -> None:
        """Refuse to act with weights that are not finite. Errors: UserError, the same on all ranks."""
        when = f"reconstructor_refresh in {when}"
        self._health.require_finite(values, when)
        self._health.require_progress(when)
        if broken := first_not_finite(self.predictor.state_dict()):
            raise self._health.diverged(when, f"{broken} of the predictor holds values that are not finite")
