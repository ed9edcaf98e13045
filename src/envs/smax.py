"""SMAX, the battle environment of JaxMARL (an extra): batched on JAX in this process, with NumPy arrays outside.

Positions are in map cells; one agent step is 8 world steps of 1/16 s. The game's rules are JaxMARL 0.2's (Apache-2.0,
https://github.com/FLAIROx/JaxMARL), used as a library.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import platform
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from omagd.config.env_info import EntityLayout, EnvInfo, StateLayout
from omagd.envs.frames import AGENTS, OPPONENTS, Frame, Scene, rounded, unit_names
from omagd.envs.protocol import BatchedEnv, Observation, ResidentGame, StepResult, random_actions, require_available
from omagd.utils.compiling import user_cache
from omagd.utils.errors import require_extra

if TYPE_CHECKING:
    import torch

UNIT_DIM = 13
N_TYPES = 6
OWN_DIM = 10
N_NORMAL_ACTIONS = 5
STOP = 4
# Actions 0 to 3: north, east, south, west.
_DIRECTIONS = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]], np.float32)

MapName = Literal[
    "3m", "8m", "25m", "2s3z", "3s5z", "5m_vs_6m", "10m_vs_11m", "27m_vs_30m", "3s5z_vs_3s6z", "3s_vs_5z", "6h_vs_8z",
    "smacv2_5_units", "smacv2_10_units", "smacv2_20_units",
]  # fmt: skip


class SmaxArgs(BaseModel):
    """Arguments of `smax`.

    Attributes:
        map_name: scenario, or a set of them (task_sets.md).
        max_steps: JaxMARL's limit; its episodes last one step longer, so `episode_limit` is `max_steps + 1`.
        reward_scale: factor on JaxMARL's reward (JaxMARL's baselines train with 10).
        continuing_episode: the step limit truncates (the target bootstraps) instead of terminating.
        see_enemy_actions: observations include the enemies' last moves and targets.
        attack_mode: target selection of the scripted enemy.
        walls_cause_death: a unit that touches the edge of the map dies.
        jax_platform: JAX platform, unless the variable JAX_PLATFORMS is set.
        jax_threads: threads of JAX on a CPU, unless the variable PJRT_NPROC is set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    map_name: MapName = "3m"
    max_steps: int = Field(default=100, ge=1)
    reward_scale: float = Field(default=10.0, gt=0.0)
    continuing_episode: bool = False
    see_enemy_actions: bool = True
    attack_mode: Literal["closest", "random"] = "closest"
    walls_cause_death: bool = True
    jax_platform: Literal["cpu", "cuda"] = "cpu"
    jax_threads: int = Field(default=1, ge=1)


def _cache_dir() -> Path:
    """Return the folder of compiled programs in the user's cache, one for each CPU type."""
    cpu = platform.machine() + platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu += "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
    return user_cache("jax", f"{zlib.crc32(cpu.encode()):08x}")


def _import_jax(args: SmaxArgs) -> Any:
    """Import JAX, configured once per process. Errors: UserError without the extra."""
    require_extra("env=smax", "smax", "jax", "jaxmarl")
    os.environ.setdefault("JAX_PLATFORMS", args.jax_platform)
    os.environ.setdefault("PJRT_NPROC", str(args.jax_threads))
    # JAX would take three quarters of a GPU's memory, which torch uses too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax: Any = import_module("jax")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(_cache_dir()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    leave_collection_to_xla()
    return jax


def leave_collection_to_xla() -> None:
    """Let Python collect garbage without JAX, which XLA also does whenever it runs a program.

    JAX's callback runs in whichever thread Python collects. It has crashed there (jax issue 15810), and the exception
    of a signal that arrives in it is lost: a run that is asked to stop would go on.
    """
    gc.callbacks[:] = [call for call in gc.callbacks if getattr(call, "__name__", "") != "_xla_gc_callback"]


def _import_smax() -> tuple[Any, Any]:
    """Import the game without its output; return its class and its function from map names to scenarios."""
    # The import prints, and its optional part "mabrax" replaces sys.stdout: block that part.
    optional = "jaxmarl.environments.mabrax"
    blocked = optional not in sys.modules
    if blocked:
        sys.modules[optional] = None  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from jaxmarl.environments.smax import HeuristicEnemySMAX, map_name_to_scenario
    finally:
        if blocked:
            del sys.modules[optional]
    return HeuristicEnemySMAX, map_name_to_scenario


