"""Single environments as one batched environment: the part shared by `SerialEnvs` and `ProcessEnvs`, and the former."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.envs.frames import Frame
from omagd.envs.outputs import counted_together
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv, Observation, StepResult
from omagd.envs.single import env_info_from_dict, single_env
from omagd.envs.workers.shared_memory import Arrays, array_specs
from omagd.envs.workers.slot import CHOOSE, FRAME, RANDOM, REPLAY, RESET, SHOW_FULL, STATS, STEP, UNSUPPORTED, EnvSlot


class ActionLog:
    """Seeds and actions of the running episodes: enough to replay them where the environment is deterministic.

    Args:
        n_slots: B. like: an array [B, ...] of one step's actions.

    Attributes:
        started: [B] bool, an episode was started. seeds: [B] int64. lengths: [B] int64, steps so far.
    """

    def __init__(self, n_slots: int, like: np.ndarray) -> None:
        self.started = np.zeros(n_slots, bool)
        self.seeds = np.zeros(n_slots, np.int64)
        self.lengths = np.zeros(n_slots, np.int64)
        self._type, stored = like.dtype, np.int32 if like.dtype.kind == "i" else like.dtype
        self._actions = np.zeros((n_slots, 64, *like.shape[1:]), stored)

    def begin(self, slots: np.ndarray, seeds: np.ndarray) -> None:
        """Start episodes in the slot numbers `slots`, from `seeds` [len(slots)]."""
        self.started[slots] = True
        self.seeds[slots] = seeds
        self.lengths[slots] = 0

    def add(self, slots: np.ndarray, actions: np.ndarray) -> None:
        """Append the next `actions` [len(slots), n] (continuous ones [len(slots), n, d]) of `slots`."""
        steps = self.lengths[slots]
        if len(steps) and steps.max() == self._actions.shape[1]:
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)], 1)
        self._actions[slots, steps] = actions
        self.lengths[slots] = steps + 1

    def actions(self, slot: int, leave_out: int = 0) -> np.ndarray:
        """Return [T, n] int64 ([T, n, d] float32), the actions of a slot's episode without the last `leave_out`."""
        return self._actions[slot, : self.lengths[slot] - leave_out].astype(self._type)

    def snapshot(self) -> dict[str, Any]:
        """Return copies of all arrays; `actions` is [B, T, n] int32 or [B, T, n, d]; T is the longest episode."""
        actions = self._actions[:, : self.lengths.max(initial=0)]
        kept = {"begun": self.started, "seeds": self.seeds, "lengths": self.lengths, "actions": actions}
        return {name: values.copy() for name, values in kept.items()}


