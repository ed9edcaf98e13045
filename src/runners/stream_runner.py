"""Runners that keep episodes in flight from one iteration to the next."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Policy
from omagd.runners.rollout import Recorder, Rollout, RolloutLoop
from omagd.runners.runner import ENDLESS, Runner
from omagd.utils.packing import RecordedEpisode


class StreamRunner(Runner):
    """Starts the next episode of a slot at once, so that no slot waits for the longest episode.

    An iteration plays ticks of all slots until as many episodes have ended as there are slots: as many as in a round of
    `ParallelRunner`, but not one of each slot, and the longest of them began under older weights. Episodes come in the
    order of their ticks, whichever environment answers first, so a run is a function of its seed.

    Where the environment can be saved, episodes in flight are set aside while tests are played, and continue with the
    next `collect`; otherwise they are finished first. Tests and episodes for pre-training are played in rounds.
    """

    rounds: ClassVar[bool] = False
    loop_kind: ClassVar[type[RolloutLoop]] = RolloutLoop
    _flying: RolloutLoop | None = None  # the loop that has episodes in flight
    _aside: dict[str, Any] | None = None  # episodes set aside, as in a snapshot
    _full_obs = False

    def collect(self, policy: Policy, *, explore: Exploration | None, full_obs: bool = False) -> Rollout:
        """Play until as many episodes have ended as there are slots and return those; the others stay in flight.

        `steps` counts all steps of the returned episodes. Those in flight are of the same policy, or must be drained.
        """
        loop = self._in_flight(policy, full_obs)
        while loop.rollout.n_episodes < self.env.n_slots:
            loop.tick(explore)
        return self._take(loop)

    def _in_flight(self, policy: Policy, full_obs: bool) -> RolloutLoop:
        """Return the loop in flight, with the policy's newest weights; a new loop where there is none."""
        aside, self._aside = self._aside, None
        if aside is not None:
            self._resume(aside, policy)
        self.prepare()
        if self._flying is None:
            self._flying = self._loop(policy, full_obs, keep=True, kind=self.loop_kind)
            self._full_obs = full_obs
            self._flying.begin(ENDLESS)
        else:
            policy.refresh()
        return self._flying

    def drain(self, policy: Policy, *, explore: Exploration | None) -> Rollout:
        """Set the episodes in flight aside; where that cannot be, finish them, begin no others, and return them."""
        if self._flying is None:
            return Rollout()
        loop, self._flying = self._flying, None
        with suppress(NotImplementedError):
            self._aside = self._saved(loop)
            return Rollout()
        policy.refresh()
        loop.clock.left[:] = 0
        while not loop.over:
            loop.tick(explore)
        return self._take(loop)

    @property
    def in_flight(self) -> bool:
        """Whether episodes are unfinished."""
        return self._flying is not None

    def snapshot(self) -> dict[str, Any]:
        """Return also the state of the episodes in flight or set aside: environment, policy's memory, rows.

        Where the environment cannot be saved, return only their number: they will be lost.
        """
        loop = self._flying
        if loop is None:
            return {**super().snapshot(), "flying": self._aside, "dropped": 0}
        loop.finish_steps()
        state = super().snapshot()  # after finishing: lost episodes have drawn other seeds
        try:
            return {**state, "flying": self._saved(loop), "dropped": 0}
        except NotImplementedError:
            return {**state, "flying": None, "dropped": loop.n_unfinished + loop.rollout.lost}

    def _saved(self, loop: RolloutLoop) -> dict[str, Any]:
        """Return the state of a loop. Errors: NotImplementedError where the environment cannot be saved."""
        loop.finish_steps()
        with loop.asking_all():
            env = self.env.snapshot()
        memory = loop.policy.snapshot()
        return {"env": env, "play": loop.snapshot(), "policy": memory, "full_obs": self._full_obs}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot` with the next `collect`; episodes that are not in it are `lost`."""
        super().restore(snapshot)
        self.lost += int(snapshot["dropped"])
        self._flying, self._aside = None, snapshot["flying"]

    def renew(self, generation: int) -> None:
        """Draw other seeds from here on; episodes set aside are dropped. Errors: as in `Runner`."""
        super().renew(generation)
        self._aside = None

    def _resume(self, flying: dict[str, Any], policy: Policy) -> None:
        """Continue the episodes of `_saved`."""
        self._full_obs = bool(flying["full_obs"])
        self._flying = self._loop(policy, self._full_obs, keep=True, kind=self.loop_kind)
        policy.begin(self.env.n_slots)
        policy.load_snapshot(flying["policy"])
        self._flying.restore(flying["play"])
        with self._flying.asking_all():
            self.env.restore(flying["env"])


class StepLoop(RolloutLoop):
    """Returns every step as an episode of two rows, as soon as its second row is observed."""

    def _rows_written(self, recorder: Recorder, slots: np.ndarray, steps: np.ndarray) -> None:
        later = slots[steps > 0]
        for slot, rows in zip(later.tolist(), recorder.latest(later, steps[steps > 0]), strict=True):
            self.rollout.keep(RecordedEpisode(rows, self.meta(slot)))

    def _episode_ended(self, recorder: Recorder, slot: int, length: int, outcome: float) -> None:
        """Do nothing: all steps have been returned."""


class TickRunner(StreamRunner):
    """Plays `ticks_per_iteration` ticks of all slots per iteration; for learners that learn from single steps.

    The episodes that `collect` returns are single steps, of two rows each, and `steps` is their number; `n_episodes`,
    stats and log count the episodes that ended. A slot needs one tick to observe an episode's end and one to begin the
    next episode: such a tick adds no step.
    """

    unit: ClassVar[str] = "steps"
    loop_kind: ClassVar[type[RolloutLoop]] = StepLoop

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
        loop = self._in_flight(policy, full_obs)
        for _ in range(self.config.ticks_per_iteration):
            loop.tick(explore)
        return self._take(loop)

    def _take(self, loop: RolloutLoop) -> Rollout:
        rollout = super()._take(loop)
        if isinstance(loop, StepLoop):
            rollout.steps = len(rollout.episodes)
        return rollout