class Program:
    """Compiled functions on a batch of SMAX states: `reset`, `advance`, `view`."""

    def __init__(self, args: SmaxArgs) -> None:
        self.jax = jax = _import_jax(args)
        self.tree = jax.tree_util
        game, scenario = _import_smax()
        keys = {"max_steps", "see_enemy_actions", "attack_mode", "walls_cause_death"}
        self.env = game(scenario=scenario(args.map_name), **args.model_dump(include=keys))
        self.n, self.m = self.env.num_allies, self.env.num_enemies
        allies = [[a for a in range(self.n) if a != i] for i in range(self.n)]
        self.others = np.array([[*range(self.n, self.n + self.m), *allies[i]] for i in range(self.n)])
        self.reset = jax.jit(jax.vmap(lambda old, key, which: self._choose(which, self.env.reset(key)[1], old)))
        self.advance = jax.jit(jax.vmap(self._advance_one))
        self.view = jax.jit(jax.vmap(self._view_one))

    def blank(self, n_slots: int) -> Any:
        """Return a batch of zero states, for the first reset to overwrite."""
        shapes = self.jax.eval_shape(self.env.reset, np.zeros(2, np.uint32))[1]
        return self.jax.tree.map(lambda leaf: np.zeros((n_slots, *leaf.shape), leaf.dtype), shapes)

    def _advance_one(self, old: Any, key: Any, actions: Any, active: Any) -> tuple[Any, Any, Any]:
        """Play one step. Its random key follows from the episode's key and the step number."""
        jax = self.jax
        step_key = jax.random.fold_in(key, old.state.step)
        chosen = {agent: actions[i] for i, agent in enumerate(self.env.agents)}
        _, new, rewards, dones, _ = self.env.step_env(step_key, old, chosen)
        return self._choose(active, new, old), rewards[self.env.agents[0]], dones["__all__"]

    def _choose(self, which: Any, new: Any, old: Any) -> Any:
        # The conversion removes JAX's "weak" types, which would make JAX compile every function twice.
        where, convert = self.jax.numpy.where, self.jax.lax.convert_element_type
        return self.jax.tree.map(lambda a, b: convert(where(which, a, b), b.dtype), new, old)

    def _view_one(self, state: Any) -> dict[str, Any]:
        """Return the features of one battle.

        others: [n, m + n - 1, 13], features of enemies, then allies, without the sight limit. seen: [n, m + n - 1]
        bool, within sight. own: [n + m, 10]. avail: [n, A]. alive: [n + m]. step: [].
        """
        jax, jnp, env, s = self.jax, self.jax.numpy, self.env, state.state
        me = jnp.arange(self.n)
        features = jax.vmap(jax.vmap(env._observe_features, (None, None, 0)), (None, 0, 0))(s, me, self.others)
        exists = s.unit_alive[: self.n, None] & s.unit_alive[self.others]
        distance = jnp.linalg.norm(s.unit_positions[self.others] - s.unit_positions[: self.n, None], axis=-1)
        sight = env.unit_type_sight_ranges[s.unit_types[: self.n]]
        avail = env.get_avail_actions(state)
        return {
            "others": jnp.where(exists[..., None], features, 0.0),
            "seen": exists & (distance < sight[:, None]),
            "own": jax.vmap(env._get_own_features, (None, 0))(s, jnp.arange(self.n + self.m)),
            "avail": jnp.stack([avail[agent] for agent in env.agents]).astype(bool),
            "alive": s.unit_alive,
            "step": s.step,
        }


