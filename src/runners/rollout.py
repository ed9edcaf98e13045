"""The vectorised rollout loop: one policy plays in all slots of an environment, and a recorder stores their rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import numpy as np
import torch

from omagd.components.episode_codec import Spec
from omagd.config.env_info import EnvInfo
from omagd.controllers.types import Exploration, Policy, Tick
from omagd.envs.outputs import OutputChecks, fault
from omagd.envs.protocol import LOST_IN_A_ROW, BatchedEnv, ManyTasks, Observation, StepResult
from omagd.utils.packing import Episode, EpisodeMeta, RecordedEpisode
from omagd.utils.registry import locate
from omagd.utils.seeding import NO_GROUP, EpisodeSeeds, Origins

OF_TASKS = ("return", "ep_length", "battle_won")  # results that are also counted for each task of a set


@dataclass
class Rollout:
    """The result of playing.

    Attributes:
        episodes: in order of their last tick, then of their slot; empty unless they were recorded.
        n_episodes: number of finished episodes. steps: their environment steps.
        lost: void episodes, because the process that played them died. Nothing else here counts them or their steps.
        stats: name -> (sum, count) over episodes: return, ep_length, the environment's results, and return_agent_0 ...
            where it reports agents' rewards.
        log: one entry for each episode, in order: slot, reset seed, length, return, results; all finite.
    """

    episodes: Sequence[Episode] = field(default_factory=list)
    n_episodes: int = 0
    steps: int = 0
    lost: int = 0
    stats: dict[str, tuple[float, float]] = field(default_factory=dict)
    log: Sequence[dict[str, float | int | str]] = field(default_factory=list)

    def count(self, name: str, value: float) -> None:
        """Add one episode's `value` to the stats; NaN means unknown and is left out."""
        if math.isfinite(value):
            total, count = self.stats.get(name, (0.0, 0.0))
            self.stats[name] = (total + float(value), count + 1.0)

    def end(self, slot: int, seed: int, length: int, reward: float, results: dict[str, float], task: str = "") -> None:
        """Count and log a finished episode. task: its name in a set; its results are also counted for itself."""
        self.n_episodes += 1
        self.steps += length
        for name, value in {"return": reward, "ep_length": length, **results}.items():
            self.count(name, value)
            if task and name in OF_TASKS:
                self.count(f"{task}/{name}", value)
        entry: dict[str, float | int | str] = {"slot": slot, "seed": seed, "length": length}
        if task:
            entry["task"] = task
        if math.isfinite(reward):
            entry["return"] = reward
        for name, value in results.items():
            if math.isfinite(value):
                entry.setdefault(name, value)
        cast(list[Any], self.log).append(entry)

    def keep(self, episode: Episode) -> None:
        """Take a finished episode."""
        cast(list[Any], self.episodes).append(episode)


SEEN = ("obs", "state", "avail_actions", "full_obs")
"""Fields of observations."""

FOLLOWED = ("actions", "reward", "terminated", "agent_reward")
"""Fields of actions and their results: zero in closing rows."""


def row_fields(info: EnvInfo, full_obs: bool) -> Spec:
    """Return the fields of an episode's rows, without those that a policy adds: (type, shape) by name."""
    n, obs = info.n_agents, (torch.float32, (info.n_agents, info.obs_dim))
    # Continuous actions as they were drawn: of one beyond the bounds, the density is not that of the bound.
    numbers = torch.uint8 if info.n_actions <= 255 else torch.int16
    actions = (numbers, (n,)) if info.box is None else (torch.float32, (n, info.box.dim))
    fields: Spec = {
        "obs": obs,
        "state": (torch.float32, (info.state_dim,)),
        "avail_actions": (torch.uint8, (n, info.n_actions)),
        "actions": actions,
        "reward": (torch.float32, ()),
        "terminated": (torch.uint8, ()),
    }
    if info.agent_rewards:
        fields["agent_reward"] = (torch.float32, (n,))
    return {**fields, "full_obs": obs} if full_obs else fields


