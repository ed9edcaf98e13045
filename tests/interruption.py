"""Runs that are interrupted at a chosen iteration, and stages without a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from omagd.config.schema import Config
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.launch.launcher import launch
from omagd.run.training.build import build_session
from omagd.run.training.stages.base import PretrainedModules, Stage
from omagd.run.training.stages.rl import RLStage
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import Logger, setup_logging
from omagd.utils.run_folder import RunFolder


class Interrupted(Exception):
    """Ends a run."""


def interrupted_run(config: Config, iteration: int) -> tuple[RunFolder, Stage | None]:
    """Run until `iteration`, with the last save complete. Return its folder and stage."""
    stages: list[Stage | None] = []
    ask = Checkpointer.ask

    def interrupt(self: Checkpointer) -> None:
        self.finish()
        if self.iteration == iteration:
            stages.append(self.stage)
            raise Interrupted
        ask(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "ask", interrupt)
        with pytest.raises(Interrupted):
            launch(config, "run")
    (folder,) = [path.parent for path in Path(config.local_results_path).glob("*/run.json")]
    return RunFolder(folder), stages[0]


def stage_of(config: Config, folder: Path, dist: Dist | None = None) -> RLStage:
    """Return stage 3 of one rank in a run's folder, without a launcher."""
    logger = Logger(setup_logging(None, rank=1), minimal=True)
    return RLStage(build_session(config, dist or Dist(), RunFolder(folder), logger), PretrainedModules())
