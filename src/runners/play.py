"""Battles that are being played: where each slot stands, and the ticks that bring them on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.controllers.types import Exploration, Policy, Tick
from omagd.envs.outputs import OutputChecks, fault
from omagd.envs.protocol import LOST_IN_A_ROW, BatchedEnv, StepResult
from omagd.runners.recorder import Recorder
from omagd.runners.seeds import EpisodeSeeds
from omagd.utils.packing import Episode

ENDLESS = 2**62


@dataclass
class Rollout:
    """What was played.

    Attributes:
        episodes: in order of their last tick, then of their slot; empty unless they were kept.
        n_episodes: how many came to their end. steps: environment steps of these.
        lost: episodes that are void, because what played them has died. Nothing else here counts them or their steps.
        stats: name -> (sum, count) over episodes: return, ep_length, the results that the environment reports, and
            return_agent_0 ... where it tells who earned what.
        log: what each episode was, in order: slot, reset seed, length, return, results; plain numbers, all finite.
    """

    episodes: list[Episode] = field(default_factory=list)
    n_episodes: int = 0
    steps: int = 0
    lost: int = 0
    stats: dict[str, tuple[float, float]] = field(default_factory=dict)
    log: list[dict[str, float | int]] = field(default_factory=list)

    def count(self, name: str, value: float) -> None:
        """Add one episode's `value` to the stats; NaN, which stands for what is not known, is left out."""
        if math.isfinite(value):
            total, count = self.stats.get(name, (0.0, 0.0))
            self.stats[name] = (total + float(value), count + 1.0)

    def end(self, slot: int, seed: int, length: int, reward: float, results: dict[str, float]) -> None:
        """Count and log an episode that has come to its end."""
        self.n_episodes += 1
        self.steps += length
        self.count("return", reward)
        self.count("ep_length", length)
        entry: dict[str, float | int] = {"slot": slot, "seed": seed, "length": length}
        if math.isfinite(reward):
            entry["return"] = reward
        for name, value in results.items():
            self.count(name, value)
            if math.isfinite(value):
                entry.setdefault(name, value)
        self.log.append(entry)