class Recorder:
    """Fields [B, episode_limit + 1, ...] of the running episodes, copied out one episode at a time."""

    def __init__(self, info: EnvInfo, n_slots: int, full_obs: bool) -> None:
        self._rows = (n_slots, info.episode_limit + 1)
        self._fields = {
            name: np.zeros((*self._rows, *shape), torch.empty(0, dtype=dtype).numpy().dtype)
            for name, (dtype, shape) in row_fields(info, full_obs).items()
        }
        self._own = tuple(self._fields)
        self._seen = tuple(name for name in SEEN if name in self._fields)
        self._followed = tuple(name for name in FOLLOWED if name in self._fields)
        self._begun = False
        self._flat: dict[str, np.ndarray] = {}
        self._flatten()

    def _flatten(self) -> None:
        """Update the views [B * (episode_limit + 1), ...] of all fields: one index is faster than two."""
        self._flat = {name: field.reshape(-1, *field.shape[2:]) for name, field in self._fields.items()}

    def begin(self) -> None:
        """Accept another policy, whose own fields may differ."""
        self._begun = False

    def record_observations(self, slots: np.ndarray, steps: np.ndarray, seen: Observation) -> None:
        """Write the observations of the slot numbers `slots` at their `steps`."""
        rows, pick = slots * self._rows[1] + steps, self._pick(slots)
        for name in self._seen:
            self._flat[name][rows] = getattr(seen, name)[pick]

    def _pick(self, slots: np.ndarray) -> np.ndarray | slice:
        """Return the index of `slots` into [B, ...]; a slice, which copies nothing, for all slots."""
        return slots if len(slots) < self._rows[0] else slice(None)

    def record_actions(
        self, slots: np.ndarray, steps: np.ndarray, actions: np.ndarray, extras: dict[str, np.ndarray]
    ) -> None:
        """Write the `actions` [B, n] and the policy's own fields (name -> [B, ...]) of `slots` at their `steps`."""
        if not self._begun:
            self._allocate(extras)
        rows, pick = slots * self._rows[1] + steps, self._pick(slots)
        self._flat["actions"][rows] = actions[pick]
        for name, value in extras.items():
            self._flat[name][rows] = value[pick]

    def _allocate(self, extras: dict[str, np.ndarray]) -> None:
        """Allocate an array for each of the policy's fields, or reuse one that fits."""
        for name in extras:
            if name in self._own:
                raise ValueError(f"the policy may not store a field called {name}")
        old = self._fields
        self._fields = {name: old[name] for name in self._own}
        for name, value in extras.items():
            kept = old.get(name)
            if kept is None or kept.shape[2:] != value.shape[1:] or kept.dtype != value.dtype:
                kept = np.zeros((*self._rows, *value.shape[1:]), value.dtype)
            self._fields[name] = kept
        self._flatten()
        self._begun = True

    def record_results(self, slots: np.ndarray, steps: np.ndarray, result: StepResult) -> None:
        """Write rewards and terminal flags of the steps that `slots` took at their `steps`."""
        rows = slots * self._rows[1] + steps
        self._flat["reward"][rows] = result.reward[slots]
        self._flat["terminated"][rows] = result.terminated[slots] & ~result.truncated[slots]
        if result.agent_reward is not None and "agent_reward" in self._own:
            self._flat["agent_reward"][rows] = result.agent_reward[slots]

    def take(self, slot: int, length: int) -> Episode:
        """Return a copy of the episode of `length` steps in `slot`: tensors [length + 1, ...] by name."""
        for name in self._followed:
            self._fields[name][slot, length] = 0
        return {name: torch.from_numpy(field[slot, : length + 1].copy()) for name, field in self._fields.items()}

    def latest(self, slots: np.ndarray, steps: np.ndarray) -> list[Episode]:
        """Return the steps that led to the rows `steps` (> 0) of `slots`, each as an episode of two rows."""
        rows = slots * self._rows[1] + steps
        pairs = {name: torch.from_numpy(flat[np.stack([rows - 1, rows], 1)]) for name, flat in self._flat.items()}
        for name in self._followed:
            pairs[name][:, 1] = 0
        return [{name: both[i] for name, both in pairs.items()} for i in range(len(slots))]

    def snapshot(self, n_steps: int) -> dict[str, np.ndarray]:
        """Return the first `n_steps` rows of every slot, name -> [B, n_steps, ...]."""
        return {name: field[:, :n_steps].copy() for name, field in self._fields.items()}

    def restore(self, snapshot: dict[str, np.ndarray]) -> None:
        """Restore the rows of a `snapshot`."""
        self._allocate({name: rows[:, 0] for name, rows in snapshot.items() if name not in self._own})
        for name, rows in snapshot.items():
            self._fields[name][:, : rows.shape[1]] = rows


