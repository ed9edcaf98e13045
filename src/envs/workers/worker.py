"""Single environments behind arrays that processes share: the player of a slot, and the worker that hosts some slots.

A command is one byte in `orders` of the slot and one byte that wakes its worker; when all orders that a worker found
are done, one small note goes into a pipe that all workers share. What is said in words travels apart, and seldom.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import signal
import struct
import sys
import traceback
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from omagd.config.env_info import EnvInfo
from omagd.envs.outputs import fault, numeric_array, wrong_flag, wrong_number, zeros_and_ones
from omagd.envs.protocol import AGENT_REWARD, TRUNCATED, MultiAgentEnv
from omagd.envs.workers.shared_memory import NamelessMemory
from omagd.envs.workers.stack import offer_stack
from omagd.utils.errors import UserError
from omagd.utils.seeding import generator

# What a slot may be ordered to do; 0: nothing. The name of the last one closes the worker.
RESET, STEP, SHOW_FULL, STATS, REPLAY, CHOOSE, CLOSE = 1, 2, 3, 4, 5, 6, 7
# What a worker says in words: a mark, then a body.
DONE, UNSUPPORTED, FACTS, NAMES, STATS_ARE, FAILED = b".", b"u", b"i", b"n", b"g", b"e"
# "The orders are done": the worker's number and how many messages it has sent. Smaller than a pipe ever splits.
NOTE = struct.Struct("<II")

MAX_INFO = 32
MAX_PATH = 4096
RANDOM = "random"  # the script that is drawn where all slots are known
_PR_SET_PDEATHSIG = 1

Specs = dict[str, tuple[tuple[int, ...], str]]
Arrays = dict[str, np.ndarray]


class Past(NamedTuple):
    """What a slot had done in a worker that died: [T, n] actions since a reset, None if none; names in its info."""

    seed: int | None
    actions: np.ndarray
    names: list[str]


def scripts_of(policies: Iterable[str]) -> list[str]:
    """Return the scripts that each slot plays for itself, in their order in `scripted`."""
    return [policy for policy in policies if policy != RANDOM]


def array_specs(info: EnvInfo, n_slots: int) -> Specs:
    """Return shape and dtype of every array that the slots share."""
    b, n = n_slots, info.n_agents
    return {
        "obs": ((b, n, info.obs_dim), "float32"),
        "full_obs": ((b, n, info.obs_dim), "float32"),
        "state": ((b, info.state_dim), "float32"),
        "avail": ((b, n, info.n_actions), "bool"),
        "reward": ((b,), "float32"),
        "agent_reward": ((b, n if info.agent_rewards else 0), "float32"),
        "terminated": ((b,), "bool"),
        "truncated": ((b,), "bool"),
        "lost": ((b,), "bool"),
        "info": ((b, MAX_INFO), "float64"),
        "actions": ((b, n), "int64"),
        "scripted": ((b, len(scripts_of(info.scripted_policies)), n), "int64"),
        "seeds": ((b,), "int64"),
        "want_full": ((1,), "bool"),
        "folder": ((MAX_PATH,), "uint8"),
        "orders": ((b,), "uint8"),
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


def array_views(buffer: mmap.mmap | bytearray, specs: Specs) -> Arrays:
    """Return the arrays that lie in `buffer`."""
    offsets, _ = _offsets(specs)
    return {name: np.ndarray(shape, dtype, buffer, offsets[name]) for name, (shape, dtype) in specs.items()}


class SlotPlayer:
    """Plays one single environment and writes what it shows into row `slot` of the arrays.

    Attributes:
        told: messages that wait to be sent, a mark and the slot and a body as JSON each.
    """

    def __init__(self, env: MultiAgentEnv, slot: int, arrays: Arrays) -> None:
        self.env = env
        self.slot = slot
        self.arrays = arrays
        self.info_names: list[str] = []
        self.told: list[bytes] = []
        self._seed = self._steps = 0
        self._counted_before: dict[str, float] = {}
        self._agent_reward = arrays["agent_reward"][slot]
        rows = (arrays[name][slot] for name in ("obs", "full_obs", "state", "avail", "actions", "info", "scripted"))
        self._obs, self._full_obs, self._state, self._avail, self._actions, self._info, self._scripted = rows

    def obey(self, order: int) -> None:
        """Do what one of the orders says."""
        if order == STEP:
            self.step()
        elif order == RESET:
            self.reset()
        elif order == SHOW_FULL:
            self.show_full()
        elif order == STATS:
            counted, before = self._stats(), self._counted_before
            self._tell(STATS_ARE, {name: value - before.get(name, 0.0) for name, value in counted.items()})
        elif order == CHOOSE:
            self.choose()
        elif order == REPLAY:
            try:
                self.env.save_replay(bytes(self.arrays["folder"]).rstrip(b"\0").decode())
            except NotImplementedError:
                self._tell(UNSUPPORTED, None)

    def let_go(self) -> None:
        """Hold no view of the arrays any longer, so that their memory can be released."""
        self.arrays = {}
        nothing = self._agent_reward = np.empty(0)
        self._obs = self._full_obs = self._state = self._avail = self._actions = self._info = self._scripted = nothing

    def catch_up(self, past: Past) -> None:
        """Play silently what the slot had played in a worker that died; what that counts, the other had counted."""
        self.info_names = list(past.names)
        if past.seed is None:
            return
        self._seed, self._steps = past.seed, len(past.actions)
        self.env.reset(seed=past.seed)
        for actions in past.actions:
            self.env.step(actions)
        self._counted_before = {k: v for k, v in self._stats().items() if not k.endswith(("_rate", "_build"))}

    def _stats(self) -> dict[str, float]:
        return {name: float(value) for name, value in (self.env.get_stats() or {}).items()}

    def _tell(self, mark: bytes, body: Any) -> None:
        self.told.append(mark + json.dumps([self.slot, body]).encode())

    def reset(self) -> None:
        """Start an episode from the slot's seed."""
        self._seed, self._steps = int(self.arrays["seeds"][self.slot]), 0
        self.env.reset(seed=self._seed)
        self._show()

    def step(self) -> None:
        """Play the slot's actions."""
        arrays, slot = self.arrays, self.slot
        reward, terminated, info = self.env.step(self._actions.copy())
        self._steps += 1
        for name, wrong in (("reward", wrong_number(reward)), ("terminated", wrong_flag(terminated))):
            if wrong:
                raise self._fault(f"{name} {wrong}")
        if not isinstance(info, Mapping):
            raise self._fault(f"info is {info!r}, not a dictionary")
        with np.errstate(over="ignore"):  # as in `_write`
            arrays["reward"][slot] = reward
        if self._agent_reward.size:
            self._write_agent_reward(info)
        arrays["terminated"][slot] = terminated
        limit = TRUNCATED if TRUNCATED in info else "episode_limit"
        arrays["truncated"][slot] = bool(terminated) and self._says(info, limit)
        arrays["lost"][slot] = bool(terminated) and self._says(info, "lost")
        if info:
            self._write_info(info)
        elif self.info_names:
            self._info[:] = 0.0
        self._show()

    def _says(self, info: Mapping[str, Any], name: str) -> bool:
        """Return the yes or no in an entry of `info`; no where there is none."""
        if wrong := wrong_flag(info.get(name, False)):
            raise self._fault(f"info[{name!r}] {wrong}")
        return bool(info.get(name, False))

    def _write_agent_reward(self, info: Mapping[str, Any]) -> None:
        self._write(f"info[{AGENT_REWARD!r}]", self._agent_reward, info.get(AGENT_REWARD, ()))

    def choose(self) -> None:
        """Write what each of the environment's scripts would do now."""
        rng = generator(self._seed, "script", self._steps)
        for place, policy in enumerate(scripts_of(self.env.scripted_policies)):
            self._scripted[place] = self.env.get_scripted_actions(policy, rng)

    def show_full(self) -> None:
        """Write the observation without range limit."""
        self._write("full_obs", self._full_obs, self.env.get_obs(no_range_limit=True))

    def _show(self) -> None:
        self._write("obs", self._obs, self.env.get_obs())
        self._write("state", self._state, self.env.get_state())
        self._write("avail_actions", self._avail, self.env.get_avail_actions(), flags=True)
        if self.arrays["want_full"][0]:
            self.show_full()

    def _write(self, name: str, row: np.ndarray, value: Any, flags: bool = False) -> None:
        """Write what the environment returned as `name`. Errors: UserError for another shape or no numbers.

        flags: only zeros and ones are right.
        """
        array, wrong = numeric_array(value, row.shape)
        if flags and not wrong and array.dtype != bool and not zeros_and_ones(array).all():
            wrong = f"holds {array[~zeros_and_ones(array)][0]}, not 0 or 1"
        if wrong:
            raise self._fault(f"{name} {wrong}")
        with np.errstate(over="ignore"):  # what becomes an infinity is found where all slots are checked
            row[...] = array

    def _fault(self, what: str) -> UserError:
        return fault(type(self.env).__name__, self.slot, self._seed, self._steps, what)

    def _write_info(self, info: Mapping[str, Any]) -> None:
        """Write the numbers of `info`, each name in a column of its own; leave out what is no number or no result.

        Errors: UserError for more numbers than there is room for, and for `battle_won` that is no number.
        """
        known = len(self.info_names)
        self._info[:] = 0.0
        for name, value in info.items():
            if name in ("lost", TRUNCATED, AGENT_REWARD):
                continue
            if wrong := wrong_number(value):
                if name == "battle_won":  # left out, the share of episodes won would be missing without a word
                    raise self._fault(f"info['battle_won'] {wrong}")
                continue
            if name not in self.info_names:
                if len(self.info_names) == MAX_INFO:
                    raise self._fault(f"info holds more than {MAX_INFO} numbers; one too many is {name!r}")
                self.info_names.append(name)
            self._info[self.info_names.index(name)] = float(value)
        if len(self.info_names) > known:
            self._tell(NAMES, self.info_names)


