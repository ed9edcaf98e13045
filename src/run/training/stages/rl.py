"""Stage 3: reinforcement learning."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from omagd import runners
from omagd.components.action_selectors import epsilon_at
from omagd.components.data import DataSource, GroupData, OnPolicyData, PrioritisedReplay, Read, ReplayData
from omagd.components.episode_buffer import UNLIMITED, EpisodeBuffer
from omagd.controllers.types import Exploration
from omagd.learners.protocol import Learner, explores, records_full_obs, updates_per_iteration
from omagd.run.checkpoint.store import Attribute, StageResult
from omagd.run.checkpoint.weights import far_step, find_step_folder, load_learner, save_learner
from omagd.run.reporting.metrics import Every, Metrics, Stopwatch
from omagd.run.training.build import build_learner
from omagd.run.training.collection import shapers
from omagd.run.training.device import replay_device
from omagd.run.training.evaluate import Tests, means
from omagd.run.training.judges import Verdict, judges
from omagd.run.training.stages.base import PretrainedModules, Session, Stage, Task, require_same_weights
from omagd.runners.rollout import Rollout
from omagd.utils.dist_utils import Pending
from omagd.utils.logging import Progress


class RLStage(Stage):
    """Trains a controller's agent with the configured learner."""

    name = "stage3"
    clock_name = "t_env"
    lr_key = "lr"
    learner: Learner

    def __init__(self, session: Session, pretrained: PretrainedModules) -> None:
        super().__init__(session, pretrained)
        config = session.config
        self.mac, learner = build_learner(session, pretrained)
        self.register_learner(learner)
        self.health.loss_name = learner.loss_name
        session.profiler.watch_acting(self.mac)
        self._learns: Any = learner  # or what calls it, with the batches of `data`
        self.data = self._data_source()
        self.shapers = shapers(session, self.mac, self.clock, self.data)
        self._steps_per_batch = updates_per_iteration(config) // self.data.batches_per_iteration
        self.played, self.learned = Metrics(), Metrics()
        self.metrics.update(played=self.played, learned=self.learned)
        self.tests = Tests(session, self.mac)
        self._collected = [0, 0]  # steps and episodes of this rank since the last count
        self._counts: Pending | None = None  # steps, episodes and ranks with a batch, of this iteration
        self._ready = False
        self._bar: Progress | None = None
        self._stopwatch = Stopwatch()
        self._since = (time.monotonic(), 0)
        test, save = Every(config.test_interval, first=True), Every(config.save_model_interval)
        self._log_due = {
            "run": Every(config.log_interval),
            "played": Every(config.runner_log_interval),
            "learned": Every(config.learner_log_interval),
        }
        self.dues.update({"test": test, "save": save, **{f"log {name}": due for name, due in self._log_due.items()}})
        self._parts_due: set[str] = set()
        self.tasks = [
            Task("test", lambda: test.due(self.clock.t_env) or self.done(), self.test),
            Task("log", self._something_to_log, self.write_log),
            Task("save", lambda: save.due(self.clock.t_env) or self.done(), self.save),
        ]
        self.register("last_test", Attribute(self.tests, "last"))
        self.register("best", Attribute(self.tests, "best"))
        if config.absolute_episodes:
            self.register("best_agent", Attribute(self.tests, "best_agent"))
        self.register("ready", Attribute(self, "_ready"))
        self.register("seconds", self._stopwatch)
        for shaper in self.shapers:  # after the clock, from which the level of opponents follows
            shaper.register(self.register)

    def _data_source(self) -> DataSource:
        """Return where batches come from, as the learner's kind of data says."""
        config, device = self.session.config, self.session.dist.device
        on_policy = self.learner.data == "on_policy"
        capacity = UNLIMITED if on_policy else config.buffer_size
        if device.type == "cuda" or config.graph_updates:
            buffer, read = self._on_device(capacity, on_policy)
        else:
            buffer = EpisodeBuffer(capacity)
            read = buffer.batch
        if on_policy:
            return (GroupData if config.group_size > 1 else OnPolicyData)(config, buffer, read)
        if not config.use_per:
            return ReplayData(config, self.rng("replay"), buffer, read)
        data = PrioritisedReplay(config, self.rng("replay"), buffer, read, cast(Any, self.learner).errors)
        self.register("priorities", Attribute(data, "priorities"), "rank")
        return data

    def _on_device(self, capacity: int, on_policy: bool) -> tuple[EpisodeBuffer, Read]:
        """Return what holds episodes for batches that are on a device or have fixed shapes, and what reads a batch."""
        from omagd.resident.replay import ResidentBuffer, StagedBuffer  # other runs load none of it
        from omagd.resident.updates import FixedUpdates, why_packed

        session, config, device = self.session, self.session.config, self.session.dist.device
        where, why = (device, "") if on_policy else replay_device(config, session.info, session.dist)
        kind = ResidentBuffer if where == device else StagedBuffer
        buffer = kind(capacity, device, runners.REGISTRY.get(config.runner).rows(session.info))
        packed = why_packed(config)
        for line in filter(None, (why, packed and f"updates are not CUDA graphs, which is slower: {packed}")):
            session.logger.info(line)
        if packed:
            return buffer, buffer.batch
        self._learns = FixedUpdates(cast(Any, self.learner))
        return buffer, cast(ResidentBuffer, buffer).whole if on_policy else buffer.fixed

    def prepare(self) -> None:
        """Run the learner's discarded passes, which fix the order of sums."""
        self.learner.warm_up()

    def start(self) -> None:
        """Load the weights of `checkpoint_path`, if given; replay starts empty, and the first test is due."""
        if self.session.config.checkpoint_path:
            folder = find_step_folder(self.session.config.checkpoint_path, self.session.config.load_step)
            self.clock.load_state_dict(load_learner(self.learner, folder))
            for module in self.learner.modules().values():
                require_same_weights(self.session.dist, module, f"checkpoint_path={folder}")
            if warning := far_step(folder, self.session.config.load_step):
                self.session.logger.warning(warning)
            where = f"t_env {self.clock.t_env}: steps count on from there to t_max {self.session.config.t_max}"
            self.session.logger.info(f"continuing from {folder} at {where}")
            for name, due in self.dues.items():
                due.last = None if name == "test" else self.clock.t_env

    def restored(self) -> None:
        """Start to measure speed and to show the progress."""
        super().restored()
        session, now = self.session, self.clock.t_env
        self._since = (time.monotonic(), now)
        self._log_news()
        self._bar = Progress(self._end(), "step", self.title, enabled=session.dist.is_main, initial=now)

    def buffers(self) -> dict[str, EpisodeBuffer]:
        """Return the episodes that checkpoints hold."""
        return {self.data.log_name: self.data.buffer}

    def episodes_changed(self) -> None:
        """Wait again until every rank can give a batch; priorities were those of the places of other episodes."""
        self._ready = False
        if isinstance(self.data, PrioritisedReplay):
            self.data.priorities = np.empty(0)

    def urgent(self) -> bool:
        """Whether a test of this iteration was the best one so far."""
        return self.tests.improved

    def standing(self) -> dict[str, float]:
        """Return the results of the last test and the best of all tests."""
        return self.tests.results()

    def score(self) -> float | None:
        """Return the last test's win rate, or its return."""
        return self.tests.score()

    def done(self) -> bool:
        """Whether `t_max` environment steps or `max_episodes` episodes have been played, over all ranks."""
        config, clock = self.session.config, self.clock
        enough = config.max_episodes is not None and clock.episodes >= config.max_episodes
        return enough or clock.t_env >= config.t_max

    def _end(self) -> int:
        """Return the step at which the stage ends: `t_max`, or an estimate from `max_episodes` and the mean length."""
        config, clock = self.session.config, self.clock
        if config.max_episodes is None or not clock.episodes:
            return config.t_max
        return min(config.t_max, max(clock.t_env, clock.t_env * config.max_episodes // clock.episodes))

    def collect(self) -> None:
        """Play one iteration of the runner, or as many as an on-policy batch needs, and store the episodes."""
        explore = self._exploration()
        self.tests.begin()
        for shaper in self.shapers:
            shaper.deal(self.data)
        self._play(explore)
        while self.data.wants_more:
            for shaper in self.shapers:
                shaper.again()
            self._play(explore)
        self._start_count()
        self.session.say_first_episodes()
        self.played.add({"epsilon": (explore.epsilon, 1.0)} if explores(self.learner) else {})
        for shaper in self.shapers:
            self.played.add(shaper.stats())

    def _play(self, explore: Exploration) -> None:
        """Play one iteration of the runner and store it."""
        for shaper in self.shapers:
            shaper.begin()
        truth = self.mac.wants_full_obs or records_full_obs(self.session.config)
        rollout = self.session.runners["train"].collect(self.mac, explore=explore, full_obs=truth)
        for shaper in self.shapers:
            shaper.played(rollout.log)
        self._store(rollout)

    def _exploration(self) -> Exploration:
        epsilon = epsilon_at(self.session.config, self.clock.t_env) if explores(self.learner) else 0.0
        return Exploration(epsilon, self.rng("explore"))

    def _store(self, rollout: Rollout) -> None:
        """Store the episodes of a rollout and add its metrics."""
        with self.phase("replay"):
            self.data.add(rollout.episodes)
            self.session.episode_log.add(rollout.log, t_env=self.clock.t_env)
        self.played.add(means(rollout.stats))
        self._collected[0] += rollout.steps
        self._collected[1] += rollout.n_episodes

    def _start_count(self) -> None:
        """Start to sum what was collected over all ranks."""
        counts = *self._collected, self.data.ready
        self._collected = [0, 0]
        self._counts = self.session.dist.sum_later(torch.tensor(counts, dtype=torch.int64))

    def ready(self) -> bool:
        """Whether every rank has a batch, or as many as what shapes the collection asks for."""
        if not self._ready:  # once true, it stays true, and no rank waits for the sum
            assert self._counts is not None
            ranks = int(self._counts.wait()[2])
            for shaper in self.shapers:
                if (enough := shaper.ready(ranks, self.when)) is not None:
                    return enough
            self._ready = ranks == self.session.dist.world_size
        return self._ready

    def update(self) -> None:
        """Learn from the batches of this iteration."""
        batches, learner = self.data.batches(), cast(Any, self.learner)
        counting = getattr(learner, "counts_updates", False)
        for _ in range(self.data.batches_per_iteration):
            with self.session.profiler.phases("sample"):
                batch = next(batches)
            before = learner.updates if counting else 0
            self.learned.add(self.health.note(self._learns.update(batch, episodes=self.clock.episodes)))
            self.clock.updates += learner.updates - before if counting else self._steps_per_batch
        next(batches, None)  # the last batch has been learned from

    def advance(self) -> None:
        """Add what all ranks have played to the clock."""
        self._count()
        self.clock.epoch += 1
        self._synchronise(self.clock.epoch)

    def _synchronise(self, iteration: int = 0) -> None:
        """Exchange what ranks have to tell each other; batches may need more episodes than before."""
        for shaper in self.shapers:
            with self.phase("tasks"):
                if shaper.synchronise(iteration):
                    self._ready = False
        self._log_news()

    def _log_news(self) -> None:
        for shaper in self.shapers:
            if line := shaper.news():
                self.session.logger.info(line)

    def _count(self) -> None:
        assert self._counts is not None
        steps, episodes, _ = self._counts.wait().tolist()
        self.clock.t_env += steps
        self.clock.episodes += episodes
        if self._bar is not None:
            self._bar.set(self.clock.t_env, total=self._end())

    def _drain(self) -> None:
        """Set aside, or finish and store, the episodes in flight before others are played in the environment."""
        train = self.session.runners["train"]
        if train.in_flight:
            self._store(train.drain(self.mac, explore=self._exploration()))
            self._start_count()
            self._count()

    def test(self) -> None:
        """Play this rank's share of the test episodes greedily."""
        self._drain()
        with self._stopwatch.paused():
            self.tests.play(self.clock.t_env, self.when, ends=self.done())

    def write_log(self) -> None:
        """Log the metrics that are due as one record. Errors: UserError where training has diverged."""
        values: dict[str, float] = {}
        for name, metrics in (("played", self.played), ("learned", self.learned)):
            if name in self._parts_due:
                values.update(metrics.reduce(self.session.dist))
        now = time.monotonic()
        values.update(self.session.profiler.record(self.clock.updates))
        values.update({**self.session.failure_counts(), **self.health.record()})
        values["steps_per_second"] = (self.clock.t_env - self._since[1]) / max(now - self._since[0], 1e-9)
        self._since = (now, self.clock.t_env)
        values["wall_seconds"] = self._stopwatch.seconds()
        if not math.isnan(cpu := self._stopwatch.cpu_seconds()):
            values["cpu_seconds"] = cpu
        values["episode"] = float(self.clock.episodes)
        values["updates"] = float(self.clock.updates)
        for shaper in self.shapers:
            values.update(shaper.record())
        if self.tests.played:
            values.update(self.tests.last[1])
        self.log(values)
        self.tests.show(self.clock.t_env)
        self.health.require_finite(values, self.when)
        self.health.require_progress(self.when)

    def save(self) -> None:
        """Write weights and learner state. Errors: UserError for values that are not finite."""
        if self.session.config.save_model:
            self.require_sound()
            if self.session.dist.is_main:
                folder = self.session.folder.step(self.clock.t_env)
                save_learner(self.learner, self.clock, folder)

    def finish(self) -> StageResult:
        """Evaluate the reconstructions of the trained policy, if any, and return the results."""
        if self._bar is not None:
            self._bar.close()
        values = self.standing()
        saved = self.session.folder.step(self.clock.t_env)
        if not saved.is_dir():  # resumed after the last iteration of a run that could not write it
            self.save()
        judged = Verdict()
        if self.mac.head is not None or self.session.config.use_graph_reconstruction:
            judged = Verdict.of(judge.team(self.mac) for judge in judges(self.session, self.pretrained))
        if judged.values:
            self.log({f"policy/{name}": value for name, value in judged.values.items()})
            values.update({f"policy_{name}": value for name, value in judged.values.items()})
        absolute: dict[str, Any] = {}
        if self.session.config.absolute_episodes:
            found, absolute["absolute"] = self.tests.absolute()
            self.log(found)
            values.update(found)
        models = {"agent": str(saved)} if saved.is_dir() else {}
        self._synchronise()
        facts = {**self._facts(), **absolute, **({"beliefs": judged.table} if judged.table else {})}
        return StageResult(self.name, self.clock.state_dict(), values, {**models, **judged.files}, facts)

    def so_far(self) -> StageResult:
        """Return also the facts of what shapes the collection."""
        reached = super().so_far()
        return replace(reached, facts={**reached.facts, **self._facts()})

    def _facts(self) -> dict[str, Any]:
        return {name: fact for shaper in self.shapers for name, fact in shaper.facts().items()}

    def _something_to_log(self) -> bool:
        self._parts_due = {name for name, due in self._log_due.items() if due.due(self.clock.t_env)}
        if self.done():
            self._parts_due = set(self._log_due)
        return bool(self._parts_due) or self.tests.played
