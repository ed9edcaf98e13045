"""Files of weights, read without running code from them; what `checkpoint_path` means, and `models/` of a run."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from omagd.config.schema import COMPONENT_ARGS, Config
from omagd.learners.belief_loss import HEAD
from omagd.learners.protocol import Trainable
from omagd.modules.graph_reconstructers import pretraining
from omagd.run.checkpoint.store import (
    EVER,
    STAGES,
    Checkpoint,
    Damaged,
    Position,
    episode_files,
    first_not_finite,
    folders,
    is_finished,
    link,
    read_checkpoint,
    read_part,
    serialized,
)
from omagd.run.reporting.metrics import Counters
from omagd.run.run_folder import RunFolder, read_entry, write_json
from omagd.utils.errors import UserError
from omagd.utils.logging import PACKAGE
from omagd.utils.storage import STORAGE, listed

AGENT_FILE, MIXER_FILE, LEARNER_FILE = "agent.th", "mixer.th", "opt.th"
TOKENIZER_FILE, PREDICTOR_FILE = "tokenizer.th", "stage2_model.th"


def keep_file(path: Path, content: Mapping[str, Any]) -> bool:
    """Write tensors and plain values to a file, later if the disk is full. Return whether it was possible now."""
    return STORAGE.write(path, serialized(content))


def load_file(path: Path, key: str) -> dict[str, Any]:
    """Read what `keep_file` wrote, onto the CPU. key: configuration key that named the file, for the message.

    Errors: UserError for a missing, damaged or foreign file.
    """
    if not path.is_file():
        raise UserError(f"{key}={path} does not exist: give a file that this program wrote, or its folder")
    try:
        return read_part(path)
    except Damaged as problem:
        raise UserError(f"{key}={path} cannot be read ({problem}): it is damaged or not a weights file") from problem


def load_into(module: nn.Module, weights: Mapping[str, Any], path: Path, key: str) -> None:
    """Load `weights` into `module`.

    Errors: UserError that names the first tensor that does not fit, or that holds what is not finite.
    """
    own = module.state_dict()
    for name in [*own, *weights]:
        here, there = own.get(name), weights.get(name)
        if here is None or not isinstance(there, torch.Tensor) or here.shape != there.shape:
            sizes = f"{_shape(there)} in the file, {_shape(here)} in this configuration"
            fix = "use the --config, map and sizes that it was trained with"
            raise UserError(f"{key}={path} does not fit: '{name}' is {sizes}; {fix}")
    require_finite(weights, path, key)
    module.load_state_dict(dict(weights))


def require_finite(content: Any, path: Path, key: str) -> None:
    """Refuse to act on or continue from tensors that hold a NaN or an infinity. Errors: UserError."""
    if broken := first_not_finite(content):
        raise UserError(
            f"{key}={path} holds values that are not finite (in '{broken}'): its training failed or the file is"
            " damaged; give an earlier step's folder or another run"
        )


def save_learner(learner: Trainable, clock: Counters, folder: Path) -> None:
    """Write the folder `<t_env>/` of stage 3: a file for each module; `opt.th` has optimizer, targets and counters.

    Where the disk is full the files are written later; a run that ends without them fails.
    """
    # The agent's file comes last: a folder that has it is complete.
    keep_file(folder / LEARNER_FILE, {"learner": learner.state_dict(), "clock": clock.state_dict()})
    for name, module in sorted(learner.modules().items(), key=lambda entry: entry[0] == "agent"):
        keep_file(folder / f"{name}.th", module.state_dict())


def load_learner(learner: Trainable, folder: Path) -> dict[str, int]:
    """Load everything of a step's folder into a learner; return the state of the clock. Errors: UserError.

    A new run begins here, so the settings of its optimizers, such as the learning rate, are its own.
    """
    for name, module in learner.modules().items():
        path = folder / f"{name}.th"
        if name == HEAD and not path.is_file():
            raise UserError(f"checkpoint_path={folder}: its team has no belief head. Continue it with belief_loss=none")
        load_into(module, load_file(path, "checkpoint_path"), path, "checkpoint_path")
    path = folder / LEARNER_FILE
    state = load_file(path, "checkpoint_path")
    require_finite(state, path, "checkpoint_path")
    try:
        learner.load_state_dict(with_own_settings(state["learner"], learner.state_dict()))
        return dict(state["clock"])
    except (KeyError, ValueError, RuntimeError) as problem:
        reason = str(problem).split("\n")[0][:100]
        fix = "use the --config that it was trained with"
        raise UserError(f"checkpoint_path={path} does not fit this learner ({reason}); {fix}") from problem


def with_own_settings(saved: Any, own: Any) -> Any:
    """Return a learner's saved state with the settings of `own` in every optimizer that it holds.

    saved, own: nested dicts, lists and tuples; an optimizer is a dict as torch.optim writes it. Moments of further
    parameters, such as those of a critic that this learner lacks, are left out. Errors: ValueError where the optimizers
    are of other parameters.
    """
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        if {"state", "param_groups"} <= saved.keys() & own.keys():
            groups = list(zip(own["param_groups"], saved["param_groups"], strict=True))
            if any(here["params"] != there["params"][: len(here["params"])] for here, there in groups):
                raise ValueError("its optimizer is of other parameters")
            kept = {place for group in own["param_groups"] for place in group["params"]}
            # The episodes of the run go on, as its clock does (`Epochs`).
            settings = [{**here, **{k: there[k] for k in {"episodes"} & there.keys()}} for here, there in groups]
            state = {place: values for place, values in saved["state"].items() if place in kept}
            return {**own, "param_groups": settings, "state": state}
        return {name: with_own_settings(value, own.get(name)) for name, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(own, list | tuple) and len(saved) == len(own):
        return type(saved)(map(with_own_settings, saved, own))
    return saved


def _shape(value: Any) -> str:
    if value is None:
        return "absent"
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else "no tensor"


def find_step_folder(path: str, load_step: int = 0, key: str = "checkpoint_path", source: str = "") -> Path:
    """Return the folder `<t_env>/` with an agent's weights that `path` means.

    `path` is a run folder, its `models/`, or a step's folder; among several steps the one nearest to `load_step` is
    taken, the last one for 0. key: configuration key that named it; `source`: what the message names instead of
    `key=path`. Errors: UserError if there is none, or if that step has no agent: an earlier one is not taken unasked.
    """
    source = source or f"{key}={path}"
    try:
        given = Path(path).expanduser()
        there = given.is_dir()
    except (OSError, ValueError, RuntimeError):  # too long a name, a null byte, the home of an unknown user
        there = False
    if not there:
        raise UserError(f"{source}: no such folder. Give a run's folder, its models/ or a folder in it")
    if (given / AGENT_FILE).is_file():
        return given
    for folder in (given / "models", given):
        steps = [p for p in folder.glob("*") if p.name.isdecimal() and p.is_dir()]
        whole = [p for p in steps if os.path.isfile(p / AGENT_FILE)]  # False where it cannot be entered
        if whole or steps and folder.name == "models":
            wanted = load_step or max(int(p.name) for p in steps)
            found, *other = (min(each, key=lambda p: abs(int(p.name) - wanted)) for each in (steps, whole) if each)
            if found not in whole:
                fix = f"Give {other[0]}, or remove the first" if other else "Remove it, and continue the run"
                raise UserError(
                    f"{source}: {found} holds no {AGENT_FILE} that can be read: its save was cut short, or is not over."
                    f" {fix}"
                )
            return found
    run = given.parent if given.name == "models" else given
    if (run / "run.json").is_file() or (run / "config.json").is_file():
        raise UserError(
            f"{source}: this run has saved no weights ({AGENT_FILE}) yet; stage 3 writes the first after"
            " save_model_interval steps. Continue the run by its command with auto_resume=True, or train with a smaller"
            " save_model_interval"
        )
    raise UserError(f"{source}: holds no {AGENT_FILE}. Give a run's folder, its models/ or a folder in it")


def far_step(folder: Path, load_step: int) -> str:
    """Return a warning where the nearest saved step is more than a tenth away from `load_step`, else nothing."""
    if not load_step or not folder.name.isdecimal() or abs(int(folder.name) - load_step) <= load_step / 10:
        return ""
    return (
        f"load_step={load_step}: the nearest step that was saved is {folder.name}. save_model_interval of that run says"
        " which there are"
    )


def run_folder_of(step_folder: Path) -> Path:
    """Return the run folder that a step's folder belongs to."""
    return step_folder.resolve().parent.parent


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash over names and bits of some tensors, to compare what different ranks hold."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


