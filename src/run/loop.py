"""The one loop: every stage, one process or many."""

from __future__ import annotations

from omagd.run.stages.base import Stage, StageResult


def fit(stage: Stage) -> StageResult:
    """Run a stage to its end: collect, learn, count, and whatever is due."""
    stage.prepare()
    while not stage.done():
        stage.collect()
        if stage.ready():
            stage.update()
        stage.advance()
        for task in stage.tasks:
            if task.due():
                task.run()
    return stage.finish()