@dataclass
class SlotState:
    """State of each slot. All [B]: reset seed, step, return so far, episodes yet to begin, three masks.

    `agent_reward` is each agent's return so far, [B, n] where the environment reports it, else [B, 0]. `lost` [B]
    counts the episodes lost in a row. `task` and `group`: see `Origins`.

    `playing` slots act and step; `stepping` slots wait for the result of their action; `closing` slots have ended and
    show their last observation once more, for the closing row. The field names are keys of checkpoints.
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
    task: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    group: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def origins(self) -> Origins:
        """Where the episodes come from."""
        return Origins(self.seed, self.task, self.group)

    @origins.setter
    def origins(self, origins: Origins) -> None:
        self.seed, self.task, self.group = origins.seed, origins.task, origins.group

    @classmethod
    def at_start(cls, origins: Origins, episodes_per_slot: int, n_rewarded: int) -> SlotState:
        """Return the state at the beginning of the first episodes; `n_rewarded` agents have rewards."""
        n_slots = len(origins.seed)
        no, yes = np.zeros(n_slots, bool), np.ones(n_slots, bool)
        left = np.full(n_slots, episodes_per_slot - 1)
        agent_reward = np.zeros((n_slots, n_rewarded))
        steps, lost = np.zeros(n_slots, np.int64), np.zeros(n_slots, np.int64)
        clock = cls(origins.seed, steps, np.zeros(n_slots), left, yes, no, no.copy(), agent_reward, lost)
        clock.origins = origins
        return clock

    def begin(self, which: np.ndarray) -> None:
        """Start episodes in the slots `which` [B] bool at step and return 0."""
        for values in (self.step, self.reward, self.agent_reward):
            values[which] = 0

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return copies of all fields."""
        return {spec.name: getattr(self, spec.name).copy() for spec in fields(self)}


class _Located:
    """Names the episodes that an error in a block belongs to. A class, since it is entered three times a tick."""

    __slots__ = ("_which", "_seeds", "_steps")

    def __init__(self, which: np.ndarray, seeds: np.ndarray, steps: np.ndarray) -> None:
        self._which, self._seeds, self._steps = which, seeds, steps

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            slots = np.flatnonzero(self._which).tolist()
            locate(error, [(slot, int(self._seeds[slot]), int(self._steps[slot])) for slot in slots])


