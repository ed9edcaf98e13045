"""JaxMARL's environments by their ids (an extra): batched on JAX in this process or in a device's memory.

The rules are JaxMARL 0.2's (Apache-2.0, https://github.com/FLAIROx/JaxMARL), used as a library. Arguments that have no
name here go to the constructor. Shapes: n agents, A actions (of the agent that has most).
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field

from omagd.config.env_info import EnvInfo
from omagd.envs.adapters import Explained, Rewards
from omagd.envs.jax_env import JaxArgs, JaxEnv, Program, import_jax, import_jaxmarl
from omagd.utils.errors import UserError, unknown_name

KEYS = ("MPE_simple_spread_v3", "MPE_simple_tag_v3", "overcooked", "overcooked_v2", "hanabi", "switch_riddle")
"""Examples: every id of `jaxmarl.make` with Discrete actions can be played."""
NEVER = 1 << 30


class JaxMarlArgs(JaxArgs, Rewards):
    """Arguments of `jaxmarl`; the others go to the constructor, such as `layout` of Overcooked.

    Attributes:
        key: id of `jaxmarl.make`.
        shaped_reward: factor of Overcooked's shaped rewards; JaxMARL's baselines begin with 1 and end with 0.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    key: str
    shaped_reward: float = Field(default=0.0, ge=0.0)


def _made(jaxmarl: Any, args: JaxMarlArgs) -> Any:
    """Return JaxMARL's environment. Errors: UserError for an id or argument that is not known; any of a constructor."""
    key, own = args.key, args.own
    if "SMAX" in key:
        raise UserError(f"env_args.key={key}: the battles of JaxMARL are env=smax. Use --env-config=smax")
    if key not in jaxmarl.registered_envs:
        raise unknown_name("env_args.key", key, [name for name in jaxmarl.registered_envs if "SMAX" not in name])
    if key == "overcooked" and isinstance(own.get("layout"), str):
        layouts = jaxmarl.environments.overcooked_layouts
        if own["layout"] not in layouts:
            raise unknown_name("env_args.layout", own["layout"], layouts)
        own["layout"] = layouts[own["layout"]]
    if "num_cards_of_rank" in own:  # of Hanabi, which sums them
        own["num_cards_of_rank"] = np.array(own["num_cards_of_rank"])
    with warnings.catch_warnings():  # Overcooked is said to be deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        env = jaxmarl.make(key, **own)
    # MPE takes any keyword and does not read those that it does not know.
    read = {name for kind in type(env).__mro__ for name in inspect.signature(kind).parameters}
    if unread := [name for name in own if name not in read and not hasattr(env, name)]:
        name = unread[0]
        raise UserError(f"env_args.key={key}: it does not read env_args.{name}={own[name]}. Remove it")
    return env


def _declared(env: Any) -> int | None:
    """Return the longest episode in steps: the limit that the environment declares, or what its rules allow."""
    if hasattr(env, "max_steps"):  # MPE compares with the steps before this one
        return int(env.max_steps) + (".mpe." in type(env).__module__)
    if hasattr(env, "num_inner_steps"):
        return int(env.num_inner_steps * env.num_outer_steps)
    if hasattr(env, "deck_size"):  # Hanabi: cards drawn, hints from tokens at first and from cards, the last round
        cards = env.deck_size - env.num_agents * env.hand_size
        return int(2 * cards + env.max_info_tokens + env.num_colors + env.num_agents)
    return None


