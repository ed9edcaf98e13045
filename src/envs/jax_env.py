"""Environments that JAX plays: batched and compiled in this process, with NumPy arrays outside.

Shapes: B slots, n agents, A actions.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import platform
import sys
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from omagd.envs.protocol import BatchedEnv, Observation, ResidentGame, StepResult, require_available
from omagd.utils.compiling import user_cache
from omagd.utils.errors import UserError, require_extra

if TYPE_CHECKING:
    import torch


class JaxArgs(BaseModel):
    """Arguments of environments that JAX plays.

    Attributes:
        jax_platform: JAX platform, unless the variable JAX_PLATFORMS is set.
        jax_threads: threads of JAX on a CPU, unless the variable PJRT_NPROC is set.
    """

    model_config = ConfigDict(frozen=True)
    jax_platform: Literal["cpu", "cuda"] = "cpu"
    jax_threads: int = Field(default=1, ge=1)

    @property
    def package(self) -> str:
        """Package of the environment, whose version belongs to results."""
        return "jaxmarl"


def _cache_dir() -> Path:
    """Return the folder of compiled programs in the user's cache, one for each CPU type."""
    cpu = platform.machine() + platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu += "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
    return user_cache("jax", f"{zlib.crc32(cpu.encode()):08x}")


def import_jax(args: JaxArgs, name: str) -> Any:
    """Import JAX for the environment `name`, configured once per process. Errors: UserError without extra or device."""
    require_extra(f"env={name}", name, "jax", "jaxmarl")
    os.environ.setdefault("JAX_PLATFORMS", args.jax_platform)
    os.environ.setdefault("PJRT_NPROC", str(args.jax_threads))
    # JAX would take three quarters of a GPU's memory, which torch uses too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax: Any = import_module("jax")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(_cache_dir()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    leave_collection_to_xla()
    try:
        jax.devices()
    except (AssertionError, RuntimeError):  # of a JAX without CUDA, and of one that finds no GPU
        given = os.environ["JAX_PLATFORMS"]
        how = "Install it (docs/gpu.md), or give cpu"
        raise UserError(f"env_args.jax_platform or JAX_PLATFORMS={given}: JAX has no such device here. {how}") from None
    return jax


def leave_collection_to_xla() -> None:
    """Let Python collect garbage without JAX, which XLA also does whenever it runs a program.

    JAX's callback runs in whichever thread Python collects. It has crashed there (jax issue 15810), and the exception
    of a signal that arrives in it is lost: a run that is asked to stop would go on.
    """
    gc.callbacks[:] = [call for call in gc.callbacks if getattr(call, "__name__", "") != "_xla_gc_callback"]


def import_jaxmarl() -> Any:
    """Import JaxMARL without its output."""
    # The import prints, and its optional part "mabrax" replaces sys.stdout: block that part.
    optional = "jaxmarl.environments.mabrax"
    blocked = optional not in sys.modules
    if blocked:
        sys.modules[optional] = None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return import_module("jaxmarl")
    finally:
        if blocked:
            del sys.modules[optional]


class Program:
    """Compiled functions on a batch of states: `reset`, `advance`, `view`.

    A subclass has them for one state: `_start_one(key)` returns it; `_advance_one(state, key, actions, active)` the
    next one (the same if not `active`) and a step's results by name: `reward`, `over`, `truncated`, others, and
    `agent_reward` [n] if agents have rewards; `_view_one(state)` `obs`, `full` [n, obs_dim], `state`, `avail` [n, A].
    """

    _start_one: Callable[..., Any]
    _advance_one: Callable[..., Any]
    _view_one: Callable[..., Any]

    def __init__(self, jax: Any) -> None:
        self.jax, self.tree = jax, jax.tree_util
        self.reset = jax.jit(jax.vmap(lambda old, key, which: self._choose(which, self._start_one(key), old)))
        self.advance = jax.jit(jax.vmap(self._advance_one))
        self.view = jax.jit(jax.vmap(self._view_one))

    def blank(self, n_slots: int) -> Any:
        """Return a batch of zero states, for the first reset to overwrite."""
        shapes = self.jax.eval_shape(self._start_one, np.zeros(2, np.uint32))
        return self.jax.tree.map(lambda leaf: np.zeros((n_slots, *leaf.shape), leaf.dtype), shapes)

    def _choose(self, which: Any, new: Any, old: Any) -> Any:
        # The conversion removes JAX's "weak" types, which would make JAX compile every function twice.
        where, convert = self.jax.numpy.where, self.jax.lax.convert_element_type
        return self.jax.tree.map(lambda a, b: convert(where(which, a, b), b.dtype), new, old)


