"""Opponents that change during training: by a schedule over the global clock, or a pool of frozen earlier policies.

Only training episodes use them. Tests always play the opponents of `env_args`, so their results stay comparable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omagd import envs
from omagd.components.opponent_schedules import REGISTRY
from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.envs.protocol import ChangingOpponents
from omagd.modules import agents
from omagd.run.training.session import Session
from omagd.utils.errors import UserError, together, unknown_name
from omagd.utils.metrics import Counters, Every

EVASION = "evasion"


def change(config: Config) -> bool:
    """Return whether a run's opponents change."""
    return config.opponent_difficulty_strategy != "none" or config.enable_opponent_evasion


@together
def check_opponents(config: Config, info: EnvInfo) -> Iterator[str]:
    """Reject changing opponents that environment or agent do not support. Errors: UserError."""
    env = envs.REGISTRY.get(config.env)
    ladders = getattr(env, "ladders", {config.opponent_order: ()})
    if config.opponent_order not in ladders:
        yield unknown_name("opponent_order", config.opponent_order, ladders).message
    if not change(config):
        return
    strategy = config.opponent_difficulty_strategy
    given = "enable_opponent_evasion=True" if strategy == "none" else f"opponent_difficulty_strategy={strategy}"
    if not hasattr(env, "set_opponents"):
        yield f"{given}: env={config.env} has no opponents that can be changed. Use another --env-config"
    if config.env_processes:
        yield f"{given}: needs env_processes=False"
    if config.enable_opponent_evasion:
        _check_evasion(config, info)
    if REGISTRY.get(strategy).selves:
        kind = agents.REGISTRY.get(config.agent)
        if not hasattr(kind, "frozen_needs"):
            fix = "Use an agent without memory: agent=ddpg for DDPG, agent=ff for Q-learning"
            yield f"{given}: agent={config.agent} cannot be frozen as an opponent. {fix}"
        elif needs := kind.frozen_needs(config):
            yield f"{given}: agent={config.agent} can be frozen as an opponent only with {', '.join(needs)}"


def _check_evasion(config: Config, info: EnvInfo) -> None:
    start, length = config.opponent_evasion_start_episode, info.episode_limit
    if EVASION not in info.scripted_policies:
        raise UserError(f"enable_opponent_evasion=True: env={config.env} has no opponent called {EVASION}")
    if start * length >= config.t_max:
        raise UserError(
            f"opponent_evasion_start_episode={start}: is after the end of the run; t_max={config.t_max} is"
            f" {config.t_max // length} episodes of {length} steps. Give a smaller one"
        )


class Opponents:
    """Sets the opponents of the episodes that begin, before each rollout.

    Args:
        session: environment and runners; not used where opponents do not change.
        policy: whose agent is frozen. clock: of the stage; it and the pool determine the opponents.

    Attributes:
        playing: names of the opponents in training now, all equally often.
    """

    def __init__(self, session: Session, policy: MAC, clock: Counters) -> None:
        self._session, self._policy, self._clock = session, policy, clock
        config = session.config
        self._schedule = REGISTRY.build(config.opponent_difficulty_strategy)
        self._change = change(config)
        self.playing: list[str] = []
        self._pool: list[tuple[str, Any]] = []  # name and layers, oldest first
        self._made: dict[str, Any] = {}
        self._copy = Every(config.opponent_pool_interval)
        self._copy_now = False
        if not self._change:
            return
        assert isinstance(session.env, ChangingOpponents), "check_opponents rejects others"
        self._env = session.env
        self._usual = sorted(set(self._env.opponents))
        self._ladder = self._env.ladders[config.opponent_order]
        for purpose, runner in session.runners.items():
            runner.prepare = self._before_training if purpose == "train" else self._before_others
        self.apply()

    def _level(self) -> int | None:
        """Return the schedule's level, at most the last of the ladder; None where there is none."""
        level = self._schedule.level(self._clock.t_env / self._session.config.t_max)
        return None if level is None else min(level, len(self._ladder) - 1)

    def due(self) -> bool:
        """Whether the opponents change now."""
        if not self._change:
            return False
        self._copy_now = self._schedule.selves and self._copy.due(self._clock.updates)
        return self._copy_now or self._wanted() != self.playing

    def run(self) -> None:
        """Add a frozen policy to the pool if that is due, and set the current opponents."""
        if self._copy_now:
            agent: Any = self._policy.agent
            self._pool.append((f"self_{self._clock.updates}", agent.layers()))
            self._pool = self._pool[-self._session.config.opponent_pool_size :]
        self.apply()
        self._session.logger.info(f"opponents from now on: {', '.join(self.playing)}")

    def apply(self) -> None:
        """Set the opponents that follow from clock and pool."""
        if not self._change:
            return
        kind: Any = type(self._policy.agent)
        self._made = {name: self._env.frozen_opponent(name, layers, kind.samples) for name, layers in self._pool}
        self.playing = self._wanted()

    def stats(self) -> dict[str, tuple[float, float]]:
        """Return the metrics: `opponent_level`, or the size of the pool."""
        if self._schedule.selves:
            return {"opponent_selves": (float(len(self._pool)), 1.0)}
        level = self._level()
        return {} if level is None else {"opponent_level": (float(level), 1.0)}

    def state_dict(self) -> dict[str, Any]:
        """Return the pool; the clock determines everything else."""
        pool = [{"name": name, "layers": layers} for name, layers in self._pool]
        return {"pool": pool, "copied": self._copy.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`, after the clock; an empty one belongs to a run without a pool."""
        if state:
            self._pool = [(kept["name"], [tuple(pair) for pair in kept["layers"]]) for kept in state["pool"]]
            self._copy.load_state_dict(state["copied"])
        self.apply()

    def _wanted(self) -> list[str]:
        config, level = self._session.config, self._level()
        names = self._usual if level is None else [self._ladder[level]]
        if self._schedule.selves:
            names = [name for name, _ in self._pool] or [self._ladder[0]]
        late = self._clock.episodes >= config.opponent_evasion_start_episode
        return names + [EVASION] * (config.enable_opponent_evasion and late and EVASION not in names)

    def _before_training(self) -> None:
        self._env.set_opponents([self._made.get(name, name) for name in self.playing])

    def _before_others(self) -> None:
        self._env.set_opponents(self._usual)
