"""Single environments that look batched (in this process, or in workers), and a batched one that looks single."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pickle
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.envs import shared_env_worker as worker
from omagd.envs.actions import random_actions
from omagd.envs.protocol import BatchedEnv, MultiAgentEnv, Observation, StepResult

CLOSE_GRACE_SECONDS = 5.0
_SINGLE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "PJRT_NPROC"), "1"
)


class EnvWorkerError(RuntimeError):
    """An environment worker failed or died; the text holds the worker's own traceback."""


def env_info_from_dict(name: str, map_name: str, facts: dict[str, Any]) -> EnvInfo:
    """Return what the field's `get_env_info()` dictionary describes; with a layout if it names `obs_component`.

    `entity_position` and `entity_health` may name the places of (dx, dy) and health in a unit's block; else SMAC's.
    """
    layout = None
    if facts.get("obs_component") is not None:
        move, (n_enemies, enemy_dim), (n_allies, ally_dim), own = facts["obs_component"]
        layout = EntityLayout(
            int(np.prod(move)),
            n_enemies,
            enemy_dim,
            n_allies,
            ally_dim,
            int(np.prod(own)),
            position=tuple(facts.get("entity_position", (2, 3))),
            health=int(facts.get("entity_health", 4 if min(enemy_dim, ally_dim) > 4 else -1)),
        )
    return EnvInfo(
        name=name,
        map_name=map_name,
        n_agents=int(facts["n_agents"]),
        n_actions=int(facts["n_actions"]),
        obs_dim=int(np.prod(facts["obs_shape"])),
        state_dim=int(np.prod(facts["state_shape"])),
        episode_limit=int(facts["episode_limit"]),
        n_normal_actions=int(facts.get("n_normal_actions", 0)),
        layout=layout,
        scripted_policies=("random",),
        has_win=bool(facts.get("has_win", True)),
    )


class _ManyEnvs(BatchedEnv):
    """What both adapters share: arrays of all slots, and commands to the slots that a mask names."""

    _arrays: worker.Arrays

    def _begin(self, env_cls: type[MultiAgentEnv], args: BaseModel, facts: dict[str, Any], name: str | None) -> None:
        """Take the environment's facts; results are labelled with `name`, by default the class's."""
        self.args_model = type(args)  # type: ignore[misc]
        label = name or env_cls.__name__
        map_name = args.model_dump().get("map_name") or facts.get("map_name") or label
        self.info = env_info_from_dict(label, str(map_name), facts)

    @abstractmethod
    def _command(self, command: bytes, which: np.ndarray) -> list[bytes]:
        """Let the slots `which` do `command`; return their answers in order."""

    @abstractmethod
    def _info_names(self, slot: int) -> list[str]:
        """Return the names of the columns of `info` in that slot."""

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new episodes in the slots `which`, slot b from `seeds[b]`."""
        which = np.asarray(which, bool)
        self._arrays["seeds"][which] = np.asarray(seeds)[which]
        self._command(worker.RESET, which)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the active slots, all at once where they have processes."""
        active = np.asarray(active, bool)
        self._arrays["actions"][active] = np.asarray(actions)[active]
        self._command(worker.STEP, active)
        terminated = self._arrays["terminated"] & active
        return StepResult(
            reward=np.where(active, self._arrays["reward"], np.float32(0.0)),
            terminated=terminated,
            truncated=self._arrays["truncated"] & active,
            info=self._episode_info(terminated),
        )

    def _episode_info(self, terminated: np.ndarray) -> dict[str, np.ndarray]:
        names = dict.fromkeys(name for slot in range(self.n_slots) for name in self._info_names(slot))
        found = {name: np.zeros(self.n_slots, np.float32) for name in names}
        for slot in np.flatnonzero(terminated):
            for column, name in enumerate(self._info_names(int(slot))):
                found[name][slot] = self._arrays["info"][slot, column]
        return found

    def observe(self, full: bool = False) -> Observation:
        """Return copies of what all slots show; once asked for, `full_obs` is computed along with each step."""
        if full and not self._arrays["want_full"][0]:
            self._command(worker.SHOW_FULL, np.ones(self.n_slots, bool))
        self._arrays["want_full"][0] = full
        obs, state, avail = (self._arrays[name].copy() for name in ("obs", "state", "avail"))
        return Observation(obs, state, avail, self._arrays["full_obs"].copy() if full else None)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions drawn uniformly from the available ones (policy "random")."""
        if policy not in self.info.scripted_policies:
            return super().scripted_actions(policy, rng)
        return random_actions(self._arrays["avail"], rng)

    def get_stats(self) -> dict[str, float]:
        """Return the counters summed over the slots; a name that ends in "_rate" is averaged."""
        answers = self._command(worker.STATS, np.ones(self.n_slots, bool))
        each = [json.loads(answer) for answer in answers]
        names = dict.fromkeys(name for stats in each for name in stats)
        total = {name: sum(stats.get(name, 0.0) for stats in each) for name in names}
        return {name: value / len(each) if name.endswith("_rate") else value for name, value in total.items()}

    def save_replay(self, folder: str) -> None:
        """Let each environment write its replay where its own arguments say. Errors: NotImplementedError."""
        if worker.UNSUPPORTED in self._command(worker.REPLAY, np.ones(self.n_slots, bool)):
            super().save_replay(folder)


class SerialEnvs(_ManyEnvs):
    """Single environments in this process, one after another."""

    def __init__(self, env_cls: type[MultiAgentEnv], args: BaseModel, n_slots: int, name: str | None = None) -> None:
        self.n_slots = n_slots
        self._envs = [env_cls(args) for _ in range(n_slots)]  # type: ignore[call-arg]
        self._begin(env_cls, args, self._envs[0].get_env_info(), name)
        specs = worker.array_specs(self.info, n_slots)
        self._arrays = worker.array_views(bytearray(worker.total_size(specs)), specs)
        self._players = [worker.SlotPlayer(env, slot, self._arrays) for slot, env in enumerate(self._envs)]

    def _info_names(self, slot: int) -> list[str]:
        return self._players[slot].info_names

    def _command(self, command: bytes, which: np.ndarray) -> list[bytes]:
        answers = []
        for slot in np.flatnonzero(which):
            conn = _Answers()
            worker.play(conn, self._players[slot], command)
            answers.append(conn.last)
        return answers

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs:
            env.close()


class _Answers:
    """Takes a worker's answers without a worker."""

    last = b""

    def send_bytes(self, answer: bytes, /) -> None:
        """Keep the last answer without its mark."""
        self.last = answer if answer == worker.UNSUPPORTED else answer[1:]