class SmaxEnv(BatchedEnv):
    """Allies against JaxMARL's scripted enemy.

    Observation: per enemy, then per other ally: health, dx, dy (over the sight range), last move (2), last target,
    cooldown, type one-hot (6); own: health, x, y, cooldown, type one-hot (6). An all-zero block is an unseen or dead
    unit. State: the ten own features of every unit, allies first. Actions: north, east, south, west, stop, then attack
    enemy i; dead agents can only stop.
    """

    args_model = SmaxArgs
    divisible = False  # JAX would compile in each process, for one battle at a time

    def __init__(self, args: SmaxArgs, n_slots: int) -> None:
        self.args = args
        self.n_slots = n_slots
        self._program = program = Program(args)
        n, m = program.n, program.m
        types = {"ally_types": UNIT_DIM - N_TYPES, "enemy_types": UNIT_DIM - N_TYPES, "n_types": N_TYPES}
        layout = EntityLayout(0, m, UNIT_DIM, n - 1, UNIT_DIM, OWN_DIM, position=(1, 2), health=0, **types)
        self.info = EnvInfo(
            name="smax", map_name=args.map_name, n_agents=n, n_actions=N_NORMAL_ACTIONS + m, obs_dim=layout.obs_dim,
            state_dim=(n + m) * OWN_DIM, episode_limit=args.max_steps + 1, n_normal_actions=N_NORMAL_ACTIONS,
            layout=layout, scripted_policies=("random", "attack_nearest"),
            state_layout=StateLayout(n, OWN_DIM, m, OWN_DIM),
        )  # fmt: skip
        self._keys = np.zeros((n_slots, 2), np.uint32)
        self._set_state(program.blank(n_slots))

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new battles in the slots `which`; the key of slot b is `seeds[b]` as two 32-bit words."""
        words = np.stack([np.asarray(seeds, np.int64) >> 32, np.asarray(seeds, np.int64) & 0xFFFFFFFF], 1)
        self._keys[which] = words[which].astype(np.uint32)
        self._set_state(self._program.reset(self._state, self._keys.copy(), np.asarray(which, bool)))

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` in the active slots."""
        active = np.asarray(active, bool)
        require_available(self.info.name, self._view["avail"], actions, active)
        chosen = np.asarray(actions, np.int32)
        state, reward, done = self._program.advance(self._state, self._keys.copy(), chosen, active)
        self._set_state(state)
        n = self.info.n_agents
        alive = self._view["alive"]
        allies, enemies = alive[:, :n].sum(1), alive[:, n:].sum(1)
        terminated = active & np.asarray(done)
        truncated = terminated & (allies > 0) & (enemies > 0) & self.args.continuing_episode
        info = {
            "battle_won": terminated & (enemies == 0) & (allies > 0),
            "dead_allies": terminated * (n - allies),
            "dead_enemies": terminated * (self._program.m - enemies),
            "episode_limit": truncated,
        }
        return StepResult(
            reward=np.where(active, np.asarray(reward) * self.args.reward_scale, 0.0).astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            info={name: value.astype(np.float32) for name, value in info.items()},
        )

    def observe(self, full: bool = False) -> Observation:
        """Return observations; `full_obs` has the same features without the sight mask.

        Widening the sight range instead would rescale positions and help the scripted enemy.
        """
        view, b, n = self._view, self.n_slots, self.info.n_agents
        own = view["own"][:, :n]
        seen = np.where(view["seen"][..., None], view["others"], np.float32(0.0))
        obs = np.concatenate([seen.reshape(b, n, -1), own], 2)
        everything = np.concatenate([view["others"].reshape(b, n, -1), own], 2) if full else None
        return Observation(obs, view["own"].reshape(b, -1).copy(), view["avail"].copy(), everything)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions: "random", or "attack_nearest", which knows the positions of all enemies."""
        if policy not in self.info.scripted_policies:
            return super().scripted_actions(policy, rng)
        view, n = self._view, self.info.n_agents
        avail = view["avail"]
        if policy == "random":
            return random_actions(avail, rng)
        size = np.array([self._program.env.map_width, self._program.env.map_height], np.float32)
        position = view["own"][:, :, 1:3] * size
        way = position[:, None, n:] - position[:, :n, None]
        distance = np.where(view["alive"][:, None, n:], np.linalg.norm(way, axis=-1), np.inf)
        nearest = distance.argmin(-1)
        toward = np.take_along_axis(way, nearest[..., None, None], 2)[:, :, 0]
        attack = avail[:, :, N_NORMAL_ACTIONS:]
        target = np.where(attack, distance, np.inf).argmin(-1) + N_NORMAL_ACTIONS
        action = np.where(attack.any(-1), target, (toward @ _DIRECTIONS.T).argmax(-1))
        return np.where(avail[:, :, 0], action, STOP)

    def frame(self, slot: int) -> Frame:
        """Return the units of a slot. A unit attacks the one that it aims at, if that is in its reach."""
        game, n, m = self._program.env, self.info.n_agents, self._program.m
        s = self._program.jax.tree.map(lambda leaf: np.asarray(leaf[slot]), self._state.state)
        kinds, everyone = s.unit_types.astype(int), np.arange(n + m)
        sight, reach = (
            np.asarray(values)[kinds] for values in (game.unit_type_sight_ranges, game.unit_type_attack_ranges)
        )
        aim = s.prev_attack_actions.astype(int) - N_NORMAL_ACTIONS
        at = np.clip(np.where(everyone < n, n + aim, n - 1 - aim), 0, n + m - 1)
        x, y = s.unit_positions.T
        near = np.hypot(x[at] - x, y[at] - y) < reach
        targets = np.where((aim >= 0) & s.unit_alive & s.unit_alive[at] & near, at, -1)
        scene = Scene(
            ids=unit_names(n, m),
            teams=(AGENTS,) * n + (OPPONENTS,) * m,
            kinds=tuple(game.unit_type_names[kind] for kind in kinds),
            team_names=("agents", "enemies"),
            actions=("north", "east", "south", "west", "stop"),
            health_max=tuple(rounded(np.asarray(game.unit_type_health)[kinds])),
            sight=tuple(rounded(sight[:n])),
            reach=tuple(rounded(reach[:n])),
            bounds=(0.0, 0.0, float(game.map_width), float(game.map_height)),
        )
        alive, health = s.unit_alive.tolist(), rounded(s.unit_health)
        return Frame(scene, rounded(x), rounded(y), alive, health, targets=targets.tolist())

    @staticmethod
    def why_not_resident(args: SmaxArgs, on_gpu: bool) -> str:
        """Return what is missing where JAX would not play where agents act; empty if nothing."""
        wanted, given = "cuda" if on_gpu else "cpu", os.environ.get("JAX_PLATFORMS")
        name = "env_args.jax_platform" if given is None else "JAX_PLATFORMS"
        found = (given or args.jax_platform).split(",")[0]
        where = "a GPU" if on_gpu else "the CPU"
        return "" if found == wanted else f"needs {name}={wanted}, not {found}, where agents act on {where}"

    def resident(self, device: torch.device, n_slots: int) -> ResidentGame:
        """Return `n_slots` battles of the same map on a device."""
        from omagd.envs.smax_resident import ResidentSmax

        given = self.args.reward_scale, self.args.continuing_episode
        return ResidentSmax(self._program, self.info, n_slots, device, *given)

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
