"""The files of stage 3: weights for everyone, and what continuing a training needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omagd.run.build import require_same_weights
from omagd.utils.checkpoint import LEARNER_FILE, find_step_folder, load_file, load_into, save_file

if TYPE_CHECKING:
    from omagd.run.stages.stage3 import Stage3


def save_training_state(stage: Stage3) -> None:
    """Write `models/<t_env>/`: one file per module, `opt.th` with optimizer, targets, counters and clock."""
    if not stage.session.dist.is_main:
        return
    folder = stage.session.folder.step(stage.clock.t_env)
    # The agent's file comes last: a folder that has it is complete.
    save_file(folder / LEARNER_FILE, {"learner": stage.learner.state_dict(), "clock": stage.clock.state_dict()})
    for name, module in sorted(stage.learner.modules().items(), reverse=True):
        save_file(folder / f"{name}.th", module.state_dict())


def load_training_state(stage: Stage3) -> None:
    """Continue from `checkpoint_path`: weights, targets, optimizer and clock. The replay buffer starts empty."""
    config = stage.session.config
    folder = find_step_folder(config.checkpoint_path, config.load_step)
    for name, module in stage.learner.modules().items():
        path = folder / f"{name}.th"
        load_into(module, load_file(path, "checkpoint_path"), path, "checkpoint_path")
    state = load_file(folder / LEARNER_FILE, "checkpoint_path")
    stage.learner.load_state_dict(state["learner"])
    for name, module in stage.learner.modules().items():
        require_same_weights(stage.session.dist, module, f"checkpoint_path: {name}")
    stage.clock.load_state_dict(state["clock"])
    stage.session.logger.info(f"continuing from {folder} at t_env {stage.clock.t_env}")
