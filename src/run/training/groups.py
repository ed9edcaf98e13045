"""Groups of episodes with one start: which configurations can have them, and updates for which no rank has one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omagd.components.data import GroupData
from omagd.config.env_info import EnvInfo
from omagd.config.loading import changed
from omagd.config.schema import Config
from omagd.learners.protocol import learner_class
from omagd.run.training.checks import complete_args
from omagd.run.training.session import Session
from omagd.run.training.stages.health import MOST_SKIPPED
from omagd.runners.starts import DealtStarts, TaskStarts
from omagd.utils.errors import UserError, together


@together
def check_groups(config: Config, info: EnvInfo) -> Iterator[str]:
    """Reject keys of groups that contradict one another, the learner or the environment. Errors: UserError."""
    if config.evaluate:
        return
    learner, given = learner_class(config.learner), f"group_size={config.group_size}"
    if config.group_size == 1:
        if getattr(learner, "needs_groups", False):
            yield (
                f"{given}: learner={config.learner} compares each episode with the others of its group. Use"
                " group_size=8, say, which divides batch_size_run"
            )
        of_groups = {"enable_dynamic_sampling": False, "early_stop_percentage": 1.0, "rollout_skip_threshold": None}
        for key, none in of_groups.items():
            if (value := getattr(config, key)) != none:
                yield f"{key}={value}: is about groups. Use group_size=8, say, or {key}={none}"
        return
    if learner.data != "on_policy":
        yield (
            f"{given}: learner={config.learner} learns from a replay, in which episodes are not compared. Use"
            " group_size=1, or learner=rloo_learner"
        )
    if config.runner != "parallel":
        yield f"{given}: needs runner=parallel, where groups begin together, not runner={config.runner}"
    if config.batch_size_run % config.group_size:
        yield f"{given}: must divide batch_size_run={config.batch_size_run}, the slots that groups fill"
    if complete_args(config, ("learner_args",)).learner_args.get("score") == "outcome" and not info.has_win:
        yield (
            f"learner_args.score=outcome: env={config.env} has battles without a winner (no battle_won). Use"
            " learner_args.score=return"
        )
    yield from _check_sampling(config, info)


def _check_sampling(config: Config, info: EnvInfo) -> Iterator[str]:
    if (threshold := config.rollout_skip_threshold) is not None:
        if config.n_starts is None:
            yield (
                f"rollout_skip_threshold={threshold}: no start comes again, so none is skipped. Add n_starts=100, say"
            )
        if not info.has_win:
            yield (
                f"rollout_skip_threshold={threshold}: skips starts whose battles were won, but env={config.env} reports"
                " no battle_won. Leave it out"
            )
    if config.enable_dynamic_sampling and not info.has_win:
        yield (
            f"enable_dynamic_sampling=True: drops groups by battle_won, which env={config.env} does not report. Use"
            " enable_dynamic_sampling=False"
        )
    if config.enable_dynamic_sampling:
        return
    if changed(config, ["max_sampling_attempts"]):
        yield (
            f"max_sampling_attempts={config.max_sampling_attempts}: bounds the rounds that replace dropped groups. Add"
            " enable_dynamic_sampling=True, or leave it out"
        )
    if config.early_stop_percentage < 1.0 and config.batch_size <= config.batch_size_run:
        yield (
            f"early_stop_percentage={config.early_stop_percentage}: ends collecting between two rounds, but one has"
            f" batch_size_run={config.batch_size_run} episodes, all of batch_size={config.batch_size}. Use a larger"
            " batch_size, or early_stop_percentage=1.0"
        )


class Groups:
    """The groups of a run, and how many updates were skipped because no rank had one; the same on all ranks.

    Args:
        session: of the run. data: the groups of this rank.
    """

    def __init__(self, session: Session, data: GroupData) -> None:
        self.data = data
        self._starts = session.runners["train"].stream
        self._config, self._dist = session.config, session.dist
        starts = self._starts
        self._pool = starts.pool if isinstance(starts, TaskStarts) and session.config.rollout_skip_threshold else None
        if self._pool is not None:
            pool = self._pool
            data.ended = lambda meta, outcomes: pool.note(meta.task, meta.seed, outcomes)
        self._counts = [0, 0]  # skipped in all, in a row by now

    def found(self, ranks: int, when: str) -> bool:
        """Return whether any rank has a group. ranks: that have one. when: stage and time.

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
        """Prepare another round: where starts are dealt to ranks, of the tasks whose groups were dropped."""
        if isinstance(self._starts, DealtStarts):
            self._starts.deal(self.data.again)

    def exchange(self) -> None:
        """Tell all ranks which starts this one has mastered and skipped: a collective, if starts can be skipped."""
        if self._pool is not None:
            for news in self._dist.gather(self._pool.take_news()):
                self._pool.learn(news)

    def record(self) -> dict[str, float]:
        """Return `updates_without_groups` in all for the log, if there were any, and the number of mastered starts."""
        values = {"updates_without_groups": float(self._counts[0])} if self._counts[0] else {}
        return values if self._pool is None else {**values, "starts_mastered": float(len(self._pool))}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the mastered starts; at the end of an iteration."""
        return {"counts": list(self._counts), "mastered": None if self._pool is None else self._pool.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._counts = [int(count) for count in state["counts"]]
        if self._pool is not None and state["mastered"] is not None:
            self._pool.load_state_dict(state["mastered"])
