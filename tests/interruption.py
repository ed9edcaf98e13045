"""Runs that are interrupted at a chosen iteration, and stages without a launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from omagd.config.schema import Config
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.checkpoint.resuming import RunLock, claimed_folder
from omagd.run.launch.launcher import launch
from omagd.run.training.build import build_session
from omagd.run.training.stages.base import PretrainedModules, Stage
from omagd.run.training.stages.rl import RLStage
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import Logger, setup_logging
from omagd.utils.run_folder import RunFolder


class Interrupted(Exception):
    """Ends a run."""


def wait_for_saves(patch: pytest.MonkeyPatch, then: Callable[[Checkpointer], object] = id) -> None:
    """Let each iteration begin with the save before it complete, then call `then`."""
    ask = Checkpointer.ask

    def complete(self: Checkpointer) -> None:
        self.finish()
        then(self)
        ask(self)

    patch.setattr(Checkpointer, "ask", complete)


def interrupted_run(config: Config, iteration: int) -> tuple[RunFolder, Stage | None]:
    """Run until `iteration`, with the last save complete. Return its folder and stage."""
    stages: list[Stage | None] = []

    def interrupt(checkpointer: Checkpointer) -> None:
        if checkpointer.iteration == iteration:
            stages.append(checkpointer.stage)
            raise Interrupted

    with pytest.MonkeyPatch.context() as patch:
        wait_for_saves(patch, interrupt)
        with pytest.raises(Interrupted):
            launch(config, "run")
    (folder,) = [path.parent for path in Path(config.local_results_path).glob("*/run.json")]
    return RunFolder(folder), stages[0]


@contextmanager
def unfinished(config: Config, token: str = "run") -> Iterator[RunLock]:
    """Lock the folder of a run, and leave the run unfinished."""
    with suppress(Interrupted), claimed_folder(config, token) as claim:
        yield claim
        raise Interrupted


def stage_of(config: Config, folder: Path, dist: Dist | None = None) -> RLStage:
    """Return stage 3 of one rank in a run's folder, without a launcher."""
    logger = Logger(setup_logging(None, rank=1), minimal=True)
    return RLStage(build_session(config, dist or Dist(), RunFolder(folder), logger), PretrainedModules())