@dataclass
class SlotState:
    """Where each slot stands. All [B]: reset seed, step, return so far, episodes yet to begin, three states.

    `agent_reward` is each agent's return so far, [B, n] where the environment tells it, else [B, 0]. `lost` [B] counts
    the episodes that were lost since the last one that came to its end.

    `playing` slots act and step; `stepping` ones are between their action and what came of it; `closing` ones have
    ended and show their last moment once more, for the closing row.
    """

    seed: np.ndarray
    step: np.ndarray
    reward: np.ndarray
    left: np.ndarray
    playing: np.ndarray
    closing: np.ndarray
    stepping: np.ndarray
    agent_reward: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    lost: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def at_start(cls, seeds: np.ndarray, episodes_per_slot: int, n_told: int) -> SlotState:
        """Return the clock of slots whose first episode begins, from `seeds` [B]; `n_told` agents' rewards are told."""
        n_slots = len(seeds)
        no, yes = np.zeros(n_slots, bool), np.ones(n_slots, bool)
        left = np.full(n_slots, episodes_per_slot - 1)
        told = np.zeros((n_slots, n_told))
        steps, lost = np.zeros(n_slots, np.int64), np.zeros(n_slots, np.int64)
        return cls(seeds, steps, np.zeros(n_slots), left, yes, no, no.copy(), told, lost)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return copies of all fields."""
        return {place.name: getattr(self, place.name).copy() for place in fields(self)}


class Play:
    """One policy in all slots of an environment.

    A tick of some slots: hear what their steps brought, look, decide, record, and start the next steps. Where the
    environment steps slots apart, each of the `parts` has its turn while the others step; the order is fixed.

    Args:
        env, info: what is played. policy: who acts; its memory is begun by `begin` or restored. recorder: where rows
            are kept; None to keep no episodes. see_all: whether to show `full_obs`. seeds: of the episodes.
        parts: masks [B] bool that divide the slots, in the order of their turns.

    Attributes:
        rollout: what was played since it was last replaced.
        ticked: called with True before each tick, with False once what was played is taken.
        asked: called with mask [B] and seeds [B] of the slots before each call of the environment about them.
    """

    def __init__(
        self,
        env: BatchedEnv,
        info: EnvInfo,
        policy: Policy,
        recorder: Recorder | None,
        see_all: bool,
        seeds: EpisodeSeeds,
        parts: list[np.ndarray],
    ) -> None:
        self.env = env
        self.info = info
        self.policy = policy
        self.recorder = recorder
        self.see_all = see_all
        self.seeds = seeds
        self.parts = parts
        self.rollout = Rollout()
        self.ticked: Callable[[bool], None] = _nothing
        self.asked: Callable[[np.ndarray, np.ndarray], None] = _nothing
        self._n_told = info.n_agents if info.agent_rewards else 0
        self.clock = SlotState.at_start(np.zeros(env.n_slots, np.int64), 0, self._n_told)
        self._results: dict[int, dict[str, float]] = {}
        self._checks = OutputChecks(info, env.n_slots)

    def begin(self, episodes_per_slot: int) -> None:
        """Start the first episode of every slot; a slot that has ended one begins its next at once."""
        self.ticked(True)
        n = self.env.n_slots
        everyone = np.ones(n, bool)
        seeds = self.seeds.draw(everyone)
        self.asked(everyone, seeds)
        self.env.reset(everyone, seeds)
        self.policy.begin(n)
        self.policy.reset(everyone)
        self.clock = SlotState.at_start(seeds, episodes_per_slot, self._n_told)

    @property
    def over(self) -> bool:
        """Whether nothing is left to play."""
        return not (self.clock.playing.any() or self.clock.closing.any())

    @property
    def n_unfinished(self) -> int:
        """How many episodes have begun and are not counted yet."""
        return int((self.clock.playing | self.clock.closing).sum())

    def tick(self, explore: Exploration | None) -> None:
        """Give every part its turn.

        Errors: UserError when the environment returns what cannot be learned from, when an episode outlives
        `info.episode_limit`, or when a slot has lost `LOST_IN_A_ROW` episodes in a row.
        """
        self.ticked(True)
        for part in self.parts:
            self._turn(part, explore)

    def settle(self) -> None:
        """Hear what all steps brought that are under way."""
        for part in self.parts:
            self._finish(part)

    def take(self) -> Rollout:
        """Return what was played since the last time."""
        self.ticked(False)
        taken, self.rollout = self.rollout, Rollout()
        return taken

    @contextmanager
    def asking_all(self) -> Iterator[None]:
        """Within, the environment is asked for all episodes that are not over, between two ticks."""
        self.ticked(True)
        self.asked(self.clock.playing | self.clock.closing, self.clock.seed)
        try:
            yield
        finally:
            self.ticked(False)

    def snapshot(self) -> dict[str, Any]:
        """Return the clock, results that are not counted yet and the rows of unfinished episodes."""
        self.settle()
        rows = self.recorder.snapshot(int(self.clock.step.max()) + 1) if self.recorder is not None else {}
        counted = {
            "n_episodes": self.rollout.n_episodes,
            "steps": self.rollout.steps,
            "lost": self.rollout.lost,
            "stats": dict(self.rollout.stats),
            "log": [dict(entry) for entry in self.rollout.log],
        }
        return {"clock": self.clock.snapshot(), "results": dict(self._results), "rows": rows, "counted": counted}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`, with policy and environment as they were then."""
        self.clock = SlotState(**{name: values.copy() for name, values in snapshot["clock"].items()})
        if not len(self.clock.agent_reward):  # saved before these were kept: what is not known is not counted
            self.clock.agent_reward = np.full((self.env.n_slots, self._n_told), np.nan)
        if not len(self.clock.lost):  # likewise
            self.clock.lost = np.zeros(self.env.n_slots, np.int64)
        self._results = dict(snapshot["results"])
        self.rollout = Rollout(**copy.deepcopy(snapshot["counted"]))
        if self.recorder is not None:
            self.recorder.restore(snapshot["rows"])

    def _turn(self, part: np.ndarray, explore: Exploration | None) -> None:
        """Bring the slots of `part` [B] bool on by one tick."""
        self._finish(part)
        clock, recorder = self.clock, self.recorder
        closing, stepping = clock.closing & part, clock.playing & part
        active = closing | stepping
        slots = np.flatnonzero(active)
        if not len(slots):
            return
        self.asked(active, clock.seed)
        shown = self.env.observe(self.see_all)
        seen = self._checks.observation(shown, active, clock.seed, clock.step, self.see_all)
        steps, lasting = clock.step[slots], self.env.steps_apart
        if recorder is not None and not lasting:
            recorder.saw(slots, steps, seen)
        decision = self.policy.act(Tick(seen, clock.step.copy(), active), explore)
        actions = np.where(stepping[:, None], decision.actions, 0)
        again = closing & (clock.left > 0)  # they begin with the next tick: they have not been asked yet
        seeds = clock.seed
        if again.any():
            seeds = np.where(again, self.seeds.draw(again), seeds)
            self.asked(again, seeds)
            self.env.reset(again, seeds)
        if stepping.any():
            self.asked(stepping, clock.seed)
            self.env.step_start(actions, stepping)
            clock.stepping |= stepping
        if recorder is not None:
            if lasting:  # what was seen can be copied while the slots step
                recorder.saw(slots, steps, seen)
            recorder.chose(slots, steps, actions, decision.extras)
            self._wrote(recorder, slots, steps)
        if closing.any():
            self._close(closing, again)
            clock.seed = seeds

    def _finish(self, part: np.ndarray) -> None:
        """Note what the steps brought that are under way in `part`."""
        clock = self.clock
        stepped = clock.stepping & part
        slots = np.flatnonzero(stepped)
        if not len(slots):
            return
        self.asked(stepped, clock.seed)
        brought = self.env.step_finish(stepped)
        clock.stepping &= ~stepped
        result = self._checks.result(brought, stepped, clock.seed, clock.step)
        reward = result.reward[slots]
        if self.recorder is not None:
            self.recorder.got(slots, clock.step[slots], result)
        clock.reward[slots] += reward
        if result.agent_reward is not None and self._n_told:
            clock.agent_reward[slots] += result.agent_reward[slots]
        clock.step[slots] += 1
        ended = result.terminated & stepped
        self._checks.lengths(stepped & ~ended, clock.seed, clock.step)
        if ended.any():
            lost = ended & result.lost
            if lost.any():
                self._replace(lost)
                ended &= ~lost
            clock.lost[ended] = 0
            clock.playing &= ~ended
            clock.closing |= ended
            self._keep_results(ended, result)

    def _replace(self, lost: np.ndarray) -> None:
        """Forget the episodes of the slots `lost` [B] bool; each begins another one at once.

        Errors: UserError when a slot has lost so many in a row that it will hardly end one.
        """
        self.rollout.lost += int(lost.sum())
        self.clock.lost += lost
        hopeless = self.clock.lost >= LOST_IN_A_ROW
        if hopeless.any():
            slot = int(hopeless.argmax())
            what = f"this was lost, as the {LOST_IN_A_ROW - 1} episodes of the slot before it were"
            raise fault(self.info.name, slot, int(self.clock.seed[slot]), int(self.clock.step[slot]), what)
        self.clock.seed = np.where(lost, self.seeds.draw(lost), self.clock.seed)
        self.asked(lost, self.clock.seed)
        self.env.reset(lost, self.clock.seed)
        self.policy.reset(lost)
        self.clock.step[lost] = 0
        self.clock.reward[lost] = 0.0
        self.clock.agent_reward[lost] = 0.0

    def _keep_results(self, ended: np.ndarray, result: StepResult) -> None:
        """Keep what the environment reports of the episodes of the slots `ended` until they are counted."""
        for slot in np.flatnonzero(ended).tolist():
            self._results[slot] = {name: float(values[slot]) for name, values in result.info.items()}

    def _close(self, closing: np.ndarray, again: np.ndarray) -> None:
        """Count and take the episodes that have ended; those `again` begin anew. Masks [B]."""
        clock, rollout = self.clock, self.rollout
        for slot in np.flatnonzero(closing).tolist():
            length = int(clock.step[slot])
            each = {f"return_agent_{i}": value for i, value in enumerate(clock.agent_reward[slot].tolist())}
            results = {**self._results.pop(slot), **each}
            rollout.end(slot, int(clock.seed[slot]), length, float(clock.reward[slot]), results)
            if self.recorder is not None:
                self._ended(self.recorder, slot, length)
        clock.closing &= ~closing
        if again.any():
            self.policy.reset(again)
            clock.step[again] = 0
            clock.reward[again] = 0.0
            clock.agent_reward[again] = 0.0
            clock.left[again] -= 1
            clock.playing |= again

    def _wrote(self, recorder: Recorder, slots: np.ndarray, steps: np.ndarray) -> None:
        """Do what is to be done once the rows `steps` of `slots` are complete but for what their steps bring."""

    def _ended(self, recorder: Recorder, slot: int, length: int) -> None:
        """Take what an episode has left."""
        self.rollout.episodes.append(recorder.take(slot, length))


def _nothing(*_: object) -> None:
    """Note nothing."""
