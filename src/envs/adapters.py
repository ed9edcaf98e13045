"""Environments of other packages: by a Gymnasium id, as PettingZoo's parallel interface, or in PyMARL's shape.

Observations of different sizes are padded with zeros, and actions that an agent does not have are never available.
Images, if all agents see such of one size, are flattened, and bytes become numbers from 0 to 1.
Shapes: n agents, A actions (of the agent that has most), d numbers of continuous actions (likewise).
"""

from __future__ import annotations

import logging
import os
import random
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from multiprocessing import parent_process
from pkgutil import iter_modules, resolve_name
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from omagd.envs.frames import Frame, drawn, without_place
from omagd.envs.outputs import as_vector, ends_of, results_of
from omagd.envs.protocol import AGENT_REWARD, TRUNCATED, MultiAgentEnv
from omagd.utils.errors import UserError, causes, install, nearest
from omagd.utils.registry import crash_of

T = TypeVar("T")
LOG = logging.getLogger("omagd")
EXTRAS = {"lbforaging": "lbf", "rware": "rware", "mpe2": "mpe", "pettingzoo": "pettingzoo", "gymnasium": "gymnasium"}
"""Packages that an extra of this one installs."""
GYMNASIUMS = " was raised from the environment creator| Environment registration via importing"
"""Where Gymnasium's errors begin to repeat what is known."""
COMPARED: set[str] = set()
"""Arguments of environments whose starts this process has compared."""


class OutsideArgs(BaseModel):
    """Arguments of all environments of other packages; those that have no name here go to the constructor.

    Attributes:
        place: form of `path`, from the value that says which environment.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    place: ClassVar[str] = "{}"

    @property
    def own(self) -> dict[str, Any]:
        """What goes to the environment's constructor."""
        return dict(self.model_extra or {})

    @property
    def given(self) -> tuple[str, str]:
        """The key that says which environment, and its value."""
        key = "key" if "key" in type(self).model_fields else "map_name"
        return key, str(getattr(self, key, ""))

    @property
    def path(self) -> str:
        """Import path, or Gymnasium id, of the environment."""
        return self.place.format(self.given[1])

    @property
    def package(self) -> str:
        """Package of the environment, whose version belongs to results."""
        return re.split("[:.]", self.path)[0]


class ForeignArgs(OutsideArgs):
    """Arguments of all environments that are objects of their own.

    Attributes:
        new_each_episode: make a new environment for each episode, which then follows from its seed and its actions.
            False suits dear constructors: one object plays all episodes, and a run that is resumed may differ.
    """

    new_each_episode: bool = True


class AdapterArgs(ForeignArgs):
    """Arguments of `pymarl`; the others go to the environment's constructor.

    Attributes:
        key: which environment: `module:Class` for `pymarl`; a module with `parallel_env`, or `module:function`, for
            `pettingzoo`; an id, `package:Name-v0`, or `pz-<family>-<name>` for `gymma`.
    """

    key: str

    @property
    def path(self) -> str:
        """Import path of the key; EPyMARL's `pz-mpe-simple-spread-v3` is `mpe2.simple_spread_v3`."""
        if (parts := re.fullmatch("pz-([^-]+)-(.+)", self.key)) is None:
            return self.key
        package = "mpe2" if parts[1] == "mpe" else f"pettingzoo.{parts[1]}"  # MPE has left PettingZoo
        return f"{package}.{parts[2].replace('-', '_')}"


class Rewards(OutsideArgs):
    """Arguments of environments that reward each agent, named as EPyMARL's.

    Attributes:
        time_limit: steps of an episode; without it, those that the environment declares.
        continuing_episode: where an episode is cut off, the target bootstraps. False: it ends there, as in EPyMARL.
        common_reward: all agents learn from one reward; False: each from its own (`iql`, `ippo`, `mappo`).
        reward_scalarisation: how that reward follows from those of the agents.
    """

    common_reward: bool = True
    reward_scalarisation: Literal["sum", "mean"] = "sum"
    time_limit: int | None = Field(default=None, ge=1)
    continuing_episode: bool = True


class RewardArgs(Rewards, AdapterArgs):
    """Arguments of `gymma` and `pettingzoo`; the others go to the environment's constructor."""

    @property
    def own(self) -> dict[str, Any]:
        """As above, without a key that EPyMARL's files set to nothing."""
        return {name: value for name, value in super().own.items() if (name, value) != ("pretrained_wrapper", None)}


