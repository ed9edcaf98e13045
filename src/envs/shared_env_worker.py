"""One single environment behind arrays that two processes share: the slot's player, and the worker that hosts it.

One tick is one byte to the worker and one byte back; observations, rewards and actions travel through the arrays.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import numbers
import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.envs.protocol import MultiAgentEnv
from omagd.utils.errors import UserError

# What the parent says.
RESET, STEP, SHOW_FULL, STATS, REPLAY, CLOSE = b"r", b"s", b"f", b"g", b"v", b"c"
# What a worker answers; all but DONE and UNSUPPORTED carry a body.
DONE, UNSUPPORTED, FACTS, NAMES, STATS_ARE, FAILED = b".", b"u", b"i", b"n", b"g", b"e"

MAX_INFO = 32
_PR_SET_PDEATHSIG = 1

Specs = dict[str, tuple[tuple[int, ...], str]]
Arrays = dict[str, np.ndarray]


def array_specs(info: EnvInfo, n_slots: int) -> Specs:
    """Return shape and dtype of every array that the slots share."""
    b, n = n_slots, info.n_agents
    return {
        "obs": ((b, n, info.obs_dim), "float32"),
        "full_obs": ((b, n, info.obs_dim), "float32"),
        "state": ((b, info.state_dim), "float32"),
        "avail": ((b, n, info.n_actions), "bool"),
        "reward": ((b,), "float32"),
        "terminated": ((b,), "bool"),
        "truncated": ((b,), "bool"),
        "info": ((b, MAX_INFO), "float64"),
        "actions": ((b, n), "int64"),
        "seeds": ((b,), "int64"),
        "want_full": ((1,), "bool"),
    }


def _offsets(specs: Specs) -> tuple[dict[str, int], int]:
    """Return where each array begins, on 64-byte boundaries, and the size of all."""
    offsets, end = {}, 0
    for name, (shape, dtype) in specs.items():
        offsets[name] = end
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        end += (size + 63) // 64 * 64
    return offsets, max(end, 64)


def total_size(specs: Specs) -> int:
    """Return the bytes that all arrays need."""
    return _offsets(specs)[1]


def array_views(buffer: memoryview | bytearray, specs: Specs) -> Arrays:
    """Return the arrays that lie in `buffer`."""
    offsets, _ = _offsets(specs)
    return {name: np.ndarray(shape, dtype, buffer, offsets[name]) for name, (shape, dtype) in specs.items()}


class Speaks(Protocol):
    """Whoever takes answers: a pipe, or a stand-in without processes."""

    def send_bytes(self, answer: bytes, /) -> None:
        """Take one answer."""


class SlotPlayer:
    """Plays one single environment and writes what it shows into row `slot` of the arrays."""

    def __init__(self, env: MultiAgentEnv, slot: int, arrays: Arrays) -> None:
        self.env = env
        self.slot = slot
        self.arrays = arrays
        self.info_names: list[str] = []

    def reset(self) -> None:
        """Start an episode from the slot's seed."""
        self.env.reset(seed=int(self.arrays["seeds"][self.slot]))
        self._show()

    def step(self) -> None:
        """Play the slot's actions."""
        arrays, slot = self.arrays, self.slot
        reward, terminated, info = self.env.step(arrays["actions"][slot].copy())
        arrays["reward"][slot] = reward
        arrays["terminated"][slot] = terminated
        arrays["truncated"][slot] = bool(terminated) and bool(info.get("episode_limit", False))
        self._write_info(info)
        self._show()

    def show_full(self) -> None:
        """Write the observation without range limit."""
        self.arrays["full_obs"][self.slot] = self.env.get_obs(no_range_limit=True)

    def _show(self) -> None:
        arrays, slot = self.arrays, self.slot
        arrays["obs"][slot] = self.env.get_obs()
        arrays["state"][slot] = self.env.get_state()
        arrays["avail"][slot] = self.env.get_avail_actions()
        if arrays["want_full"][0]:
            self.show_full()

    def _write_info(self, info: dict[str, Any]) -> None:
        """Write the numbers of `info`, each name in a column of its own, and leave out what is no number."""
        row = self.arrays["info"][self.slot]
        row[:] = 0.0
        for name, value in info.items():
            if not isinstance(value, (numbers.Number, np.generic)):
                continue
            if name not in self.info_names:
                if len(self.info_names) == MAX_INFO:
                    raise ValueError(f"info holds more than {MAX_INFO} numbers; one too many is {name}")
                self.info_names.append(name)
            row[self.info_names.index(name)] = float(value)  # type: ignore[arg-type]


def follow_parent(parent_pid: int) -> None:
    """End with the parent, however it ends (Linux), and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def _describe(error: BaseException) -> bytes:
    kept = error if isinstance(error, UserError) else None
    return FAILED + pickle.dumps((traceback.format_exc(), kept))


def play(conn: Speaks, player: SlotPlayer, command: bytes) -> None:
    """Do what `command` says and answer; names of info values go ahead when there are new ones."""
    known = len(player.info_names)
    answer = DONE
    if command == RESET:
        player.reset()
    elif command == STEP:
        player.step()
    elif command == SHOW_FULL:
        player.show_full()
    elif command == STATS:
        answer = STATS_ARE + json.dumps({k: float(v) for k, v in player.env.get_stats().items()}).encode()
    elif command == REPLAY:
        try:
            player.env.save_replay()
        except NotImplementedError:
            answer = UNSUPPORTED
    if len(player.info_names) > known:
        conn.send_bytes(NAMES + json.dumps(player.info_names).encode())
    conn.send_bytes(answer)


def work(conn: Connection, slot: int, parent_pid: int, payload: bytes) -> None:
    """Host one environment until the parent says so or is gone.

    Setup: send the environment's facts, receive the shared segment's name and layout, answer DONE. Then one answer
    for each command.
    """
    follow_parent(parent_pid)
    env: MultiAgentEnv | None = None
    segment: SharedMemory | None = None
    player: SlotPlayer | None = None
    try:
        env_cls, args = pickle.loads(payload)
        env = env_cls(args)
        conn.send_bytes(FACTS + pickle.dumps(env.get_env_info()))
        name, specs = pickle.loads(conn.recv_bytes())
        segment = SharedMemory(name)
        player = SlotPlayer(env, slot, array_views(segment.buf, specs))
        conn.send_bytes(DONE)
        while (command := conn.recv_bytes()) != CLOSE:
            play(conn, player, command)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent is gone: nobody is left to tell.
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
        with contextlib.suppress(OSError):
            conn.send_bytes(_describe(error))
    finally:
        if player is not None:
            player.arrays = {}
        if env is not None:
            env.close()
        if segment is not None:
            segment.close()
        conn.close()
