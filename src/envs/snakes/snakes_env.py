"""`snakes_3v3`: three snakes against three, the other team played inside (docs/snakes.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from omagd.config.env_info import EnvInfo
from omagd.envs.actions import random_actions, require_available
from omagd.envs.protocol import BatchedEnv, Observation, StepResult
from omagd.envs.snakes.args import SnakesArgs
from omagd.envs.snakes.board import EPISODE_LIMIT, N_ACTIONS, N_TEAM
from omagd.envs.snakes.engine import Engine, Outcome, baseline_rewards, potential, score_rewards
from omagd.envs.snakes.features import STATE_DIM, state_features
from omagd.envs.snakes.observer import Observer
from omagd.envs.snakes.opponents import LADDERS, SCRIPTS, NetworkOpponent, Opponent, OpponentPool
from omagd.envs.snakes.replay import Tape


@dataclass
class _Sums:
    """What an episode has come to. [B] each: raw rewards of both teams, own beans and deaths."""

    own: np.ndarray
    other: np.ndarray
    beans: np.ndarray
    deaths: np.ndarray


class Snakes3v3(BatchedEnv):
    """Boards on which the agents' team plays against a scripted opponent or a frozen policy.

    The agents are the three snakes of one team in index order. Actions 0 up, 1 down, 2 left, 3 right; all are
    available, the engine replaces a reversal. Results: battle_won, draw (by the teams' scores), score_own,
    score_opponent, beans and deaths of the own team. The last step is a part of the game, never a truncation.

    Args:
        args: what is seen and paid, who plays the other team. n_slots: boards played side by side.
    """

    args_model: ClassVar[type[BaseModel]] = SnakesArgs
    ladders: ClassVar[Mapping[str, tuple[str, ...]]] = LADDERS

    def __init__(self, args: SnakesArgs, n_slots: int) -> None:
        self.n_slots, self._args = n_slots, args
        self._observer = Observer(args.obs, args.normalise, args.centred, args.sight)
        self._engine = Engine(n_slots)
        self._pool = OpponentPool(n_slots, args.opponent)
        self._team = np.zeros(n_slots, np.int64)
        self._sums = _Sums(*(np.zeros(n_slots, np.int64) for _ in fields(_Sums)))
        self._avail = np.ones((n_slots, N_TEAM, N_ACTIONS), bool)
        self._counts: dict[str, float] = {"games": 0, "won": 0, "drawn": 0}
        self._tape = Tape()
        self.info = EnvInfo(
            name="snakes_3v3",
            map_name="",
            n_agents=N_TEAM,
            n_actions=N_ACTIONS,
            obs_dim=self._observer.obs_dim,
            state_dim=STATE_DIM,
            episode_limit=EPISODE_LIMIT,
            n_normal_actions=N_ACTIONS,
            layout=self._observer.layout,
            scripted_policies=tuple(SCRIPTS),
            agent_rewards=True,
        )

    def set_opponents(self, opponents: Sequence[str | Opponent], weights: Sequence[float] | None = None) -> None:
        """Draw the opponents of episodes that begin from now on from these, by their `weights` (None: equally).

        Args:
            opponents: names of scripts, `NetworkOpponent`s, or anything that keeps `opponents.Opponent`.

        Errors: UserError for unknown names and weights that are no shares.
        """
        self._pool.set(opponents, weights)

    def frozen_opponent(self, name: str, layers: Sequence[tuple[np.ndarray, np.ndarray]], sample: bool) -> Opponent:
        """Return an opponent that sees what the agents see and plays by the softmax, or the largest, of its outputs."""
        return NetworkOpponent(name, layers, self._observer, sample)

    @property
    def opponents(self) -> list[str]:
        """Names of the opponents of the slots' present episodes."""
        return self._pool.names()

    def reset(self, which: np.ndarray, seeds: np.ndarray) -> None:
        """Start new games in the slots `which`; seed, and the opponents set, tell side, opponent, start and chance."""
        rows = np.flatnonzero(which)
        self._engine.reset(rows, seeds[rows])
        self._pool.choose(rows, self._engine.board.keys[rows])
        self._team[rows] = seeds[rows] % 2 if self._args.side == "both" else int(self._args.side == "b")
        for part in fields(_Sums):
            getattr(self._sums, part.name)[rows] = 0
        if which[0]:
            self._tape.begin(self._engine, int(self._team[0]), self.opponents[0])

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Play `actions` [B, 3] in the `active` slots. Errors: ValueError for an action that does not exist."""
        require_available(self.info.name, self._avail, actions, active)
        rows = np.flatnonzero(active)
        if not len(rows):
            return self._result(rows, np.zeros((0, N_TEAM)), np.zeros(0, bool))
        board, team, each = self._engine.board, self._team[rows], np.arange(len(rows))
        joint = np.empty((len(rows), 2, N_TEAM), np.int64)
        joint[each, team] = actions[rows]
        joint[each, 1 - team] = self._pool.act(board, rows, 1 - team)
        before = self._potential(rows)
        outcome = self._engine.step(joint.reshape(len(rows), -1), rows)
        reward = self._pay(outcome, rows, before)
        if active[0]:
            self._tape.note(self._engine, outcome.hit[0], bool(outcome.over[0]))
        return self._result(rows, reward, outcome.over)

    def observe(self, full: bool = False) -> Observation:
        """Return what all slots show now."""
        board = self._engine.board
        obs, everything = self._observer.look(board, self._team, full)
        return Observation(obs, state_features(board, self._team), self._avail.copy(), everything)

    def scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        """Return [B, 3] what the opponent of that name would do in the agents' place."""
        if policy not in SCRIPTS:
            return super().scripted_actions(policy, rng)
        if policy == "random":
            return random_actions(self._avail, rng)
        return SCRIPTS[policy].act(self._engine.board, self._team)

    def snapshot(self) -> dict[str, Any]:
        """Return all games, the opponents (`pool`) and the sums; not the tape of the replay."""
        return {
            "engine": self._engine.snapshot(),
            "pool": self._pool.snapshot(),
            "team": self._team.copy(),
            "sums": {name: values.copy() for name, values in vars(self._sums).items()},
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from `snapshot`. Errors: ValueError for an opponent of another kind that is not here."""
        self._pool.restore(snapshot["pool"])
        self._engine.restore(snapshot["engine"])
        self._team[:] = snapshot["team"]
        for name, values in snapshot["sums"].items():
            getattr(self._sums, name)[:] = values
        self._tape.stop()

    def get_stats(self) -> dict[str, float]:
        """Return counts of games since construction: played, won, drawn; games and wins against each opponent."""
        return dict(self._counts)

    def save_replay(self, folder: str) -> None:
        """Write the last whole game of slot 0 as snakes.gif and snakes.html. Errors: UserError before there is one."""
        self._tape.save(folder)

    def _potential(self, rows: np.ndarray) -> np.ndarray:
        """Return the potential of the own snakes, [k, 3]; zero where it is not paid."""
        if self._args.reward != "potential":
            return np.zeros((len(rows), N_TEAM))
        board = self._engine.board
        heads = board.heads[rows].reshape(-1, 2, N_TEAM)[np.arange(len(rows)), self._team[rows]]
        return potential(heads, board.beans[rows], self._args.potential_scale)

    def _pay(self, outcome: Outcome, rows: np.ndarray, before: np.ndarray) -> np.ndarray:
        """Add up what the step brought; return the rewards [k, 3] of the own snakes."""
        args, board, team, each = self._args, self._engine.board, self._team[rows], np.arange(len(rows))
        raw = outcome.raw.reshape(-1, 2, N_TEAM)
        own, other = raw[each, team], raw[each, 1 - team]
        self._sums.own[rows] += own.sum(1)
        self._sums.other[rows] += other.sum(1)
        self._sums.beans[rows] += outcome.ate.reshape(raw.shape)[each, team].sum(1)
        self._sums.deaths[rows] += outcome.hit.reshape(raw.shape)[each, team].sum(1)
        lead = self._sums.own[rows] - self._sums.other[rows]
        if args.reward == "baseline":
            heads = board.heads[rows].reshape(raw.shape)[each, team]
            return baseline_rewards(own, lead, outcome.over, heads, board.beans[rows])
        reward = score_rewards(own, other) + (args.reward_win * np.sign(lead) * outcome.over)[:, None]
        if args.reward == "potential":
            after = np.where(outcome.over[:, None], 0, self._potential(rows))
            reward += args.potential_gamma * after - before
        return reward

    def _result(self, rows: np.ndarray, reward: np.ndarray, over: np.ndarray) -> StepResult:
        """Return rewards [k, 3] and ends [k] of the slots `rows`, and what the episodes that ended have come to."""
        b, sums = self.n_slots, self._sums
        agent_reward, terminated = np.zeros((b, N_TEAM), np.float32), np.zeros(b, bool)
        agent_reward[rows], terminated[rows] = reward, over
        won, drawn = terminated & (sums.own > sums.other), terminated & (sums.own == sums.other)
        if terminated.any():
            self._count(terminated, won, drawn)
        results = {"score_own": sums.own, "score_opponent": sums.other, "beans": sums.beans, "deaths": sums.deaths}
        info = {name: np.where(terminated, value, 0).astype(np.float32) for name, value in results.items()}
        return StepResult(
            reward=agent_reward.sum(1),
            terminated=terminated,
            truncated=np.zeros(b, bool),
            info={"battle_won": won.astype(np.float32), "draw": drawn.astype(np.float32), **info},
            agent_reward=agent_reward,
        )

    def _count(self, ended: np.ndarray, won: np.ndarray, drawn: np.ndarray) -> None:
        names = self.opponents
        for slot in np.flatnonzero(ended):
            counted = {"games": 1, "won": won[slot], "drawn": drawn[slot]}
            against = {f"{key}_against_{names[slot]}": counted[key] for key in ("games", "won", "drawn")}
            for key, value in {**counted, **against}.items():
                self._counts[key] = self._counts.get(key, 0) + int(value)