class Explained:
    """What an environment of another package does wrong, in one line that names its key. args: its arguments."""

    args: Any
    _fix = ""  # where a key names what is not there

    @contextmanager
    def _in_one_line(self) -> Iterator[None]:
        """Turn any fault of the environment in the block into one line; a missing package names its extra."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as problem:  # noqa: BLE001 (constructors of other people)
            said = re.split(GYMNASIUMS, _said(problem))[0].rstrip(".")
            names = [str(each.name) for each in causes(problem) if isinstance(each, ImportError)]
            fixes = [f" Install it: {install(EXTRAS[name])}" for name in names if name in EXTRAS]
            packages = {name.rpartition(".")[0] for name in names} & sys.modules.keys()  # in which they are not
            there = [iter_modules(getattr(sys.modules[each], "__path__", ()), f"{each}.") for each in packages]
            fixes += [nearest(name, [found.name for found in chain(*there)]) for name in names]
            unknown = re.findall(r"unexpected keyword argument '(\w+)'", said)
            fixes += [nearest(name, type(self.args).model_fields) for name in unknown]
            path = self.args.path.replace(":", ".") + "."
            lost = type(problem).__name__.endswith("NotFound") or any(path.startswith(f"{name}.") for name in names)
            fix = next(filter(None, fixes), self._fix * lost)
            where = f" ({crash.last}; --loglevel=DEBUG shows the traceback)" if (crash := crash_of(problem)) else ""
            raise self._wrong(f"{said}{where}{'.' * (said[-1] != '?')}{fix}") from problem

    def _wrong(self, what: str) -> UserError:
        return UserError(f"env_args.{'='.join(self.args.given)}: {what}")

    def _limit(self, declared: Any) -> int:
        """Return the step limit: the given one, else what the environment declares."""
        limit = self.args.time_limit or declared
        if not limit:
            raise self._wrong("it declares no step limit. Give env_args.time_limit=…")
        return int(limit)


class Foreign(Explained, MultiAgentEnv):
    """Base of the adapters. Some environments keep something of the last episode; hence a new one for each.

    A subclass sets `n_agents`, `episode_limit` and, by `_set_actions` and `_set_observations`, `n_actions` and `sizes`
    (of each agent) from `env`.

    Attributes:
        image: (H, W, C) of what every agent sees; None where it is no image.
        boxes: spaces of continuous actions, of each agent; none: actions are discrete.
    """

    deterministic = True
    n_agents: int
    episode_limit: int
    sizes: list[int]
    n_actions: list[int]
    image: tuple[int, ...] | None = None
    boxes: Sequence[Any] = ()
    _own_state = 0  # numbers of the state, where it is not all observations in a row
    returns: tuple[int, ...] = (5,)  # how many values `env.step` may return

    def __init__(self, args: Any) -> None:
        self.args, self._own = args, args.own
        self._seed = 0
        self._stale = args.new_each_episode  # whether the next episode needs a new object, as the first one does
        self._steps = 0
        self._draws: bool | None = None  # unknown until a picture is asked for
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # for modules of the working directory
        with self._in_one_line():
            self.env = self._make()
            self._measure()
            # Other slots, and workers, would find the same.
            if args.new_each_episode and parent_process() is None and repr(args) not in COMPARED:
                COMPARED.add(repr(args))
                self._compare_starts()

    def _compare_starts(self) -> None:
        """Start two episodes of one seed, and say where they differ."""

        def start() -> np.ndarray:
            self.reset(seed=0)
            return np.concatenate([self.get_obs().ravel(), self.get_state()])

        if not np.array_equal(start(), start(), equal_nan=True):
            fix = "Take `seed` in reset() or in the constructor; until then a run that is continued may differ"
            LOG.warning("%s. %s", self._wrong("its episodes do not follow from their seeds"), fix)

    @abstractmethod
    def _make(self) -> Any:
        """Return the environment."""

    @abstractmethod
    def _measure(self) -> None:
        """Set sizes from `env`."""

    def _set_actions(self, acts: Sequence[Any]) -> None:
        """Set what agents can do from their spaces. Errors: UserError for other spaces, and for two kinds at once."""
        from gymnasium import spaces

        def known(space: Any) -> bool:
            real = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and space.shape != (0,)
            return real or (isinstance(space, spaces.Discrete) and space.start == 0)

        if wrong := [i for i, space in enumerate(acts) if not known(space)]:
            what = f"the actions of agent {wrong[0]} are {acts[wrong[0]]}"
            raise self._wrong(f"{what}: only Discrete actions from 0 on, or Box of floats, are supported")
        self.boxes = [space for space in acts if isinstance(space, spaces.Box)]
        if not self.boxes:
            self.n_actions = [int(space.n) for space in acts]
        elif len(self.boxes) < len(acts):
            raise self._wrong("some agents have Box actions and others Discrete: only one kind at once is supported")
        else:
            self.n_actions = [2 * max(space.low.size for space in self.boxes)] * len(acts)
        own = _first([space.low.size for space in self.boxes] or self.n_actions)
        self._all = np.tile(own, 2) if self.boxes else own  # means and deviations of the numbers that the agent has
        self._all.flags.writeable = False  # of all steps

    def _set_observations(self, seen: Sequence[Any]) -> None:
        """Set what agents observe from their spaces."""
        from gymnasium import spaces

        own = [space.spaces if isinstance(space, spaces.Dict) else {} for space in seen]
        # Some declare the space of the observation alone.
        self._masked = [
            not parts or ("observation" in parts and {"observation", "action_mask"} >= parts.keys()) for parts in own
        ]
        seen = [
            parts["observation"] if masked and parts else space
            for parts, masked, space in zip(own, self._masked, seen, strict=True)
        ]
        self._flat, self.sizes = [_flattener(space) for space in seen], [spaces.flatdim(space) for space in seen]
        self._inside = _first(self.sizes)
        shapes = {space.shape if isinstance(space, spaces.Box) else () for space in seen}
        self.image = next((shape for shape in shapes if len(shapes) == 1 and len(shape) == 3), None)

    def _seen_by(self, agent: int, seen: Any, mask: Any) -> tuple[np.ndarray | None, Any]:
        """Return what an agent observes as a vector, None for nothing, and its mask: that of the observation if any."""
        if isinstance(seen, Mapping):
            mask = seen.get("action_mask", mask)
            seen = seen["observation"] if self._masked[agent] and "observation" in seen else seen
        return None if seen is None else self._flat[agent](seen), None if self.boxes else mask

    def _played(self, actions: np.ndarray) -> list[Any]:
        """Return each agent's action as its space has it, from [n] or [n, d]."""
        if not self.boxes:
            return list(actions.tolist())
        pairs = zip(self.boxes, actions, strict=True)
        return [_inside(space, own[: space.low.size].reshape(space.shape)) for space, own in pairs]

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play an action of each agent, [n] or [n, d]. Errors: UserError for returned values that do not fit."""

        def play() -> tuple[float, bool, dict[str, Any]]:
            returned = self._play(self._played(actions))
            if len(returned) not in self.returns:
                raise self._wrong(f"step() returned {len(returned)} values, not {' or '.join(map(str, self.returns))}")
            return self._read(*returned)

        return self._fitting("step()", play)

    def _fitting(self, call: str, read: Callable[[], T]) -> T:
        """Return what `read` makes of the result of a call; one line says what it cannot read."""
        try:
            return read()
        except UserError:
            raise
        except Exception as problem:
            if crash_of(problem, self.args.package) is not None:  # in the environment's own code
                raise
            raise self._wrong(f"what {call} returned does not fit: {_said(problem)}") from problem

    def _play(self, actions: list[Any]) -> Sequence[Any]:
        """Return what `env.step` returns for the actions of all agents."""
        return tuple(self.env.step(actions))

    def _read(self, *returned: Any) -> tuple[float, bool, dict[str, Any]]:
        """Keep the observations that `env.step` has returned, and return the result of `step`."""
        raise NotImplementedError

    def _begin(self, seed: int) -> None:
        """Start an episode of `env`, and keep its observations."""
        begun = self.env.reset(seed=seed % 2**31)
        if not isinstance(begun, tuple) or len(begun) != 2:
            raise self._wrong(f"reset() returned a {type(begun).__name__}, not observations and infos")
        self._keep(*begun)

    def _keep(self, seen: Any, info: Any) -> None:
        """Keep what agents observe, and what they can do, until they are asked for."""
        raise NotImplementedError

    def reset(self, *, seed: int) -> None:
        """Start an episode."""
        self._seed, self._steps = seed, 0
        random.seed(seed)  # for environments, and their constructors, that draw from a global generator
        np.random.seed(seed % 2**32)  # noqa: NPY002
        if self._stale:
            self.env.close()
            with self._in_one_line():
                self.env = self._make()
        self._stale = self.args.new_each_episode
        with self._in_one_line():
            self._begin(seed)

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, obs_dim] float32; an agent that has left sees zeros."""
        return self._obs

    def get_state(self) -> np.ndarray:
        """Return all observations in a row, without padding."""
        return self._row

    def get_avail_actions(self) -> np.ndarray:
        """Return [n, A] of zeros and ones, as the environment says them."""
        return self._avail

    def get_env_info(self) -> dict[str, Any]:
        """Return sizes; no win is reported, and there is no entity layout."""
        return {
            "map_name": self.args.given[1],
            "n_agents": self.n_agents,
            "n_actions": max(self.n_actions),
            "obs_shape": self.image or max(self.sizes),
            "state_shape": self._own_state or sum(self.sizes),
            "episode_limit": self.episode_limit,
            "agent_rewards": not self.args.common_reward,
            "has_win": False,
            "deterministic": self.args.new_each_episode,
            **({"action_bounds": self._bounds()} if self.boxes else {}),
        }

    def _bounds(self) -> np.ndarray:
        """Return (low, high) [2, n, d]; -1 and 1 for numbers that an agent does not have."""
        ends = np.array([-1.0, 1.0])[:, None, None] * np.ones((self.n_agents, max(self.n_actions) // 2))
        for i, space in enumerate(self.boxes):
            ends[:, i, : space.low.size] = space.low.ravel(), space.high.ravel()
        return ends

    def _see(self, obs: Sequence[Any], masks: Sequence[Any]) -> None:
        """Keep padded observations and masks; `masks` holds None where all of an agent's actions are available."""
        seen = [np.zeros(size) if own is None else own for own, size in zip(obs, self.sizes, strict=True)]
        if (found := [own.size for own in seen]) != self.sizes:
            i = next(i for i, size in enumerate(self.sizes) if found[i] != size)
            raise self._wrong(f"agent {i} observes {found[i]} numbers, and its space has {self.sizes[i]}")
        self._row = np.concatenate(seen)
        self._obs = np.zeros(self._inside.shape, np.float32)
        self._obs[self._inside] = self._row
        self._avail = self._all
        if any(mask is not None for mask in masks):
            self._avail = self._all.astype(np.float64)  # as given: the slot rejects what is neither 0 nor 1
            for i, (own, mask, count) in enumerate(zip(self._avail, masks, self.n_actions, strict=True)):
                if mask is not None:
                    if np.shape(mask) != (count,):
                        raise self._wrong(f"agent {i}'s action_mask has the shape {np.shape(mask)}, not ({count},)")
                    own[:count] = mask

    def _result(
        self, rewards: Any, ended: bool, truncated: bool, results: Mapping[str, Any]
    ) -> tuple[float, bool, dict[str, Any]]:
        """Return a step's result: one reward, the step limit, and what the environment says about the episode."""
        self._steps += 1
        late = self._steps >= self.episode_limit
        each = np.asarray(rewards, np.float64)
        if each.ndim and each.shape != (self.n_agents,):
            if each.size not in (1, self.n_agents):
                raise self._wrong(f"step() returned {each.size} rewards for {self.n_agents} agents")
            each = each.ravel() if each.size == self.n_agents else each.reshape(())
        if self.args.reward_scalarisation == "mean" and self.args.common_reward and each.ndim:
            each = each / self.n_agents
        info = results_of(results)
        info[TRUNCATED] = self.args.continuing_episode and not ended and (truncated or late)
        if not self.args.common_reward:
            if not each.ndim:
                raise self._wrong("it gives one reward to all agents. Leave env_args.common_reward=True")
            info[AGENT_REWARD] = each.astype(np.float32)
        return float(each.sum()), ended or truncated or late, info

    def get_frame(self) -> Frame | None:
        """Return a picture that the environment draws (`rgb_array`); None where it draws none."""
        try:
            if self._draws is None:
                self._draws = self._starts_to_draw()
            return without_place(self.n_agents, drawn(self.env.render())) if self._draws else None
        except Exception as problem:  # noqa: BLE001 (other people's drawing, often without a display)
            LOG.warning("%s", self._wrong(f"it cannot draw: {' '.join(str(problem).split())}"))
            if self._draws is None:  # the object that draws could not be made
                self._own, self._stale = self.args.own, True
                self.reset(seed=self._seed)
            self._draws = False
            return None

    def _starts_to_draw(self) -> bool:
        """Return whether the environment draws: most need an argument, and so the episode starts again."""
        modes = (getattr(self.env, "metadata", None) or {}).get("render_modes", ())
        if "render_mode" in self.args.own or "rgb_array" not in modes:
            return self.args.own.get("render_mode") == "rgb_array"
        if self._stale and not self._steps:
            self._own = self.args.own | {"render_mode": "rgb_array"}
            self.reset(seed=self._seed)
        return "render_mode" in self._own

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _said(problem: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())}".rstrip(". :")


def _first(counts: Sequence[int]) -> np.ndarray:
    """Return where the first `counts` numbers of each row are, [rows, the most] bool."""
    return np.asarray(np.arange(max(counts)) < np.array(counts)[:, None])


def _inside(space: Any, action: np.ndarray) -> np.ndarray:
    """Return a float32 action in the type of its space; another type's bounds may have been rounded to outside it."""
    action = action.astype(space.dtype)
    return action if space.dtype == np.float32 else action.clip(space.low, space.high)


def _flattener(space: Any) -> Callable[[Any], np.ndarray]:
    """Return what makes vectors of observations; of boxes, which most are, without Gymnasium's slower `flatten`."""
    from gymnasium.spaces import Box, flatten

    if isinstance(space, Box):
        return partial(as_vector, declared=space.dtype)
    return lambda value: np.asarray(flatten(space, value))


def imported(path: str) -> Any:
    """Return what an import path `module:name` means. Errors: any of the module; ImportError for another path."""
    try:
        return resolve_name(path if ":" in path else f"{path}:")  # all before the colon is imported
    except (AttributeError, ValueError) as problem:
        if crash_of(problem) is not None:  # in the module
            raise
        raise ImportError(str(problem), name=path.replace(":", ".")) from None


class PettingZooEnv(Foreign):
    """Any environment of PettingZoo's parallel interface with a fixed set of possible agents.

    An agent that has left (dead, or done before the others) sees zeros, earns nothing of its own, and can only choose
    action 0, which nobody plays. Masks: `action_mask` in the observation (with `observation`) or in the infos.
    """

    args_model: ClassVar[type[ForeignArgs]] = RewardArgs
    _fix = " Give a module with parallel_env, or module:function"

    def _measure(self) -> None:
        self.names = list(getattr(self.env, "possible_agents", None) or ())
        if not self.names:
            raise self._wrong("it has no fixed possible_agents; agents that come and go are not supported")
        self.n_agents = len(self.names)
        self._set_actions([self.env.action_space(name) for name in self.names])
        self._set_observations([self.env.observation_space(name) for name in self.names])
        self.episode_limit = self._limit(getattr(self.env.unwrapped, "max_cycles", self._own.get("max_cycles")))
        space = getattr(self.env, "state_space", None) or self.env.observation_space(self.names[0])  # few declare one
        self._state_type = getattr(space, "dtype", None)
        self._begin(0)
        with suppress(AttributeError, NotImplementedError):  # it has no state
            if not np.array_equal(state := self._state(), super().get_state()):
                self._own_state = state.size

    def _state(self) -> np.ndarray:
        return as_vector(self.env.state(), self._state_type)

    def _make(self) -> Any:
        found = imported(self.args.path)
        make = getattr(found, "parallel_env", found)
        if not callable(make):
            raise self._wrong("it has no parallel_env, and cannot be called")
        env = make(**self._own)
        if not hasattr(env, "observation_space") or hasattr(env, "agent_iter"):
            raise self._wrong("it is not a parallel environment (pettingzoo.utils.aec_to_parallel makes one)")
        return env

    def _begin(self, seed: int) -> None:
        self._playing, self._said = list[str](), dict[str, Any]()  # who plays, and each one's last info
        super()._begin(seed)

    def _keep(
        self, seen: Mapping[str, Any], infos: Mapping[str, Any], over: Collection[str] = (), cut: Collection[str] = ()
    ) -> None:
        if strangers := set(self.env.agents).difference(self.names):
            raise self._wrong(
                f"{min(map(str, strangers))} is not in possible_agents, which must be fixed and hold all agents"
            )
        self._playing = [name for name in self.env.agents if name not in over]
        # The target of an episode that was cut off values every action of its last agents.
        acting = self._playing or cut
        self._over = not acting
        obs, masks = [], []
        if lacking := [name for name in self._playing if seen.get(name) is None]:
            raise self._wrong(f"{lacking[0]} plays on, and has no observation")
        for i, (name, count) in enumerate(zip(self.names, self.n_actions, strict=True)):
            one, mask = self._seen_by(i, seen.get(name), ((infos or {}).get(name) or {}).get("action_mask"))
            # Zeros as soon as it has left: the value of its last observation is that of an agent that plays on.
            obs.append(one if name in acting else None)
            masks.append(mask if name in acting else np.arange(count) == 0)
        self._see(obs, masks)

    def _play(self, actions: list[Any]) -> Sequence[Any]:
        pairs, there = zip(self.names, actions, strict=True), self.env.agents
        return tuple(self.env.step({name: action for name, action in pairs if name in there}))

    def _read(self, *returned: Any) -> tuple[float, bool, dict[str, Any]]:
        seen, rewards, terminated, truncated, infos = returned
        acted = self._playing
        if lacking := [name for name in acted if name not in rewards]:
            raise self._wrong(f"{lacking[0]} took part, and has no reward")
        cut = {name for name in acted if truncated.get(name) and not terminated.get(name)}
        self._keep(seen, infos, {name for ends in (terminated, truncated) for name in ends if ends[name]}, cut)
        stopped = bool(cut) and not self._playing  # as long as it lasts for one agent, its target bootstraps
        earlier = {name: said for name, said in self._said.items() if name not in acted}
        self._said = earlier | {name: (infos or {}).get(name) for name in acted}  # the last step has the last word
        results = {k: v for each in (infos or {}, self._said) for i in each.values() for k, v in (i or {}).items()}
        earned = [rewards.get(name, 0.0) if self.args.common_reward or name in acted else 0.0 for name in self.names]
        return self._result(earned, self._over, stopped, results)

    def get_state(self) -> np.ndarray:
        """Return the environment's state; all observations in a row where it has none or the same.

        After the end nobody learns from it, and some cannot say it: SISL's multiwalker has taken its walkers down.
        """
        if not self._own_state:
            return super().get_state()
        return np.zeros(self._own_state, np.float32) if self._over else self._state().astype(np.float32)


class GymmaEnv(Foreign):
    """A multi-agent environment with a Gymnasium id, in EPyMARL's convention.

    Tuple spaces with a part for each agent; `step` takes and returns a value for each agent.
    """

    args_model: ClassVar[type[ForeignArgs]] = RewardArgs
    _fix = " Install its package, or give package:Name-v0, such as lbforaging:Foraging-8x8-2p-3f-v3"

    def __new__(cls, args: Any) -> Any:
        """Return PettingZoo's environment for a key that begins with `pz-`, as EPyMARL does."""
        return PettingZooEnv(args) if args.given[1].startswith("pz-") else super().__new__(cls)

    def _measure(self) -> None:
        from gymnasium.spaces import Tuple

        seen, acts = self.env.observation_space, self.env.action_space
        if not (isinstance(seen, Tuple) and isinstance(acts, Tuple)):
            raise self._wrong("its spaces are not tuples with a part for each agent: it is for one agent")
        self.n_agents = len(acts)
        self._set_actions(list(acts))
        self._set_observations(list(seen))
        self.episode_limit = self._limit(getattr(self.env.spec, "max_episode_steps", None))

    def _make(self) -> Any:
        import gymnasium

        return gymnasium.make(self.args.path, disable_env_checker=True, **self._own)

    def _keep(self, obs: Any, info: Mapping[str, Any]) -> None:
        given = info if isinstance(info, Mapping) else {}
        masks = given.get("action_mask", [None] * self.n_agents)
        both = [self._seen_by(i, *each) for i, each in enumerate(zip(obs, masks, strict=True))]
        self._see([seen for seen, _ in both], [mask for _, mask in both])

    def _read(self, *returned: Any) -> tuple[float, bool, dict[str, Any]]:
        obs, rewards, ended, truncated, info = returned
        self._keep(obs, info)
        return self._result(rewards, *ends_of(ended, truncated), info if isinstance(info, Mapping) else {})
