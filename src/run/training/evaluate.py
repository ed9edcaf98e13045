"""Evaluate a trained run: `evaluate RUN [key=value …]`, or `evaluate=True checkpoint_path=…`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from omagd.config.env_info import EnvInfo
from omagd.config.loading import apply_texts, read_saved, validate
from omagd.config.schema import Config
from omagd.controllers.types import MAC
from omagd.run.checkpoint.state import StageResult
from omagd.run.checkpoint.weights import find_step_folder, run_folder_of
from omagd.run.recording.recorder import Recorder
from omagd.run.recording.recording import Recording, save_recording
from omagd.run.reporting.card import Card, read_card
from omagd.run.training.battles import greedy_episodes, load_mac, policy_name
from omagd.run.training.build import require_same_weights
from omagd.run.training.session import Session
from omagd.utils.errors import Mistakes, UserError, collected
from omagd.utils.run_folder import RunFolder
from omagd.utils.writing import STORAGE

FIXED = {
    "evaluate": True, "load_step": 0, "seeds": (), "unique_token": "", "auto_resume": False, "pretrain_only": False,
    "evaluation_only": False, "use_wandb": False, "use_tensorboard": False, "log_video": False,
    "profile": False,
}  # fmt: skip
"""Values that an evaluation does not take from the evaluated run's `config.json`."""

HERE = {
    "run": "default", "world_size": None, "dist_backend": None, "max_memory_per_gpu_gb": None, "precision": "float32",
    "compile": False, "buffer_cpu_only": True, "graph_updates": None,
}  # fmt: skip
"""Values for one process on any machine, instead of those of the training run."""


def evaluation_config(
    run: str, texts: Mapping[str, Any], command: str = "evaluate", mistakes: Mistakes | None = None
) -> Config:
    """Return the configuration that evaluates a run: the run's own with the keys in `texts` changed.

    Args:
        run: the run's folder, its `models/` or one step's folder. texts: the text of each `key=value`. command: what
            the user called, for errors. mistakes: collects wrong keys and values.
    Errors: UserError for a folder that holds no run, a `config.json` that cannot be read, wrong keys and values.
    """
    source = f"{command} {run}"
    for key in ("evaluate", "checkpoint_path"):
        if key in texts:
            raise UserError(f"{key}={texts[key]}: already set by `{source}`. Leave it out")
    step = find_step_folder(run, source=source)
    folder = RunFolder(run_folder_of(step))
    paths = {"checkpoint_path": str(Path(run).expanduser().absolute()), "local_results_path": str(folder.evaluations)}
    values: dict[str, Any] = {**read_saved(folder.config_json, source), **FIXED, **HERE, **paths}
    if "test_nepisode" in texts:  # else the run's `eval_report_episodes` would override it
        values["eval_report_episodes"] = 0
    with collected(mistakes) as found:
        return validate(apply_texts(values, texts, found), found)


def trained_team(path: str, key: str, info: EnvInfo, device: torch.device) -> MAC:
    """Return the team of a run, as it was trained: it reads what it has learned from, its reconstructions too.

    Args:
        path: the run's folder, its `models/` or one step's folder. key: configuration key that named it. info: of the
            environment in which it plays.
    Errors: UserError for a folder without weights, and for weights of another map.
    """
    folder = find_step_folder(path, key=key)
    config = evaluation_config(path, {}, f"{key}:")
    return load_mac(config, info, device, folder, key)


def trained_card(config: Config) -> Card | None:
    """Return the card of the training that an evaluation plays; None where there is none. Errors: UserError."""
    if not config.evaluate:
        return None
    return read_card(run_folder_of(find_step_folder(config.checkpoint_path, config.load_step)))


def evaluate(session: Session) -> StageResult:
    """Play `eval_report_episodes` (else `test_nepisode`) greedy episodes over all ranks with the saved agent."""
    config, info, device = session.config, session.info, session.dist.device
    folder = find_step_folder(config.checkpoint_path, config.load_step)
    session.logger.info(f"evaluation of {folder}")
    mac = load_mac(config, info, device, folder, "checkpoint_path")
    require_same_weights(session.dist, mac.agent, "checkpoint_path")
    t_env = int(folder.name) if folder.name.isdecimal() else 0
    records = config.save_replay and session.dist.is_main
    recorder = Recorder(mac, session.env, info, policy_name(config, folder)) if records else None
    wanted = config.eval_report_episodes or config.test_nepisode
    values = greedy_episodes(session, mac, wanted, t_env, recorder=recorder)
    values.update(session.failure_counts())
    session.logger.log(values, stage="stage3", clock="t_env", t=t_env)
    if recorder is not None:
        with STORAGE.attempt("replays"):
            save_recording(Recording(episodes=recorder.episodes), session.folder.replays / "episodes", "html")
    if config.save_replay:
        # An environment may have replays of its own, as StarCraft II has.
        with suppress(NotImplementedError), STORAGE.attempt("replays"):
            session.env.save_replay(str(session.folder.replays))
    return StageResult("stage3", {"t_env": t_env}, values, {"agent": str(folder)})
