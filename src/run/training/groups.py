"""Groups of episodes with one start: which configurations can have them, and updates for which no rank has one."""

from __future__ import annotations

from omagd.components.groups import GroupData
from omagd.config.env_info import EnvInfo
from omagd.config.loading import HERE, read_yaml
from omagd.config.schema import Config
from omagd.learners.protocol import learner_class
from omagd.run.training.session import Session
from omagd.run.training.stages.health import MOST_SKIPPED
from omagd.runners.starts import DealtStarts
from omagd.utils.errors import UserError


def check_groups(config: Config, info: EnvInfo) -> None:
    """Reject keys of groups that contradict one another, the learner or the environment. Errors: UserError."""
    learner, given = learner_class(config.learner), f"group_size={config.group_size}"
    if config.group_size == 1:
        if getattr(learner, "needs_groups", False):
            raise UserError(
                f"{given}: learner={config.learner} compares each episode with the others of its group. Use"
                " group_size=8, say, which divides batch_size_run"
            )
        for key, none in (("enable_dynamic_sampling", False), ("early_stop_percentage", 1.0)):
            if (value := getattr(config, key)) != none:
                raise UserError(f"{key}={value}: is about groups. Use group_size=8, say, or {key}={none}")
        return
    if learner.data != "on_policy":
        raise UserError(
            f"{given}: learner={config.learner} learns from a replay, in which episodes are not compared. Use"
            " group_size=1, or learner=rloo_learner"
        )
    if config.runner != "parallel":
        raise UserError(f"{given}: needs runner=parallel, where groups begin together, not runner={config.runner}")
    if config.batch_size_run % config.group_size:
        raise UserError(f"{given}: must divide batch_size_run={config.batch_size_run}, the slots that groups fill")
    if config.learner_args.get("score") == "outcome" and not info.has_win:
        raise UserError(
            f"learner_args.score=outcome: env={config.env} has battles without a winner (no battle_won). Use"
            " learner_args.score=return"
        )
    _check_sampling(config, info)


def _check_sampling(config: Config, info: EnvInfo) -> None:
    if config.enable_dynamic_sampling and not info.has_win:
        raise UserError(
            f"enable_dynamic_sampling=True: drops groups by battle_won, which env={config.env} does not report. Use"
            " enable_dynamic_sampling=False"
        )
    if config.enable_dynamic_sampling:
        return
    default = read_yaml(HERE / "default.yaml")["max_sampling_attempts"]
    if config.max_sampling_attempts != default:
        raise UserError(
            f"max_sampling_attempts={config.max_sampling_attempts}: bounds the rounds that replace dropped groups. Add"
            " enable_dynamic_sampling=True, or leave it out"
        )
    if config.early_stop_percentage < 1.0 and config.batch_size <= config.batch_size_run:
        raise UserError(
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
        self._config = session.config
        self._counts = [0, 0]  # skipped in all, in a row by now

    def found(self, ranks: int, when: str) -> bool:
        """Return whether any rank has a group. ranks: that have one. when: stage and time.

        Errors: UserError after `MOST_SKIPPED` times without any: the policy always wins or always loses.
        """
        total, row = self._counts
        self._counts = [total, 0] if ranks else [total + 1, row + 1]
        if self._counts[1] < MOST_SKIPPED:
            return ranks > 0
        config = self._config
        raise UserError(
            f"{when}: {MOST_SKIPPED} updates in a row had no group with won and lost battles"
            f" (group_size={config.group_size}, max_sampling_attempts={config.max_sampling_attempts}). Start from a"
            " policy that wins some of them (checkpoint_path=…), or use enable_dynamic_sampling=False"
        )

    def again(self) -> None:
        """Prepare another round: where starts are dealt to ranks, of the tasks whose groups were dropped."""
        if isinstance(self._starts, DealtStarts):
            self._starts.deal(self.data.again)

    def record(self) -> dict[str, float]:
        """Return `updates_without_groups` in all for the log, if there were any."""
        return {"updates_without_groups": float(self._counts[0])} if self._counts[0] else {}

    def state_dict(self) -> list[int]:
        """Return the counts."""
        return list(self._counts)

    def load_state_dict(self, state: list[int]) -> None:
        """Continue from `state_dict()`."""
        self._counts = [int(count) for count in state]
