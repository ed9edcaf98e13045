"""Single environments in worker processes, which write into shared memory, and step while others are decided for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import NoReturn

import numpy as np
from pydantic import BaseModel

from omagd.envs import shared_env_worker as worker
from omagd.envs.adapters import ManyEnvs
from omagd.envs.protocol import MultiAgentEnv

CLOSE_GRACE_SECONDS = 5.0
_NOTES_AT_ONCE = 512
_SINGLE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PJRT_NPROC"), "1"
)


class EnvWorkerError(RuntimeError):
    """An environment worker failed or died; the text holds the worker's own traceback."""


class _SharedArrays(dict[str, np.ndarray]):
    """The arrays by name; empty once the workers are closed."""

    def __missing__(self, name: str) -> np.ndarray:
        raise EnvWorkerError(f"no {name}: the environment workers are closed")


class _Workers:
    """Processes and what connects them to this one.

    Attributes:
        processes, conns, wakes: one of each for each worker; a byte in its `wakes` has a worker look at its orders.
        done: where all workers leave their notes. owed: notes that each worker still owes.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.conns: list[Connection] = []
        self.wakes: list[Connection] = []
        self.arrays = _SharedArrays()
        self.segments: list[SharedMemory] = []
        self.owed: list[int] = []
        self.done: Connection | None = None
        self._poll = select.poll()
        self._number: dict[int, int] = {}

    def start(self, payload: bytes, hosts: list[range]) -> None:
        """Start a worker for the slots of each of `hosts`."""
        context = multiprocessing.get_context("spawn")
        self.done, note = context.Pipe(duplex=False)
        self._poll.register(self.done.fileno(), select.POLLIN)
        with _environment(_SINGLE_THREAD):
            for number, slots in enumerate(hosts):
                conn, their_conn = context.Pipe()
                their_wake, wake = context.Pipe(duplex=False)
                args = (their_conn, their_wake, note, number, slots, os.getpid(), payload)
                process = context.Process(target=worker.work, args=args, daemon=True, name=f"env-{number}")
                self.conns.append(conn)
                self.wakes.append(wake)
                self.owed.append(0)
                self._number[conn.fileno()] = number
                self._poll.register(conn.fileno(), 0)  # tells when the other end is gone
                process.start()
                self.processes.append(process)
                their_conn.close()
                their_wake.close()
        note.close()

    def share(self, specs: worker.Specs) -> None:
        """Let all workers map one segment and remove its name at once: nothing is left behind, however we end."""
        segment = SharedMemory(create=True, size=worker.total_size(specs))
        self.segments.append(segment)
        try:
            for conn in self.conns:
                conn.send_bytes(pickle.dumps((segment.name, specs)))
            for number in range(len(self.conns)):
                self.message(number)
        finally:
            segment.unlink()
        self.arrays.update(worker.array_views(segment.buf, specs))

    def wake(self, number: int) -> None:
        """Have a worker look at its orders; it owes one note more."""
        self.owed[number] += 1
        with contextlib.suppress(BrokenPipeError):  # waiting for its note tells why
            os.write(self.wakes[number].fileno(), b".")

    def notes(self) -> list[tuple[int, int]]:
        """Wait for notes and return (worker, number of its messages) of each. Errors: EnvWorkerError for the dead."""
        assert self.done is not None
        here, found = self.done.fileno(), []
        lost = []
        for place, _ in self._poll.poll():
            if place == here:
                found += worker.NOTE.iter_unpack(os.read(here, _NOTES_AT_ONCE * worker.NOTE.size))
            else:
                lost.append(self._number[place])
        if lost and not found:
            self.message(lost[0])
            self.dead(lost[0])
        for number, _ in found:
            self.owed[number] -= 1
        return found

    def message(self, number: int) -> tuple[bytes, bytes]:
        """Return mark and body of a worker's next message. Errors: EnvWorkerError, or the worker's own UserError."""
        try:
            message = self.conns[number].recv_bytes()
        except (EOFError, ConnectionResetError):
            self.dead(number)
        mark, body = message[:1], message[1:]
        if mark == worker.FAILED:
            text, user_error = pickle.loads(body)
            raise user_error or EnvWorkerError(f"environment worker {number} failed:\n{text}")
        return mark, body

    def dead(self, number: int) -> NoReturn:
        """Raise that a worker died."""
        self.processes[number].join(CLOSE_GRACE_SECONDS)
        raise EnvWorkerError(
            f"environment worker {number} died (exit code {self.processes[number].exitcode})"
        ) from None

    def release(self) -> None:
        """Ask the workers to close, wait a little, then make them; let go of the shared memory."""
        if self.arrays:
            self.arrays["orders"][:] = worker.CLOSE
        for conn, wake in zip(self.conns, self.wakes, strict=True):
            with contextlib.suppress(OSError):
                os.write(wake.fileno(), b".")
            wake.close()
            conn.close()
        deadline = time.monotonic() + CLOSE_GRACE_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        if self.done is not None:
            self.done.close()
        self.arrays.clear()
        for segment in self.segments:
            segment.close()


class ProcessEnvs(ManyEnvs):
    """Single environments in worker processes that write into shared memory.

    The workers are started by spawn, compute with one thread, end with this process, and leave Ctrl-C to it. An
    environment's error arrives as EnvWorkerError with its traceback (a UserError as itself) and closes all workers;
    that of a reset arrives with the next call. The thread that constructs this must live as long as it: Linux ends
    the workers with that thread.

    Args:
        env_cls, args: the environment. n_slots: B. name: for results. per_process: slots that share a worker and step
            there one after another; for environments that cost less than waking a process.
    """

    steps_apart = True

    def __init__(
        self,
        env_cls: type[MultiAgentEnv],
        args: BaseModel,
        n_slots: int,
        name: str | None = None,
        per_process: int = 1,
    ) -> None:
        self.n_slots = n_slots
        self._host = [slot // per_process for slot in range(n_slots)]
        self._names: list[list[str]] = [[] for _ in range(n_slots)]
        self._resetting = np.zeros(n_slots, bool)
        self._workers = _Workers()
        self._arrays = self._workers.arrays
        self._finalizer = weakref.finalize(self, self._workers.release)
        try:
            hosts = [range(first, min(first + per_process, n_slots)) for first in range(0, n_slots, per_process)]
            self._workers.start(pickle.dumps((env_cls, args)), hosts)
            facts = [pickle.loads(self._workers.message(number)[1]) for number in range(len(hosts))][0]
            self._begin(env_cls, args, facts, name)
            self._workers.share(worker.array_specs(self.info, n_slots))
        except BaseException:
            self.close()
            raise

    def _info_names(self, slot: int) -> list[str]:
        return self._names[slot]

    def _starting(self) -> np.ndarray:
        return np.flatnonzero(self._resetting)

    def _order(self, order: int, slots: np.ndarray) -> None:
        self._require_open()
        self._arrays["orders"][slots] = order
        if order == worker.RESET:
            self._resetting[slots] = True
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
                for number, messages in self._workers.notes():
                    for _ in range(messages):
                        self._listen(number)
        except BaseException:
            self.close()
            raise
        self._resetting[slots] = False

    def _listen(self, number: int) -> None:
        """Take in one message of a worker."""
        mark, body = self._workers.message(number)
        slot = self._take(mark, body)
        if mark == worker.NAMES:
            self._names[slot] = self._said[slot]

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise EnvWorkerError("the environment workers are closed")

    def close(self) -> None:
        """End all workers and release the shared memory. May be called twice."""
        self._finalizer()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables that children inherit, and put the old ones back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