def follow_parent(parent_pid: int) -> None:
    """End with the parent, however it ends (Linux), and leave signals of a terminal to it."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def _give_way() -> None:
    """Do not take the processor from the parent the moment it wakes us: it has others to wake (Linux)."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _describe(error: BaseException) -> bytes:
    kept = error if isinstance(error, UserError) else None
    return FAILED + pickle.dumps((traceback.format_exc(), kept))


def _serve(players: list[SlotPlayer], orders: np.ndarray) -> bool:
    """Let the players do what is ordered; return whether the worker shall close."""
    for player in players:
        order = int(orders[player.slot])
        if order == CLOSE:
            return True
        if order:
            orders[player.slot] = 0
            player.obey(order)
    return False


def _work_on(conn: Connection, wake: int, done: int, number: int, players: list[SlotPlayer]) -> None:
    """Serve until told to close, or until the parent is gone. wake, done: file descriptors."""
    orders = players[0].arrays["orders"]
    while os.read(wake, 1):
        if _serve(players, orders):
            return
        told = 0
        for player in players:
            for message in player.told:
                conn.send_bytes(message)
                told += 1
            player.told.clear()
        os.write(done, NOTE.pack(number, told))


class Links(NamedTuple):
    """A worker's ends of what connects it: words, bytes that wake it, the pipe for its notes, the shared arrays."""

    conn: Connection
    wake: Connection
    done: Connection
    memory: NamelessMemory

    def close(self) -> None:
        """Let go of all."""
        for end in self:
            end.close()