class VectorEnv(BatchedEnv):
    """Base of `SerialEnvs` and `ProcessEnvs`: the shared arrays of all slots, and commands to some of them.

    Attributes:
        deterministic: that of the environment class; then a snapshot is the action log.
    """

    _arrays: Arrays

    def _setup(self, env_cls: type, args: BaseModel, facts: dict[str, Any], name: str | None) -> None:
        """Set the attributes that follow from `get_env_info()`. name: label of results, by default the class's name."""
        self.args_model = type(args)  # type: ignore[misc]
        self._replies: dict[int, Any] = {}
        self._infos: list[dict[str, float]] = [{} for _ in range(self.n_slots)]  # of each slot's last step
        self._begun = np.zeros(self.n_slots, bool)  # a slot of a set of maps may stay without an episode
        self._choices: list[Any] = []  # each slot's scripted actions by policy, for the current observations
        label = name or env_cls.__name__
        self.info = env_info_from_dict(label, args.model_dump().get("map_name"), facts)
        promised = facts.get("deterministic", env_cls.deterministic)  # type: ignore[attr-defined]
        self.deterministic = bool(promised)  # type: ignore[misc]
        actions = np.zeros(*array_specs(self.info, self.n_slots)["actions"])
        self._log = ActionLog(self.n_slots, actions) if self.deterministic else None

    @abstractmethod
    def _start(self, command: int, slots: np.ndarray, argument: Any = None) -> None:
        """Let the slot numbers `slots` start to execute a command."""

    @abstractmethod
    def _wait(self, slots: np.ndarray) -> None:
        """Wait until the slot numbers `slots` have executed their commands."""

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new episodes in the slots `which`, slot b from `seeds[b]`. Later calls wait for it."""
        slots = np.flatnonzero(which)
        self._wait(slots)
        chosen = np.asarray(seeds)[slots]
        self._begun[slots], self._arrays["seeds"][slots] = True, chosen
        self._choices = []
        if self._log is not None:
            self._log.begin(slots, chosen)
        self._start(RESET, slots)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the active slots."""
        self.step_start(actions, active)
        return self.step_finish(active)

    def step_start(self, actions: np.ndarray, active: np.ndarray) -> None:
        """Start to play `actions` in the active slots."""
        slots = np.flatnonzero(active)
        self._wait(slots)
        chosen = np.asarray(actions)[slots]
        self._arrays["actions"][slots] = chosen
        self._choices = []
        if self._log is not None:
            self._log.add(slots, chosen)
        self._start(STEP, slots)

    def step_finish(self, active: np.ndarray) -> StepResult:
        """Wait for the active slots and return the results of their step."""
        active = np.asarray(active, bool)
        self._wait(np.flatnonzero(active))
        terminated = self._arrays["terminated"] & active
        each = np.where(active[:, None], self._arrays["agent_reward"], np.float32(0.0))
        return StepResult(
            reward=np.where(active, self._arrays["reward"], np.float32(0.0)),
            agent_reward=each if self.info.agent_rewards else None,
            terminated=terminated,
            truncated=self._arrays["truncated"] & active,
            lost=self._arrays["lost"] & active,
            info=self._episode_info(terminated) if terminated.any() else {},
        )

    def _episode_info(self, terminated: np.ndarray) -> dict[str, np.ndarray]:
        slots = np.flatnonzero(terminated).tolist()
        found = {name: np.zeros(self.n_slots, np.float32) for slot in slots for name in self._infos[slot]}
        for slot in slots:
            for name, value in self._infos[slot].items():
                found[name][slot] = value
        return found

    def observe(self, full: bool = False) -> Observation:
        """Return copies of all slots' observations; once requested, `full_obs` is computed with each step.

        Waits for resets. Rows of slots between `step_start` and `step_finish` are undefined.
        """
        if full and not self._arrays["want_full"][0]:
            self._ask(SHOW_FULL)
        else:
            self._wait(self._starting())
        self._arrays["want_full"][0] = full
        obs, state, avail = (self._arrays[name].copy() for name in ("obs", "state", "avail"))
        return Observation(obs, state, avail, self._arrays["full_obs"].copy() if full else None)

    def _starting(self) -> np.ndarray:
        """Return the slot numbers whose reset has not been waited for."""
        return np.empty(0, np.int64)

    def _ask(self, command: int, slots: np.ndarray | None = None, argument: Any = None) -> list[Any]:
        """Send a command to the slot numbers `slots`, None: to all that have begun an episode.

        Returns the replies of `slots`, None: of all; None for slots that were lost or not asked.
        """
        chosen = np.flatnonzero(self._begun) if slots is None else slots
        self._wait(chosen)
        self._replies.clear()
        self._start(command, chosen, argument)
        self._wait(chosen)
        return [self._replies.get(slot) for slot in (range(self.n_slots) if slots is None else chosen.tolist())]

    def _store(self, slot: int, command: int, reply: Any) -> None:
        """Store a slot's reply to a command."""
        if command == STEP:
            self._infos[slot] = reply
        else:
            self._replies[slot] = reply

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions: "random" is drawn here, other policies are computed by each environment."""
        if policy == RANDOM or policy not in self.info.scripted_policies:
            return super().scripted_actions(policy, rng)
        self._choices = self._choices or self._ask(CHOOSE)
        nothing = np.zeros_like(self._arrays["actions"][0])  # of a slot whose episode is lost
        return np.stack([nothing if own is None else np.asarray(own[policy], nothing.dtype) for own in self._choices])

    def snapshot(self) -> dict[str, Any]:
        """Return the action log. Errors: NotImplementedError if the environment is not deterministic."""
        if self._log is None:
            return super().snapshot()
        self._wait(np.arange(self.n_slots))
        return self._log.snapshot()

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Replay the episodes of a `snapshot`. Errors: ValueError for other sizes, NotImplementedError."""
        if self._log is None:
            return super().restore(snapshot)
        started, lengths, actions = snapshot["begun"], snapshot["lengths"], snapshot["actions"]
        if len(started) != self.n_slots or actions.shape[2] != self.info.n_agents:
            found = f"{actions.shape[2]} agents in {len(started)} slots"
            raise ValueError(f"the snapshot is of {found}, not {self.info.n_agents} in {self.n_slots}")
        self.reset(started, snapshot["seeds"])
        for step in range(actions.shape[1]):
            self.step_start(actions[:, step], lengths > step)
        self._wait(np.arange(self.n_slots))
        self._arrays["want_full"][0] = False

    def get_stats(self) -> dict[str, float]:
        """Return the slots' counters together."""
        return counted_together([stats or {} for stats in self._ask(STATS)])

    def frame(self, slot: int) -> Frame:
        """Return the units of a slot; without places where the environment shows none, or its process has died."""
        (found,) = self._ask(FRAME, np.array([slot]))
        return super().frame(slot) if found is None else found

    def save_replay(self, folder: str) -> None:
        """Let each environment write its replay into `folder`. Errors: NotImplementedError."""
        if UNSUPPORTED in self._ask(REPLAY, argument=folder):
            super().save_replay(folder)


class SerialEnvs(VectorEnv):
    """Single environments in this process, stepped one after another."""

    def __init__(self, env_cls: type, args: BaseModel, n_slots: int, name: str | None = None) -> None:
        self.n_slots = n_slots
        self._envs: list[MultiAgentEnv] = [single_env(env_cls, args, name or env_cls.__name__) for _ in range(n_slots)]
        self._setup(env_cls, args, self._envs[0].get_env_info(), name)
        specs = array_specs(self.info, n_slots)
        self._arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}
        self._running: int | None = None
        self._slots = [EnvSlot(env, slot, self._arrays) for slot, env in enumerate(self._envs)]

    def _start(self, command: int, slots: np.ndarray, argument: Any = None) -> None:
        for number in slots.tolist():
            self._running = number
            self._store(number, command, self._slots[number].execute(command, argument))
        self._running = None

    def busy_slots(self) -> dict[int, int]:
        """Return slot -> seed for the slot that is being reset or stepped."""
        at = self._running
        return {} if at is None else {at: int(self._arrays["seeds"][at])}

    def _wait(self, slots: np.ndarray) -> None:
        """Do nothing: commands are executed at once."""

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()