class RolloutLoop:
    """Plays one policy in all slots of an environment.

    A tick collects the results of the last steps, observes, acts, records and starts the next steps. Between two ticks
    an environment in processes keeps stepping.

    Args:
        env, info: what is played. policy: acts; `begin` or a restored snapshot initialises its memory.
        recorder: stores rows; None to record no episodes. see_all: whether to request `full_obs`. seeds: of episodes.

    Attributes:
        rollout: finished episodes since the last `take`.
        ticked: called with True before each tick, with False by `take`.
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
    ) -> None:
        self.env = env
        self.info = info
        self.policy = policy
        self.recorder = recorder
        self.see_all = see_all
        self.seeds = seeds
        self.rollout = Rollout()
        self.ticked: Callable[[bool], None] = do_nothing
        self.asked: Callable[[np.ndarray, np.ndarray], None] = do_nothing
        self._n_rewarded = info.n_agents if info.agent_rewards else 0
        self.clock = SlotState.at_start(Origins.of(np.zeros(env.n_slots, np.int64)), 0, self._n_rewarded)
        self._results: dict[int, dict[str, float]] = {}
        self._meta: dict[int, EpisodeMeta] = {}
        self._checks = OutputChecks(info, env.n_slots)

    def begin(self, episodes_per_slot: int) -> None:
        """Start the first episode of every slot; a slot whose episode has ended begins its next one at once.

        Slots that `seeds` has no episode for stay idle.
        """
        self.ticked(True)
        n = self.env.n_slots
        everyone = np.ones(n, bool)
        begun = self.seeds.begun(everyone)
        origins = self.seeds.origins(begun)
        self._reset(begun, origins)
        self.policy.begin(n)
        self.policy.reset(everyone)
        self.clock = SlotState.at_start(origins, episodes_per_slot, self._n_rewarded)
        self.clock.playing = begun.copy()

    def _reset(self, which: np.ndarray, origins: Origins) -> None:
        """Start the episodes of `origins` in the slots `which` [B] bool."""
        with self._asking(which, origins.seed, np.zeros_like(origins.seed)):
            if isinstance(self.env, ManyTasks):
                self.env.set_tasks(which, origins.task)
            self.env.reset(which, origins.seed)

    def _asking(self, which: np.ndarray, seeds: np.ndarray, steps: np.ndarray) -> _Located:
        """Mark a call of the environment about the slots `which` [B] bool, whose episodes its errors name."""
        self.asked(which, seeds)
        return _Located(which, seeds, steps)

    @property
    def over(self) -> bool:
        """Whether nothing is left to play."""
        return not (self.clock.playing.any() or self.clock.closing.any())

    @property
    def n_unfinished(self) -> int:
        """Number of episodes that have begun and are not counted yet."""
        return int((self.clock.playing | self.clock.closing).sum())

    def tick(self, explore: Exploration | None) -> None:
        """Play one step of every slot.

        Errors: UserError for invalid outputs of the environment, an episode longer than `info.episode_limit`, and a
        slot that has lost `LOST_IN_A_ROW` episodes in a row.
        """
        self.ticked(True)
        self.finish_steps()
        clock, recorder = self.clock, self.recorder
        closing, stepping = clock.closing.copy(), clock.playing.copy()
        active = closing | stepping
        slots = active.nonzero()[0]
        if not len(slots):
            return
        with self._asking(active, clock.seed, clock.step):
            shown = self.env.observe(self.see_all)
        seen = self._checks.observation(shown, active, clock.seed, clock.step, self.see_all)
        steps, lasting = clock.step[slots], self.env.steps_apart
        if recorder is not None and not lasting:  # the next call of the environment overwrites the observation
            recorder.record_observations(slots, steps, seen)
        decision = self.policy.act(Tick(seen, clock.step.copy(), active), explore)
        actions = np.where(stepping.reshape(-1, *[1] * (decision.actions.ndim - 1)), decision.actions, 0)
        again = closing & (clock.left > 0)
        if again.any():
            again = self.seeds.begun(again)
        upcoming = None
        if again.any():
            upcoming = self.seeds.origins(again).where(again, clock.origins)
            self._reset(again, upcoming)
        if stepping.any():
            with self._asking(stepping, clock.seed, clock.step):
                self.env.step_start(actions if self.info.box is None else self.info.box.clip(actions), stepping)
            clock.stepping |= stepping
        if recorder is not None:
            if lasting:  # copied while the slots step
                recorder.record_observations(slots, steps, seen)
            recorder.record_actions(slots, steps, actions, decision.extras)
            self._rows_written(recorder, slots, steps)
        if closing.any():
            self._close(closing, again)
            if upcoming is not None:
                clock.origins = upcoming

    def finish_steps(self) -> None:
        """Wait for the steps in progress and process their results."""
        clock = self.clock
        stepped = clock.stepping.copy()
        slots = stepped.nonzero()[0]
        if not len(slots):
            return
        with self._asking(stepped, clock.seed, clock.step):
            returned = self.env.step_finish(stepped)
        clock.stepping[:] = False
        result = self._checks.result(returned, stepped, clock.seed, clock.step)
        if self.recorder is not None:
            self.recorder.record_results(slots, clock.step[slots], result)
        clock.reward[slots] += result.reward[slots]
        if result.agent_reward is not None and self._n_rewarded:
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
            for slot in np.flatnonzero(ended).tolist():
                self._results[slot] = {name: float(values[slot]) for name, values in result.info.items()}

    def take(self) -> Rollout:
        """Return what was played since the last time."""
        self.ticked(False)
        taken, self.rollout = self.rollout, Rollout()
        return taken

    @contextmanager
    def asking_all(self) -> Iterator[None]:
        """Mark a call of the environment about all unfinished episodes, between two ticks."""
        self.ticked(True)
        self.asked(self.clock.playing | self.clock.closing, self.clock.seed)
        try:
            yield
        finally:
            self.ticked(False)

    def snapshot(self) -> dict[str, Any]:
        """Return the slots' state, results that are not counted yet and the rows of unfinished episodes."""
        self.finish_steps()
        rows = self.recorder.snapshot(int(self.clock.step.max()) + 1) if self.recorder is not None else {}
        counted = copy.deepcopy({name: value for name, value in vars(self.rollout).items() if name != "episodes"})
        return {"clock": self.clock.snapshot(), "results": dict(self._results), "rows": rows, "counted": counted}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a `snapshot`, with policy and environment in the state of that moment."""
        self.clock = SlotState(**{name: values.copy() for name, values in snapshot["clock"].items()})
        if not len(self.clock.agent_reward):  # an earlier version did not save them: unknown, so not counted
            self.clock.agent_reward = np.full((self.env.n_slots, self._n_rewarded), np.nan)
        if not len(self.clock.lost):  # likewise
            self.clock.lost = np.zeros(self.env.n_slots, np.int64)
        if not len(self.clock.task):  # likewise
            self.clock.origins = Origins.of(self.clock.seed)
        self._results = dict(snapshot["results"])
        self.rollout = Rollout(**copy.deepcopy(snapshot["counted"]))
        if self.recorder is not None:
            self.recorder.restore(snapshot["rows"])

    def _replace(self, lost: np.ndarray) -> None:
        """Discard the episodes of the slots `lost` [B] bool; each begins another one at once.

        Errors: UserError when a slot has lost so many in a row that it will hardly finish one.
        """
        self.rollout.lost += int(lost.sum())
        self.clock.lost += lost
        hopeless = self.clock.lost >= LOST_IN_A_ROW
        if hopeless.any():
            slot = int(hopeless.argmax())
            what = f"this was lost, as the {LOST_IN_A_ROW - 1} episodes of the slot before it were"
            raise fault(self.info.name, slot, int(self.clock.seed[slot]), int(self.clock.step[slot]), what)
        self.clock.origins = self.seeds.origins(lost, lost=True).where(lost, self.clock.origins)
        self._reset(lost, self.clock.origins)
        self.policy.reset(lost)
        self.clock.begin(lost)

    def _close(self, closing: np.ndarray, again: np.ndarray) -> None:
        """Count and take the finished episodes; the slots `again`, also idle ones, begin another one. Masks [B]."""
        clock, rollout = self.clock, self.rollout
        for slot in np.flatnonzero(closing).tolist():
            length = int(clock.step[slot])
            each = {f"return_agent_{i}": value for i, value in enumerate(clock.agent_reward[slot].tolist())}
            results = {**self._results.pop(slot), **each}
            task = self.info.tasks[clock.task[slot]] if self.info.tasks else ""
            rollout.end(slot, int(clock.seed[slot]), length, float(clock.reward[slot]), results, task)
            if self.recorder is not None:
                self._episode_ended(self.recorder, slot, length, results.get("battle_won", math.nan))
        clock.closing &= ~closing
        if again.any():
            self.policy.reset(again)
            clock.begin(again)
            clock.left[again] -= 1
            clock.playing |= again

    def meta(self, slot: int) -> EpisodeMeta:
        """Return the metadata of a slot's episode; all its steps share one object."""
        clock = self.clock
        group = "" if clock.group[slot] == NO_GROUP else str(clock.group[slot])
        meta = EpisodeMeta(slot, int(clock.seed[slot]), int(clock.task[slot]), group)
        if self._meta.get(slot) != meta:
            self._meta[slot] = meta
        return self._meta[slot]

    def _rows_written(self, recorder: Recorder, slots: np.ndarray, steps: np.ndarray) -> None:
        """Hook: the rows `steps` of `slots` are complete but for the results of their steps."""

    def _episode_ended(self, recorder: Recorder, slot: int, length: int, outcome: float) -> None:
        meta = replace(self.meta(slot), outcome=outcome)
        self.rollout.keep(RecordedEpisode(recorder.take(slot, length), meta))


def do_nothing(*_: object) -> None:
    """Do nothing."""
