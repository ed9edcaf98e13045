"""Battles that go on tick by tick, with updates in between; what is kept are single steps."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Policy
from omagd.envs.protocol import BatchedEnv
from omagd.runners import REGISTRY
from omagd.runners.play import Play, Rollout
from omagd.runners.recorder import Recorder
from omagd.runners.rollout import Runner
from omagd.runners.seeds import EpisodeSeeds
from omagd.runners.stream_runner import StreamRunner


class StepPlay(Play):
    """Battles whose every step is handed on as an episode of its own, of two rows, once its second row is seen."""

    def _wrote(self, recorder: Recorder, slots: np.ndarray, steps: np.ndarray) -> None:
        later = steps > 0
        if later.any():
            self.rollout.episodes += recorder.latest(slots[later], steps[later])

    def _ended(self, recorder: Recorder, slot: int, length: int) -> None:
        """Nothing is left: all steps have been handed on."""


@REGISTRY.register("ticks")
class TickRunner(StreamRunner):
    """An iteration plays `ticks_per_iteration` ticks of all slots; for learners that learn from single steps.

    What `collect` returns as episodes are steps, of two rows each; `steps` is their number, while `n_episodes`, stats
    and log tell of the episodes that came to their end. A slot needs a tick to look at an episode's last moment, and
    one to begin the next: such a tick brings no step of it. Where the environment can be saved, battles are put aside
    while others play in it, and go on with the next `collect`; else they are played to their end. Everything but
    training (tests, episodes for pre-training) is played in rounds, as by any runner.
    """

    unit: ClassVar[str] = "steps"
    play_kind: ClassVar[type[Play]] = StepPlay

    def __init__(self, env: BatchedEnv, config: Config, info: EnvInfo, stream: EpisodeSeeds) -> None:
        super().__init__(env, config, info, stream)
        self._aside: dict[str, Any] | None = None

    @staticmethod
    def rows(info: EnvInfo) -> int:
        """Return 2: before and after a step."""
        return 2

    @staticmethod
    def per_iteration(config: Config, environments: int) -> str:
        """Return, in words, what `environments` of all ranks play between updates."""
        return f"{environments * config.ticks_per_iteration} steps"

    def collect(self, policy: Policy, *, explore: Exploration | None, full_obs: bool = False) -> Rollout:
        """Play the ticks of an iteration and return their steps. Arguments and errors as in `StreamRunner`."""
        aside, self._aside = self._aside, None
        if aside is not None:
            self._take_up(aside, policy)
        self.prepare()
        play = self._under_way(policy, full_obs)
        for _ in range(self.config.ticks_per_iteration):
            play.tick(explore)
        return self._take(play)

    def drain(self, policy: Policy, *, explore: Exploration | None) -> Rollout:
        """Put the battles in flight aside, where the environment can be saved; else play them to their end."""
        if self._flying is None:
            return Rollout()
        self._require_same(policy, self._full_obs)
        try:
            self._aside = self._saved(self._flying)
        except NotImplementedError:
            return super().drain(policy, explore=explore)
        self._flying = None
        return Rollout()

    def snapshot(self) -> dict[str, Any]:
        """Return also what the battles in flight, or put aside, consist of."""
        state = super().snapshot()
        return state if self._aside is None else {**state, "flying": self._aside}

    def restore(self, snapshot: dict[str, Any], policy: Policy | None) -> None:
        """Continue from a `snapshot`; its battles go on with the next `collect`."""
        self._flying = None
        Runner.restore(self, snapshot, policy)
        self.lost += int(snapshot["dropped"])
        self._aside = snapshot["flying"]

    def renew(self, generation: int) -> None:
        """Play other episodes from here on; what was put aside is dropped. Errors: as in `Runner`."""
        super().renew(generation)
        self._aside = None

    def _take(self, play: Play) -> Rollout:
        rollout = super()._take(play)
        if isinstance(play, StepPlay):
            rollout.steps = len(rollout.episodes)
        return rollout
