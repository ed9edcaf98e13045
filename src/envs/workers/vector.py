"""Single environments in worker processes, which write into shared memory, and step while others are decided for."""

from __future__ import annotations

import os
import pickle
import weakref
from functools import partial

import numpy as np
from pydantic import BaseModel

from omagd.envs.adapters import VectorEnv
from omagd.envs.protocol import StepResult
from omagd.envs.single import single_env
from omagd.envs.workers import worker
from omagd.envs.workers.processes import EnvWorkerError, Workers

__all__ = ["EnvWorkerError", "ProcessEnvs"]


class ProcessEnvs(VectorEnv):
    """Single environments in worker processes that write into shared memory.

    The workers are started by spawn, compute with one thread, end with this process, and leave Ctrl-C to it. An
    environment's error arrives as EnvWorkerError with its traceback (a UserError as itself) and closes all workers;
    that of a reset arrives with the next call. A worker that is killed or crashes is replaced. Where the environment is
    deterministic, the new one plays the same episodes from the same seeds with the same actions, then does what the
    other was to do: nothing is lost. Else the episodes that its slots were playing are `lost` in their next step; those
    that they were about to start start in the new one. One that dies ten times without an episode that comes to its end
    is an EnvWorkerError. The thread that constructs this and plays must live as long as it: Linux ends the workers with
    that thread.

    Args:
        env_cls, args: the environment, a single one or a batched one, whose slots then are played apart. n_slots: B.
        name: for results. per_process: slots that share a worker and step there one after another; for environments
            that cost less than waking a process.
    """

    steps_apart = True

    def __init__(
        self,
        env_cls: type,
        args: BaseModel,
        n_slots: int,
        name: str | None = None,
        per_process: int = 1,
    ) -> None:
        self.n_slots = n_slots
        self._host = [slot // per_process for slot in range(n_slots)]
        self._names: list[list[str]] = [[] for _ in range(n_slots)]
        self._pending = np.zeros(n_slots, np.uint8)  # what each slot was ordered and may not have done yet
        self._void = np.zeros(n_slots, bool)  # what these slots played has died with their worker
        self._told: dict[int, dict[str, float]] = {}  # counters of each slot when they were last asked for
        self._past: dict[str, float] = {}  # those of workers that died
        self._workers = Workers()
        self._arrays = self._workers.arrays
        self._finalizer = weakref.finalize(self, self._workers.release)
        hosts = [range(first, min(first + per_process, n_slots)) for first in range(0, n_slots, per_process)]
        try:
            self._workers.start(pickle.dumps(partial(single_env, env_cls, args)), hosts)
            self._begin(env_cls, args, pickle.loads(self._workers.facts()), name)
            self._workers.share(worker.array_specs(self.info, n_slots))
        except BaseException:
            self.close()
            raise

    def _info_names(self, slot: int) -> list[str]:
        return self._names[slot]

    def _starting(self) -> np.ndarray:
        return np.flatnonzero(self._pending == worker.RESET)

    def slots_at_work(self) -> dict[int, int]:
        """Return the seeds of the slots whose workers owe an answer."""
        return self._workers.at_work()

    def be_patient(self, seconds: float) -> None:
        """Kill a worker that has not answered for `seconds`; it is replaced, as one that died is."""
        self._workers.patience = seconds

    def step_finish(self, active: np.ndarray) -> StepResult:
        """Wait for the active slots and return what their step brought."""
        result = super().step_finish(active)
        if result.terminated.any():
            for slot in np.flatnonzero(result.terminated & ~result.lost).tolist():
                self._workers.deaths[self._host[slot]] = 0
        return result

    def get_stats(self) -> dict[str, float]:
        """Return the counters of all slots, as `VectorEnv` does, and `worker_restarts`.

        What a worker that died had counted since the last call is not in them.
        """
        total = super().get_stats()
        self._told = {slot: stats for slot, stats in self._said.items() if stats}
        for name, value in self._past.items():
            total[name] = total.get(name, 0.0) + value
        return {**total, "worker_restarts": self._workers.replaced}

    def _order(self, order: int, slots: np.ndarray) -> None:
        self._require_open()
        if order == worker.RESET:
            self._void[slots] = False
        elif self._void.any():
            slots = slots[~self._void[slots]]  # nothing has begun there that could be stepped or shown
        self._pending[slots] = order
        self._arrays["orders"][slots] = order
        for number in dict.fromkeys(self._host[slot] for slot in slots.tolist()):
            self._workers.wake(number)

    def _settle(self, slots: np.ndarray) -> None:
        self._require_open()
        owed = self._workers.owed
        hosts = [self._host[slot] for slot in slots.tolist()]
        if any(owed[number] for number in hosts):
            os.sched_yield()  # where processors are few, the workers do better before we wait than one by one between
        try:
            while any(owed[number] for number in hosts):
                notes, dead = self._workers.notes()
                for number, messages in notes:
                    for _ in range(messages):
                        self._listen(number)
                for number in dead:
                    self._replace(number)
        except BaseException:
            self.close()
            raise
        self._pending[slots] = 0

    def _listen(self, number: int) -> None:
        """Take in one message of a worker, if it did not die while it spoke."""
        message = self._workers.message(number)
        if message is not None:
            slot = self._take(*message)
            if message[0] == worker.NAMES:
                self._names[slot] = self._said[slot]

    def _replace(self, number: int) -> None:
        """Have another worker for one that died; its slots do again what they had done and were doing, or are void."""
        slots = np.array(self._workers.hosts[number])
        pasts = {slot: self._past_of(slot) for slot in slots.tolist()} if self.deterministic else {}
        self._workers.replace(number, pasts)
        for slot in slots.tolist():
            for name, counted in self._told.pop(slot, {}).items():
                if not name.endswith(("_rate", "_build")):
                    self._past[name] = self._past.get(name, 0.0) + counted
        if not self.deterministic:
            self._drop(slots)
        self._arrays["orders"][slots] = self._pending[slots]
        if self._pending[slots].any():
            self._workers.wake(number)

    def _past_of(self, slot: int) -> worker.Past:
        """Return what a slot has done without what it is doing."""
        journal, pending = self._journal, self._pending[slot]
        assert journal is not None
        if not journal.begun[slot] or pending == worker.RESET:
            return worker.Past(None, journal.actions(slot), self._names[slot])
        played = journal.actions(slot, leave_out=int(pending == worker.STEP))
        return worker.Past(int(journal.seeds[slot]), played, self._names[slot])

    def _drop(self, slots: np.ndarray) -> None:
        """The episodes of `slots` are void, but for those that have yet to begin."""
        arrays = self._arrays
        for name in ("reward", "agent_reward", "truncated", "info"):
            arrays[name][slots] = 0
        for name in ("terminated", "lost"):
            arrays[name][slots] = True
        for slot in slots.tolist():
            self._names[slot] = []
        begin = self._pending[slots] == worker.RESET
        self._void[slots] = ~begin
        self._pending[slots] = np.where(begin, worker.RESET, 0)

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise EnvWorkerError("the environment workers are closed")

    def close(self) -> None:
        """End all workers and release the shared memory. May be called twice."""
        self._finalizer()
