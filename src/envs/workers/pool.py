"""A pool of worker processes: start, command, listen, replace the dead, and leave none behind."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import pickle
import select
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any

from omagd.envs.workers.shared_memory import Arrays, Specs, mapped, new_memory, total_size
from omagd.envs.workers.slot import History
from omagd.envs.workers.worker import FAILED, REPLY, work
from omagd.utils.errors import RunFailed
from omagd.utils.registry import carrying

CLOSE_GRACE_SECONDS = 5.0
DEATHS_IN_A_ROW = 10
"""A worker that dies so often without completing an episode ends the run."""

DEATHS_OF_A_HANG = 5
"""A hang counts as so many deaths, since waiting for it takes long."""

LOG = logging.getLogger("omagd")
STACK_SECONDS = 0.2  # in which hung workers write their stacks
_SINGLE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PJRT_NPROC"), "1"
)


class EnvWorkerError(RuntimeError):
    """An environment worker failed or died; the message includes its traceback."""


class EnvWorkerDied(EnvWorkerError, RunFailed):
    """Environment workers die again and again: a run cannot go on, and no line of Python says why."""


class WorkerPool:
    """Worker processes and the connections to them.

    Attributes:
        arrays: shared with all workers, from `share` to `close`; worker k plays slot k.
        processes, conns: one of each per worker.
        owed: whether each worker owes a reply. deaths: deaths of each worker since it last completed an episode.
        replaced: number of workers replaced so far. timeout: seconds without an answer before a worker is killed.
    """

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.conns: list[Connection] = []
        self.arrays: Arrays = {}
        self.owed: list[bool] = []
        self.deaths: list[int] = []
        self.replaced = 0
        self.timeout = math.inf
        self._hung: set[int] = set()
        self._memory = -1  # its descriptor
        self._poll = select.poll()
        self._number: dict[int, int] = {}
        self._payload = b""
        self._specs: Specs = {}

    def start(self, payload: bytes, slots: int) -> None:
        """Start one worker for each slot. payload: pickled function that creates an environment."""
        self._payload = payload
        self.owed, self.deaths = [False] * slots, [0] * slots
        for number in range(slots):
            process, conn = self._spawn(number)
            self.processes.append(process)
            self.conns.append(conn)

    def _spawn(self, number: int) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("spawn")
        conn, theirs = context.Pipe()
        args = (theirs, number, os.getpid(), self._payload)
        process = context.Process(target=work, args=args, daemon=True, name=f"env-{number}")
        self._number[conn.fileno()] = number
        self._poll.register(conn.fileno(), select.POLLIN)
        with _environment(_SINGLE_THREAD):
            process.start()
        theirs.close()
        return process, conn

    def facts(self) -> Any:
        """Return the first worker's description of the environment, once all workers have sent it.

        A worker that is killed before is replaced. Errors: as `message`, and EnvWorkerError if one exits by itself.
        """
        found = {}
        for number in range(len(self.conns)):
            while (message := self.message(number)) is None:
                how = self._join(number)
                self.deaths[number] += 1
                if (self.processes[number].exitcode or 0) >= 0 or self.deaths[number] >= DEATHS_IN_A_ROW:
                    raise EnvWorkerDied(f"environment worker {number} died ({how}) during its start")
                LOG.warning("environment worker %d died (%s) during its start and is restarted", number, how)
                self._respawn(number)
            found[number] = message[1]
        return found[0]

    def share(self, specs: Specs) -> None:
        """Create the arrays, and let all workers map them."""
        self._specs, self._memory = specs, new_memory(total_size(specs))
        self.arrays.update(mapped(self._memory, specs))
        for number in range(len(self.conns)):
            self._hand_over(number, None)

    def _hand_over(self, number: int, history: History | None) -> None:
        """Let a worker map the arrays, and begin with `history`."""
        self._send(number, (self._specs, history))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_handle(self.conns[number], self._memory, self.processes[number].pid)

    def _send(self, number: int, value: object) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `replies` finds that it has died
            self.conns[number].send_bytes(pickle.dumps(value))  # `send` pickles at a third of the speed

    def _respawn(self, number: int) -> None:
        old = self.processes[number], self.conns[number]
        self._poll.unregister(old[1].fileno())
        self.owed[number] = False
        self.processes[number], self.conns[number] = self._spawn(number)
        for part in old:
            part.close()
        self.replaced += 1

    def command(self, number: int, command: int, argument: object = None) -> None:
        """Make a worker execute a command; it owes a reply."""
        self.owed[number] = True
        self._send(number, (command, argument))

    def replies(self) -> tuple[list[tuple[int, Any]], list[int]]:
        """Wait, then return replies, each (worker, reply), and the workers that have died. Errors: as `message`."""
        found: list[tuple[int, Any]] = []
        dead: list[int] = []
        for place, _ in self._wait():
            number = self._number[place]
            message = self.message(number)
            if message is None:
                dead.append(number)
            elif message[0] == REPLY:  # not the facts, which one that replaces another sends again
                self.owed[number] = False
                found.append((number, message[1]))
        return found, dead

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
        hung = [number for number, owed in enumerate(self.owed) if owed]
        for number in hung:
            pid, seed = self.processes[number].pid or 0, self.arrays["seeds"][number]
            what = f"environment worker {number} (process {pid}, slot {number} from seed {seed})"
            LOG.error("%s has not answered for %.0f s and is killed; its stack is on stderr", what, seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_SECONDS)
        for number in hung:
            self.deaths[number] += DEATHS_OF_A_HANG - 1
            self._hung.add(number)
            self.processes[number].kill()

    def message(self, number: int) -> tuple[str, Any] | None:
        """Return kind and content of a worker's next message; None if it has died.

        Errors: EnvWorkerError, or the worker's own UserError, if that is the message.
        """
        try:
            kind, content = self.conns[number].recv()
        except (EOFError, OSError):  # also in the middle of a message
            return None
        if kind == FAILED:
            text, user_error, crash = content
            raise user_error or carrying(EnvWorkerError(f"environment worker {number} failed:\n{text}"), crash)
        return kind, content

    def replace(self, number: int, history: History | None) -> None:
        """Replace a worker that died; the new one first replays its `history`; None: its episode is lost.

        Errors: EnvWorkerError after too many deaths.
        """
        how = self._join(number)
        self.deaths[number] += 1
        if self.deaths[number] >= DEATHS_IN_A_ROW:
            what = "hung repeatedly" if number in self._hung else f"died {DEATHS_IN_A_ROW} times"
            raise EnvWorkerDied(f"environment worker {number} {what} without completing an episode, {how}")
        fate = "starts; its episode is lost" if history is None else "replays its episode"
        LOG.warning("environment worker %d died (%s); a new worker %s", number, how, fate)
        self._respawn(number)
        self._hand_over(number, history)

    def _join(self, number: int, seconds: float = CLOSE_GRACE_SECONDS) -> str:
        """Wait for the end of a worker, and kill it after `seconds`; return its exit code in words."""
        process = self.processes[number]
        process.join(max(0.0, seconds))
        if process.is_alive():
            process.kill()
            process.join()
        return f"exit code {process.exitcode}"

    def close(self) -> None:
        """Let the workers end, kill those that do not, and free the shared memory."""
        for conn in self.conns:
            conn.close()
        deadline = time.monotonic() + CLOSE_GRACE_SECONDS
        for number, process in enumerate(self.processes):
            self._join(number, deadline - time.monotonic())
            process.close()
        self.arrays.clear()
        if self._memory >= 0:
            os.close(self._memory)


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
