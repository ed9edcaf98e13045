"""The one loop: every stage, one process or many."""

from __future__ import annotations

from omagd.run.stages.base import Stage, StageResult


def fit(stage: Stage) -> StageResult:
    """Run a stage to its end: collect, learn, count, and whatever is due."""
    stage.begin()
    with stage.phase("prepare"):
        stage.prepare()
    while not stage.done():
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
    with stage.phase("finish"):
        return stage.finish()
