"""The processes of environment workers: started, woken, heard, replaced when they die, and gone with this process."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import select
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import numpy as np

from omagd.envs.workers import worker
from omagd.envs.workers.shared_memory import NamelessMemory
from omagd.envs.workers.stack import stack_of

CLOSE_GRACE_SECONDS = 5.0
DEATHS_IN_A_ROW = 10
"""So often a worker may die without an episode that comes to its end; then the run does."""

DEATHS_OF_A_HANG = 5
"""As how many deaths a hang counts: an environment that hangs at the same place again ends the run."""

LOG = logging.getLogger("omagd")
_MOST_NOTES = 512 * worker.NOTE.size
_SINGLE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PJRT_NPROC"), "1"
)


class EnvWorkerError(RuntimeError):
    """An environment worker failed or died; the text holds the worker's own traceback."""


class _SharedArrays(dict[str, np.ndarray]):
    """The arrays by name; empty once the workers are closed."""

    def __missing__(self, name: str) -> np.ndarray:
        raise EnvWorkerError(f"no {name}: the environment workers are closed")


class Workers:
    """Processes and what connects them to this one.

    Attributes:
        hosts: slots of each worker.
        processes, conns, wakes: one of each for each worker; a byte in its `wakes` has a worker look at its orders.
        owed: notes that each worker still owes. deaths: how often each has died since an episode of it has ended.
        replaced: workers that have died and were replaced.
        patience: seconds that a worker may take to answer before it is killed.
    """

    def __init__(self) -> None:
        self.hosts: list[range] = []
        self.processes: list[BaseProcess] = []
        self.conns: list[Connection] = []
        self.wakes: list[Connection] = []
        self.arrays = _SharedArrays()
        self.owed: list[int] = []
        self.deaths: list[int] = []
        self.replaced = 0
        self.patience = math.inf
        self._hung: set[int] = set()
        self.memory = NamelessMemory()
        self._done, self._note = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._poll = select.poll()
        self._poll.register(self._done.fileno(), select.POLLIN)
        self._number: dict[int, int] = {}
        self._payload = b""
        self._specs: worker.Specs | None = None

    def start(self, payload: bytes, hosts: list[range]) -> None:
        """Start a worker for the slots of each of `hosts`. payload: what makes an environment, pickled."""
        self._payload, self.hosts = payload, hosts
        with _environment(_SINGLE_THREAD):
            for number in range(len(hosts)):
                process, conn, wake = self._spawn(number)
                self.processes.append(process)
                self.conns.append(conn)
                self.wakes.append(wake)
                self.owed.append(0)
                self.deaths.append(0)

    def _spawn(self, number: int) -> tuple[BaseProcess, Connection, Connection]:
        context = multiprocessing.get_context("spawn")
        conn, their_conn = context.Pipe()
        their_wake, wake = context.Pipe(duplex=False)
        links = worker.Links(their_conn, their_wake, self._note, self.memory)
        args = (links, number, self.hosts[number], os.getpid(), self._payload, self._specs)
        process = context.Process(target=worker.work, args=args, daemon=True, name=f"env-{number}")
        self._number[conn.fileno()] = number
        self._poll.register(conn.fileno(), 0)  # tells when the other end is gone
        process.start()
        their_conn.close()
        their_wake.close()
        return process, conn, wake

    def facts(self) -> bytes:
        """Return what the first worker says of the environment, once all have said it. Errors: as `message`."""
        return [self._first_message(number) for number in range(len(self.conns))][0]

    def share(self, specs: worker.Specs) -> None:
        """Let all workers map the arrays of `specs`. Errors: as `message`."""
        self.memory.resize(worker.total_size(specs))
        for number in range(len(self.conns)):
            self._send(number, specs)
        for number in range(len(self.conns)):
            while self.message(number) is None:
                self._start_again(number)
                self._first_message(number)
                self._send(number, specs)
        self._specs = specs
        self.arrays.update(worker.array_views(self.memory.map(), specs))

    def _send(self, number: int, value: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died: it will be found so
            self.conns[number].send_bytes(pickle.dumps(value))

    def _first_message(self, number: int) -> bytes:
        """Return what a worker says first; one that is killed before it does is started again."""
        while (message := self.message(number)) is None:
            self._start_again(number)
        return message[1]

    def _start_again(self, number: int) -> None:
        """Start a worker again that was killed while it started. Errors: EnvWorkerError where it ended by itself."""
        how = self._how_it_ended(number)
        self.deaths[number] += 1
        if (self.processes[number].exitcode or 0) >= 0 or self.deaths[number] >= DEATHS_IN_A_ROW:
            raise EnvWorkerError(f"environment worker {number} died ({how})")
        LOG.warning("environment worker %d died (%s) while it started: another one is started", number, how)
        self._put_another(number)

    def _put_another(self, number: int) -> None:
        """Have a new process in the place of one that has died."""
        old = self.processes[number], self.conns[number], self.wakes[number]
        self._poll.unregister(old[1].fileno())
        self.owed[number] = 0
        with _environment(_SINGLE_THREAD):
            self.processes[number], self.conns[number], self.wakes[number] = self._spawn(number)
        for part in old:
            part.close()
        self.replaced += 1

    def wake(self, number: int) -> None:
        """Have a worker look at its orders; it owes one note more."""
        self.owed[number] += 1
        with contextlib.suppress(BrokenPipeError):  # waiting for its note tells why
            os.write(self.wakes[number].fileno(), b".")

    def notes(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Wait for notes, (worker, number of its messages) each; or where there are none, for workers that died."""
        here = self._done.fileno()
        found: list[tuple[int, int]] = []
        dead: list[int] = []
        events = self._patiently()
        if here not in dict(events):
            events = self._poll.poll(0)  # a worker may have noted something after that was looked at, and then died
        for place, _ in events:
            if place == here:
                found += [(n, said) for n, said in worker.NOTE.iter_unpack(os.read(here, _MOST_NOTES))]
            else:
                dead.append(self._number[place])
        for number, _ in found:
            self.owed[number] -= 1
        return found, [] if found else dead  # what it said before it died comes first

    def _patiently(self) -> list[tuple[int, int]]:
        """Wait for events; kill workers that owe an answer for longer than `patience`, which is an event too.

        Time counts in short pieces, so that an hour in which this whole process was stopped does not.
        """
        piece = min(5.0, self.patience / 8)
        quiet, at = 0.0, time.monotonic()
        while not (events := self._poll.poll(1000 * piece)):
            now = time.monotonic()
            quiet, at = quiet + min(now - at, 2 * piece), now
            if quiet >= self.patience:
                self._kill_the_stuck(quiet)
                quiet = 0.0
        return events

    def _kill_the_stuck(self, seconds: float) -> None:
        for number, process in enumerate(self.processes):
            if not self.owed[number] or process.pid is None:
                continue
            state, stack = stack_of(process.pid)
            slots = self.hosts[number]
            seeds = ", ".join(f"slot {slot} from seed {self.arrays['seeds'][slot]}" for slot in slots)
            text = "environment worker %d (process %d, %s; %s) has not answered for %.0f s: it is killed%s"
            LOG.error(text, number, process.pid, seeds, state, seconds, f"\n{stack}".rstrip())
            self.deaths[number] += DEATHS_OF_A_HANG - 1
            self._hung.add(number)
            process.kill()

    def at_work(self) -> dict[int, int]:
        """Return the seeds of the slots of workers that owe an answer."""
        slots = [slot for number, slots in enumerate(self.hosts) if self.owed[number] for slot in slots]
        return {slot: int(self.arrays["seeds"][slot]) for slot in slots} if self.arrays else {}

    def message(self, number: int) -> tuple[bytes, bytes] | None:
        """Return mark and body of a worker's next message; None from one that died.

        Errors: EnvWorkerError, or the worker's own UserError, where that is what it says.
        """
        try:
            message = self.conns[number].recv_bytes()
        except (EOFError, ConnectionResetError):
            return None
        mark, body = message[:1], message[1:]
        if mark == worker.FAILED:
            text, user_error = pickle.loads(body)
            raise user_error or EnvWorkerError(f"environment worker {number} failed:\n{text}")
        return mark, body

    def replace(self, number: int, pasts: dict[int, worker.Past]) -> None:
        """Start another worker for the slots of one that died; it owes nothing, and first plays their `pasts`.

        Errors: EnvWorkerError when it has died too often; what `message` raises where it has said why.
        """
        while self.message(number) is not None:  # said, but never noted: it will be said again, or is void
            pass
        how = self._how_it_ended(number)
        self.deaths[number] += 1
        if self.deaths[number] >= DEATHS_IN_A_ROW:
            what = "hung again and again" if number in self._hung else f"died {DEATHS_IN_A_ROW} times"
            raise EnvWorkerError(f"environment worker {number} {what} without an episode that came to its end, {how}")
        fate = "is played again by another one" if pasts else "is dropped; another one is started"
        LOG.warning("environment worker %d died (%s): what it played %s", number, how, fate)
        self._put_another(number)
        self._send(number, pasts)

    def _how_it_ended(self, number: int) -> str:
        process = self.processes[number]
        process.join(CLOSE_GRACE_SECONDS)
        if process.is_alive():  # it has hung up, but does not end
            process.kill()
            process.join()
        return f"exit code {process.exitcode}"

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
        self._done.close()
        self._note.close()
        self.arrays.clear()
        self.memory.close()


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