T = TypeVar("T")
LOG = logging.getLogger(PACKAGE)
RATES = ("lr", "critic_lr", "graph_lr")
"""Learning rates, which belong to the whole state of a run."""

CONTINUED = "continued_from.json"

MUST_AGREE = (
    "learner", "group_size", "use_graph_reconstruction", "use_full_obs", "use_team_obs", "belief_loss", "optimizer",
    "use_per", "standardise_rewards",
)  # fmt: skip
"""What must be equal in two runs, if one goes on with the other's state of stage 3."""

ADDED: dict[str, Any] = {
    **dict.fromkeys(COMPONENT_ARGS, {}), "use_team_obs": False, "belief_inputs": False,
    "truth_all_until": 0.0, "truth_until": 0.0,
    "belief_loss": "none", "belief_weight": 0.3, "belief_units": "unseen", "belief_every": 4,
    "share_parameters": True, "group_size": 1, "n_starts": None,
    "rollout_skip_threshold": None, "enable_dynamic_sampling": False, "max_sampling_attempts": 3,
    "early_stop_percentage": 1.0, "task_weights": {}, "task_dealing": None, "enable_task_sharding": False,
    "balance_tasks_across_gpus": True, "min_tasks_per_gpu": 1, "sync_every_n_steps": 5,
    "graph_pretrain_test_episodes": 128, "resident_slots": None, "absolute_episodes": 0, "test_greedy": True,
    "graph_pretrain_patience": 0, "reconstructor_refresh": 0, "reconstructor_refresh_updates": 50,
    "graph_pretrain_policy_path": "", "graph_pretrain_policy_share": 0.5, "q_lambda": False, "optimizer": "adam",
    "per_alpha": 0.6, "per_beta": 0.4, "standardise_rewards": False,
}  # fmt: skip
"""Keys that earlier versions did not have, with the values by which their runs went: these are not hashed.
Some are gone again (`REMOVED`): runs that had them at these values keep their identity."""