class ProcessEnvs(_ManyEnvs):
    """Single environments, each in a worker process that writes into shared memory.

    The workers are started by spawn, compute with one thread, end with this process, and leave Ctrl-C to it. An
    environment's error arrives as EnvWorkerError with its traceback (a UserError as itself) and closes all workers.
    The thread that constructs this must live as long as it: Linux ends the workers with that thread.
    """

    def __init__(self, env_cls: type[MultiAgentEnv], args: BaseModel, n_slots: int, name: str | None = None) -> None:
        self.n_slots = n_slots
        self._names: list[list[str]] = [[] for _ in range(n_slots)]
        self._processes: list[BaseProcess] = []
        self._conns: list[Connection] = []
        self._arrays = _SharedArrays()
        self._segments: list[SharedMemory] = []
        self._finalizer = weakref.finalize(self, _release, self._processes, self._conns, self._arrays, self._segments)
        try:
            self._start(pickle.dumps((env_cls, args)))
            facts = [pickle.loads(self._answer(slot)) for slot in range(n_slots)][0]
            self._begin(env_cls, args, facts, name)
            self._share(worker.array_specs(self.info, n_slots))
        except BaseException:
            self.close()
            raise

    def _start(self, payload: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        with _environment(_SINGLE_THREAD):
            for slot in range(self.n_slots):
                conn, theirs = context.Pipe()
                process = context.Process(
                    target=worker.work, args=(theirs, slot, os.getpid(), payload), daemon=True, name=f"env-{slot}"
                )
                self._conns.append(conn)
                process.start()
                self._processes.append(process)
                theirs.close()

    def _share(self, specs: worker.Specs) -> None:
        """Let all workers map one segment and remove its name at once: nothing is left behind, however we end."""
        segment = SharedMemory(create=True, size=worker.total_size(specs))
        self._segments.append(segment)
        try:
            for conn in self._conns:
                conn.send_bytes(pickle.dumps((segment.name, specs)))
            for slot in range(self.n_slots):
                self._answer(slot)
        finally:
            segment.unlink()
        self._arrays.update(worker.array_views(segment.buf, specs))

    def _info_names(self, slot: int) -> list[str]:
        return self._names[slot]

    def _answer(self, slot: int) -> bytes:
        """Return the body of the slot's answer. Errors: EnvWorkerError, or the worker's UserError."""
        try:
            answer = self._conns[slot].recv_bytes()
        except (EOFError, ConnectionResetError):
            self._processes[slot].join(CLOSE_GRACE_SECONDS)
            code = self._processes[slot].exitcode
            raise EnvWorkerError(f"environment worker {slot} died (exit code {code})") from None
        mark, body = answer[:1], answer[1:]
        if mark == worker.FAILED:
            text, user_error = pickle.loads(body)
            raise user_error or EnvWorkerError(f"environment worker {slot} failed:\n{text}")
        if mark == worker.NAMES:
            self._names[slot] = json.loads(body)
            return self._answer(slot)
        return mark if mark == worker.UNSUPPORTED else body

    def _command(self, command: bytes, which: np.ndarray) -> list[bytes]:
        if not self._finalizer.alive:
            raise EnvWorkerError("the environment workers are closed")
        slots = [int(slot) for slot in np.flatnonzero(which)]
        try:
            for slot in slots:
                with contextlib.suppress(BrokenPipeError):  # the answer tells why
                    self._conns[slot].send_bytes(command)
            return [self._answer(slot) for slot in slots]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all workers and release the shared memory. May be called twice."""
        self._finalizer()


class _SharedArrays(dict[str, np.ndarray]):
    """The arrays by name; empty once the workers are closed."""

    def __missing__(self, name: str) -> np.ndarray:
        raise EnvWorkerError(f"no {name}: the environment workers are closed")


def _release(
    processes: list[BaseProcess], conns: list[Connection], arrays: worker.Arrays, segments: list[SharedMemory]
) -> None:
    """Ask the workers to close, wait a little, then make them; let go of the shared memory."""
    for conn in conns:
        with contextlib.suppress(OSError):
            conn.send_bytes(worker.CLOSE)
        conn.close()
    deadline = time.monotonic() + CLOSE_GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()
    arrays.clear()
    for segment in segments:
        segment.close()


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


class BatchedAsSingle(MultiAgentEnv):
    """The only slot of a batched environment as the field's single environment.

    Args:
        env: a batched environment with one slot.
        more_info: further entries of `get_env_info()` ("state_component", "map_type", ...).
    """

    def __init__(self, env: BatchedEnv, more_info: dict[str, Any] | None = None) -> None:
        if env.n_slots != 1:
            raise ValueError(f"a single environment has one slot, not {env.n_slots}")
        self.env = env
        self.args_model = env.args_model  # type: ignore[misc]
        self._more_info = dict(more_info or {})
        self._rng = np.random.default_rng(0)
        self._slot = np.ones(1, bool)

    def reset(self, seed: int | None = None) -> None:
        """Start an episode; without a seed, the next one of a fixed stream."""
        chosen = int(self._rng.integers(2**62)) if seed is None else seed
        self.env.reset(self._slot, np.array([chosen], np.int64))

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play [n] actions; `episode_limit` in the info means truncated, as PyMARL reads it."""
        result = self.env.step(np.asarray(actions)[None], self._slot)
        info = {name: values[0].item() for name, values in result.info.items()}
        info["episode_limit"] = bool(result.truncated[0])
        return float(result.reward[0]), bool(result.terminated[0]), info

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, obs_dim] float32."""
        seen = self.env.observe(full=no_range_limit)
        return (seen.full_obs if seen.full_obs is not None else seen.obs)[0].copy()

    def get_state(self) -> np.ndarray:
        """Return [state_dim] float32."""
        return self.env.observe().state[0].copy()

    def get_avail_actions(self) -> np.ndarray:
        """Return [n, A] bool."""
        return self.env.observe().avail_actions[0].copy()

    def get_env_info(self) -> dict[str, Any]:
        """Return the field's dictionary; the entries on entities only where there is a layout."""
        info = self.env.info
        facts: dict[str, Any] = {
            "n_agents": info.n_agents,
            "n_actions": info.n_actions,
            "obs_shape": info.obs_dim,
            "state_shape": info.state_dim,
            "episode_limit": info.episode_limit,
            "map_name": info.map_name,
            "has_win": info.has_win,
        }
        if info.layout is not None:
            facts["obs_component"] = info.layout.obs_component
            facts["entity_position"] = info.layout.position
            facts["entity_health"] = info.layout.health
            facts["n_enemies"] = info.layout.n_enemies
            facts["n_allies"] = info.layout.n_allies
            facts["n_normal_actions"] = info.n_normal_actions
        return {**facts, **self._more_info}

    def get_stats(self) -> dict[str, float]:
        """Return counters."""
        return self.env.get_stats()

    def close(self) -> None:
        """Release everything."""
        self.env.close()
