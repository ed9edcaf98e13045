"""The training loop of all stages, in one process or in many."""

from __future__ import annotations

from omagd.run.checkpoint.store import StageResult
from omagd.run.training.stages.base import Stage


def fit(stage: Stage) -> StageResult:
    """Run a stage from its beginning or from a checkpoint: collect, update, advance the clock, run what is due."""
    checkpointer = stage.session.checkpointer
    stage.session.profiler.begin(stage.name)
    with stage.phase("prepare"):
        stage.prepare()
        checkpointer.restore(stage)
        stage.restored()
    with checkpointer.until_boundary():
        while not stage.done():
            checkpointer.ask()
            with stage.phase("collect"):
                stage.collect()
            if learned := stage.ready():
                with stage.phase("update"):
                    stage.update()
            stage.advance()
            stage.inspect(learned)
            for task in stage.tasks:
                if task.due():
                    with stage.phase(task.name):
                        task.run()
            with stage.phase("checkpoint"):
                checkpointer.boundary(stage)
    with stage.phase("finish"):
        return stage.finish()
