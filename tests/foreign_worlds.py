"""Environments of other shapes: a parallel one whose agents differ and leave, and two in PyMARL's shape."""

from __future__ import annotations

import random
from types import SimpleNamespace

import gymnasium
import numpy as np
from gymnasium import spaces

SMALL = {
    "gymma": {"key": "lbforaging:Foraging-8x8-2p-3f-v3", "time_limit": 8},
    "pettingzoo": {"key": "mpe2.simple_spread_v3", "max_cycles": 8},
    "pymarl": {"key": "foreign_worlds:Pursuit"},
}
"""Arguments of each adapter, which plays nothing without a key."""
SEEN = {"tall": spaces.Box(-9, 9, (2, 2), np.float32), "kind": spaces.Discrete(3)}


class Leaving:
    """`tall` (4 features, 3 actions) leaves after 2 steps, `kind` (3 features, 2 actions) after 4."""

    possible_agents = ("tall", "kind")

    def __init__(self, end: str = "terminated", masks: str = "observation", start: int = 0, max_cycles=None) -> None:
        self.end, self.masks, self.first = end, masks, start
        self.unwrapped = SimpleNamespace(**({} if max_cycles else {"max_cycles": 5}))  # some do not say it

    def observation_space(self, name: str) -> spaces.Space:
        if self.masks == "observation":
            return spaces.Dict(
                {"observation": SEEN[name], "action_mask": spaces.MultiBinary(int(self.action_space(name).n))}
            )
        return SEEN[name]

    def action_space(self, name: str) -> spaces.Discrete:
        return spaces.Discrete({"tall": 3, "kind": 2}[name], start=self.first)

    def _look(self) -> tuple[dict, dict]:
        seen = {"tall": np.full((2, 2), self.t + self.start, np.float32), "kind": self.t % 3}
        masks = {"tall": np.array([1, 1, self.t == 1], np.int8), "kind": np.array([1, 1], np.int8)}
        if self.masks == "observation":
            both = {name: {"observation": seen[name], "action_mask": masks[name]} for name in self.agents}
            return both, {name: {} for name in self.agents}
        return {name: seen[name] for name in self.agents}, {name: {"action_mask": masks[name]} for name in self.agents}

    def state(self) -> np.ndarray:
        assert self.agents or self.end == "truncated", "all is taken down"
        return np.array([self.t, self.start])

    def reset(self, seed: int | None = None, options: None = None) -> tuple[dict, dict]:
        self.t, self.start, self.agents = 0, seed % 5, list(self.possible_agents)
        return self._look()

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert actions.keys() == set(self.agents)
        self.t += 1
        rewards = {name: float(1 + actions[name]) for name in self.agents}
        over = {"tall": self.t >= 2, "kind": self.t >= 4}
        ended = {name: over[name] and (self.end == "terminated" or name == "tall") for name in over}
        cut = {name: over[name] and not ended[name] for name in over}
        seen, infos = self._look()
        if over["kind"]:
            infos["kind"] |= {"score": 7.0, "return": 1.0}
        if self.t == 2:
            infos["tall"] |= {"steps": 2, "score": 3.0}  # the last that is heard of it
        self.agents = [name for name in self.agents if not over[name]]
        return seen, rewards, ended, cut, infos

    def close(self) -> None:
        self.closed = True


class Sloppy(Leaving):
    """It ends as `how` says: what PettingZoo allows, or what people get wrong."""

    def __init__(self, how: str, **given: str) -> None:
        super().__init__(**given)
        self.how = how

    def observation_space(self, name: str) -> spaces.Space:
        space = SEEN[name] if self.how == "plain" else super().observation_space(name)
        return spaces.Dict({**space.spaces, "goal": spaces.Box(0, 1, (2,))}) if self.how == "goal" else space

    def step(self, actions: dict) -> tuple:
        seen, rewards, ended, cut, infos = super().step(actions)
        if self.how in ("stays", "both", "stale"):  # agents stay listed, and an action of each is read
            self.agents = list(self.possible_agents)
            ended = {"tall": self.t >= 2 and self.how != "stale", "kind": self.t == 4}
            cut = dict.fromkeys(self.agents, self.how == "both" and self.t == 4)
            cut["tall"] |= self.how == "stale" and self.t >= 2  # also when it has long been gone
            return self._look()[0], dict.fromkeys(self.agents, 1.0), ended, cut, {}
        if self.how == "all cut":  # also the one that has left
            cut = dict.fromkeys(self.possible_agents, self.t == 4)
            ended = {"tall": self.t == 2, "kind": False}
        if self.how == "goal":
            seen = {name: {**one, "goal": np.ones(2, np.float32)} for name, one in seen.items()}
        changed = {
            "lost": (seen, rewards, ended, cut, {**infos, "kind": {**infos["kind"], "lost": 1}}),
            "no infos": (seen, rewards, ended, cut, None),
            "four values": (seen, rewards, ended, infos),
            "nothing": None,
            "unseen": ({**seen, "kind": None}, rewards, ended, cut, infos),
            "rewards": (seen, {**rewards, "kind": [1.0, 2.0]}, ended, cut, infos),
            "unpaid": (seen, {"tall": 1.0}, ended, cut, infos),
        }
        for how, mask in (("mask", np.ones(1, np.int8)), ("logits", np.array([0.0, -np.inf]))):
            masked = {**seen, "kind": {**seen["kind"], "action_mask": mask}} if self.how == how else seen
            changed[how] = masked, rewards, ended, cut, infos
        return changed.get(self.how, (seen, rewards, ended, cut, infos))

    def reset(self, seed: int | None = None, options: None = None) -> tuple[dict, dict]:
        seen, infos = super().reset(seed, options)
        more = {"goal": np.ones(2, np.float32)} if self.how == "goal" else {}
        begun = {name: {**one, **more} for name, one in seen.items()}
        return begun if self.how == "bare" else (begun, infos)


