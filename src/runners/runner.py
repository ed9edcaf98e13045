"""Runners that play rounds of episodes, and the interface of all runners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Policy
from omagd.envs.protocol import BatchedEnv
from omagd.runners.rollout import Recorder, Rollout, RolloutLoop, do_nothing
from omagd.runners.starts import EpisodeSeeds


class Runner:
    """Plays a fixed number of episodes per slot, so that short episodes are not preferred to long ones.

    Args:
        env: all slots. config: the run. info: facts of `env`. stream: reset seeds, this runner's own.

    Attributes:
        lost: episodes that were void and replaced.
        ticked, asked: called at every tick, and with every call of the environment; see `RolloutLoop`.
        prepare: called before episodes begin or continue; opponents are set here.
    """

    unit: ClassVar[str] = "episodes"  # of replay and batches
    rounds: ClassVar[bool] = True  # an iteration is a round of episodes, and leaves none in flight

    def __init__(self, env: BatchedEnv, config: Config, info: EnvInfo, stream: EpisodeSeeds) -> None:
        self.env = env
        self.config = config
        self.info = info
        self.stream = stream
        self.lost = 0
        self.prepare: Callable[[], None] = do_nothing
        self.ticked: Callable[[bool], None] = do_nothing
        self.asked: Callable[[np.ndarray, np.ndarray], None] = do_nothing
        self._recorders: dict[bool, Recorder] = {}

    @staticmethod
    def slots(config: Config) -> int:
        """Return the number of slots of the environment."""
        return config.batch_size_run

    @staticmethod
    def rows(info: EnvInfo) -> int:
        """Return the most rows of one entry of the replay."""
        return info.episode_limit + 1

    @staticmethod
    def per_iteration(config: Config, environments: int) -> str:
        """Return, in words, what `environments` of all ranks play between updates."""
        return f"{environments} episodes"

    @staticmethod
    def check(config: Config) -> None:
        """Reject configurations that this runner cannot play: here, none. Errors: UserError."""

    def run(
        self,
        policy: Policy,
        *,
        explore: Exploration | None,
        episodes_per_slot: int = 1,
        full_obs: bool = False,
        keep: bool = True,
    ) -> Rollout:
        """Play `episodes_per_slot` episodes in every slot; a slot whose episode has ended begins its next one at once.

        Args:
            policy: acts. It is also asked at the closing row of an episode, whose actions are not played, since its
                own fields belong to that row too.
            explore: None to act greedily. full_obs: record `full_obs`. keep: return the episodes, or the stats alone.

        A lost episode is replaced by another one, from the next seed of its slot.
        Errors: UserError as in `RolloutLoop.tick`; RuntimeError while other episodes are in flight.
        """
        if self.in_flight:
            raise RuntimeError("episodes are in flight: drain them before others are played")
        self.prepare()
        loop = self._loop(policy, full_obs, keep)
        loop.begin(episodes_per_slot)
        while not loop.over:
            loop.tick(explore)
        return self._take(loop)

    def collect(self, policy: Policy, *, explore: Exploration | None, full_obs: bool = False) -> Rollout:
        """Play one iteration of training: here, one round. Arguments as in `run`."""
        return self.run(policy, explore=explore, episodes_per_slot=self.stream.per_round, full_obs=full_obs)

    def drain(self, policy: Policy, *, explore: Exploration | None) -> Rollout:
        """Finish the episodes that `collect` left in flight and return them: here, none."""
        return Rollout()

    @property
    def in_flight(self) -> bool:
        """Whether `collect` has left episodes unfinished."""
        return False

    def snapshot(self) -> dict[str, Any]:
        """Return the state between two calls, as arrays, tensors and plain values; changes nothing."""
        return {"stream": self.stream.state_dict(), "lost": self.lost}

    def restore(self, snapshot: dict[str, Any], policy: Policy | None) -> None:
        """Continue from a `snapshot`; where episodes are in flight, with a policy of the same weights."""
        self.stream.load_state_dict(snapshot["stream"])
        self.lost = int(snapshot["lost"])

    def renew(self, generation: int) -> None:
        """Draw other, reproducible seeds from here on: see `EpisodeSeeds.renew`.

        Errors: RuntimeError while episodes are in flight.
        """
        if self.in_flight:
            raise RuntimeError("episodes are in flight: drain them before their seeds are renewed")
        self.stream.renew(generation)

    def _loop(self, policy: Policy, full_obs: bool, keep: bool, kind: type[RolloutLoop] = RolloutLoop) -> RolloutLoop:
        """Return a loop that has not begun."""
        recorder = self._recorder(full_obs) if keep else None
        loop = kind(self.env, self.info, policy, recorder, full_obs or policy.wants_full_obs, self.stream)
        loop.ticked, loop.asked = self.ticked, self.asked
        return loop

    def _take(self, loop: RolloutLoop) -> Rollout:
        rollout = loop.take()
        self.lost += rollout.lost
        return rollout

    def _recorder(self, full_obs: bool) -> Recorder:
        if full_obs not in self._recorders:
            self._recorders[full_obs] = Recorder(self.info, self.env.n_slots, full_obs)
        self._recorders[full_obs].begin()
        return self._recorders[full_obs]


class ParallelRunner(Runner):
    """Plays `batch_size_run` slots."""


class EpisodeRunner(Runner):
    """Plays one slot."""

    @staticmethod
    def slots(config: Config) -> int:
        """Return 1, whatever `batch_size_run` says."""
        return 1
