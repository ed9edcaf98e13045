"""Facts of an environment: sizes, step limit, layout of the observation.

Letters for shapes, used in the whole code base: B episodes or battle slots, T steps, S packed rows (all steps of a
batch), W ranks; n agents, N nodes of one agent's graph, D features of a node, A actions; K codes, H hidden units,
k stacked frames.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from omagd.utils.errors import UserError

SELF, ALLY, ENEMY = 0, 1, 2
LONGEST_LABEL = 60
LARGEST = 1 << 20
"""Largest size that is accepted from a file."""
Size = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]


ADAPTERS = ("gymma", "pettingzoo", "pymarl", "jaxmarl")
"""Environments whose map is `env_args.key`, as in EPyMARL; `key` of another one means something else."""


def given_map(env: object, env_args: Mapping[str, Any]) -> Any:
    """Return what `env_args` of an environment give as the map; empty if they give none."""
    return env_args.get("map_name") or (env_args.get("key") if env in ADAPTERS else None) or ""


def map_label(given: object) -> str:
    """Return the name, in results, of what `env_args.map_name` gives: a map, a set, a file, its content, or a list.

    A list becomes its names with + between them; a long one the first name and the number of the others.
    """
    if isinstance(given, Mapping):
        given = given.get("name") or given.get("training", "")
    if not isinstance(given, list | tuple):
        text = str(given)
        if text.endswith((".yaml", ".yml")):
            return Path(text).stem
        given = [name for part in text.strip("[]()").split(",") if (name := part.strip(" '\""))]
    label = "+".join(map(str, given))
    return label if len(label) <= LONGEST_LABEL else f"{given[0]}+{len(given) - 1}_maps"


@dataclass(frozen=True)
class EntityLayout:
    """Layout of one agent's flat observation: move, enemies, allies, own, in that order (`obs_component`).

    For pictures: `position` and `health` are the columns of (relative x, relative y) and health among another unit's
    features (-1: no health), and `sight` is the sight range in cells, by which positions are divided.

    Where some agents heal, `healer` is the column of the agent's own features that is 1 for these: their targets are
    agents and not enemies. -1: nobody heals, or it is not known who.

    `ally_types` and `enemy_types` are the first columns of the one-hot type among an ally's and an enemy's features,
    `n_types` its length; -1: not observed.
    """

    move_dim: Count
    n_enemies: Count
    enemy_dim: Count
    n_allies: Count
    ally_dim: Count
    own_dim: Count
    position: tuple[int, int] = (2, 3)
    health: int = 4
    sight: float = 9.0
    healer: int = -1
    ally_types: int = -1
    enemy_types: int = -1
    n_types: Count = 0

    @property
    def obs_dim(self) -> int:
        """Features of the flat observation."""
        return self.move_dim + self.n_enemies * self.enemy_dim + self.n_allies * self.ally_dim + self.own_dim

    @property
    def n_nodes(self) -> int:
        """N: self, allies, enemies."""
        return 1 + self.n_allies + self.n_enemies

    @property
    def node_dim(self) -> int:
        """D: widest node, zero-padded on the right."""
        return max(self.ally_dim, self.enemy_dim, 4 + self.move_dim + self.own_dim)

    @property
    def node_types(self) -> tuple[int, ...]:
        """Type of each node in graph order: SELF, allies, enemies."""
        return (SELF, *([ALLY] * self.n_allies), *([ENEMY] * self.n_enemies))

    @property
    def is_possible(self) -> bool:
        """Whether the columns named are among the features."""
        types = (self.ally_types, self.ally_dim), (self.enemy_types, self.enemy_dim)
        inside = all(first < 0 or first + self.n_types <= width for first, width in types)
        return inside and self.healer < self.own_dim

    @property
    def obs_component(self) -> tuple[object, ...]:
        """The published form: (move_dim, (n_enemies, enemy_dim), (n_allies, ally_dim), own_dim)."""
        return (self.move_dim, (self.n_enemies, self.enemy_dim), (self.n_allies, self.ally_dim), self.own_dim)


@dataclass(frozen=True)
class StateLayout:
    """Layout of a state: allies, enemies, one-hot last actions of the allies, then features that are no units'.

    A unit that is dead or absent is a block of zeros.

    Attributes:
        last_actions: length of an ally's one-hot last action; 0: not in the state.
    """

    n_allies: Count
    ally_dim: Count
    n_enemies: Count
    enemy_dim: Count
    last_actions: Count = 0

    @property
    def units_dim(self) -> int:
        """Features of all units, which are the first ones of the state."""
        return self.n_allies * self.ally_dim + self.n_enemies * self.enemy_dim

    @property
    def width(self) -> int:
        """Features of all units and of the last actions."""
        return self.units_dim + self.n_allies * self.last_actions


@dataclass(frozen=True)
class ActionBox:
    """Continuous actions: d numbers of each of n agents, in the environment's units.

    Networks count from the middle in half widths, u = (a - center) / half, so that -1 and 1 are the bounds.

    Attributes:
        low, high: bounds [n][d]; None: no bound.
    """

    low: tuple[tuple[float | None, ...], ...]
    high: tuple[tuple[float | None, ...], ...]

    @classmethod
    def of(cls, low: Any, high: Any) -> ActionBox:
        """Return the box of bounds [n, d], infinite where there are none. Errors: ValueError for other shapes."""
        ends = [np.asarray(bound, np.float64) for bound in (low, high)]
        if ends[0].ndim != 2 or not ends[0].size or ends[0].shape != ends[1].shape or not (ends[0] <= ends[1]).all():
            raise ValueError("action_bounds are not (low, high) of shape [agents, numbers] with low <= high")
        rows = ((tuple(float(x) if np.isfinite(x) else None for x in row) for row in end.tolist()) for end in ends)
        return cls(*map(tuple, rows))

    @property
    def dim(self) -> int:
        """Numbers of an action, d."""
        return len(self.low[0])

    @property
    def bounded(self) -> bool:
        """Whether all numbers have bounds."""
        return not any(bound is None for end in (self.low, self.high) for row in end for bound in row)

    @cached_property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Bounds low, high [n, d] float32."""
        low, high = (np.array(end, np.float32) for end in (self.low, self.high))  # None is NaN
        return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)

    @cached_property
    def scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Center and half width [n, d] float32; 0 and 1 where a bound is missing."""
        low, high = self.ends
        known = np.isfinite(low) & np.isfinite(high)
        low, high = np.where(known, low, -1.0), np.where(known, high, 1.0)
        half = (high - low) / 2
        return ((low + high) / 2).astype(np.float32), np.where(half > 0, half, 1.0).astype(np.float32)

    def clip(self, actions: np.ndarray) -> np.ndarray:
        """Return actions [..., n, d] within the bounds, as the environment plays them."""
        return actions.clip(*self.ends)

    def uniform(self, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        """Return random actions [*shape, n, d] float32; from -1 to 1 where a bound is missing."""
        center, half = self.scale
        drawn = rng.uniform(-1.0, 1.0, (*shape, *center.shape)).astype(np.float32)
        return self.clip(center + half * drawn)


_NOT_SHAPES = {"scripted_policies", "has_win", "agent_rewards", "state_layout", "tasks", "n_training", "padded"}
_NOT_SHAPES |= {"box", "image"}


@dataclass(frozen=True)
class EnvInfo:
    """Facts of one environment; `layout` is None if graphs are not supported.

    Attributes:
        name: environment key ("skirmish"); results are labelled with it.
        map_name: map or task.
        n_agents, n_actions, obs_dim, state_dim: sizes. With `box`, A = n_actions = 2 d: an agent's output and its row
            of `avail_actions` are of d means, then of d deviations, and 1 where the agent has such a number.
        episode_limit: longest episode in agent steps.
        n_normal_actions: actions without a target; action n_normal_actions + i attacks enemy i, or heals agent i.
        layout: entity layout of `obs`, or None.
        scripted_policies: names that the environment's `scripted_actions` takes.
        has_win: whether the environment reports `battle_won`.
        agent_rewards: whether it reports each agent's reward (`StepResult.agent_reward`).
        state_layout: the units of `state`, or None.
        tasks: names of the tasks of a set; the sizes are then those of the largest ones. Empty: one task.
        n_training: number of tasks that are trained on, the first ones; the others are for tests.
        padded: whether some tasks are smaller than the sizes here.
        box: bounds of continuous actions; None: actions are numbers from 0 to A - 1.
        image: height, width and channels, where observations are images; they are flat rows of pixels, in that order.
    """

    name: str
    map_name: str
    n_agents: Size
    n_actions: Size
    obs_dim: Size
    state_dim: Count
    episode_limit: Size
    n_normal_actions: Count = 0
    layout: EntityLayout | None = None
    scripted_policies: tuple[str, ...] = ()
    has_win: bool = True
    agent_rewards: bool = False
    state_layout: StateLayout | None = None
    tasks: tuple[str, ...] = ()
    n_training: Count = 0
    padded: bool = False
    box: ActionBox | None = None
    image: tuple[Size, Size, Size] | None = None

    def learns_own_rewards(self, env_args: Mapping[str, Any]) -> bool:
        """Return whether a run with these `env_args` asks for rewards of agents; some worlds report them anyway."""
        return self.agent_rewards and env_args.get("common_reward", True) is not True

    @property
    def action_dim(self) -> int:
        """Numbers of an action as an input: a one-hot of A, or the d numbers themselves."""
        return self.n_actions if self.box is None else self.box.dim

    @property
    def sizes(self) -> str:
        """The sizes in words; also what the score of a run is, where it is not the win rate."""
        actions = f"{self.n_actions} actions" if self.box is None else f"continuous actions of {self.box.dim} numbers"
        seen = "x".join(map(str, self.image or (self.obs_dim,)))
        units = f"{self.n_agents} agents, {actions}, observation {seen}, state {self.state_dim}"
        score = "" if self.has_win else "; without has_win the score is the return"
        return f"{units}, at most {self.episode_limit} steps{score}"

    def layout_for(self, given: str, env: str) -> EntityLayout:
        """Return the layout. Errors: UserError without one, by what was `given`, as key=value, with `env`."""
        if self.layout is None:
            raise UserError(
                f"{given} needs an environment with an entity layout; env={env} has none. Use --config=qmix or mappo,"
                " or an environment with units, such as --env-config=lbf"
            )
        return self.layout

    def shape_key(self) -> str:
        """Return a short hash of the facts that pre-trained graph modules depend on: environment, map, sizes."""
        facts = {k: v for k, v in asdict(self).items() if k not in _NOT_SHAPES}
        for name in ("healer", "ally_types", "enemy_types", "n_types"):
            (facts["layout"] or {}).pop(name, None)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> EnvInfo:
        """Rebuild from `to_dict`. Errors: ValueError for a wrong type or an impossible size."""
        info: EnvInfo = TypeAdapter(cls).validate_json(json.dumps(values), strict=True)
        if (layout := info.layout) is not None and not (layout.obs_dim <= LARGEST and layout.is_possible):
            raise ValueError("an impossible size")
        if (box := info.box) is not None and {len(row) for end in (box.low, box.high) for row in end} != {box.dim}:
            raise ValueError("bounds of another size")
        if info.image is not None and math.prod(info.image) != info.obs_dim:
            raise ValueError("an image of another size")
        return info
