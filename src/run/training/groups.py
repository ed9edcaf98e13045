"""Groups of episodes with one start: which configurations can have them."""

from __future__ import annotations

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.learners.protocol import learner_class
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
