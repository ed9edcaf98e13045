"""Many battles side by side that never wait for one another."""

from __future__ import annotations

from typing import Any, ClassVar

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Policy
from omagd.envs.protocol import BatchedEnv
from omagd.runners import REGISTRY
from omagd.runners.play import ENDLESS, Play, Rollout
from omagd.runners.rollout import Runner
from omagd.runners.seeds import EpisodeSeeds


@REGISTRY.register("stream")
class StreamRunner(Runner):
    """A slot that has ended an episode begins its next at once, and battles go on from one iteration to the next.

    An iteration plays ticks of all slots until as many episodes have ended as there are slots: as many as in a round of
    `ParallelRunner`, though not one of each slot, and the longest of them began under older weights. The order is that
    of the ticks, whichever environment answers first, so that a run is a function of its seed.
    """

    play_kind: ClassVar[type[Play]] = Play

    def __init__(self, env: BatchedEnv, config: Config, info: EnvInfo, stream: EpisodeSeeds) -> None:
        super().__init__(env, config, info, stream)
        self._flying: Play | None = None
        self._full_obs = False

    def collect(self, policy: Policy, *, explore: Exploration | None, full_obs: bool = False) -> Rollout:
        """Play until as many episodes have ended as there are slots, and return those; the others stay in flight.

        `steps` counts those of the episodes that are returned, wherever they began. Errors: RuntimeError when battles
        of another policy are in flight.
        """
        self.prepare()
        play = self._under_way(policy, full_obs)
        while play.rollout.n_episodes < self.env.n_slots:
            play.tick(explore)
        return self._take(play)

    def _under_way(self, policy: Policy, full_obs: bool) -> Play:
        """Return the battles in flight, with what `policy` has learned meanwhile; new ones where there are none."""
        if self._flying is None:
            self._flying = self._play(policy, full_obs, keep=True, kind=self.play_kind)
            self._full_obs = full_obs
            self._flying.begin(ENDLESS)
        else:
            self._require_same(policy, full_obs)
            policy.refresh()
        return self._flying

    def drain(self, policy: Policy, *, explore: Exploration | None) -> Rollout:
        """Play the battles in flight to their end, start no others but for those that are lost, and return them."""
        if self._flying is None:
            return Rollout()
        self._require_same(policy, self._full_obs)
        policy.refresh()
        play, self._flying = self._flying, None
        play.clock.left[:] = 0
        while not play.over:
            play.tick(explore)
        return self._take(play)

    @property
    def in_flight(self) -> bool:
        """Whether battles are unfinished."""
        return self._flying is not None

    def snapshot(self) -> dict[str, Any]:
        """Return also what the battles in flight consist of: environment, policy's memory, rows.

        Of an environment that cannot be saved only how many they are: they will be lost.
        """
        play = self._flying
        if play is None:
            return {**super().snapshot(), "flying": None, "dropped": 0}
        play.settle()
        state = super().snapshot()  # what was lost in steps under way has drawn other seeds
        try:
            return {**state, "flying": self._saved(play), "dropped": 0}
        except NotImplementedError:
            return {**state, "flying": None, "dropped": play.n_unfinished + play.rollout.lost}

    def _saved(self, play: Play) -> dict[str, Any]:
        """Return all that battles consist of. Errors: NotImplementedError where the environment cannot be saved."""
        play.settle()
        with play.asking_all():
            env = self.env.snapshot()
        memory = play.policy.snapshot()
        return {"env": env, "play": play.snapshot(), "policy": memory, "full_obs": self._full_obs}

    def restore(self, snapshot: dict[str, Any], policy: Policy | None) -> None:
        """Continue from a `snapshot`, with a policy of the same weights; battles that are not in it are `lost`.

        Errors: ValueError where battles are in flight and nobody is there to play them.
        """
        super().restore(snapshot, policy)
        self.lost += int(snapshot["dropped"])
        self._flying = None
        flying = snapshot["flying"]
        if flying is None:
            return
        if policy is None:
            raise ValueError("battles are in flight: who plays them must be given")
        self._take_up(flying, policy)

    def _take_up(self, flying: dict[str, Any], policy: Policy) -> None:
        """Have battles in flight again that were `_saved`."""
        self._full_obs = bool(flying["full_obs"])
        self._flying = self._play(policy, self._full_obs, keep=True, kind=self.play_kind)
        policy.begin(self.env.n_slots)
        policy.load_snapshot(flying["policy"])
        self._flying.restore(flying["play"])
        with self._flying.asking_all():
            self.env.restore(flying["env"])

    def _require_same(self, policy: Policy, full_obs: bool) -> None:
        assert self._flying is not None
        if self._flying.policy is not policy or self._full_obs != full_obs:
            raise RuntimeError("battles of another policy are in flight: drain them first")