class World(Program):
    """One of JaxMARL's environments on JAX, its results as `JaxEnv` wants them.

    A state holds JaxMARL's (`world`), the padded observations (`obs`, which some environments make from the last step
    too), the number of steps (`t`), and the team's return without shaped rewards (`score`).

    Args:
        limit: steps after which an episode is cut off.
    """

    def __init__(self, jax: Any, env: Any, args: JaxMarlArgs) -> None:
        super().__init__(jax)
        self.env, self._args, self.limit = env, args, NEVER
        self.names = list(env.agents)
        self.n = len(self.names)
        spaces = [env.action_space(name) for name in self.names]
        if odd := [name for space in spaces if (name := type(space).__name__) != "Discrete"]:
            raise UserError(f"env_args.key={args.key}: its actions are {odd[0]}; only Discrete ones are supported")
        self.n_actions = [int(space.n) for space in spaces]
        obs, _ = jax.eval_shape(self._reset_one, np.zeros(2, np.uint32))
        seen = [[leaf.shape for leaf in jax.tree.leaves(one)] for one in obs]
        self.sizes = [sum(map(math.prod, shapes)) for shapes in seen]
        (first, *more), alike = seen[0], all(shapes == seen[0] for shapes in seen)
        self.image = first if alike and not more and len(first) == 3 else None
        self._masks = getattr(env, "get_legal_moves", None)  # Hanabi's; all others but SMAX have none
        self._endless = copy.copy(env)
        self._endless.max_steps = NEVER

    def _each(self, values: Any) -> list[Any]:
        """Return what each agent has of JaxMARL's values: by its name, in a tuple, or in the rows of arrays."""
        if isinstance(values, Mapping) and all(name in values for name in self.names):
            return [values[name] for name in self.names]
        if isinstance(values, tuple):
            return list(values)
        return [self.jax.tree.map(lambda leaf, i=i: leaf[i], values) for i in range(self.n)]

    def _reset_one(self, key: Any) -> tuple[list[Any], Any]:
        """Return what each agent observes first, and JaxMARL's state."""
        obs, world = self.env.reset(key)
        return self._each(obs), world

    def _start_one(self, key: Any) -> Any:
        obs, world = self._reset_one(key)
        return {
            "world": world,
            "obs": self._padded(obs),
            "t": self.jax.numpy.int32(0),
            "score": self.jax.numpy.float32(0),
        }

    def _padded(self, obs: list[Any]) -> Any:
        """Return what each agent observes as [n, obs_dim] float32."""
        jnp, leaves = self.jax.numpy, self.jax.tree.leaves
        flat = [jnp.concatenate([leaf.ravel().astype("float32") for leaf in leaves(one)]) for one in obs]
        return jnp.stack([jnp.pad(row, (0, max(self.sizes) - len(row))) for row in flat])

    def _advance_one(self, old: Any, key: Any, actions: Any, active: Any) -> tuple[Any, dict[str, Any]]:
        """Play one step. Its random key follows from the episode's key and the step number."""
        jnp, args, t = self.jax.numpy, self._args, old["t"] + 1
        played = self.jax.random.fold_in(key, old["t"]), old["world"], dict(zip(self.names, actions, strict=True))
        obs, world, rewards, dones, info = self.env.step_env(*played)
        each = jnp.stack([jnp.asarray(reward, "float32") for reward in self._each(rewards)])
        team = jnp.mean if args.common_reward and args.reward_scalarisation == "mean" else jnp.sum
        score = old["score"] + team(each)  # of the game, without what shapes it
        if args.shaped_reward:
            each += args.shaped_reward * jnp.stack(self._each(info["shaped_reward"]))
        ended = over = dones["__all__"]  # the coin game and STORM show the next game at their last step
        if hasattr(self.env, "max_steps"):  # would it end without them? XLA computes no more of this other step
            ended = self._endless.step_env(*played)[3]["__all__"]
        over = over | (t >= self.limit)
        new = {"world": world, "obs": self._padded(self._each(obs)), "t": t, "score": score}
        truncated = over & ~ended & args.continuing_episode
        out = {"reward": team(each), "over": over, "truncated": truncated, "agent_reward": each, "score": score}
        return self._choose(active, new, old), out

    def _view_one(self, state: Any) -> dict[str, Any]:
        jnp, rows = self.jax.numpy, list(zip(state["obs"], self.sizes, strict=True))
        counts = self.n_actions
        masks = self._each(self._masks(state["world"])) if self._masks else [jnp.ones(count) for count in counts]
        avail = jnp.stack([jnp.pad(mask.astype(bool), (0, max(counts) - len(mask))) for mask in masks])
        state_row = jnp.concatenate([row[:size] for row, size in rows])
        return {"obs": state["obs"], "full": state["obs"], "state": state_row, "avail": avail}


class JaxMarlEnv(Explained, JaxEnv):
    """An environment of JaxMARL: flattened, padded observations; the state is all of them in a row."""

    args_model = JaxMarlArgs
    resident = JaxEnv.resident  # `plays_here` asks the class itself for it

    def __init__(self, args: JaxMarlArgs, n_slots: int) -> None:
        self.args, self.results = args, ("score",) * bool(args.shaped_reward)  # type: ignore[misc]
        jax = import_jax(args, "jaxmarl")
        with self._in_one_line():
            env = _made(import_jaxmarl(), args)
            program = World(jax, env, args)
            declared = _declared(env)
            program.limit = min(self._limit(declared), declared or NEVER)
            self._begin(program, n_slots)
            if args.shaped_reward and "overcooked" not in args.key:
                raise self._wrong("it has no shaped rewards. Leave env_args.shaped_reward=0")
        self.info = EnvInfo(
            "jaxmarl", args.key, program.n, max(program.n_actions), max(program.sizes), sum(program.sizes),
            program.limit, scripted_policies=("random",), has_win=False, agent_rewards=not args.common_reward,
            image=program.image,
        )  # fmt: skip

    @staticmethod
    def why_not_resident(args: JaxMarlArgs, on_gpu: bool) -> str:
        """Return what is missing where JAX would not play where agents act; empty if nothing."""
        if not args.common_reward:
            return "rounds on a device have one reward, so not with env_args.common_reward=False"
        return JaxEnv.why_not_resident(args, on_gpu)