def continue_whole(config: Config, folder: RunFolder) -> None:
    """Copy the whole state that `checkpoint_path` means, if any, into a new run's folder. Errors: UserError."""
    source = whole_state(config, lambda found: _adopt(found, folder))
    if source is None:
        return
    LOG.info(f"continuing from {source.path} in a new folder: {folder.path}")
    theirs = read_entry(RunFolder(source.path.parents[1]).config_json)
    if given := [key for key in RATES if theirs.get(key, ...) not in (..., getattr(config, key))]:
        kept = ", ".join(f"{key}={theirs[key]}" for key in given)
        LOG.warning(f"checkpoint_path: a whole state keeps {kept}; give the run's models/ to change it")


def whole_state(config: Config, use: Callable[[Checkpoint], T]) -> T | None:
    """Return what `use` makes of the newest sound checkpoint that `checkpoint_path` means; None where it means weights.

    A run's folder, its `checkpoints/` or a folder in that mean a whole state, unless `load_step` asks for weights; a
    run's folder means weights, too, where this run cannot go on with the state (`_unlike`).
    Errors: UserError where there are checkpoints and none of them is sound, or where they were asked for and are not
        this run's kind.
    """
    if not config.checkpoint_path or config.evaluate or config.load_step:
        return None
    given = Path(config.checkpoint_path).expanduser().absolute()
    problems: list[str] = []
    for path in _candidates(given):
        try:
            found = read_checkpoint(path)
            if not (reason := _unlike(config, found)):
                _require_files(config, found)
                found.common()
                for rank in range(found.manifest["world_size"]):
                    found.of_rank(rank)
                return use(found)
            models = f"{path.parents[1]}/models"
            if path.parents[1] != given:
                raise UserError(
                    f"checkpoint_path={config.checkpoint_path}: a state with {reason}. Give {models} to start from its"
                    " weights"
                )
            LOG.info(f"checkpoint_path: a run with {reason}, so this one starts from the weights in {models}")
            return None
        except (Damaged, FileNotFoundError) as problem:  # the run may be running, and have removed it just now
            problems.append(f"{path.name}: {problem}")
    if problems:
        raise UserError(
            f"checkpoint_path={config.checkpoint_path}: no checkpoint there is sound ({problems[0]}); give models/ to"
            " continue from saved weights"
        )
    return None


def _require_files(config: Config, found: Checkpoint) -> None:
    """Compare the files of a checkpoint with its manifest; with `resume=lossy` episodes may be missing.

    Errors: Damaged; UserError where the replay was removed when the run had finished.
    """
    faults, episodes = found.faults(), episode_files(found.manifest)
    if not faults or config.resume == "lossy" and faults.keys() <= episodes:
        return
    if faults.keys() == episodes and is_finished(RunFolder(found.path.parents[1])):
        raise UserError(
            f"checkpoint_path={config.checkpoint_path}: its replay was removed when it finished (keep_checkpoints="
            "True would have kept it). resume=lossy continues with an empty replay, models/ from the weights"
        )
    raise Damaged(next(iter(faults.values())))