def work(
    links: Links,
    number: int,
    slots: range,
    parent_pid: int,
    payload: bytes,
    specs: Specs | None,
) -> None:
    """Host the environments of `slots` until the parent says so or is gone. number: of this worker.

    payload: what makes an environment, pickled.

    Setup, where `specs` are not known yet: send the environment's facts, receive the arrays' layout, answer DONE. Else
    this worker replaces another: receive what each slot had done, and catch up. Then follow the orders in the shared
    arrays, one note for each byte that wakes.
    """
    follow_parent(parent_pid)
    offer_stack()
    _give_way()
    envs: list[MultiAgentEnv] = []
    players: list[SlotPlayer] = []
    try:
        make_env = pickle.loads(payload)
        envs += [make_env() for _ in slots]
        pasts: dict[int, Past] | None = None
        if specs is None:
            links.conn.send_bytes(FACTS + pickle.dumps(envs[0].get_env_info()))
            specs = pickle.loads(links.conn.recv_bytes())
        else:
            pasts = pickle.loads(links.conn.recv_bytes())
        arrays = array_views(links.memory.map(), specs)
        players += [SlotPlayer(env, slot, arrays) for env, slot in zip(envs, slots, strict=True)]
        if pasts is None:
            links.conn.send_bytes(DONE)
        del arrays
        for player in players:
            if pasts:
                player.catch_up(pasts[player.slot])
        _work_on(links.conn, links.wake.fileno(), links.done.fileno(), number, players)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # The parent is gone: nobody is left to tell.
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent raises it
        with contextlib.suppress(OSError):
            links.conn.send_bytes(_describe(error))
            os.write(links.done.fileno(), NOTE.pack(number, 1))
    finally:
        for player in players:
            player.let_go()
        for env in envs:
            env.close()
        links.close()
