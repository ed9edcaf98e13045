"""What a checkpoint holds, and the folder `checkpoints/` of a run: a checkpoint is complete or absent, and checked.

    checkpoints/00000120/manifest.json          what belongs to it, with sizes and SHA-256; written last
    checkpoints/00000120/common.th rank_0.th …  tensors and plain values, which can be read without running code
    checkpoints/kept/…                          files that several checkpoints share: replayed episodes, trained modules

A save is a folder `.<name>.<attempt>.partial` into which every rank writes its part and then `report_<rank>.json`; rank
0 waits for all reports, writes the manifest and renames the folder. What a kill leaves of it is removed by the next
attempt. Several machines share the folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import stat
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from omagd.run.run_folder import RUN_FILE, RunFolder, fingerprint, read_entry, write_json
from omagd.utils.logging import PACKAGE
from omagd.utils.storage import ABSENT, FOLDER, Unreadable, listed, opened, patiently, read_json, sync

Scope = Literal["shared", "rank"]
"""`shared`: equal on all ranks, rank 0 writes it. `rank`: each rank writes and restores its own."""


class Stateful(Protocol):
    """An object that can be registered with a checkpointer.

    An object of scope `rank` may also have `merge(states)`: where the number of ranks has changed, rank 0 calls it with
    the states of all former ranks. Without it, and on the other ranks, the object stays as the stage made it.
    """

    def state_dict(self) -> Any:
        """Return the state: nested dicts, lists and tuples of tensors, arrays, numbers, text, None."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state. Errors: KeyError, RuntimeError, TypeError, ValueError for one that does not fit."""


