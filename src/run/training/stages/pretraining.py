"""Pretraining: stage 1 trains the tokenizer, stage 2 the predictor of what an agent does not see, and tests it."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from omagd import learners
from omagd.components.episode_buffer import EpisodeBuffer
from omagd.components.episode_codec import Codec
from omagd.learners.graph_metrics import summarise
from omagd.learners.protocol import PretrainingLearner
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.graph_reconstructers import training_fields
from omagd.modules.graph_reconstructers.pretrained import describe
from omagd.run.checkpoint.store import Attribute, StageResult
from omagd.run.checkpoint.weights import PREDICTOR_FILE, TOKENIZER_FILE, keep_file
from omagd.run.memory_budget import GIGABYTE
from omagd.run.reporting.metrics import Every, Metrics
from omagd.run.training.build import new_predictor, new_tokenizer, pretrain_policy
from omagd.run.training.device import room_for_episodes
from omagd.run.training.judges import Verdict, judges
from omagd.run.training.stages.base import PretrainedModules, Session, Stage, Task, require_same_weights
from omagd.runners.rollout import row_fields
from omagd.utils.errors import UserError
from omagd.utils.logging import Progress
from omagd.utils.packing import PackedBatch
from omagd.utils.seeding import seed_everything
from omagd.utils.storage import STORAGE

if TYPE_CHECKING:
    from omagd.resident.updates import FixedUpdates

TOGETHER = 32  # episodes that are read together
TEST = "pretrain_test"  # purpose of the test episodes of stage 2


class PretrainStage(Stage):
    """Base of stages 1 and 2; the learner defines "best".

    Attributes:
        module_name: name of the trained module in `PretrainedModules`. weights_name: of its file.
    """

    clock_name = "epoch"
    lr_key = "graph_lr"
    learner: PretrainingLearner
    module_name: str
    weights_name: str

    def __init__(self, session: Session, pretrained: PretrainedModules) -> None:
        super().__init__(session, pretrained)
        config = session.config
        self.register_learner(self.make_learner())
        seed_everything(config.seed, f"{self.name} dropout", session.dist.rank)
        self.trained_on = Metrics()
        self.metrics["trained_on"] = self.trained_on
        self.best: tuple[float, int, dict[str, Any]] = (math.nan, 0, {})
        self.last: dict[str, float] = {}
        evaluation = Every(config.graph_pretrain_eval_interval)
        self.dues["test"] = evaluation
        self.tasks = [Task("test", lambda: evaluation.due(self.clock.epoch) or self._learned_all(), self.evaluate)]
        self._missing: dict[str, int] = {}
        room = {name: session.rounds(count) * session.env.n_slots for name, count in self._wanted().items()}
        self._fixed, stored = self._fixed_shapes(room.get("pretrain", 1))
        for name, count in room.items():  # those that no stage before has
            self.buffers().setdefault(name, stored if name == "pretrain" else EpisodeBuffer(count))
        self._policies: dict[str, Any] = {}
        self._learned = False
        self._bar: Progress | None = None
        for name in ("best", "last", "_missing"):
            self.register(name.removeprefix("_"), Attribute(self, name))

    @abstractmethod
    def make_learner(self) -> PretrainingLearner:
        """Return the learner of this stage over freshly initialised modules."""

    @property
    def trained(self) -> nn.Module:
        """The module that this stage trains."""
        module: nn.Module = self.learner.modules()[self.module_name]
        return module

    def prepare(self) -> None:
        """Fix the order of sums."""
        if not self.session.config.evaluation_only:
            self.learner.warm_up()

    def restored(self) -> None:
        """Play the episodes of which a rank has none: at the beginning, and where it has lost them."""
        super().restored()
        for purpose, count in self._wanted().items():
            if not self.session.dist.all(len(self.buffers()[purpose]) > 0):
                self._missing[purpose] = count

    def done(self) -> bool:
        """Whether all epochs have been run; under `evaluation_only`, whether the given module has been measured."""
        return self._learned_all() and (not self.session.config.evaluation_only or bool(self.last))

    def _learned_all(self) -> bool:
        """Whether there is nothing left to learn from or to learn."""
        config = self.session.config
        over = self.clock.epoch >= config.graph_pretrain_epochs
        return not self._missing and (config.evaluation_only or over)

    def collect(self) -> None:
        """Play a round of the episodes that are still missing: first those to learn from, then those to measure on."""
        if not self._missing:
            return
        config, purpose = self.session.config, next(iter(self._missing))
        buffer = self.buffers()[purpose]
        if purpose == "pretrain" and config.pretrain_buffer_path:
            path = Path(config.pretrain_buffer_path).expanduser() / _buffer_file(self.session.dist.rank)
            buffer.load(path, self._facts(), "pretrain_buffer_path")
            played = self._missing[purpose]
        else:
            played = self._play(purpose, buffer)
        self._missing[purpose] -= played
        if self._missing[purpose] <= 0:
            del self._missing[purpose]
            self._close_bar()
            if purpose == "pretrain" and config.save_pretrain_buffer:
                path = self.session.folder.path / "pretrain_buffer" / _buffer_file(self.session.dist.rank)
                with STORAGE.attempt(STORAGE.name(path)):
                    buffer.save(path, self._facts())

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def ready(self) -> bool:
        """Whether there is a batch to learn from: once all episodes are there."""
        self._learned = not self._missing and not self._learned_all()
        return self._learned

    def update(self) -> None:
        """One epoch: one sampled batch on each rank, one update."""
        config, logger = self.session.config, self.session.logger
        if self._bar is None:
            whole, shown = config.graph_pretrain_epochs, self.session.dist.is_main
            logger.info(f"{self.name}: {whole} epochs of {len(self._episodes)} episodes on every rank")
            self._bar = Progress(whole, "epoch", self.name, enabled=shown, initial=self.clock.epoch)
        if self.clock.epoch == 0:
            with self.session.profiler.phases("prepare"):  # once, not per epoch
                self.learner.begin(partial(in_batches, self._episodes, self.session.dist.device))
        size = min(config.graph_pretrain_batch_size, len(self._episodes))
        with self.session.profiler.phases("sample"):
            drawn = self._episodes.draw(size, self.rng(f"{self.name} sampling"))
            packed = None if self._fixed else self._episodes.batch(drawn).to(self.session.dist.device)
        if self._fixed is None:
            stats = self.learner.update(cast(PackedBatch, packed))
        else:
            stats = self._fixed.update(cast(Any, self._episodes).fixed(drawn), episodes=0)
        self.trained_on.add(self.health.note(stats), prefix="train/")

    def advance(self) -> None:
        """Count the epoch, if there was one."""
        if not self._learned:
            return
        self.clock.epoch += 1
        self.clock.updates += 1
        if self._bar is not None:
            self._bar.update(1)

    def evaluate(self) -> None:
        """Measure on the held-out episodes, keep the best model, write one record.

        Errors: UserError where training has diverged.
        """
        self.last = values = self.measure(self.buffers()["held_out"])
        record = {f"eval/{name}": value for name, value in values.items()}
        measured = {**self.session.profiler.record(self.clock.updates), **self.health.record()}
        record = {**self.trained_on.reduce(self.session.dist), **record, **measured, **self.session.failure_counts()}
        self.log(record)
        self.health.require_finite(record, self.when, also=f"eval/{self.learner.best_metric}")
        self.require_sound()
        reached = values.get(self.learner.best_metric, 0.0)  # no value: nothing was unseen, nothing can be wrong
        if reached < self.best[0] or math.isnan(self.best[0]):
            self.best = (reached, self.clock.epoch, copy.deepcopy(self.trained.state_dict()))

    def measure(self, buffer: EpisodeBuffer, together: int = 0) -> dict[str, float]:
        """Return the learner's metrics on episodes of all ranks. together: read at a time, 0: all."""
        metrics, names = Metrics(), set[str]()
        for batch in in_batches(buffer, self.session.dist.device, together or max(1, len(buffer))):
            metrics.add(found := self.learner.evaluate(batch))
            names |= found.keys()
        names = set().union(*self.session.dist.gather(names))
        if names and self.learner.best_metric not in names:
            raise UserError(
                f"mask_predictor_config.kind={self.session.config.mask_predictor_config.kind}: best_metric="
                f"{self.learner.best_metric} is not among what its evaluate returns: {', '.join(sorted(names))}"
            ).on_all_ranks()
        return summarise(metrics.reduce(self.session.dist))

    def standing(self) -> dict[str, float]:
        """Return the last measurement on the held-out episodes, and the best one with its epoch."""
        if not self.last:
            return {}
        return {**self.last, f"best_{self.learner.best_metric}": self.best[0], "best_epoch": float(self.best[1])}

    def finish(self) -> StageResult:
        """Save the last and the best model, and hand the best one on."""
        self._close_bar()
        self.require_sound()
        more = self.saved_beside()
        module, folder = self.trained, self.session.folder
        last = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(self.best[2])
        require_same_weights(self.session.dist, module, self.name)
        files: dict[str, str] = {}
        if self.session.dist.is_main and self.session.config.save_model:
            meta = describe(self.session.config, self.session.info, predictor=self.module_name == "predictor")
            for best, weights in ((False, last), (True, self.best[2])):
                path = folder.pretrained(self.name, best) / self.weights_name
                keep_file(path, {"weights": weights, "meta": meta, **more})
            files[self.name] = str(folder.pretrained(self.name, best=True) / self.weights_name)
        setattr(self.pretrained, self.module_name, module.eval().requires_grad_(False))
        return StageResult(self.name, self.clock.state_dict(), self.standing(), files)

    def saved_beside(self) -> dict[str, Any]:
        """Return what the files of weights hold beside them. Called by all ranks."""
        return {}

    @property
    def _episodes(self) -> EpisodeBuffer:
        return self.buffers()["pretrain"]

    def _wanted(self) -> dict[str, int]:
        """Return how many episodes are to be played over all ranks, by purpose; in whole rounds of all slots."""
        config = self.session.config
        judged = config.eval_report_episodes if config.evaluation_only else 0
        wanted = {} if config.evaluation_only else {"pretrain": config.graph_pretrain_episodes}
        wanted["held_out"] = judged or config.graph_pretrain_eval_episodes
        return wanted

    def _fixed_shapes(self, episodes: int) -> tuple[FixedUpdates | None, EpisodeBuffer]:
        """Return updates of fixed shapes, None for packed batches, and room for `episodes` where these read them.

        Where fixed shapes are wanted, but cannot be, the log says why.
        """
        config, dist, info = self.session.config, self.session.dist, self.session.info
        if config.evaluation_only or not (config.graph_updates or dist.device.type == "cuda"):
            return None, EpisodeBuffer(episodes)
        from omagd.resident.replay import ResidentBuffer  # other runs load none of it
        from omagd.resident.updates import FixedUpdates, why_packed

        there = self.buffers().get("pretrain")
        why = why_packed(config, type(self.learner))
        if there is not None and not isinstance(there, ResidentBuffer):
            why = why or "the episodes of the stage before are in main memory"
        elif there is None and dist.device.type == "cuda" and torch.cuda.is_available():
            fields = row_fields(info, full_obs=True)
            width = Codec({name: fields[name] for name in training_fields(config)}).width
            need, room = width * (info.episode_limit + 1) * episodes / GIGABYTE, room_for_episodes(config, dist)
            why = why or (f"{need:.2f} GB of episodes do not fit into {room:.2f} GB" if need > room else "")
        # The same on all ranks, whose free memory differs: fixed shapes sum gradients in another way than DDP.
        if why := max(dist.gather(why)):
            self.session.logger.info(f"{self.name}: updates are not CUDA graphs, which is slower: {why}")
            return None, EpisodeBuffer(episodes)
        return FixedUpdates(cast(Any, self.learner)), ResidentBuffer(episodes, dist.device, info.episode_limit + 1)

    def _play(self, purpose: str, into: EpisodeBuffer) -> int:
        """Play one round of all slots; return how many episodes that are over all ranks."""
        session = self.session
        if session.config.evaluation_only:  # the held-out episodes chose the model that is compared
            purpose = TEST
        if self._bar is None:
            text = f"{self.name}: playing"
            self._bar = Progress(into.capacity, "episode", text, enabled=session.dist.is_main, initial=len(into))
        if purpose not in self._policies:
            self._policies[purpose] = pretrain_policy(session, self.rng(f"{purpose} policy"))
        rollout = session.runners[purpose].run(self._policies[purpose], explore=None, full_obs=True)
        with self.phase("replay"):
            fields = training_fields(session.config)
            into.add([{name: episode[name] for name in fields} for episode in rollout.episodes])
        session.say_first_episodes()
        self._bar.update(rollout.n_episodes)
        return session.env.n_slots * session.dist.world_size

    def _facts(self) -> dict[str, str]:
        fields = training_fields(self.session.config)
        more = {} if fields == ("obs", "full_obs") else {"fields": ", ".join(fields)}  # files of earlier versions
        return {"shape_key": self.session.info.shape_key(), **more}