class JaxEnv(BatchedEnv):
    """Episodes of a `Program`: see `BatchedEnv`.

    Attributes:
        results: names of the results of episodes. reward_scale: factor on the program's reward.
    """

    divisible = False  # JAX would compile in each process, for one episode at a time
    results: ClassVar[tuple[str, ...]] = ()
    reward_scale = 1.0

    def _begin(self, program: Any, n_slots: int) -> None:
        """Take the program; no episode has begun."""
        self._program, self.n_slots = program, n_slots
        self._keys = np.zeros((n_slots, 2), np.uint32)
        self._set_state(program.blank(n_slots))

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new episodes in the slots `which`; the key of slot b is `seeds[b]` as two 32-bit words."""
        words = np.stack([np.asarray(seeds, np.int64) >> 32, np.asarray(seeds, np.int64) & 0xFFFFFFFF], 1)
        self._keys[which] = words[which].astype(np.uint32)
        self._set_state(self._program.reset(self._state, self._keys.copy(), np.asarray(which, bool)))

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the active slots."""
        active = np.asarray(active, bool)
        require_available(self.info.name, self._view["avail"], actions, active)
        chosen = np.asarray(actions, np.int32)
        state, out = self._program.advance(self._state, self._keys.copy(), chosen, active)
        self._set_state(state)
        found = {name: np.asarray(value) for name, value in out.items()}
        over, truncated = active & found["over"], active & found["truncated"]
        info = {name: over * found[name] for name in self.results} | {"episode_limit": truncated}
        each = np.where(active[:, None], found["agent_reward"], np.float32(0.0)) if self.info.agent_rewards else None
        return StepResult(
            reward=np.where(active, found["reward"] * self.reward_scale, 0.0).astype(np.float32),
            terminated=over,
            truncated=truncated,
            info={name: value.astype(np.float32) for name, value in info.items()},
            agent_reward=each,
        )

    def observe(self, full: bool = False) -> Observation:
        """Return observations; `full_obs` has the same features without the sight mask, if there is one."""
        obs, state, avail = (self._view[name].copy() for name in ("obs", "state", "avail"))
        return Observation(obs, state, avail, self._view["full"].copy() if full else None)

    @staticmethod
    def why_not_resident(args: Any, on_gpu: bool) -> str:
        """Return what is missing where JAX would not play where agents act; empty if nothing."""
        wanted, given = "cuda" if on_gpu else "cpu", os.environ.get("JAX_PLATFORMS")
        name = "env_args.jax_platform" if given is None else "JAX_PLATFORMS"
        found = (given or args.jax_platform).split(",")[0]
        where = "a GPU" if on_gpu else "the CPU"
        return "" if found == wanted else f"needs {name}={wanted}, not {found}, where agents act on {where}"

    def resident(self, device: torch.device, n_slots: int) -> ResidentGame:
        """Return `n_slots` episodes of the same arguments on a device."""
        from omagd.envs.jax_resident import ResidentJax

        return ResidentJax(self, n_slots, device)

    def snapshot(self) -> dict[str, Any]:
        """Return the keys and all parts of the state by path."""
        leaves, name = self._program.tree.tree_leaves_with_path(self._state), self._program.tree.keystr
        return {"keys": self._keys.copy(), "state": {name(path): np.array(leaf) for path, leaf in leaves}}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from `snapshot`."""
        state, name = snapshot["state"], self._program.tree.keystr
        self._set_state(self._program.tree.tree_map_with_path(lambda path, _: state[name(path)], self._state))
        self._keys = np.array(snapshot["keys"])

    def _set_state(self, state: Any) -> None:
        self._state = state
        self._seen: dict[str, np.ndarray] | None = None

    @property
    def _view(self) -> dict[str, np.ndarray]:
        """Features of the current state, computed on first use."""
        if self._seen is None:
            self._seen = {name: np.asarray(value) for name, value in self._program.view(self._state).items()}
        return self._seen
