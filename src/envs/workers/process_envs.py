"""Single environments in worker processes, as one batched environment."""

from __future__ import annotations

import os
import pickle
import weakref
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.envs.protocol import StepResult
from omagd.envs.single import single_env
from omagd.envs.workers.pool import EnvWorkerError, WorkerPool
from omagd.envs.workers.shared_memory import array_specs
from omagd.envs.workers.slot import RESET, STEP, History
from omagd.envs.workers.vector import VectorEnv

__all__ = ["EnvWorkerError", "ProcessEnvs"]


class ProcessEnvs(VectorEnv):
    """Single environments in worker processes that write into shared memory.

    Workers are spawned, compute with one thread, ignore Ctrl-C and end with this process. An environment's error is
    raised here as EnvWorkerError with its traceback (a UserError as itself) and closes all workers; an error in `reset`
    is raised by the next call. A worker that is killed, crashes or hangs is replaced:

    - deterministic environment: the new worker replays the same episodes from their seeds and actions; nothing is lost.
    - otherwise: episodes in progress are `lost` in their next step; pending resets are done by the new worker.

    Ten deaths without a completed episode are an EnvWorkerError. The thread that constructs this object must outlive
    it: Linux ends the workers with that thread.

    Args:
        env_cls, args: the environment, single or batched (then each slot is a batch of one). n_slots: B.
        name: label of results.
    """

    steps_apart = True

    def __init__(self, env_cls: type, args: BaseModel, n_slots: int, name: str | None = None) -> None:
        self.n_slots = n_slots
        self._pending = np.zeros(n_slots, np.uint8)  # last command of each slot until it is known to be executed
        self._argument: Any = None  # of the last command
        self._void = np.zeros(n_slots, bool)  # slots whose episode was lost with their worker
        self._restarts = np.zeros(n_slots)  # of each slot's game, as its worker last counted them
        self._restarts_before = 0.0  # of the games of workers that died
        self._workers = WorkerPool()
        self._arrays = self._workers.arrays
        self._finalizer = weakref.finalize(self, self._workers.close)
        try:
            self._workers.start(pickle.dumps(partial(single_env, env_cls, args, name or env_cls.__name__)), n_slots)
            self._setup(env_cls, args, self._workers.facts(), name)
            self._workers.share(array_specs(self.info, n_slots))
        except BaseException:
            self.close()
            raise

    def _starting(self) -> np.ndarray:
        return np.flatnonzero(self._pending == RESET)

    def busy_slots(self) -> dict[int, int]:
        """Return slot -> seed for the slots whose workers owe an answer."""
        busy = [slot for slot, owed in enumerate(self._workers.owed) if owed]
        return {slot: int(self._arrays["seeds"][slot]) for slot in busy} if self._arrays else {}

    def set_worker_timeout(self, seconds: float) -> None:
        """Kill and replace a worker that has not answered for `seconds`."""
        self._workers.timeout = seconds

    def step_finish(self, active: np.ndarray) -> StepResult:
        """Wait for the active slots and return the results of their step."""
        result = super().step_finish(active)
        if result.terminated.any():
            for slot in np.flatnonzero(result.terminated & ~result.lost).tolist():
                self._workers.deaths[slot] = 0
        return result

    def get_stats(self) -> dict[str, float]:
        """Return the counters of the living workers, as `VectorEnv` does, and `worker_restarts`.

        `restarts` are also those that dead workers had counted until the last call.
        """
        total = super().get_stats()
        if "restarts" in total:
            self._restarts[:] = [(self._replies.get(slot) or {}).get("restarts", 0) for slot in range(self.n_slots)]
            total["restarts"] += self._restarts_before
        return {**total, "worker_restarts": self._workers.replaced}

    def _start(self, command: int, slots: np.ndarray, argument: Any = None) -> None:
        self._require_open()
        if command == RESET:
            self._void[slots] = False
        elif self._void.any():
            slots = slots[~self._void[slots]]  # without an episode there is nothing to step or show
        self._pending[slots], self._argument = command, argument
        for slot in slots.tolist():
            self._workers.command(slot, command, argument)

    def _wait(self, slots: np.ndarray) -> None:
        self._require_open()
        owed, numbers = self._workers.owed, slots.tolist()
        if any(owed[number] for number in numbers):
            os.sched_yield()  # with few cores, let the workers run before this process starts to poll
        try:
            while any(owed[number] for number in numbers):
                replies, dead = self._workers.replies()
                for number, reply in replies:
                    self._store(number, self._pending[number], reply)
                for number in dead:
                    self._replace(number)
        except BaseException:
            self.close()
            raise
        self._pending[slots] = 0

    def _replace(self, slot: int) -> None:
        """Replace a dead worker; its slot replays its episode and repeats a pending command, or becomes void."""
        self._workers.replace(slot, self._history(slot) if self.deterministic else None)
        self._restarts_before += float(self._restarts[slot])
        self._restarts[slot] = 0
        if not self.deterministic:
            self._drop_episode(slot)
        if self._pending[slot]:
            self._workers.command(slot, int(self._pending[slot]), self._argument)

    def _history(self, slot: int) -> History:
        """Return the episode of a slot without a pending step."""
        log, pending = self._log, self._pending[slot]
        assert log is not None
        seed = int(log.seeds[slot]) if log.started[slot] and pending != RESET else None
        return History(seed, log.actions(slot, leave_out=int(pending == STEP)))

    def _drop_episode(self, slot: int) -> None:
        """Mark the episode of a slot as lost, unless its reset is pending."""
        for name in ("reward", "agent_reward", "truncated"):
            self._arrays[name][slot] = 0
        for name in ("terminated", "lost"):
            self._arrays[name][slot] = True
        self._infos[slot] = {}
        self._void[slot] = self._pending[slot] != RESET
        if self._void[slot]:
            self._pending[slot] = 0

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise EnvWorkerError("the environment workers are closed")

    def close(self) -> None:
        """End all workers and free the shared memory. May be called twice."""
        self._finalizer()
