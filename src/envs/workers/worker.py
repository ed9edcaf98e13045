"""The worker process: hosts the environment of one slot and executes commands from shared memory.

The parent writes a command into the array `commands` and one byte into the worker's wake pipe. The worker executes the
pending command, then writes one note into a pipe shared by all workers. Results are in the shared arrays;
the few messages that do not fit there (names, counters, errors) go through the worker's own connection.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from omagd.envs.protocol import MultiAgentEnv
from omagd.envs.workers.shared_memory import AnonymousMemory, Specs, array_views
from omagd.envs.workers.slot import CLOSE, EnvSlot, History
from omagd.utils.errors import UserError
from omagd.utils.registry import crash_of

# First byte of a message from a worker; those of its slots are in `slot`.
READY, FACTS, FAILED = b".", b"i", b"e"
# "Commands executed": number of the worker and of the messages it has sent. Smaller than PIPE_BUF: writes are atomic.
NOTE = struct.Struct("<II")

STACK = "omagd_stack"
_STATES = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk", "S": "waiting", "R": "computing"}
_PR_SET_PDEATHSIG = 1


class Links(NamedTuple):
    """A worker's end of its connections: messages, wake pipe, shared note pipe, shared memory."""

    conn: Connection
    wake: Connection
    done: Connection
    memory: AnonymousMemory


def work(links: Links, number: int, parent_pid: int, payload: bytes, specs: Specs | None) -> None:
    """Host the environment of slot `number` until the parent closes this worker or is gone.

    Args:
        payload: pickled function that creates an environment.
        specs: None at the first start: send the environment's facts, receive the specs, reply READY. Otherwise this
            worker replaces one that died: receive the slot's history and replay it.
    """
    _prepare_process(parent_pid)
    env: MultiAgentEnv | None = None
    slot: EnvSlot | None = None
    try:
        env = made = pickle.loads(payload)()
        history: History | None = None
        if first := specs is None:
            links.conn.send_bytes(FACTS + pickle.dumps(made.get_env_info()))
            specs = pickle.loads(links.conn.recv_bytes())
        else:
            history = pickle.loads(links.conn.recv_bytes())
        assert specs is not None
        arrays = array_views(links.memory.map(), specs)
        slot = EnvSlot(made, number, arrays)
        if first:
            links.conn.send_bytes(READY)
        commands = arrays.pop("commands")
        del arrays
        if history is not None:
            slot.replay(history)
        _serve(links, slot, commands)
        del commands
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        with contextlib.suppress(OSError):
            user_error = error if isinstance(error, UserError) else None
            crash = crash_of(error) if user_error is None else None
            links.conn.send_bytes(FAILED + pickle.dumps((traceback.format_exc(), user_error, crash)))
            os.write(links.done.fileno(), NOTE.pack(number, 1))
    finally:
        if slot is not None:
            slot.release()
        if env is not None:
            env.close()
        for end in links:
            end.close()


def _serve(links: Links, slot: EnvSlot, commands: np.ndarray) -> None:
    """Execute commands until CLOSE, or until the parent is gone; one note for each byte in the wake pipe."""
    wake, done, number = links.wake.fileno(), links.done.fileno(), slot.slot
    while os.read(wake, 1):
        command = int(commands[number])
        if command == CLOSE:
            return
        if command:
            commands[number] = 0
            slot.execute(command)
        for message in slot.messages:
            links.conn.send_bytes(message)
        os.write(done, NOTE.pack(number, len(slot.messages)))
        slot.messages.clear()


def _prepare_process(parent_pid: int) -> None:
    """End with the parent (Linux), ignore a terminal's signals, dump the stack on SIGUSR1, let the parent run first."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.register(signal.SIGUSR1, os.memfd_create(STACK), all_threads=False)
    if os.getppid() != parent_pid:
        sys.exit(1)
    if hasattr(os, "SCHED_BATCH"):  # do not preempt the parent while it wakes the other workers
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def stack_of(pid: int, seconds: float = 1.0) -> tuple[str, str]:
    """Return a worker's state in words and its Python stack, innermost call first; "" where it cannot be read.

    The worker dumps its stack into a memfd on SIGUSR1, which is read through /proc.
    """
    process = Path(f"/proc/{pid}")
    try:
        letter = (process / "stat").read_text().rpartition(")")[2].split()[0]
        state = _STATES.get(letter, f"state {letter}")
        (place,) = [entry for entry in (process / "fd").iterdir() if f"memfd:{STACK}" in os.readlink(entry)]
        if letter in "Tt":
            return state, ""
        os.kill(pid, signal.SIGUSR1)
        until = time.monotonic() + seconds
        while not (text := place.read_text(errors="replace")) and time.monotonic() < until:
            time.sleep(0.02)
    except (OSError, ValueError, IndexError):
        return "state unknown", ""
    return state, text
