"""Judges of what a run believes of units that its agents do not see: tools beside training, which find it by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.config.env_info import EnvInfo
    from omagd.config.schema import Config
    from omagd.run.training.stages.base import PretrainedModules, Session
    from omagd.utils.packing import PackedBatch


@dataclass(frozen=True)
class Verdict:
    """What was measured: metrics for the log, entries of the summary's `beliefs`, and paths of pictures by name."""

    values: dict[str, float] = field(default_factory=dict)
    table: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Iterable[Verdict]) -> Verdict:
        """Return what several judges say as one verdict."""
        whole = cls()
        for each in found:
            whole.values.update(each.values)
            whole.table.update(each.table)
            whole.files.update(each.files)
        return whole


class Judge:
    """Judges a predictor in stage 2, and a team at the end of stage 3. Every rank calls it; here nothing is done."""

    def __init__(self, session: Session, pretrained: PretrainedModules) -> None:
        self.session, self.pretrained = session, pretrained

    @staticmethod
    def check(config: Config, info: EnvInfo) -> None:
        """Reject a given predictor's file that a run could not be judged with. Errors: UserError."""

    def predictor(self, learner: Any, batches: Iterable[PackedBatch]) -> Verdict:
        """Return what stage 2's `learner` believes in this rank's `batches`. Its training episodes are still there."""
        return Verdict()

    def saved(self) -> dict[str, Any]:
        """Return what the predictor's file holds for later runs, beside weights."""
        return {}

    def picture(self, batch: PackedBatch) -> dict[str, str]:
        """Draw what the trained predictor believes in held-out episodes; return paths by name. Rank 0 alone calls."""
        return {}

    def team(self, mac: Any) -> Verdict:
        """Play episodes with the trained team and return what it believes."""
        return Verdict()


JUDGES: Registry[type[Judge]] = Registry(
    "judge",
    "omagd.judges",
    lazy={"beliefs": "omagd.lab.beliefs.judge:BeliefJudge"},
    protocol="omagd.run.training.judges:Judge",
)


def judges(session: Session, pretrained: PretrainedModules) -> list[Judge]:
    """Return all judges of a run."""
    return [JUDGES.build(name, session, pretrained) for name in JUDGES.names()]