class Group:
    """Several objects that are registered under one name. members: by their own names."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = members

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every member. Errors: KeyError where one is missing."""
        for name, member in self.members.items():
            member.load_state_dict(state[name])

    def merge(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Merge what former ranks had into every member that can do that."""
        for name, member in self.members.items():
            if hasattr(member, "merge"):
                member.merge([state[name] for state in states])


class Attribute:
    """One attribute of an object, with a plain value. owner: the object. name: of the attribute."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def state_dict(self) -> Any:
        """Return the value."""
        return getattr(self.owner, self.name)

    def load_state_dict(self, state: Any) -> None:
        """Set the value."""
        setattr(self.owner, self.name, state)


NO_AGENT: tuple[int, dict[str, Any], tuple[float, ...]] = (-1, {}, (-math.inf,))
"""Step, weights and values of the best test before there is one, or without `absolute_episodes`."""


def upgraded(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shared state of a stage as this version reads it: others wrote none of these."""
    return {"health": [0, 0, 0], "opponents": {}, "best_agent": NO_AGENT, **shared}


@dataclass(frozen=True)
class StageResult:
    """How a stage ended: `values` are its last and best numbers, `files` its artifacts by name."""

    name: str
    clock: dict[str, int]
    values: dict[str, float]
    files: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)


_ARRAY = "__ndarray__"


def pack(tree: Any) -> Any:
    """Return an independent copy of `tree`: tensors on the CPU, NumPy arrays as marked tensors.

    tree: dicts, lists and tuples of tensors, arrays, numbers, text, bytes, None. Errors: TypeError for anything else.
    """
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, np.ndarray):
        return {_ARRAY: torch.from_numpy(tree.copy())}
    if isinstance(tree, np.generic):
        return tree.item()
    if isinstance(tree, Mapping):
        return {pack(key): pack(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(pack(value) for value in tree)
    if tree is None or type(tree) in {bool, int, float, str, bytes}:  # an enum is not: its class would be loaded
        return tree
    raise TypeError(f"{type(tree).__name__} has no place in a checkpoint")


def unpack(tree: Any) -> Any:
    """Return what `pack` was given: arrays are arrays again; tensors stay on the CPU."""
    if isinstance(tree, Mapping):
        if tree.keys() == {_ARRAY}:
            return tree[_ARRAY].numpy()
        return {key: unpack(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(unpack(value) for value in tree)
    return tree


def serialized(content: Mapping[str, Any]) -> bytes:
    """Return tensors and plain values as the bytes of a file.

    `torch.save` does not write the file itself: on a full disk it raises an error of another kind than OSError.
    """
    stream = io.BytesIO()
    torch.save(dict(content), stream)
    return stream.getvalue()


def first_not_finite(tree: Any, path: str = "") -> str | None:
    """Return the path of the first tensor in nested dicts and lists that is not finite, None if all are."""
    if isinstance(tree, torch.Tensor):
        return path if tree.is_floating_point() and not bool(tree.isfinite().all()) else None
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    found = (first_not_finite(value, f"{path}.{key}" if path else str(key)) for key, value in items)
    return next((place for place in found if place is not None), None)


FORMAT = 2
"""Of the manifest and the parts. 1 was `models/<t_env>/opt.th`, which `checkpoint_path` still reads."""

MANIFEST, SAVED = "manifest.json", "saved.json"
LOG = logging.getLogger(PACKAGE)
NUMBERS = re.compile(r"[0-9]+(_[0-9]+)?")


class Damaged(Exception):
    """A checkpoint with missing or changed files."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder. manifest: its content; `files`: name below `checkpoints/` -> bytes and SHA-256.
    """

    path: Path
    manifest: Mapping[str, Any]

    def faults(self, part: int = 0, parts: int = 1) -> dict[str, str]:
        """Return the problems of a share of the files that differ from the manifest, by name.

        Errors: Unreadable.
        """
        found = {}
        for name in sorted(self.manifest["files"])[part::parts]:
            if problem := fault(self.path.parent / name, self.manifest["files"][name]):
                found[name] = f"{name}: {problem}"
        return found

    def common(self) -> dict[str, Any]:
        """Return what all ranks share. Errors: Damaged, Unreadable."""
        return _fitting(CommonForm, "common.th", read_part(self.path / "common.th"))

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return a rank's part. Errors: Damaged, Unreadable."""
        return _fitting(RankForm, f"rank_{rank}.th", read_part(self.path / f"rank_{rank}.th"))

    def shared(self, name: str) -> Path:
        """Return the path of a file that the manifest names below `checkpoints/`. Errors: Damaged."""
        if name not in self.manifest["files"]:
            raise Damaged(f"{name} does not belong to it")
        return self.path.parent / name


def fault(path: Path, entry: Mapping[str, Any]) -> str:
    """Return how a file differs from its entry in the manifest, empty if it does not. Errors: Unreadable."""
    try:
        facts = patiently(path, path.stat)
        size = facts.st_size if stat.S_ISREG(facts.st_mode) else -1  # a pipe would keep its reader waiting
        if size != entry["bytes"]:
            return f"{size} bytes instead of {entry['bytes']}"
        if patiently(path, lambda: digest(path)) != entry["sha256"]:
            return "its content has changed"
    except ABSENT as problem:
        return str(problem.strerror)
    return ""


def read_part(path: Path) -> dict[str, Any]:
    """Return the state in a file, running nothing that is in it. Errors: Damaged, Unreadable."""
    raw = io.BytesIO(_content(path))
    try:
        with warnings.catch_warnings():  # torch warns about files of other programs
            warnings.simplefilter("ignore")
            content = torch.load(raw, map_location="cpu", weights_only=True)
    except Exception as problem:  # torch raises many kinds for a file that is not its own
        raise Damaged(f"{path.name}: {(str(problem).splitlines() or [''])[0][:120]}") from problem
    if not isinstance(content, dict):
        raise Damaged(f"{path.name}: no state of this program")
    return dict(unpack(content))


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder, its files unchecked. Errors: Damaged, Unreadable."""
    text = _content(path / MANIFEST)
    try:
        return Checkpoint(path, _fitting(ManifestForm, MANIFEST, _known(json.loads(text))))
    except (ValueError, RecursionError) as problem:
        raise Damaged(f"{MANIFEST}: no JSON ({problem})") from problem


def _content(path: Path) -> bytes:
    """Return the bytes of a regular file. Errors: Damaged where there is none, Unreadable."""
    try:
        if not stat.S_ISREG(patiently(path, path.stat).st_mode):
            raise Damaged(f"{path.name}: not a regular file")
        return patiently(path, path.read_bytes)
    except ABSENT as problem:
        raise Damaged(f"{path.name}: {problem.strerror}") from problem


def _known(manifest: Any) -> dict[str, Any]:
    if not isinstance(manifest, dict) or sealed(manifest)["seal"] != manifest.get("seal"):
        raise Damaged(f"{MANIFEST}: its content has changed")
    if (found := manifest.get("format")) != FORMAT:
        raise Damaged(f"{MANIFEST}: format {found}, which this version does not read (it reads {FORMAT})")
    return manifest


def _fitting(form: type[Form], name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file, which fits a form. Errors: Damaged."""
    try:
        form.model_validate(content)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(str(part)[:40] for part in first["loc"])
        raise Damaged(": ".join(filter(None, (name, place, first["msg"])))) from problem
    return content


class CheckpointStore:
    """The checkpoints of one run, as one rank sees them.

    Args:
        path: `checkpoints/` of the run. rank, world_size: of this process. attempt: text that no other start of this
            run has used; the same on all ranks. keep: how many of the newest stay; that with the best score does too.

    Attributes:
        waits_until: moment (`time.monotonic()`) at which no save waits for other ranks any more; set when a run ends
            early, since a rank that is gone never writes its part.
    """

    def __init__(self, path: Path, rank: int, world_size: int, attempt: str, keep: int) -> None:
        self.path, self.rank, self.world_size = path, rank, world_size
        self.attempt, self.keep, self.waits_until = attempt, keep, math.inf

    def prune(self) -> None:
        """Remove checkpoints that are neither among the newest nor the best, and the files that they alone name.

        No other file is touched: other ranks may be writing the next checkpoint. A manifest that cannot be read may
        name any of the shared files: then these stay.
        """
        known, paths = [], folders(self.path)
        for path in paths:
            with suppress(Damaged, Unreadable):
                known.append(read_checkpoint(path))
        scored = [found for found in known if found.manifest.get("score") is not None]
        best = max(scored, key=lambda found: found.manifest["score"], default=None)
        old = [found for found in known[self.keep :] if best is None or found.path != best.path]
        needed = {name for found in known if found not in old for name in found.manifest["files"]}
        for each in old:
            doomed = each.path.with_name(f".{each.path.name}.{self.attempt}.partial")
            each.path.rename(doomed)  # disappears at once, even if its removal is interrupted
            shutil.rmtree(doomed, ignore_errors=True)
        unused = {name for found in old for name in found.manifest["files"]} - needed
        if len(known) == len(paths):
            remove_kept(self.path, unused)


def clean(path: Path) -> None:
    """Remove half-written files of killed starts below `checkpoints/`. Called while no other process writes there.

    Shared files stay where a manifest cannot be read: it may name any of them. Errors: Unreadable.
    """
    for entry in listed(path):
        if entry.name.startswith(".") and entry.name.endswith(".partial"):
            shutil.rmtree(entry.path, ignore_errors=True)
    needed: set[str] = set()
    for each in folders(path):
        try:
            needed |= set(read_checkpoint(each).manifest["files"])
        except Damaged:
            return
    remove_kept(path, {f"kept/{entry.name}" for entry in listed(path / "kept")} - needed)


def remove_kept(path: Path, names: set[str]) -> None:
    """Remove those of some files of the manifest that are shared. A folder among them is not ours and stays."""
    shared = [name for name in names if name.startswith("kept/")]
    for name in [] if (path / "kept").is_symlink() else shared:  # a link leads to files that are not ours
        with suppress(IsADirectoryError):
            (path / name).unlink(missing_ok=True)


def episode_files(manifest: Mapping[str, Any]) -> set[str]:
    """Return the files of episodes that a manifest names."""
    return {part["file"] for rank in manifest["logs"] for log in rank.values() for part in log["parts"]}


def folders(path: Path) -> list[Path]:
    """Return the folders of checkpoints below `checkpoints/`, newest first. Errors: Unreadable."""
    found = [Path(entry.path) for entry in listed(path) if NUMBERS.fullmatch(entry.name) and entry.is_dir()]
    return sorted(found, key=lambda path: [int(part) for part in path.name.split("_")], reverse=True)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_saved(folder: RunFolder) -> int | None:
    """Return the iteration of the last complete save of a run; 0 before the first one.

    None where no version that notes it has run; 1, which is too low but not 0, where the note is damaged.
    Errors: Unreadable.
    """
    path = folder.path / SAVED
    try:
        return int(patiently(path, partial(read_json, path))["iteration"])
    except FileNotFoundError:
        return None
    except (*ABSENT, ValueError, KeyError, TypeError, OverflowError):
        return 1


def note_saved(folder: RunFolder, iteration: int) -> None:
    """Note the iteration of the last complete save, durably. Errors: OSError."""
    write_json(folder.path / SAVED, {"iteration": iteration, "format": FORMAT})
    sync(folder.path)


Count = Annotated[int, Field(ge=0, le=2**62)]
Stage = Literal["stage1", "stage2", "stage3"]
LONGEST_NAME = 255
STAGES = ("stage1", "stage2", "stage3")
EVER = float("inf")
Position = tuple[int, float]
"""A stage's place among the three, and its clock: epochs, or environment steps in stage 3."""

PLAIN = re.compile(r"[^./][^/]*/[^./][^/]*")


class Form(BaseModel):
    """Base of the models: values must have exactly these types, nothing is converted."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class FileForm(Form):
    """A file below `checkpoints/`."""

    bytes: Count
    sha256: str


class RangeForm(Form):
    """A file of episodes."""

    first: Count
    count: Count
    file: str
    entry: FileForm
    codec: dict[str, Any] | None


class LogForm(Form):
    """A rank's episodes under a name."""

    added: Count
    kept: Count
    parts: list[RangeForm]


class ManifestForm(Form):
    """`manifest.json`."""

    world_size: Annotated[int, Field(ge=1)]
    iteration: Count
    stage: Stage
    t_env: Count
    clock: dict[str, Count]
    score: float | None
    files: dict[str, FileForm]
    logs: list[dict[str, LogForm]]

    @model_validator(mode="after")
    def _fits(self) -> ManifestForm:
        for name in self.files:
            if not _is_inside(name):
                raise ValueError(f"{name[:80]!a} is no file of a checkpoint")
        if len(self.logs) != self.world_size:
            raise ValueError(f"logs of {len(self.logs)} ranks instead of {self.world_size}")
        for part in (part for rank in self.logs for log in rank.values() for part in log.parts):
            if part.file not in self.files:
                raise ValueError(f"{part.file[:80]!a} does not belong to it")
        if self.stage != "stage3" and "epoch" not in self.clock:
            raise ValueError("clock: no epoch")
        return self


class ResultForm(Form):
    """A finished stage."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Stage
    clock: dict[str, int]
    values: dict[str, Any]
    files: dict[str, str]
    facts: dict[str, Any]


class RunForm(Form):
    """What the run has logged."""

    wall_seconds: float
    metrics_bytes: Count
    sinks: dict[str, dict[str, Any]]
    earlier_ranks: dict[Count, Count] = {}


class CommonForm(Form):
    """`common.th`."""

    stage: Stage | None
    finished: list[ResultForm]
    products: dict[str, str]
    modules: dict[str, str]
    shared: dict[str, Any]
    run: RunForm


class RankForm(Form):
    """`rank_<r>.th`."""

    stage: dict[str, Any]
    random: dict[str, Any]
    runners: dict[str, Any]
    past: dict[str, float]
    episode_bytes: Count


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest with a checksum of its content under `seal`."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    return {**content, "seal": fingerprint(content)}


def _is_inside(name: str) -> bool:
    """Return whether a name is `<folder>/<file>`, both plain and of a length that a disk takes."""
    sizes = [len(part.encode(errors="replace")) for part in name.split("/")]
    return bool(PLAIN.fullmatch(name)) and name.isprintable() and max(sizes) <= LONGEST_NAME


def link(source: Path, target: Path) -> None:
    """Link a file that is never changed to another place; copy it if the disk has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        if not target.exists():
            shutil.copy2(source, target)
            sync(target)


EPISODES = ".episodes"


def is_finished(folder: RunFolder) -> bool:
    """Return whether a run has ended and written everything."""
    return bool(read_entry(folder.path / RUN_FILE).get("finished"))


def free_replay(folder: RunFolder, remove: bool = True) -> tuple[int, int]:
    """Remove the episodes of a finished run's checkpoints; return the number of files and the bytes that this frees.

    Every folder is opened by its name in the one before, following no links. A file that another run shares by a hard
    link frees nothing. remove: False only counts. Errors: OSError.
    """
    files = size = 0
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(opened(folder.path, FOLDER))
            for name in ("checkpoints", "kept"):
                handle = stack.enter_context(opened(name, FOLDER, handle))
        except ABSENT:
            return 0, 0
        for name in sorted(os.listdir(handle)):
            about = os.stat(name, dir_fd=handle, follow_symlinks=False)
            if not name.endswith(EPISODES) or not stat.S_ISREG(about.st_mode):
                continue
            files, size = files + 1, size + about.st_size * (about.st_nlink == 1)
            if remove:
                os.unlink(name, dir_fd=handle)
    return files, size


def free_finished(folder: RunFolder) -> None:
    """Remove the replay of a run that has just finished, and log how much that frees."""
    try:
        size = free_replay(folder)[1]
    except OSError as problem:
        LOG.warning(f"the replay of the finished run stays in its checkpoints: {problem}")
        return
    if size:
        LOG.info(f"freed {size / 1e6:.1f} MB: the replay in the checkpoints (keep_checkpoints=True keeps it)")
