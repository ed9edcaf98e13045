"""A pool of worker processes: start, wake, listen, replace the dead, and leave none behind."""

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

from omagd.envs.workers.shared_memory import AnonymousMemory, Arrays, Specs, array_views, total_size
from omagd.envs.workers.slot import CLOSE, History
from omagd.envs.workers.worker import FAILED, NOTE, Links, stack_of, work
from omagd.utils.registry import carrying

CLOSE_GRACE_SECONDS = 5.0
DEATHS_IN_A_ROW = 10
"""A worker that dies so often without completing an episode ends the run."""

DEATHS_OF_A_HANG = 5
"""A hang counts as so many deaths, since waiting for it takes long."""

LOG = logging.getLogger("omagd")
_MOST_NOTES = 512 * NOTE.size
_SINGLE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PJRT_NPROC"), "1"
)


class EnvWorkerError(RuntimeError):
    """An environment worker failed or died; the message includes its traceback."""


class WorkerPool:
    """Worker processes and the connections to them.

    Attributes:
        arrays: shared with all workers, from `share` to `close`; worker k plays slot k.
        processes, conns, wakes: one of each per worker; a byte in `wakes` makes the worker execute its commands.
        owed: notes that each worker still owes. deaths: deaths of each worker since it last completed an episode.
        replaced: number of workers replaced so far. timeout: seconds without an answer before a worker is killed.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.conns: list[Connection] = []
        self.wakes: list[Connection] = []
        self.arrays: Arrays = {}
        self.owed: list[int] = []
        self.deaths: list[int] = []
        self.replaced = 0
        self.timeout = math.inf
        self._hung: set[int] = set()
        self.memory = AnonymousMemory()
        self._done, self._note = multiprocessing.get_context("spawn").Pipe(duplex=False)
        self._poll = select.poll()
        self._poll.register(self._done.fileno(), select.POLLIN)
        self._number: dict[int, int] = {}
        self._payload = b""
        self._specs: Specs | None = None

    def start(self, payload: bytes, slots: int) -> None:
        """Start one worker for each slot. payload: pickled function that creates an environment."""
        self._payload = payload
        self.owed, self.deaths = [0] * slots, [0] * slots
        for number in range(slots):
            process, conn, wake = self._spawn(number)
            self.processes.append(process)
            self.conns.append(conn)
            self.wakes.append(wake)

    def _spawn(self, number: int) -> tuple[BaseProcess, Connection, Connection]:
        context = multiprocessing.get_context("spawn")
        conn, their_conn = context.Pipe()
        their_wake, wake = context.Pipe(duplex=False)
        links = Links(their_conn, their_wake, self._note, self.memory)
        args = (links, number, os.getpid(), self._payload, self._specs)
        process = context.Process(target=work, args=args, daemon=True, name=f"env-{number}")
        self._number[conn.fileno()] = number
        self._poll.register(conn.fileno(), 0)  # reports a hang-up only
        with _environment(_SINGLE_THREAD):
            process.start()
        their_conn.close()
        their_wake.close()
        return process, conn, wake

    def facts(self) -> bytes:
        """Return the first worker's description of the environment, once all workers have sent it."""
        return [self._first_message(number) for number in range(len(self.conns))][0]

    def share(self, specs: Specs) -> None:
        """Create the arrays and wait until all workers have mapped them. Errors: as `message`."""
        self.memory.resize(total_size(specs))
        for number in range(len(self.conns)):
            self._send(number, specs)
        for number in range(len(self.conns)):
            while self.message(number) is None:
                self._restart(number)
                self._first_message(number)
                self._send(number, specs)
        self._specs = specs
        self.arrays.update(array_views(self.memory.map(), specs))

    def _send(self, number: int, value: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `message` and `notes` find that it has died
            self.conns[number].send_bytes(pickle.dumps(value))

    def _first_message(self, number: int) -> bytes:
        """Return a worker's first message; restart it if it was killed before."""
        while (message := self.message(number)) is None:
            self._restart(number)
        return message[1]

    def _restart(self, number: int) -> None:
        """Replace a worker that was killed during its start. Errors: EnvWorkerError if it exited by itself."""
        how = self._join(number)
        self.deaths[number] += 1
        if (self.processes[number].exitcode or 0) >= 0 or self.deaths[number] >= DEATHS_IN_A_ROW:
            raise EnvWorkerError(f"environment worker {number} died ({how})")
        LOG.warning("environment worker %d died (%s) during its start and is restarted", number, how)
        self._respawn(number)

    def _respawn(self, number: int) -> None:
        old = self.processes[number], self.conns[number], self.wakes[number]
        self._poll.unregister(old[1].fileno())
        self.owed[number] = 0
        self.processes[number], self.conns[number], self.wakes[number] = self._spawn(number)
        for part in old:
            part.close()
        self.replaced += 1

    def wake(self, number: int) -> None:
        """Make a worker execute its commands; it owes one more note."""
        self.owed[number] += 1
        with contextlib.suppress(BrokenPipeError):  # `notes` finds that it has died
            os.write(self.wakes[number].fileno(), b".")

    def notes(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Wait, then return the notes, each (worker, number of its messages), or without notes the dead workers."""
        here = self._done.fileno()
        found: list[tuple[int, int]] = []
        dead: list[int] = []
        events = self._wait()
        if here not in dict(events):
            events = self._poll.poll(0)  # a worker may have written a note after the first look, and then died
        for place, _ in events:
            if place == here:
                found += NOTE.iter_unpack(os.read(here, _MOST_NOTES))
            else:
                dead.append(self._number[place])
        for number, _ in found:
            self.owed[number] -= 1
        return found, [] if found else dead  # notes of a dead worker come first

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for events; kill workers that have owed an answer for longer than the timeout.

        Time is counted in short pieces: an hour during which this process was stopped does not count.
        """
        piece = min(5.0, self.timeout / 8)
        quiet, at = 0.0, time.monotonic()
        while not (events := self._poll.poll(1000 * piece)):
            now = time.monotonic()
            quiet, at = quiet + min(now - at, 2 * piece), now
            if quiet >= self.timeout:
                self._kill_hung_workers(quiet)
                quiet = 0.0
        return events

    def _kill_hung_workers(self, seconds: float) -> None:
        for number, process in enumerate(self.processes):
            if not self.owed[number] or process.pid is None:
                continue
            state, stack = stack_of(process.pid)
            seed, shown = self.arrays["seeds"][number], f"\n{stack}".rstrip()
            what = f"environment worker {number} (process {process.pid}, slot {number} from seed {seed}; {state})"
            LOG.error("%s has not answered for %.0f s and is killed%s", what, seconds, shown)
            self.deaths[number] += DEATHS_OF_A_HANG - 1
            self._hung.add(number)
            process.kill()

    def message(self, number: int) -> tuple[bytes, bytes] | None:
        """Return type and content of a worker's next message; None if it has died.

        Errors: EnvWorkerError, or the worker's own UserError, if that is the message.
        """
        try:
            message = self.conns[number].recv_bytes()
        except (EOFError, ConnectionResetError):
            return None
        kind, content = message[:1], message[1:]
        if kind == FAILED:
            text, user_error, crash = pickle.loads(content)
            raise user_error or carrying(EnvWorkerError(f"environment worker {number} failed:\n{text}"), crash)
        return kind, content

    def replace(self, number: int, history: History | None) -> None:
        """Replace a worker that died; the new one first replays its `history`; None: its episode is lost.

        Errors: EnvWorkerError after too many deaths; the errors of `message` if it sent one.
        """
        while self.message(number) is not None:  # sent but never noted: it will be sent again, or is void
            pass
        how = self._join(number)
        self.deaths[number] += 1
        if self.deaths[number] >= DEATHS_IN_A_ROW:
            what = "hung repeatedly" if number in self._hung else f"died {DEATHS_IN_A_ROW} times"
            raise EnvWorkerError(f"environment worker {number} {what} without completing an episode, {how}")
        fate = "starts; its episode is lost" if history is None else "replays its episode"
        LOG.warning("environment worker %d died (%s); a new worker %s", number, how, fate)
        self._respawn(number)
        self._send(number, history)

    def _join(self, number: int, seconds: float = CLOSE_GRACE_SECONDS) -> str:
        """Wait for the end of a worker, and kill it after `seconds`; return its exit code in words."""
        process = self.processes[number]
        process.join(max(0.0, seconds))
        if process.is_alive():
            process.kill()
            process.join()
        return f"exit code {process.exitcode}"

    def close(self) -> None:
        """Ask the workers to close, kill those that do not, and free the shared memory."""
        if self.arrays:
            self.arrays["commands"][:] = CLOSE
        for conn, wake in zip(self.conns, self.wakes, strict=True):
            with contextlib.suppress(OSError):
                os.write(wake.fileno(), b".")
            wake.close()
            conn.close()
        deadline = time.monotonic() + CLOSE_GRACE_SECONDS
        for number, process in enumerate(self.processes):
            self._join(number, deadline - time.monotonic())
            process.close()
        self._done.close()
        self._note.close()
        self.arrays.clear()
        self.memory.close()


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)
