"""What stages 1 and 2 have in common: a fixed set of episodes, epochs of one update, a held-out choice of the best."""

from __future__ import annotations

import copy
import math
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch import nn

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.learners.graph_metrics import summarise
from omagd.run.build import pretrain_policy, require_same_weights
from omagd.run.session import Session
from omagd.run.stages.base import Products, Stage, StageResult, Task
from omagd.utils.checkpoint import save_file
from omagd.utils.clock import Due
from omagd.utils.metrics import Metrics
from omagd.utils.progress import Progress, duration
from omagd.utils.seeding import generator, seed_everything

FIELDS = ("obs", "full_obs")
REHEARSAL_EPISODES = 8


class PretrainStage(Stage):
    """Base of stages 1 and 2. A subclass says which learner and which file; the learner, what "best" means."""

    clock_name = "epoch"
    weights_name: str

    def __init__(self, session: Session, products: Products) -> None:
        super().__init__(session, products)
        config = session.config
        self.learner = self.make_learner()
        seed_everything(config.seed, f"{self.name} dropout", session.dist.rank)
        self.metrics = Metrics()
        self.best: tuple[float, int, dict[str, Any]] = (math.nan, 0, {})
        self.last: dict[str, float] = {}
        self._replay = generator(config.seed, f"{self.name} sampling", session.dist.rank)
        evaluation = Due(config.graph_pretrain_eval_interval)
        self.tasks = [Task("test", lambda: evaluation.due(self.clock.epoch) or self.done(), self.evaluate)]
        self._bar: Progress | None = None

    @abstractmethod
    def make_learner(self) -> Any:
        """Return the learner of this stage over freshly initialised modules."""

    @abstractmethod
    def trained(self) -> nn.Module:
        """Return the module that this stage trains."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the facts that are stored beside the weights."""

    def prepare(self) -> None:
        """Get the episodes: those of the stage before, a file's, or freshly played ones."""
        config = self.session.config
        if self.products.train_episodes is None:
            self._fill()
        if not config.evaluation_only:
            self._rehearse()
            self._bar = Progress(config.graph_pretrain_epochs, "epoch", self.name, enabled=self.session.dist.is_main)

    def done(self) -> bool:
        """Whether all epochs have been run."""
        return self.session.config.evaluation_only or self.clock.epoch >= self.session.config.graph_pretrain_epochs

    def collect(self) -> None:
        """Nothing: the episodes are fixed."""

    def ready(self) -> bool:
        """Whether there is a batch: always, the set is filled first."""
        return True

    def update(self) -> None:
        """One epoch: one sampled batch on each rank, one update."""
        size = min(self.session.config.graph_pretrain_batch_size, len(self._episodes))
        with self.session.measures.phases("sample"):
            batch = self._episodes.sample(size, self._replay).to(self.session.dist.device)
        self.metrics.add(self.learner.update(batch), prefix="train/")

    def advance(self) -> None:
        """Count the epoch."""
        self.clock.epoch += 1
        self.clock.updates += 1
        if self._bar is not None:
            self._bar.update(1)

    def evaluate(self) -> None:
        """Measure on the held-out episodes, keep the best model, write one record."""
        assert self.products.held_out is not None
        held_out = Metrics()
        held_out.add(self.learner.evaluate(self.products.held_out.to(self.session.dist.device)))
        values = summarise(held_out.reduce(self.session.dist))
        self.last = values
        reached = values.get(self.learner.best_metric, 0.0)  # no value: nothing was unseen, nothing can be wrong
        if reached < self.best[0] or math.isnan(self.best[0]):  # also where training has diverged from the start
            self.best = (reached, self.clock.epoch, copy.deepcopy(self.trained().state_dict()))
        record = {f"eval/{name}": value for name, value in values.items()}
        measured = self.session.measures.record(self.clock.updates)
        self.log({**self.metrics.reduce(self.session.dist), **record, **measured, **self.session.mishaps()})

    def finish(self) -> StageResult:
        """Save the last and the best model, and hand the best one on."""
        if self._bar is not None:
            self._bar.close()
        if self.session.config.evaluation_only:
            self.evaluate()
        module, folder = self.trained(), self.session.folder
        last = {name: value.clone() for name, value in module.state_dict().items()}
        module.load_state_dict(self.best[2])
        require_same_weights(self.session.dist, module, self.name)
        files: dict[str, str] = {}
        if self.session.dist.is_main and self.session.config.save_model:
            meta = self.describe()
            for best, weights in ((False, last), (True, self.best[2])):
                path = folder.pretrained(self.name, best) / self.weights_name
                save_file(path, {"weights": weights, "meta": meta})
            files[self.name] = str(folder.pretrained(self.name, best=True) / self.weights_name)
        module.eval().requires_grad_(False)
        values = {**self.last, f"best_{self.learner.best_metric}": self.best[0], "best_epoch": float(self.best[1])}
        return StageResult(self.name, self.clock.state_dict(), values, files)

    @property
    def _episodes(self) -> EpisodeBuffer:
        assert self.products.train_episodes is not None
        return self.products.train_episodes

    def _rehearse(self) -> None:
        """Run the learner's discarded first pass on a few episodes, and say from it how long the stage will take."""
        config = self.session.config
        size = min(config.graph_pretrain_batch_size, len(self._episodes))
        few = self._episodes.sample(min(REHEARSAL_EPISODES, size), generator(config.seed, "rehearsal"))
        started = time.monotonic()
        passes = self.learner.warm_up(few.to(self.session.dist.device))
        seconds = (time.monotonic() - started) / passes * size / few.packing.n_episodes
        self.session.logger.info(
            f"{self.name}: {config.graph_pretrain_epochs} epochs, each of {size} of {len(self._episodes)} episodes on"
            f" every rank; about {duration(seconds * config.graph_pretrain_epochs)}"
        )

    def _fill(self) -> None:
        """Play (or load) this rank's share of the training and the held-out episodes."""
        session, config = self.session, self.session.config
        facts = {"shape_key": session.info.shape_key()}
        buffer = EpisodeBuffer(self._whole_rounds(config.graph_pretrain_episodes))
        if config.pretrain_buffer_path:
            path = Path(config.pretrain_buffer_path).expanduser() / _buffer_file(session.dist.rank)
            buffer.load(path, facts, "pretrain_buffer_path")
        elif not config.evaluation_only:
            with session.measures.phases("collect"):
                self._play("pretrain", buffer)
        judged = config.eval_report_episodes if config.evaluation_only else 0
        held_out = EpisodeBuffer(self._whole_rounds(judged or config.graph_pretrain_eval_episodes))
        with session.measures.phases("collect"):
            self._play("held_out", held_out)
        self.products.train_episodes = buffer
        self.products.held_out = held_out.batch(range(len(held_out)))
        if config.save_pretrain_buffer and len(buffer):
            buffer.save(session.folder.path / "pretrain_buffer" / _buffer_file(session.dist.rank), facts)

    def _whole_rounds(self, episodes: int) -> int:
        """Return each rank's share of `episodes`, in whole rounds of all slots."""
        return self.session.rounds(episodes) * self.session.env.n_slots

    def _play(self, purpose: str, into: EpisodeBuffer) -> None:
        session = self.session
        policy = pretrain_policy(session, purpose)
        bar = Progress(into.capacity, "episode", f"{self.name}: playing", enabled=session.dist.is_main)
        while len(into) < into.capacity:
            rollout = session.runners[purpose].run(policy, explore=None, full_obs=True)
            with self.phase("replay"):
                into.add([{name: episode[name] for name in FIELDS} for episode in rollout.episodes])
            session.say_first_episodes()
            bar.update(rollout.n_episodes)
        bar.close()


def _buffer_file(rank: int) -> str:
    return f"rank_{rank}.episodes"
