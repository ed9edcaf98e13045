"""Level-based foraging (LBF), particle worlds (MPE) and the warehouse (RWARE) by the names of their maps.

The rules are those of lbforaging, mpe2 and rware, which are extras. Shapes: n agents, m foods or landmarks, U = n + m.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field

from omagd.config.env_info import EntityLayout, StateLayout
from omagd.envs.adapters import Foreign, ForeignArgs, GymmaEnv, PettingZooEnv, Rewards
from omagd.envs.frames import AGENTS, THINGS, Frame, Scene, rounded, unit_names

FORAGING = r"(?:([1-9]\d?)s-)?([1-9]\d?)x\2-([1-9]\d?)p-([1-9]\d?)f((?:-coop|-ind|-pen)*)"
LBF_MAPS = ("8x8-2p-3f", "2s-8x8-2p-2f-coop", "10x10-3p-3f", "15x15-3p-5f", "15x15-4p-3f", "15x15-4p-5f")
RWARE_MAPS = ("tiny-2ag", "tiny-2ag-hard", "tiny-4ag", "small-4ag", "medium-6ag-easy", "large-8ag")
"""Examples: every name of this form can be played."""
MpeMap = Literal[
    "simple_v3", "simple_spread_v3", "simple_tag_v3", "simple_adversary_v3", "simple_push_v3", "simple_crypto_v3",
    "simple_reference_v3", "simple_speaker_listener_v4", "simple_world_comm_v3", "simple_formation_v1",
    "simple_line_v1", "collect_treasure_v1",
]  # fmt: skip
SPREAD: Final = "simple_spread_v3"
"""The world of MPE that has units."""
CELLS = 10.0
"""Cells of a picture for a unit of length of MPE."""
MOVES = ("stay", "left", "right", "down", "up")


class LbfArgs(Rewards, ForeignArgs):
    """Arguments of `lbf`; the others go to lbforaging's constructor.

    Attributes:
        map_name: `<size>x<size>-<agents>p-<foods>f`. `2s-` before it: one sees 2 cells far. Behind it `-coop`: foods
            that up to three must lift together; `-ind`: of level 1; `-pen`: an attempt that fails costs 0.1.
        time_limit: steps of an episode, which terminates then.
    """

    place = "lbforaging"
    map_name: str = "8x8-2p-3f"
    time_limit: int = Field(default=50, ge=1)


class MpeArgs(Rewards, ForeignArgs):
    """Arguments of `mpe`; the others go to the constructor of the world, such as `N` and `max_cycles`.

    Attributes:
        map_name: the world.
    """

    place = "mpe2.{}"
    map_name: MpeMap = SPREAD


class RwareArgs(Rewards, ForeignArgs):
    """Arguments of `rware`; the others go to rware's constructor.

    Attributes:
        map_name: `<tiny, small, medium or large>-<agents>ag`, with nothing, `-easy` or `-hard` behind it.
        time_limit: steps of an episode.
    """

    place = "rware:rware-{}-v2"
    map_name: str = "tiny-2ag"
    time_limit: int = Field(default=500, ge=1)


class Units(NamedTuple):
    """All units at one moment, agents first.

    Attributes:
        place: [U, 2], x to the right, y up. there: [U] bool. features: [U, f], for all who see the unit.
        hidden: [U, h], in the state only. own: [n, o], for the agent itself only. sees: [n, U] bool.
    """

    place: np.ndarray
    there: np.ndarray
    features: np.ndarray
    hidden: np.ndarray
    own: np.ndarray
    sees: np.ndarray


class _WithUnits(Foreign):
    """Observations of units: foods or landmarks, then the other agents, then the agent's own features.

    Block of a unit: 1, dx and dy over `_scale`, features; zeros if unseen or gone. State: for each unit, agents first,
    1, x and y over `_scale`, features, hidden ones.
    """

    _scale: float
    layout: EntityLayout | None = None
    state_layout: StateLayout

    def _measure_units(self, units: Units, cells: float) -> None:
        """Set sizes. cells: of a picture, for a unit of length."""
        n, total = len(units.own), len(units.place)
        others = np.arange(n - 1) + (np.arange(n - 1) >= np.arange(n)[:, None])
        self._of, self._order = np.arange(n)[:, None], np.hstack([np.tile(np.arange(n, total), (n, 1)), others])
        block, own = 3 + units.features.shape[1], units.own.shape[1]
        sight = self._scale * cells
        self.layout = EntityLayout(
            0, total - n, block, n - 1, block, own, position=(1, 2), health=-1, sight=sight
        )  # fmt: skip
        row = block + units.hidden.shape[1]
        self.state_layout = StateLayout(n, row, total - n, row)
        self.sizes, self._own_state = [self.layout.obs_dim] * n, self.state_layout.width

    def _see_units(self, units: Units) -> None:
        """Keep what follows from the units until somebody asks for it."""
        there, hidden = units.there[:, None], units.hidden.shape[1]
        rows = np.concatenate([there, units.place / self._scale, units.features, units.hidden], 1) * there
        blocks = rows[:, : rows.shape[1] - hidden][self._order]
        blocks[..., 1:3] -= rows[: len(blocks), None, 1:3]
        self._units, self._blocks, self._state = units, blocks, rows.ravel()
        self._obs = self._of_units(units.sees)
        self._avail = self._all

    def _of_units(self, shown: np.ndarray) -> np.ndarray:
        """Return observations [n, obs_dim] float32 of the units `shown` [n, U] bool."""
        shown = (shown & self._units.there)[self._of, self._order, None]
        seen = np.where(shown, self._blocks, 0.0).reshape(len(shown), -1)
        return np.concatenate([seen, self._units.own], 1, dtype=np.float32)

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        """Return [n, obs_dim] float32."""
        unlimited = no_range_limit and self.layout is not None
        return self._of_units(np.ones_like(self._units.sees)) if unlimited else super().get_obs()

    def get_state(self) -> np.ndarray:
        """Return [state_dim] float32."""
        return super().get_state() if self.layout is None else self._state.astype(np.float32)

    def get_env_info(self) -> dict[str, Any]:
        """Return sizes, with the layouts where there are some."""
        facts = super().get_env_info()
        if self.layout is not None:
            facts |= {
                "obs_component": self.layout.obs_component, "entity_position": self.layout.position,
                "entity_health": self.layout.health, "entity_sight": self.layout.sight,
                "n_normal_actions": max(self.n_actions), "state_layout": self.state_layout,
            }  # fmt: skip
        return facts


class Lbf(_WithUnits, GymmaEnv):
    """Agents of levels gather foods of levels; those who lift a food together need its level in all.

    Foods that are left come first, in the order of the field, as in lbforaging's own vectors: so all agents find the
    same one in the first place. Features of a unit: its level. Own: x and y in cells, level. An agent sees what
    lbforaging shows. dx and dy are over the sight where it is limited, else in cells.
    """

    args_model = LbfArgs

    def _make(self) -> Any:
        from lbforaging.foraging import ForagingEnv  # registered ids have at most 4 foods

        found = re.fullmatch(FORAGING, self.args.map_name)
        if found is None:
            raise self._wrong("must be of the form 8x8-2p-3f: a square, agents, foods (docs/lbf.md)")
        defaults = {"observe_agent_levels": True, "grid_observation": False}
        if unread := [key for key, default in defaults.items() if self._own.get(key, default) != default]:
            raise self._wrong(f"{unread[0]} changes lbforaging's observations, which only --env-config=gymma reads")
        sight, size, n, m, more = found.groups()
        settings = {
            "players": int(n), "max_num_food": int(m), "field_size": (int(size), int(size)),
            "sight": int(sight or size), "force_coop": "-coop" in more, "penalty": 0.1 * ("-pen" in more),
            "min_player_level": 1, "max_player_level": 2, "min_food_level": 1,
            "max_food_level": 1 if "-ind" in more else None, "max_episode_steps": self.args.time_limit,
        }  # fmt: skip
        settings |= self._own
        if np.shape(settings["field_size"]) != (2,):
            raise self._wrong(f"field_size={settings['field_size']} must be rows and columns, as [8,8]")
        env = ForagingEnv(**settings)
        env._make_gym_obs = tuple  # nobody reads what it observes, which takes most of its time
        return env

    def _measure(self) -> None:
        super()._measure()
        # Over the size of the field, a cell would be too little for a network to learn from within a million steps.
        self._scale = float(self.env.sight) if self.env.sight < self.env.rows else 1.0
        self.env.reset(seed=0)
        self._measure_units(self._look(), 1.0)

    def _keep(self, obs: Any, info: Any) -> None:
        self._see_units(self._look())

    def _look(self) -> Units:
        players, sight, size, field = self.env.players, self.env.sight, self.env.rows, self.env.field
        own, foods = np.array([player.position for player in players]), np.argwhere(field)  # row, column
        gone = np.zeros((self.env.max_num_food - len(foods), 2), int)  # also those without room at the start
        n, cells = len(own), np.concatenate([own, foods, gone])
        levels = np.array([player.level for player in players] + field[tuple(cells[n:].T)].tolist(), float)[:, None]
        away = cells - own[:, None]
        last = np.full(away.shape, sight)
        last[:, :n] = np.maximum(sight, 2 * sight - own)[:, None]  # lbforaging's rule for agents
        sees = ((away >= -sight) & (away <= last)).all(-1)
        there = np.arange(len(cells)) < n + len(foods)
        place = np.array([0.0, size - 1]) + cells[:, ::-1] * (1, -1)
        own_features = np.concatenate([place[:n], levels[:n]], 1)
        return Units(place, there, levels, np.empty((len(cells), 0)), own_features, sees)

    def get_frame(self) -> Frame:
        """Return agents and foods in their cells; their health is the level."""
        units, n, size = self._units, self.n_agents, float(self.env.rows)
        kinds = ["agent"] * n + ["food"] * (len(units.place) - n)
        sight = float(self.env.sight) if self.env.sight < size else 0.0
        actions = ("stay", "north", "south", "west", "east", "lift")
        x0, x1 = -0.5, size - 0.5
        levels = units.features[:, 0].tolist()
        return _frame("f", kinds, units.place, units.there, n, (x0, x0, x1, x1), actions, sight, levels)


class Mpe(_WithUnits, PettingZooEnv):
    """Particles that move, talk, chase or cover landmarks. `simple_spread_v3` has units, the other worlds have not.

    Own features: velocity and place. Hidden: velocity. `num_agent_neighbors` and `num_landmark_neighbors`, of mpe2,
    limit what is seen to the nearest.
    """

    args_model = MpeArgs

    def _make(self) -> Any:
        if self.args.time_limit:
            self._own = {"max_cycles": self.args.time_limit, **self._own}
        return super()._make()

    def _measure(self) -> None:
        super()._measure()
        if self.args.map_name == SPREAD:
            self._scale = 1.0
            self._measure_units(self._look(), CELLS)

    def _keep(self, seen: Any, infos: Any, over: Collection[str] = (), cut: Collection[str] = ()) -> None:
        if self.layout is None:
            super()._keep(seen, infos, over, cut)
            return
        self._playing = list(self.env.agents)
        self._see_units(self._look())

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        """Play [n] actions; in a world of units without PettingZoo's loop over agents, which takes half of the time."""
        if self.layout is None:
            return super().step(actions)
        raw = self.env.unwrapped
        raw.current_actions[:] = self._played(actions)
        raw._execute_world_step()
        raw.steps += 1
        self._see_units(self._look())
        late = raw.steps >= raw.max_cycles
        results = {name: value for info in raw.infos.values() for name, value in info.items()}
        rewards = [raw.rewards[name] for name in self.names]
        return self._result(rewards, not late and raw.scenario.is_terminal(raw.world), late, results)

    def _look(self) -> Units:
        world, scenario = self.env.unwrapped.world, self.env.unwrapped.scenario
        n, everything = len(world.agents), [*world.agents, *world.landmarks]
        place, speed = (np.array([getattr(one.state, name) for one in everything]) for name in ("p_pos", "p_vel"))
        sees = np.ones((n, len(place)), bool)
        for part, most in ((slice(n), scenario.num_agent_neighbors), (slice(n, None), scenario.num_landmark_neighbors)):
            if most is not None:
                away = np.linalg.norm(place - place[:n, None], axis=-1)
                away[np.arange(n), np.arange(n)] = np.inf
                sees[:, part] = away[:, part].argsort(1).argsort(1) < most
        nothing = np.empty((len(everything), 0))
        return Units(place, np.ones(len(place), bool), nothing, speed, np.hstack([speed[:n], place[:n]]), sees)

    def get_frame(self) -> Frame:
        """Return agents and landmarks."""
        world = self.env.unwrapped.world
        landmarks = [one for one in world.landmarks if not getattr(one, "boundary", False)]
        kinds = ["adversary" if getattr(one, "adversary", False) else "agent" for one in world.agents]
        place = CELLS * np.array([one.state.p_pos for one in (*world.agents, *landmarks)])
        there = np.array([getattr(one, "alive", True) for one in (*world.agents, *landmarks)])
        most, bounds = max(self.n_actions), (-100.0, -100.0, 100.0, 100.0)
        actions = MOVES if most == len(MOVES) else tuple(f"action {i}" for i in range(most))  # none aims at a unit
        return _frame("l", kinds + ["landmark"] * len(landmarks), place, there, self.n_agents, bounds, actions)


