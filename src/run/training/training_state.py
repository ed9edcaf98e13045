"""The files of stage 3: weights for everyone, and what continuing a training needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.run.checkpoint.weights import LEARNER_FILE, find_step_folder, keep_file, load_file, load_into, require_finite
from omagd.run.training.build import require_same_weights
from omagd.utils.errors import UserError

if TYPE_CHECKING:
    from omagd.run.training.stages.rl import RLStage


def save_training_state(stage: RLStage) -> None:
    """Write `models/<t_env>/`: one file per module, `opt.th` with optimizer, targets, counters and clock.

    Where the disk is full the files are written later; a run that ends without them fails.
    """
    if not stage.session.dist.is_main:
        return
    folder = stage.session.folder.step(stage.clock.t_env)
    # The agent's file comes last: a folder that has it is complete.
    keep_file(folder / LEARNER_FILE, {"learner": stage.learner.state_dict(), "clock": stage.clock.state_dict()})
    for name, module in sorted(stage.learner.modules().items(), reverse=True):
        keep_file(folder / f"{name}.th", module.state_dict())


def load_learner(learner: Any, folder: Path) -> dict[str, int]:
    """Load everything of a step's folder into a learner and return the clock's state. Errors: UserError."""
    for name, module in learner.modules().items():
        path = folder / f"{name}.th"
        load_into(module, load_file(path, "checkpoint_path"), path, "checkpoint_path")
    path = folder / LEARNER_FILE
    state = load_file(path, "checkpoint_path")
    require_finite(state, path, "checkpoint_path")
    try:
        learner.load_state_dict(state["learner"])
        return dict(state["clock"])
    except (KeyError, ValueError, RuntimeError) as problem:
        reason = str(problem).split("\n")[0][:100]
        mend = "use the --config that it was trained with"
        raise UserError(f"checkpoint_path={path} does not fit this learner ({reason}); {mend}") from problem


def load_training_state(stage: RLStage) -> None:
    """Continue from `checkpoint_path`: weights, targets, optimizer and clock. The replay buffer starts empty."""
    config = stage.session.config
    folder = find_step_folder(config.checkpoint_path, config.load_step)
    stage.clock.load_state_dict(load_learner(stage.learner, folder))
    for module in stage.learner.modules().values():
        require_same_weights(stage.session.dist, module, f"checkpoint_path={config.checkpoint_path}")
    stage.session.logger.info(f"continuing from {folder} at t_env {stage.clock.t_env}")
