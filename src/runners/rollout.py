"""Playing episodes in all slots of an environment, tick by tick."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import Exploration, Policy, Tick
from omagd.envs.protocol import BatchedEnv, StepResult
from omagd.runners.recorder import Recorder
from omagd.utils.packing import Episode
from omagd.utils.seeding import stream_seed


class EpisodeSeeds:
    """Reset seeds of one purpose on one rank; the one of an episode follows from its slot and its number there.

    Args:
        seed: the run's seed. purpose: "train", "test", "pretrain", ... rank: of this process.
    """

    def __init__(self, seed: int, purpose: str, rank: int = 0) -> None:
        self._place = (seed, f"env/{purpose}", rank)
        self._played: list[int] = []

    def draw(self, which: np.ndarray) -> np.ndarray:
        """Return the next seed of each slot in `which` [B] bool as [B] int64, 0 elsewhere."""
        self._played += [0] * (len(which) - len(self._played))
        seeds = np.zeros(len(which), np.int64)
        seed, purpose, rank = self._place
        for slot in np.flatnonzero(which):
            seeds[slot] = stream_seed(seed, purpose, rank, int(slot), self._played[slot])
            self._played[slot] += 1
        return seeds

    def state_dict(self) -> dict[str, Any]:
        """Return how many episodes each slot has begun."""
        return {"played": list(self._played)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the episodes of `state`."""
        self._played = [int(count) for count in state["played"]]


@dataclass
class Rollout:
    """What was played.

    Attributes:
        episodes: in order of their last tick, then of their slot; empty unless they were kept.
        n_episodes: how many were played. steps: environment steps of all of them together.
        stats: name -> (sum, count) over episodes: return, ep_length and the results that the environment reports.
    """

    episodes: list[Episode] = field(default_factory=list)
    n_episodes: int = 0
    steps: int = 0
    stats: dict[str, tuple[float, float]] = field(default_factory=dict)

    def count(self, name: str, value: float) -> None:
        """Add one episode's `value` to the stats; one that is not finite is no result and is left out."""
        if np.isfinite(value):
            total, count = self.stats.get(name, (0.0, 0.0))
            self.stats[name] = (total + float(value), count + 1.0)


@dataclass
class _Clock:
    """Where each slot stands. All [B]: step within the episode, return so far, episodes yet to begin, two states.

    `playing` slots act and step; `closing` ones have ended and show their last moment once more, for the closing row.
    """

    step: np.ndarray
    reward: np.ndarray
    left: np.ndarray
    playing: np.ndarray
    closing: np.ndarray


class Runner:
    """Plays fixed numbers of episodes per slot, so that no short episode is preferred to a long one.

    Args:
        env: all slots. config: the run. info: facts of `env`. stream: reset seeds, this runner's own.
    """

    def __init__(self, env: BatchedEnv, config: Config, info: EnvInfo, stream: EpisodeSeeds) -> None:
        self.env = env
        self.config = config
        self.info = info
        self.stream = stream
        self._recorders: dict[bool, Recorder] = {}

    @staticmethod
    def slots(config: Config) -> int:
        """Return how many battle slots the environment shall be built with."""
        return config.batch_size_run

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

        Errors: RuntimeError when an episode outlives `info.episode_limit`.
        """
        recorder = self._recorder(full_obs) if keep else None
        see_all = full_obs or policy.wants_full_obs
        rollout, clock = Rollout(), self._begin(policy, episodes_per_slot)
        while True:
            active = clock.playing | clock.closing
            slots, steps = np.flatnonzero(active), clock.step[active]
            seen = self.env.observe(see_all)
            if recorder is not None:
                recorder.saw(slots, steps, seen)
            decision = policy.act(Tick(seen, clock.step.copy(), active), explore)
            actions = np.where(clock.playing[:, None], decision.actions, 0)
            if recorder is not None:
                recorder.chose(slots, steps, actions, decision.extras)
            stepping = clock.playing  # slots that are reset now begin with the next tick: they have not been asked yet
            if clock.closing.any():
                self._close(clock, recorder, rollout, policy)
            if stepping.any():
                self._step(actions, stepping, clock, recorder, rollout)
            elif not clock.playing.any():
                return rollout

    def state_dict(self) -> dict[str, Any]:
        """Return what continuing needs between two calls of `run`."""
        return {"stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self.stream.load_state_dict(state["stream"])

    def _recorder(self, full_obs: bool) -> Recorder:
        if full_obs not in self._recorders:
            self._recorders[full_obs] = Recorder(self.info, self.env.n_slots, full_obs)
        self._recorders[full_obs].begin()
        return self._recorders[full_obs]

    def _begin(self, policy: Policy, episodes_per_slot: int) -> _Clock:
        """Start the first episode of every slot."""
        n = self.env.n_slots
        everyone = np.ones(n, bool)
        self.env.reset(everyone, self.stream.draw(everyone))
        policy.begin(n)
        policy.reset(everyone)
        left = np.full(n, episodes_per_slot - 1)
        return _Clock(np.zeros(n, np.int64), np.zeros(n), left, everyone, np.zeros(n, bool))

    def _step(
        self, actions: np.ndarray, stepping: np.ndarray, clock: _Clock, recorder: Recorder | None, rollout: Rollout
    ) -> None:
        """Play one step of the slots `stepping` [B] and note what came of it."""
        result = self.env.step(actions, stepping)
        slots = np.flatnonzero(stepping)
        if recorder is not None:
            recorder.got(slots, clock.step[slots], result.reward, result.terminated & ~result.truncated)
        clock.reward[slots] += result.reward[slots]
        clock.step[slots] += 1
        rollout.steps += len(slots)
        ended = result.terminated & stepping
        if (stepping & ~ended & (clock.step >= self.info.episode_limit)).any():
            limit = self.info.episode_limit
            raise RuntimeError(f"{self.info.name}: an episode goes on after its limit of {limit} steps")
        if ended.any():
            clock.playing = clock.playing & ~ended
            clock.closing = ended
            self._count(np.flatnonzero(ended), clock, result, rollout)

    def _count(self, ended: np.ndarray, clock: _Clock, result: StepResult, rollout: Rollout) -> None:
        """Add the episodes of the slots `ended` to the stats."""
        for slot in ended:
            rollout.n_episodes += 1
            rollout.count("return", clock.reward[slot])
            rollout.count("ep_length", clock.step[slot])
            for name, value in result.info.items():
                rollout.count(name, float(value[slot]))

    def _close(self, clock: _Clock, recorder: Recorder | None, rollout: Rollout, policy: Policy) -> None:
        """Take the episodes that ended with the last tick, and start what their slots have left to play."""
        if recorder is not None:
            rollout.episodes += [recorder.take(int(s), int(clock.step[s])) for s in np.flatnonzero(clock.closing)]
        again = clock.closing & (clock.left > 0)
        if again.any():
            self.env.reset(again, self.stream.draw(again))
            policy.reset(again)
            clock.step[again] = 0
            clock.reward[again] = 0.0
            clock.left[again] -= 1
            clock.playing = clock.playing | again
        clock.closing = np.zeros_like(clock.closing)