class Rware(GymmaEnv):
    """Robots carry the shelves that are asked for to the goals. 71 features without units."""

    args_model = RwareArgs
    _fix = " Give <size>-<agents>ag, such as tiny-2ag"

    def _make(self) -> Any:
        self._own = {"max_steps": None, **self._own}  # its own limit would say that the episode is over
        return super()._make()

    def get_frame(self) -> Frame:
        """Return robots, the shelves that are asked for, and goals."""
        env = self.env.unwrapped
        cells = [(one.x, one.y) for one in (*env.agents, *env.request_queue)] + list(env.goals)
        kinds = ["robot"] * self.n_agents + ["shelf"] * len(env.request_queue) + ["goal"] * len(env.goals)
        high, wide = env.grid_size
        place = np.array([(x, high - 1 - y) for x, y in cells], float)
        actions = ("stay", "forward", "left", "right", "load")
        bounds = (-0.5, -0.5, wide - 0.5, high - 0.5)
        return _frame("s", kinds, place, np.ones(len(cells), bool), self.n_agents, bounds, actions)


def _frame(
    letter: str, kinds: list[str], place: np.ndarray, there: np.ndarray, n: int,
    bounds: tuple[float, float, float, float], actions: tuple[str, ...], sight: float = 0.0,
    levels: Sequence[float] = (),
) -> Frame:  # fmt: skip
    """Return agents, first in `kinds`, and things, whose names begin with a letter. place: [U, 2] in cells.

    levels: [U], which can be as high as that of all agents together.
    """
    m = len(kinds) - n
    ids = (*unit_names(n, 0), *(f"{letter}{i}" for i in range(m)))
    teams, names = (AGENTS,) * n + (THINGS,) * m, ("agents", "opponents", kinds[-1].split()[0] + "s")
    highest = (sum(levels[:n]),) * len(levels)
    scene = Scene(ids, teams, tuple(kinds), names, actions, highest, sight=(sight,) * n, bounds=bounds)
    x, y = map(rounded, place.T)
    return Frame(scene, x, y, there.tolist(), list(levels))