def _unlike(config: Config, found: Checkpoint) -> str:
    """Return why a run cannot go on with a state of stage 3: the key with both values; empty if it can.

    Learners and starts of episodes have states of their own, and the episodes of a replay hold
    what their agents read.
    """
    saved = read_entry(RunFolder(found.path.parents[1]).config_json)
    if found.manifest["stage"] != "stage3" or "learner" not in saved:
        return ""
    theirs = {"use_per": False, **ADDED, **saved}
    for key in MUST_AGREE:
        ours = getattr(config, key)
        # A learner has two names.
        if str(theirs.get(key, ours)).removesuffix("_ddp") != str(ours).removesuffix("_ddp"):
            return f"{key}={theirs[key]}, not {ours}"
    return ""


def _candidates(given: Path) -> list[Path]:
    """Return the folders of checkpoints that a path means, newest first."""
    if (given / "manifest.json").exists():
        return [given]
    return folders(given / "checkpoints") or (folders(given) if given.name == "checkpoints" else [])


def _adopt(source: Checkpoint, folder: RunFolder) -> Checkpoint:
    """Copy a checkpoint, and what its run had logged until then, into another run's folder; return the checkpoint.

    Errors: FileNotFoundError if the run is still running and has just removed the checkpoint.
    """
    old = RunFolder(source.path.parents[1])
    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # half of one that was removed meanwhile
    lost = episode_files(source.manifest)  # with `resume=lossy`
    for name in [*source.manifest["files"], f"{source.path.name}/manifest.json"]:
        if name not in lost or (source.path.parent / name).exists():
            link(source.path.parent / name, folder.checkpoints / name)
    for path in (old.metrics_jsonl, old.card_json, *old.episode_logs()):
        if path.exists():
            target = folder.path / path.relative_to(old.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    for path in [old.pretrained(stage, best) for stage in ("stage1", "stage2") for best in (False, True)]:
        if path.is_dir():
            half = shutil.ignore_patterns(".*")
            shutil.copytree(path, folder.models / path.name, ignore=half, dirs_exist_ok=True)
    write_json(folder.path / CONTINUED, {"checkpoint": str(source.path), "iteration": source.manifest["iteration"]})
    return source


PRETRAINED = {"stage1": TOKENIZER_FILE, "stage2": PREDICTOR_FILE}


@dataclass(frozen=True)
class SavedWeights:
    """Weights in `models/` that this run continues from, without a checkpoint.

    Attributes:
        step: folder of stage 3's weights, None before that stage. trained: files of finished stages by name.
    """

    step: Path | None
    trained: Mapping[str, Path]

    @property
    def position(self) -> Position:
        """Stage and clock at which they were written."""
        return (2, float(self.step.name)) if self.step is not None else (max(map(STAGES.index, self.trained)), EVER)


def saved_weights(folder: RunFolder, config: Config) -> SavedWeights | None:
    """Return the newest readable weights in `models/` with all modules that they need; None if there are none."""
    trained: dict[str, Path] = {}
    given = {"stage1": config.pretrained_tokenizer_path, "stage2": config.pretrained_mask_predictor_path}
    needed = [name for name in pretraining(config) if config.stage in {"all", name} and not given[name]]
    for name in needed if config.use_graph_reconstruction else ():
        files = [folder.pretrained(name, best) / PRETRAINED[name] for best in (True, False)]
        readable = [path for path in files if _can_be_read(path)]
        if not readable:
            return SavedWeights(None, trained) if trained else None
        trained[name] = readable[0]
    for t_env in reversed(folder.saved_steps()):
        step = folder.step(t_env)
        files = [Path(entry.path) for entry in listed(step) if entry.name.endswith(".th")]
        if {AGENT_FILE, LEARNER_FILE} <= {path.name for path in files} and all(map(_can_be_read, files)):
            return SavedWeights(step, trained)
    return SavedWeights(None, trained) if trained else None


def _can_be_read(path: Path) -> bool:
    """Return whether a file of weights is whole. Errors: Unreadable."""
    try:
        read_part(path)
    except Damaged:
        return False
    return True
