"""`snakes_3v3`: three snakes against three, the other team played inside (docs/snakes.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from omagd.config.env_info import EnvInfo
from omagd.envs.frames import AGENTS, OPPONENTS, THINGS, Frame, Scene
from omagd.envs.protocol import BatchedEnv, Observation, StepResult, require_available
from omagd.envs.snakes.board import (
    EPISODE_LIMIT,
    HEIGHT,
    N_ACTIONS,
    N_BEANS,
    N_SNAKES,
    N_TEAM,
    START_LENGTH,
    WIDTH,
    compiler,
)
from omagd.envs.snakes.engine import Engine
from omagd.envs.snakes.flat import STATE_DIM
from omagd.envs.snakes.observer import Observer, ObsName, state_features
from omagd.envs.snakes.opponents import LADDERS, SCRIPTS, NetworkOpponent, Opponent, OpponentPool, random_bits
from omagd.envs.snakes.rewards import Ledger


class SnakesArgs(BaseModel):
    """Arguments of `snakes_3v3`.

    Attributes:
        obs: observation of a snake; flat.py, near.py and views.py list the columns. "26_raw" is "26" without
            `normalise`.
        normalise: whether "26", "30" and "35" are divided by the size of the board, codes by 7.
        centred: no effect; accepted because earlier runs have it.
        sight: distance (cells, on the torus) up to which "entities" shows others; None: no limit.
        reward: "score", the change of the difference between the teams' scores; "potential", the same with
            potential-based shaping; "baseline", as published. rewards.py has the formulas.
        potential_scale, potential_gamma: cost of each step to the nearest bean; the learner's discount.
        reward_win: added for each snake at the end of a won game, subtracted after a lost one; not with "baseline",
            which has its own.
        opponent: plays the other team until `set_opponents` is called.
        side: team of the agents: "a" snakes 0 to 2, "b" snakes 3 to 5, "both": a with even reset seeds, b with odd
            ones.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    obs: ObsName = "26"
    normalise: bool = True
    centred: bool = True
    sight: float | None = Field(default=None, gt=0)
    reward: Literal["score", "potential", "baseline"] = "score"
    potential_scale: float = Field(default=0.1, ge=0)
    potential_gamma: float = Field(default=0.99, gt=0, le=1)
    reward_win: float = Field(default=0.0, ge=0)
    opponent: Literal["random", "l1", "l3", "l4", "evasion", "greedy"] = "greedy"
    side: Literal["a", "b", "both"] = "both"

    @field_validator("obs", mode="before")
    @classmethod
    def _number_as_name(cls, value: Any) -> Any:
        """Accept 26 for "26", as YAML reads it."""
        return str(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _belong_together(self) -> SnakesArgs:
        """Reject keys without an effect."""
        if self.sight is not None and self.obs != "entities":
            raise ValueError(f"env_args.sight={self.sight:g} needs obs=entities, but obs={self.obs}")
        if self.reward_win and self.reward == "baseline":
            raise ValueError(f"env_args.reward_win={self.reward_win:g} is not for reward=baseline, which pays its own")
        return self


RESULTS = {"own": "score_own", "other": "score_opponent", "beans": "beans", "deaths": "deaths"}
"""Names of the ledger's sums in results."""


SCENE = Scene(
    ids=(*(f"a{i}" for i in range(N_TEAM)), *(f"e{i}" for i in range(N_TEAM)), *(f"b{i}" for i in range(N_BEANS))),
    teams=(AGENTS,) * N_TEAM + (OPPONENTS,) * N_TEAM + (THINGS,) * N_BEANS,
    kinds=("snake",) * N_SNAKES + ("bean",) * N_BEANS,
    team_names=("agents", "opponents", "beans"),
    actions=("up", "down", "left", "right"),
    health_max=(0.0,) * (N_SNAKES + N_BEANS),
    bounds=(0.0, 0.0, float(WIDTH), float(HEIGHT)),
    torus=True,
    score="score",
)


def _middle(cell: int) -> tuple[float, float]:
    """Return the middle of a cell, y up."""
    return cell % WIDTH + 0.5, HEIGHT - cell // WIDTH - 0.5


class Snakes3v3(BatchedEnv):
    """Games of the agents' team against a scripted opponent or a frozen policy.

    The agents are the three snakes of one team in index order. Actions 0 up, 1 down, 2 left, 3 right; all are
    available, the engine replaces a reversal. Results: battle_won, draw (by the teams' scores), score_own,
    score_opponent, beans and deaths of the own team. Step 200 ends the game as terminated, not as truncated.
    """

    args_model: ClassVar[type[BaseModel]] = SnakesArgs
    ladders: ClassVar[Mapping[str, tuple[str, ...]]] = LADDERS

    def __init__(self, args: SnakesArgs, n_slots: int) -> None:
        self.n_slots, self._args = n_slots, args
        self._observer = Observer(args.obs, args.normalise, args.sight)
        prepare()
        self._engine = Engine(n_slots)
        self._ledger = Ledger(args.reward, (args.potential_scale, args.potential_gamma, args.reward_win), n_slots)
        self._pool = OpponentPool(n_slots, args.opponent)
        self._team = np.zeros(n_slots, np.int64)
        self._avail = np.ones((n_slots, N_TEAM, N_ACTIONS), bool)
        self._hit = np.zeros((n_slots, N_SNAKES), bool)  # in the last step, for pictures
        sizes = N_TEAM, N_ACTIONS, self._observer.obs_dim, STATE_DIM, EPISODE_LIMIT, N_ACTIONS
        self.info = EnvInfo(
            "snakes_3v3", "", *sizes, self._observer.layout, scripted_policies=tuple(SCRIPTS), agent_rewards=True
        )

    def set_opponents(self, opponents: Sequence[str | Opponent]) -> None:
        """Draw the opponents of new episodes from these, all equally often.

        Args:
            opponents: names of scripts, `NetworkOpponent`s, or other implementations of `opponents.Opponent`.

        Errors: UserError for unknown names, and for none.
        """
        self._pool.set(opponents)

    def frozen_opponent(self, name: str, layers: Sequence[tuple[np.ndarray, np.ndarray]], sample: bool) -> Opponent:
        """Return an opponent with the agents' observation that samples from, or maximises, its outputs."""
        return NetworkOpponent(name, layers, self._observer, sample)

    @property
    def opponents(self) -> list[str]:
        """Names of the opponents in the slots' current episodes."""
        return self._pool.names()

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new games in the slots `which`; the seed determines side, opponent, start and random numbers."""
        rows = np.flatnonzero(which)
        self._engine.reset(rows, seeds[rows])
        self._pool.choose(rows, self._engine.board.keys[rows])
        self._team[rows] = seeds[rows] % 2 if self._args.side == "both" else int(self._args.side == "b")
        self._ledger.begin(rows)
        self._hit[rows] = False

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` [B, 3] in the `active` slots. Errors: ValueError for an action that does not exist."""
        require_available(self.info.name, self._avail, actions, active)
        rows = np.flatnonzero(active)
        board, team, each = self._engine.board, self._team[rows], np.arange(len(rows))
        joint = np.empty((len(rows), 2, N_TEAM), np.int64)
        joint[each, team] = actions[rows]
        joint[each, 1 - team] = self._pool.act(board, rows, 1 - team)
        before = self._ledger.potential(board, self._team, rows)
        outcome = self._engine.step(joint.reshape(-1, N_SNAKES), rows)
        reward = self._ledger.pay(outcome, board, self._team, rows, before)
        self._hit[rows] = outcome.hit
        return self._result(rows, reward, outcome.over)

    def observe(self, full: bool = False) -> Observation:
        """Return the observations of all slots."""
        board = self._engine.board
        obs, everything = self._observer.observe(board, self._team, full)
        return Observation(obs, state_features(board, self._team), self._avail.copy(), everything)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return the actions [B, 3] of the script of that name in the agents' place."""
        if policy == "random" or policy not in SCRIPTS:
            return super().scripted_actions(policy, rng)
        return SCRIPTS[policy].act(self._engine.board, self._team)

    def snapshot(self) -> dict[str, Any]:
        """Return all games, opponents (`pool`) and sums."""
        return {
            "engine": self._engine.snapshot(),
            "pool": self._pool.snapshot(),
            "team": self._team.copy(),
            "sums": {name: values.copy() for name, values in self._ledger.sums.items()},
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a `snapshot`. Errors: ValueError if an opponent is neither script nor network nor in this pool."""
        self._pool.restore(snapshot["pool"])
        self._engine.restore(snapshot["engine"])
        self._team[:] = snapshot["team"]
        for name, values in snapshot["sums"].items():
            self._ledger.sums[name][:] = values
        self._hit[:] = False

    def frame(self, slot: int) -> Frame:
        """Return the own snakes of a slot, the opponent's, and the beans; marked are those that have just died."""
        board = self._engine.board
        beans = board.beans[slot, np.argsort(board.bean_slots[slot])]
        order = (np.arange(N_SNAKES) + N_TEAM * self._team[slot]) % N_SNAKES  # own team first
        bodies, lengths = self._engine.segments(slot), board.lengths[slot][order]
        cells = [*board.heads[slot][order].tolist(), *beans.tolist()]
        parts = [[value for cell in bodies[snake] for value in _middle(cell)] for snake in order]
        x, y = zip(*map(_middle, cells), strict=True)
        scene = replace(
            SCENE, team_names=("agents", self.opponents[slot], "beans"), sight=(self._args.sight or 0.0,) * N_TEAM
        )
        points = np.maximum(lengths, START_LENGTH) - START_LENGTH
        score = [float(points[:N_TEAM].sum()), float(points[N_TEAM:].sum())]
        alive = [*(lengths > 0).tolist(), *(beans >= 0).tolist()]
        marked = np.flatnonzero(self._hit[slot][order]).tolist()
        return Frame(scene, [*x], [*y], alive, bodies=[*parts, *[[]] * N_BEANS], marked=marked, score=score)

    def _result(self, rows: np.ndarray, reward: np.ndarray, over: np.ndarray) -> StepResult:
        """Return rewards [k, 3] and ends [k] of the slots `rows`, with the results of episodes that ended."""
        agent_reward, terminated = np.zeros((self.n_slots, N_TEAM), np.float32), np.zeros(self.n_slots, bool)
        agent_reward[rows], terminated[rows] = reward, over
        facts = np.zeros((2 + len(RESULTS), self.n_slots), np.float32)
        if terminated.any():
            lead = self._ledger.sums["own"] - self._ledger.sums["other"]
            ended = (terminated * self._ledger.sums[name] for name in RESULTS)
            facts[:] = terminated & (lead > 0), terminated & (lead == 0), *ended
        info = dict(zip(("battle_won", "draw", *RESULTS.values()), facts, strict=True))
        return StepResult(agent_reward.sum(1), terminated, np.zeros_like(terminated), info, agent_reward=agent_reward)


@lru_cache(maxsize=1)
def prepare() -> None:
    """Compile or load the kernels, once per process."""
    compiler.prepare(_play_one_step)


def _play_one_step() -> None:
    """Call every kernel with the types that it always has."""
    engine, ledger = Engine(1), Ledger("potential", (1.0, 1.0, 1.0), 1)
    row = team = np.zeros(1, np.int64)
    engine.reset(row, row)
    names: tuple[ObsName, ...] = "26", "near", "entities"
    for obs in names:
        Observer(obs).observe(engine.board, team)
    state_features(engine.board, team)
    SCRIPTS["greedy"].act(engine.board, team)
    random_bits(engine.board, 0, np.empty((1, 1), np.uint64))
    before = ledger.potential(engine.board, team, row)
    outcome = engine.step(np.zeros((1, 6), np.int64), row)
    ledger.pay(outcome, engine.board, team, row, before)