class Painted(Leaving):
    """It draws the time, if its constructor is told to."""

    metadata = {"render_modes": ["human", "rgb_array"]}

    def __init__(self, render_mode: str | None = None, broken: bool = False) -> None:
        super().__init__()
        self.render_mode, self.broken = render_mode, broken

    def render(self) -> np.ndarray | None:
        if self.broken:
            raise OSError("no display")
        return np.full((20, 30, 3), (self.t, 200, 9), np.uint8) if self.render_mode == "rgb_array" else None


class Pursuit:
    """PyMARL's shape, with a base class of its own: `reset()` without a seed, lists, three values from `step`."""

    def __init__(self, size: int = 4, five: bool = False) -> None:
        self.size, self.five = size, five

    def reset(self) -> None:
        self.t, self.place = 0, (random.randrange(self.size) + np.random.randint(self.size)) % self.size  # noqa: S311

    def step(self, actions: list) -> tuple:
        self.t += 1
        won = all(action == self.place for action in actions)
        if self.five:
            late = self.t == 3  # also where it is won, as Gymnasium's TimeLimit says
            return self.get_obs(), [won, 0.0], [True, won], [late, late], {}  # of each agent
        over = [True, won or self.t == 3]
        return [0.0, float(won)], over, {"battle_won": won, "episode_limit": self.t == 3 and not won}

    def get_obs(self) -> list:
        return [np.array([self.place, self.t, i]) for i in range(2)]

    def get_state(self) -> list:
        return [self.place, self.t]

    def get_avail_actions(self) -> list:
        return [[1] * self.size] * 2

    def get_env_info(self) -> dict:
        sizes = {"n_agents": 2, "n_actions": self.size, "obs_shape": 3, "state_shape": 2, "episode_limit": 3}
        return {**sizes, "has_win": not self.five}

    def close(self) -> None:
        """Nothing to release."""


class Filmed(Pursuit):
    """It shows the place as the grey of a picture, and passes on what it is given."""

    def __init__(self, **given: int) -> None:
        super().__init__(**given)

    def get_obs(self) -> list:
        return [np.full((3, 2, 1), 51 * self.place, np.uint8)] * 2

    def get_env_info(self) -> dict:
        return {**super().get_env_info(), "obs_shape": (3, 2, 1)}


class Given(Pursuit):
    """Its `reset` takes the seed, its constructor draws, and the step limit is in the info, as in EPyMARL's SMAC."""

    def __init__(self, size: int = 1000) -> None:
        super().__init__(size, five=True)
        self.drawn, self.also = random.random(), np.random.random()  # noqa: S311, NPY002

    def reset(self, seed: int = 0) -> None:
        self.t, self.place = 0, seed % self.size

    def step(self, actions: list) -> tuple:
        obs, reward, _, (late, _), _ = super().step(actions)
        return obs, self.drawn, late, False, {"episode_limit": late, "also": self.also}


