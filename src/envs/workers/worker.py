"""The worker process: hosts the environment of one slot and executes commands.

The parent sends a command through the worker's connection, the worker executes it and sends one reply. Observations,
actions and rewards are in shared arrays; replies are the few things that do not fit there (results, counters, errors).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from omagd.envs.protocol import MultiAgentEnv
from omagd.envs.workers.shared_memory import mapped
from omagd.envs.workers.slot import EnvSlot
from omagd.utils.errors import UserError
from omagd.utils.registry import crash_of

# First item of a message from a worker.
FACTS, REPLY, FAILED = "facts", "reply", "failed"
_PR_SET_PDEATHSIG = 1


def work(conn: Connection, number: int, parent_pid: int, payload: bytes) -> None:
    """Host the environment of slot `number` until the parent closes the connection or is gone.

    Sends the environment's facts, receives the arrays and the slot's history, replays it, then obeys.

    Args:
        payload: pickled function that creates an environment.
    """
    _prepare_process(parent_pid)
    env: MultiAgentEnv | None = None
    try:
        env = pickle.loads(payload)()
        conn.send((FACTS, env.get_env_info()))
        specs, history = conn.recv()
        memory = recv_handle(conn)
        slot = EnvSlot(env, number, mapped(memory, specs))
        os.close(memory)
        if history is not None:
            slot.replay(history)
        while True:
            conn.send_bytes(pickle.dumps((REPLY, slot.execute(*conn.recv()))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent has closed the connection, or is gone
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        with contextlib.suppress(OSError):
            user_error = error if isinstance(error, UserError) else None
            crash = crash_of(error) if user_error is None else None
            conn.send((FAILED, (traceback.format_exc(), user_error, crash)))
    finally:
        if env is not None:
            env.close()
        conn.close()


def _prepare_process(parent_pid: int) -> None:
    """End with the parent (Linux), ignore a terminal's signals, show the stack on SIGUSR1, let the parent run first."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable(all_threads=False)  # an environment's own code may be killed by its faults
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    if os.getppid() != parent_pid:
        sys.exit(1)
    if hasattr(os, "SCHED_BATCH"):  # do not preempt the parent while it wakes the other workers
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
