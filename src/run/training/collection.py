"""What shapes the collection of training episodes beside the runner: groups with one start, maps, opponents."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from omagd.components.data import DataSource, GroupData
from omagd.components.opponent_schedules import REGISTRY
from omagd.controllers.types import MAC
from omagd.envs.protocol import ChangingOpponents
from omagd.run.reporting.metrics import Counters, Every
from omagd.run.training.checks import EVASION, change
from omagd.run.training.stages.base import MOST_SKIPPED, Session, Shaper
from omagd.run.training.tasks import training_tasks
from omagd.runners.runner import DealtStarts
from omagd.utils.errors import UserError


def shapers(session: Session, policy: MAC, clock: Counters, data: DataSource) -> list[Shaper]:
    """Return what shapes the collection of a run, each only where the configuration or the environment asks for it.

    policy: whose agent plays. clock: of the stage. data: where the episodes go.
    """
    found: list[Shaper] = [Groups(session, data)] if isinstance(data, GroupData) else []
    found += [training_tasks(session)] if session.info.tasks else []
    return found + ([Opponents(session, policy, clock)] if change(session.config) else [])


class Groups(Shaper):
    """The groups of a run, and how many updates were skipped because no rank had one; the same on all ranks."""

    def __init__(self, session: Session, data: GroupData) -> None:
        self.data = data
        self._starts = session.runners["train"].stream
        self._config = session.config
        self._counts = [0, 0]  # skipped in all, in a row by now

    def register(self, register: Callable[..., None]) -> None:
        """Save the counts."""
        register("groups", self)

    def deal(self, data: DataSource) -> None:
        """Begin an iteration."""
        self.data.begin()

    def stats(self) -> dict[str, tuple[float, float]]:
        """Return the metrics of the groups of this iteration."""
        return self.data.stats()

    def ready(self, ranks: int, when: str) -> bool:
        """Return whether any rank has a group; the others help to count. ranks: that have one. when: stage and time.

        Errors: UserError after `MOST_SKIPPED` times without any: the policy always wins or never does.
        """
        total, row = self._counts
        self._counts = [total, 0] if ranks else [total + 1, row + 1]
        if self._counts[1] < MOST_SKIPPED:
            return ranks > 0
        config = self._config
        raise UserError(
            f"{when}: {MOST_SKIPPED} updates in a row had no group with won and lost battles"
            f" (group_size={config.group_size}, max_sampling_attempts={config.max_sampling_attempts}). Start from a"
            " policy that wins some of them and loses others (checkpoint_path=…), or compare returns"
            " (learner_args.score=return, enable_dynamic_sampling=False)"
        )

    def again(self) -> None:
        """Prepare another round: where starts are divided among ranks, of the tasks whose groups were dropped."""
        if isinstance(self._starts, DealtStarts):
            self._starts.deal(self.data.again)

    def record(self) -> dict[str, float]:
        """Return `updates_without_groups` in all for the log, if there were any."""
        return {"updates_without_groups": float(self._counts[0])} if self._counts[0] else {}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"counts": list(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._counts = [int(count) for count in state["counts"]]


class Opponents(Shaper):
    """Sets the opponents of the episodes that begin, before each rollout.

    Args:
        session: environment and runners, of a run whose opponents change.
        policy: whose agent is frozen. clock: of the stage; it and the pool determine the opponents.

    Attributes:
        playing: names of the opponents in training now, all equally often.
    """

    def __init__(self, session: Session, policy: MAC, clock: Counters) -> None:
        self._session, self._policy, self._clock = session, policy, clock
        config = session.config
        self._schedule = REGISTRY.build(config.opponent_difficulty_strategy)
        self.playing: list[str] = []
        self._pool: list[tuple[str, Any]] = []  # name and layers, oldest first
        self._made: dict[str, Any] = {}
        self._copy = Every(config.opponent_pool_interval)
        assert isinstance(session.env, ChangingOpponents), "check_opponents rejects others"
        self._env = session.env
        self._usual = sorted(set(self._env.opponents))
        self._ladder = self._env.ladders[config.opponent_order]
        for purpose, runner in session.runners.items():
            runner.prepare = self._before_training if purpose == "train" else self._before_others
        self._set()

    def register(self, register: Callable[..., None]) -> None:
        """Save the pool."""
        register("opponents", self)

    def _level(self) -> int | None:
        """Return the schedule's level, at most the last of the ladder; None where there is none."""
        config, clock = self._session.config, self._clock
        # With `max_episodes` a run plays fewer steps than `t_max` where episodes are shorter than they can be.
        share = max(clock.t_env / config.t_max, clock.episodes / (config.max_episodes or math.inf))
        level = self._schedule.level(share)
        return None if level is None else min(level, len(self._ladder) - 1)

    def deal(self, data: DataSource) -> None:
        """Add a frozen policy to the pool if that is due, and change the opponents where clock or pool ask for it."""
        if self._schedule.selves and self._copy.due(self._clock.updates):
            agent: Any = self._policy.agent
            self._pool.append((f"self_{self._clock.updates}", agent.layers()))
            self._pool = self._pool[-self._session.config.opponent_pool_size :]
        if self._wanted() != self.playing:  # also with another policy in the pool, whose name is new
            self._set()
            self._session.logger.info(f"opponents from now on: {', '.join(self.playing)}")

    def _set(self) -> None:
        """Set the opponents that follow from clock and pool."""
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
        self._set()

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