def in_batches(buffer: EpisodeBuffer, device: torch.device, together: int = TOGETHER) -> Iterator[PackedBatch]:
    """Yield all episodes of a buffer, so many at a time that memory does not grow with their number."""
    for first in range(0, len(buffer), together):
        yield buffer.batch(range(first, min(len(buffer), first + together))).to(device)


def _buffer_file(rank: int) -> str:
    return f"rank_{rank}.episodes"


class Stage1(PretrainStage):
    """Trains a fresh tokenizer on `full_obs`."""

    name = "stage1"
    module_name, weights_name = "tokenizer", TOKENIZER_FILE

    def make_learner(self) -> TokenizerLearner:
        """Return the learner over a new tokenizer, or over the given one when it is only evaluated."""
        session = self.session
        tokenizer = self.pretrained.tokenizer or new_tokenizer(session.config, session.info, session.dist.device)
        tokenizer.requires_grad_(True)
        return TokenizerLearner(tokenizer, session.config, session.info, session.dist)


class Stage2(PretrainStage):
    """Trains a fresh predictor, over the frozen tokenizer's tokens where its kind reads them.

    Held-out episodes select the best predictor; test episodes, which nothing else reads, judge it at the end.
    """

    name = "stage2"
    module_name, weights_name = "predictor", PREDICTOR_FILE
    learner: Any

    def __init__(self, session: Session, pretrained: PretrainedModules) -> None:
        super().__init__(session, pretrained)
        self.judges = judges(session, pretrained)

    def make_learner(self) -> Any:
        """Return the learner over a new predictor, or over the given one when it is only evaluated."""
        session, tokenizer = self.session, self.pretrained.tokenizer
        predictor = self.pretrained.predictor or new_predictor(session.config, session.info, session.dist.device)
        predictor.requires_grad_(True)
        kind = learners.PREDICTORS.get(session.config.mask_predictor_config.kind)
        return kind(predictor, tokenizer, session.config, session.info, session.dist)

    def _wanted(self) -> dict[str, int]:
        """Return also the test episodes."""
        tests = {} if self.session.config.evaluation_only else {TEST: self.session.config.graph_pretrain_test_episodes}
        return {**super()._wanted(), **tests}

    def measure(self, buffer: EpisodeBuffer, together: int = 0) -> dict[str, float]:
        """Return also what the judges measure."""
        self._verdict = Verdict.of(
            judge.predictor(self.learner, in_batches(buffer, self.session.dist.device)) for judge in self.judges
        )
        return {**super().measure(buffer, together), **self._verdict.values}

    def saved_beside(self) -> dict[str, Any]:
        """Return what judges need to judge the predictor in later runs too."""
        return {name: value for judge in self.judges for name, value in judge.saved().items()}

    def finish(self) -> StageResult:
        """Save the models, judge the best one on the test episodes, and let judges draw what it believes."""
        result, episodes = super().finish(), self.buffers()
        if TEST in episodes:
            with self.phase("test"):
                values = self.measure(episodes[TEST], TOGETHER)
            self.log({f"test/{name}": value for name, value in values.items()})
            result.values.update({f"test_{name}": value for name, value in values.items()})
            result.facts.update({"beliefs": self._verdict.table} if self._verdict.table else {})
        held_out = episodes["held_out"]
        for judge in self.judges if self.session.dist.is_main else []:
            result.files.update(judge.picture(held_out.batch(range(len(held_out)))))
        return result
