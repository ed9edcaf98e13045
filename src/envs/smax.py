"""SMAX, the battle environment of JaxMARL (an extra): batched on JAX in this process, with NumPy arrays outside.

Positions are in map cells; one agent step is 8 world steps of 1/16 s. The game's rules are JaxMARL 0.2's (Apache-2.0,
https://github.com/FLAIROx/JaxMARL), used as a library.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, Field

from omagd.config.env_info import EntityLayout, EnvInfo, StateLayout
from omagd.envs.frames import AGENTS, OPPONENTS, Frame, Scene, rounded, unit_names
from omagd.envs.jax_env import JaxArgs, JaxEnv, Program, import_jax, import_jaxmarl

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


class SmaxArgs(JaxArgs):
    """Arguments of `smax`.

    Attributes:
        map_name: scenario, or a set of them (task_sets.md).
        max_steps: JaxMARL's limit; its episodes last one step longer, so `episode_limit` is `max_steps + 1`.
        reward_scale: factor on JaxMARL's reward (JaxMARL's baselines train with 10).
        continuing_episode: the step limit truncates (the target bootstraps) instead of terminating.
        see_enemy_actions: observations include the enemies' last moves and targets.
        attack_mode: target selection of the scripted enemy.
        walls_cause_death: a unit that touches the edge of the map dies.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    map_name: MapName = "3m"
    max_steps: int = Field(default=100, ge=1)
    reward_scale: float = Field(default=10.0, gt=0.0)
    continuing_episode: bool = False
    see_enemy_actions: bool = True
    attack_mode: Literal["closest", "random"] = "closest"
    walls_cause_death: bool = True


class Battles(Program):
    """SMAX on JAX."""

    def __init__(self, args: SmaxArgs) -> None:
        super().__init__(import_jax(args, "smax"))
        import_jaxmarl()
        from jaxmarl.environments.smax import HeuristicEnemySMAX, map_name_to_scenario

        keys = {"max_steps", "see_enemy_actions", "attack_mode", "walls_cause_death"}
        scenario = map_name_to_scenario(args.map_name)
        self.env = HeuristicEnemySMAX(scenario=scenario, **args.model_dump(include=keys))
        self._continuing = args.continuing_episode
        self.n, self.m = self.env.num_allies, self.env.num_enemies
        allies = [[a for a in range(self.n) if a != i] for i in range(self.n)]
        self.others = np.array([[*range(self.n, self.n + self.m), *allies[i]] for i in range(self.n)])

    def _start_one(self, key: Any) -> Any:
        return self.env.reset(key)[1]

    def _advance_one(self, old: Any, key: Any, actions: Any, active: Any) -> tuple[Any, dict[str, Any]]:
        """Play one step. Its random key follows from the episode's key and the step number."""
        jax = self.jax
        step_key = jax.random.fold_in(key, old.state.step)
        chosen = {agent: actions[i] for i, agent in enumerate(self.env.agents)}
        _, new, rewards, dones, _ = self.env.step_env(step_key, old, chosen)
        over, alive = dones["__all__"], new.state.unit_alive
        allies, enemies = alive[: self.n].sum(), alive[self.n :].sum()
        return self._choose(active, new, old), {
            "reward": rewards[self.env.agents[0]], "over": over,
            "truncated": over & (allies > 0) & (enemies > 0) & self._continuing,
            "battle_won": (enemies == 0) & (allies > 0), "dead_allies": self.n - allies,
            "dead_enemies": self.m - enemies,
        }  # fmt: skip

    def _view_one(self, state: Any) -> dict[str, Any]:
        """Return what is shown, `own` features [n + m, 10] and who is `alive` [n + m].

        `full` has no sight mask: to widen the sight range would rescale positions and help the scripted enemy.
        """
        jax, jnp, env, s = self.jax, self.jax.numpy, self.env, state.state
        me = jnp.arange(self.n)
        features = jax.vmap(jax.vmap(env._observe_features, (None, None, 0)), (None, 0, 0))(s, me, self.others)
        exists = s.unit_alive[: self.n, None] & s.unit_alive[self.others]
        distance = jnp.linalg.norm(s.unit_positions[self.others] - s.unit_positions[: self.n, None], axis=-1)
        sight = env.unit_type_sight_ranges[s.unit_types[: self.n]]
        avail = env.get_avail_actions(state)
        others = jnp.where(exists[..., None], features, 0.0)
        seen = exists & (distance < sight[:, None])
        own = jax.vmap(env._get_own_features, (None, 0))(s, jnp.arange(self.n + self.m))

        def row(units: Any) -> Any:
            return jnp.concatenate([units.reshape(self.n, -1), own[: self.n]], 1)

        return {
            "obs": row(jnp.where(seen[..., None], others, 0.0)), "full": row(others), "state": own.ravel(),
            "avail": jnp.stack([avail[agent] for agent in env.agents]).astype(bool), "own": own, "alive": s.unit_alive,
        }  # fmt: skip


class SmaxEnv(JaxEnv):
    """Allies against JaxMARL's scripted enemy.

    Observation: per enemy, then per other ally: health, dx, dy (over the sight range), last move (2), last target,
    cooldown, type one-hot (6); own: health, x, y, cooldown, type one-hot (6). An all-zero block is an unseen or dead
    unit. State: the ten own features of every unit, allies first. Actions: north, east, south, west, stop, then attack
    enemy i; dead agents can only stop.
    """

    args_model = SmaxArgs
    results = ("battle_won", "dead_allies", "dead_enemies")
    resident = JaxEnv.resident  # `plays_here` asks the class itself for it

    def __init__(self, args: SmaxArgs, n_slots: int) -> None:
        self.args, self.reward_scale = args, args.reward_scale
        self._begin(program := Battles(args), n_slots)
        n, m = program.n, program.m
        types = {"ally_types": UNIT_DIM - N_TYPES, "enemy_types": UNIT_DIM - N_TYPES, "n_types": N_TYPES}
        layout = EntityLayout(0, m, UNIT_DIM, n - 1, UNIT_DIM, OWN_DIM, position=(1, 2), health=0, **types)
        self.info = EnvInfo(
            name="smax", map_name=args.map_name, n_agents=n, n_actions=N_NORMAL_ACTIONS + m, obs_dim=layout.obs_dim,
            state_dim=(n + m) * OWN_DIM, episode_limit=args.max_steps + 1, n_normal_actions=N_NORMAL_ACTIONS,
            layout=layout, scripted_policies=("random", "attack_nearest"),
            state_layout=StateLayout(n, OWN_DIM, m, OWN_DIM),
        )  # fmt: skip

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, n] actions: "random", or "attack_nearest", which knows the positions of all enemies."""
        if policy != "attack_nearest":
            return super().scripted_actions(policy, rng)
        view, n = self._view, self.info.n_agents
        avail = view["avail"]
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
