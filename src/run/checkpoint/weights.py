"""Files of weights: written whole or not at all, read without running code from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from omagd.learners.belief_loss import HEAD
from omagd.learners.protocol import Trainable
from omagd.run.checkpoint.store import Damaged, first_not_finite, read_part, serialized
from omagd.utils.errors import UserError
from omagd.utils.metrics import Counters
from omagd.utils.storage import STORAGE

AGENT_FILE, MIXER_FILE, LEARNER_FILE = "agent.th", "mixer.th", "opt.th"
TOKENIZER_FILE, PREDICTOR_FILE = "tokenizer.th", "stage2_model.th"


def keep_file(path: Path, content: Mapping[str, Any]) -> bool:
    """Write tensors and plain values to a file, later if the disk is full. Return whether it was possible now."""
    return STORAGE.write(path, serialized(content))


def load_file(path: Path, key: str) -> dict[str, Any]:
    """Read what `keep_file` wrote, onto the CPU.

    Args:
        path: the file. key: configuration key that named it, for the message.
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
    for name, module in sorted(learner.modules().items(), reverse=True):
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
    with _fits(path):
        load_learner_state(learner, state["learner"], path)
        return dict(state["clock"])


def load_learner_state(learner: Any, saved: Any, path: Path) -> None:
    """Load a learner's state from a file, all but the settings of its optimizers. Errors: UserError."""
    require_finite(saved, path, "checkpoint_path")
    with _fits(path):
        learner.load_state_dict(with_own_settings(saved, learner.state_dict()))


@contextmanager
def _fits(path: Path) -> Iterator[None]:
    try:
        yield
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
            groups = zip(own["param_groups"], saved["param_groups"], strict=True)
            if any(here["params"] != there["params"][: len(here["params"])] for here, there in groups):
                raise ValueError("its optimizer is of other parameters")
            kept = {place for group in own["param_groups"] for place in group["params"]}
            return {**own, "state": {place: values for place, values in saved["state"].items() if place in kept}}
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
        whole = [p for p in steps if _has_agent(p)]
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


def _has_agent(folder: Path) -> bool:
    """Return whether a folder has the file of the agent, which a save writes last; False if it cannot be entered."""
    try:
        return (folder / AGENT_FILE).is_file()
    except OSError:
        return False


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
