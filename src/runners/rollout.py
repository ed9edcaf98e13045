"""What every runner can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Policy
from omagd.envs.protocol import BatchedEnv
from omagd.runners.play import Play, Rollout
from omagd.runners.recorder import Recorder
from omagd.runners.seeds import EpisodeSeeds

__all__ = ["EpisodeSeeds", "Rollout", "Runner"]

HALVES_FROM = 4


class Runner:
    """Plays fixed numbers of episodes per slot, so that no short episode is preferred to a long one.

    Args:
        env: all slots. config: the run. info: facts of `env`. stream: reset seeds, this runner's own.

    Attributes:
        halves: whether to decide for half of the slots while the others step, where environment and policy can.
        lost: episodes that were void, and replaced, since this was made.
        ticked, asked: called at every tick, and with every call of the environment; see `Play`.
        prepare: called before episodes begin or go on: who plays in the environment has it to itself from here on.
    """

    unit: ClassVar[str] = "episodes"  # what replay and batches count

    def __init__(self, env: BatchedEnv, config: Config, info: EnvInfo, stream: EpisodeSeeds) -> None:
        self.env = env
        self.config = config
        self.info = info
        self.stream = stream
        self.halves = config.act_in_halves
        self.lost = 0
        self.prepare: Callable[[], None] = _nothing
        self.ticked: Callable[[bool], None] = _nothing
        self.asked: Callable[[np.ndarray, np.ndarray], None] = _nothing
        self._recorders: dict[bool, Recorder] = {}

    @staticmethod
    def slots(config: Config) -> int:
        """Return how many battle slots the environment shall be built with."""
        return config.batch_size_run

    @staticmethod
    def rows(info: EnvInfo) -> int:
        """Return the most rows of one entry of the replay."""
        return info.episode_limit + 1

    @staticmethod
    def per_iteration(config: Config, environments: int) -> str:
        """Return, in words, what `environments` of all ranks play between updates."""
        return f"{environments} episodes"

    def run(
        self,
        policy: Policy,
        *,
        explore: Exploration | None,
        episodes_per_slot: int = 1,
        full_obs: bool = False,
        keep: bool = True,
    ) -> Rollout:
        """Play `episodes_per_slot` episodes in every slot; a slot that has ended one begins its next at once.

        Args:
            policy: who acts; also asked for what an episode's last moment shows, since its own fields belong to the
                closing row too. `active` of its ticks includes those slots; their actions are not played.
            explore: None to act greedily. full_obs: record `full_obs`. keep: return the episodes, or the stats alone.

        An episode that the environment lost is replaced by another one, from the next seed of its slot.
        Errors: UserError as in `Play.tick`; RuntimeError while other battles are in flight.
        """
        if self.in_flight:
            raise RuntimeError("battles are in flight: drain them before others are played")
        self.prepare()
        play = self._play(policy, full_obs, keep)
        play.begin(episodes_per_slot)
        while not play.over:
            play.tick(explore)
        return self._take(play)

    def collect(self, policy: Policy, *, explore: Exploration | None, full_obs: bool = False) -> Rollout:
        """Play what one iteration of training asks for: here, one episode in every slot. Arguments as in `run`."""
        return self.run(policy, explore=explore, full_obs=full_obs)

    def drain(self, policy: Policy, *, explore: Exploration | None) -> Rollout:
        """Play the battles that `collect` left in flight to their end and return them: here, none."""
        return Rollout()

    @property
    def in_flight(self) -> bool:
        """Whether `collect` has left battles unfinished."""
        return False

    def snapshot(self) -> dict[str, Any]:
        """Return all that continuing needs between two calls, as arrays, tensors and plain values; changes nothing."""
        return {"stream": self.stream.state_dict(), "lost": self.lost}

    def restore(self, snapshot: dict[str, Any], policy: Policy | None) -> None:
        """Continue from a `snapshot`; where battles are in flight, with a policy of the same weights."""
        self.stream.load_state_dict(snapshot["stream"])
        self.lost = int(snapshot["lost"])

    def renew(self, generation: int) -> None:
        """Play other episodes from here on, reproducible ones: see `EpisodeSeeds.renew`.

        Errors: RuntimeError while battles are in flight.
        """
        if self.in_flight:
            raise RuntimeError("battles are in flight: drain them before their seeds are renewed")
        self.stream.renew(generation)

    def _play(self, policy: Policy, full_obs: bool, keep: bool, kind: type[Play] = Play) -> Play:
        """Return battles that have not begun."""
        recorder = self._recorder(full_obs) if keep else None
        see_all = full_obs or policy.wants_full_obs
        play = kind(self.env, self.info, policy, recorder, see_all, self.stream, self._parts(policy))
        play.ticked, play.asked = self.ticked, self.asked
        return play

    def _take(self, play: Play) -> Rollout:
        rollout = play.take()
        self.lost += rollout.lost
        return rollout

    def _parts(self, policy: Policy) -> list[np.ndarray]:
        """Return masks of the slots that have their turns together."""
        n = self.env.n_slots
        if self.halves and n >= HALVES_FROM and self.env.steps_apart and policy.acts_in_parts:
            first = np.arange(n) < n // 2
            return [first, ~first]
        return [np.ones(n, bool)]

    def _recorder(self, full_obs: bool) -> Recorder:
        if full_obs not in self._recorders:
            self._recorders[full_obs] = Recorder(self.info, self.env.n_slots, full_obs)
        self._recorders[full_obs].begin()
        return self._recorders[full_obs]


def _nothing(*_: object) -> None:
    """Prepare and note nothing."""