class Seeded(Pursuit):
    """Its constructor takes the seed, as SMAC's does."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(size=1000)
        self.seed = seed

    def reset(self) -> None:
        self.t, self.place = 0, self.seed % 1000


class Passed(Seeded):
    """Its constructor takes what PyMARL passes: all arguments, with the seed."""

    def __init__(self, **given: int) -> None:
        super().__init__(**given)


class Unseeded(Pursuit):
    """Its starts follow from nothing."""

    def reset(self) -> None:
        self.t, self.place = 0, int(np.random.default_rng().integers(2**62))


class Nobody(Leaving):
    """Agents come and go."""

    possible_agents = ()


class Newcomer(Leaving):
    """Somebody plays whom it has not named."""

    def reset(self, seed: int | None = None) -> tuple:
        seen, infos = super().reset(seed)
        self.agents = [*self.agents, "stranger"]
        return seen, infos


def raises() -> None:
    raise OSError("the simulator is not there")


def needs() -> None:
    __import__("gone")


def exits() -> None:
    raise SystemExit("usage: give a map")


class Reach:
    """One step: each agent is shown a place and should give it; `far` in a box of two numbers, `near` of one."""

    possible_agents = ("far", "near")
    unwrapped = SimpleNamespace(max_cycles=1)
    boxes = {
        "far": spaces.Box(np.array([-4, 0], np.float32), np.array([4, 2], np.float32)),
        "near": spaces.Box(0, 1, (1,)),
    }

    def __init__(self, steps: int = 1, mixed: bool = False) -> None:
        self.steps, self.mixed, self.unwrapped = steps, mixed, SimpleNamespace(max_cycles=steps)

    def observation_space(self, name: str) -> spaces.Space:
        return spaces.Box(-1, 1, self.boxes[name].shape)

    def action_space(self, name: str) -> spaces.Space:
        return spaces.Discrete(3) if self.mixed and name == "far" else self.boxes[name]

    def _look(self) -> tuple[dict, dict]:
        self.goal = {name: self.rng.uniform(-1, 1, box.shape).astype(np.float32) for name, box in self.boxes.items()}
        return dict(self.goal), {name: {} for name in self.agents}

    def _reward(self, name: str, action: np.ndarray) -> float:
        low, high = self.boxes[name].low, self.boxes[name].high
        middle, half = (high + low) / 2, (high - low) / 2
        return -float(np.square((action - middle) / half - 0.7 * self.goal[name]).sum())

    def reset(self, seed: int | None = None, options: None = None) -> tuple[dict, dict]:
        self.rng, self.t, self.agents = np.random.default_rng(seed), 0, list(self.possible_agents)
        return self._look()

    def step(self, actions: dict) -> tuple[dict, dict, dict, dict, dict]:
        assert all(actions[name] in self.action_space(name) for name in self.possible_agents), actions
        rewards = {name: self._reward(name, action) for name, action in actions.items()}
        self.t += 1
        over = dict.fromkeys(self.agents, self.t >= self.steps)
        seen, infos = self._look()
        self.agents = [] if self.t >= self.steps else self.agents
        return seen, rewards, over, dict.fromkeys(over, False), infos

    def close(self) -> None:
        """Nothing to release."""


class Figures(Reach):
    """Each agent sees a cross, an X, a T or an L, somewhere in its picture and in some colour, and should say which."""

    figures = (0o272, 0o525, 0o722, 0o447)  # bits of 3 x 3 pixels, 5 of them set

    def __init__(self, steps: int = 4, size: int = 6) -> None:
        super().__init__(steps)
        self.size = size

    def observation_space(self, name: str) -> spaces.Space:
        return spaces.Box(0, 255, (self.size, self.size, 3), np.uint8)

    def action_space(self, name: str) -> spaces.Space:
        return spaces.Discrete(4)

    def _look(self) -> tuple[dict, dict]:
        kinds = zip(self.possible_agents, (np.uint8, np.int64), strict=True)  # the second is not what the space says
        seen = {name: np.zeros((self.size, self.size, 3), kind) for name, kind in kinds}
        self.goal = {name: int(self.rng.integers(4)) for name in seen}
        for name, picture in seen.items():
            row, column, colour = self.rng.integers([self.size - 2, self.size - 2, 3])
            bits = f"{self.figures[self.goal[name]]:09b}"
            picture[row : row + 3, column : column + 3, colour] = 255 * np.array([*map(int, bits)]).reshape(3, 3)
        self.seen = seen
        return seen, {name: {} for name in self.agents}

    def state(self) -> np.ndarray:
        return np.concatenate([*self.seen.values()])  # of integers, since one picture is

    def _reward(self, name: str, action: int) -> float:
        return float(action == self.goal[name])


class OfGymnasium(gymnasium.Env):
    """`Reach` and `Figures` with a Gymnasium id, in EPyMARL's convention: a part for each agent."""

    def __init__(self, world: type = Reach) -> None:
        self.world = world()
        names = self.world.possible_agents
        self.observation_space = spaces.Tuple([self.world.observation_space(name) for name in names])
        self.action_space = spaces.Tuple([self.world.action_space(name) for name in names])

    def reset(self, seed: int | None = None, options: None = None) -> tuple[tuple, dict]:
        return tuple(self.world.reset(seed)[0].values()), {"action_mask": [[1, 1, 1, 0]] * 2}

    def step(self, actions: tuple) -> tuple:
        parts = self.world.step(dict(zip(self.world.possible_agents, actions, strict=True)))
        obs, rewards, ended, truncated = (tuple(part.values()) for part in parts[:4])
        return obs, rewards, ended, truncated, {}


gymnasium.register("Reach-v0", entry_point=OfGymnasium)
gymnasium.register("Figures-v0", entry_point=OfGymnasium, kwargs={"world": Figures})
