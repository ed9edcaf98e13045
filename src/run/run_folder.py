"""One folder per run: names and paths of its files, and whether it is safe to write there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omagd.utils.errors import UserError, readable
from omagd.utils.storage import FOLDER, STORAGE, opened, read_json, release, replace_file

STUDY_FILE, STUDY_RUNS = "study.json", "runs"
"""In a study's folder: its state, and the folder of its runs."""

RUN_FILE = "run.json"
"""In a run's folder: what the run is, and whether it is finished."""

FAILING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of the system, not of a file."""


def fingerprint(values: Any) -> str:
    """Return the SHA-256 of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def make_token(
    name: str, env: str, map_name: str, seed: int, now: float | None = None, *, evaluation: bool = False
) -> str:
    """Return the name of a run's folder: `<name>_<env>_<map>_seed<seed>_<date>_<time>`; a missing map is left out.

    Args:
        now: seconds since the epoch, this moment if None. Two runs in one second get the same token;
            `RunFolder.create` makes them differ. evaluation: add `evaluation` before the date.
    """
    stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(now))
    parts = [for_files(part) for part in (name, env, map_name) if part]
    return "_".join([*parts, f"seed{seed}", *(["evaluation"] * evaluation), stamp])


def newest_run(command: str) -> str:
    """Return the folder of the run in `results/` that began to train last. Errors: UserError where there is none."""
    found = Path("results").glob(f"*/{RUN_FILE}")
    begun = [path for path in found if not read_entry(RunFolder(path.parent).config_json).get("evaluate")]
    if not begun:
        raise UserError(f"{command}: no run in results/. Name one, as in: omagd {command} results/<run>")
    return str(max(begun, key=lambda path: path.stat().st_mtime).parent)


def is_word(text: str) -> bool:
    """Return whether a text in the place of a run is `with` or `key=value`; folders may have such names, too."""
    return text == "with" or ("=" in text and not os.path.exists(os.path.expanduser(text)))


def for_files(name: str) -> str:
    """Return a name as files and folders may have it."""
    return re.sub(r"[^\w.+-]+", "-", name)


class RunFolder:
    """Paths of a run's files. Opening one creates nothing; `create` makes a new one.

    Args:
        path: `<local_results_path>/<unique_token>`.

    Attributes:
        token: the run's unique name.
        config_json: the resolved configuration. card_json: what the result depends on. env_info_json: facts about the
            environment. metrics_jsonl: one JSON object per log. summary_json: what the run reached.
        checkpoints, models, plots, logs, profile, replays: folders of checkpoints, weights, pictures, text logs, traces
            and recorded games.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.token = self.path.name
        self.config_json, self.card_json = self.path / "config.json", self.path / "card.json"
        self.env_info_json, self.metrics_jsonl = self.path / "env_info.json", self.path / "metrics.jsonl"
        self.summary_json = self.path / "summary.json"
        self.checkpoints, self.models = self.path / "checkpoints", self.path / "models"
        self.plots, self.logs = self.path / "plots", self.path / "logs"
        self.profile, self.replays = self.path / "profile", self.path / "replays"

    @property
    def made_first(self) -> tuple[Path, ...]:
        """Folders that `create` makes."""
        return self.models, self.plots, self.logs

    @property
    def evaluations(self) -> Path:
        """Where evaluations of the run go: beside it, but not among the runs of a study, which are compared."""
        around = self.path.parent
        in_study = around.name == STUDY_RUNS and (around.parent / STUDY_FILE).is_file()
        return around.parent / "evaluations" if in_study else around

    @classmethod
    def create(
        cls, local_results_path: str | Path, unique_token: str, *, generated: bool = True, left: bool = False
    ) -> RunFolder:
        """Make a new folder under `local_results_path`; runs never share one.

        Args:
            generated: whether the name was made by `make_token`: then a taken one gets `_2`, `_3`, ...
            left: use the folder of that name that an earlier start has left behind.
        Errors: OSError where nothing can be written, FileExistsError among them for a taken name that a user gave.
        """
        root = Path(local_results_path).expanduser().absolute()
        root.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = root / (unique_token if number == 1 else f"{unique_token}_{number}")
            try:
                path.mkdir(mode=0o755)  # with any umask: who else could write here could plant links
                release(path)  # of an earlier folder there
                break
            except FileExistsError:
                if left:
                    break
                if not generated:
                    raise
        folder = cls(path)
        for sub in folder.made_first:
            sub.mkdir(mode=0o755, exist_ok=True)
        return folder

    def files(self) -> tuple[Path, ...]:
        """Return the paths of the files that a run writes beside its episodes, text logs and weights."""
        return self.config_json, self.env_info_json, self.card_json, self.metrics_jsonl, self.summary_json

    def episode_log(self, rank: int) -> Path:
        """Return where a rank notes the episodes of its training, a JSON object each."""
        return self.path / "episodes" / f"rank_{rank}.jsonl"

    def episode_logs(self) -> list[Path]:
        """Return the notes of all ranks that are there."""
        found = (self.path / "episodes").glob("rank_*.jsonl")
        return sorted(path for path in found if path.stem.removeprefix("rank_").isdecimal())

    def step(self, t_env: int) -> Path:
        """Return the folder of the stage-3 weights at `t_env`."""
        return self.models / str(int(t_env))

    def pretrained(self, stage: str, best: bool = False) -> Path:
        """Return the folder of the weights of `stage1` or `stage2`."""
        return self.models / f"pretrain_{stage}{'_best' if best else ''}"

    def log(self, rank: int) -> Path:
        """Return the text log of a rank."""
        return self.logs / f"rank_{rank}.log"

    def saved_steps(self) -> list[int]:
        """Return the `t_env` of all saved stage-3 weights, ascending."""
        found = self.models.iterdir() if self.models.is_dir() else ()
        return sorted(int(path.name) for path in found if path.name.isdecimal() and path.is_dir())

    def half_written(self) -> list[Path]:
        """Return the temporary files that a killed process has left; none of another program's folder."""
        others = (self.path / name for name in ("episodes", "pretrain_buffer"))
        below = self.models, self.checkpoints, self.plots, self.replays, *others
        found = [*self.path.glob(".*.tmp"), *(path for folder in below for path in folder.rglob(".*.tmp"))]
        return [path for path in found if stat.S_ISREG(path.lstat().st_mode)]

    def artifacts(self) -> dict[str, str]:
        """Return the absolute paths of what is there, by name: files, folders of weights, pictures."""
        folders = [self.pretrained(stage, best) for stage in ("stage1", "stage2") for best in (False, True)]
        found = {path.stem: path for path in self.files() if path.is_file() and path != self.summary_json}
        found |= {path.name: path for path in folders if path.is_dir()}
        if steps := self.saved_steps():
            found["model"] = self.step(steps[-1])
        found |= {f"profile/{path.stem}": path for path in sorted(self.profile.glob("*.json"))}
        found |= {f"plots/{path.stem}": path for path in sorted(self.plots.glob("*.png"))}
        if self.replays.is_dir():
            found["replays"] = self.replays
        return {name: str(path) for name, path in found.items()}


def rank_of(episode_log: Path) -> int:
    """Return the rank whose episodes a file notes."""
    return int(episode_log.stem.removeprefix("rank_"))


def read_entry(path: Path, strict: bool = False) -> dict[str, Any]:
    """Return the JSON object in a small file; empty where it is anything else: a pipe, a device, huge, missing.

    Errors: with `strict` OSError where the system cannot read it, unless it is another user's and closed to this one.
    """
    try:
        found = read_json(path)
    except ValueError:
        return {}
    except OSError as problem:
        if strict and (problem.errno in FAILING or problem.errno == errno.EACCES and _is_own(path)):
            raise
        return {}
    return found if isinstance(found, dict) else {}


def _is_own(path: Path) -> bool:
    """Return whether a file is this user's; where its folder cannot be entered, whether that folder is."""
    for place in (path, path.parent):
        with contextlib.suppress(OSError):
            return place.lstat().st_uid == os.geteuid()
    return False


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all: into a file beside it, which then takes its name.

    NaN and infinities become null; paths become text; NumPy and torch scalars and arrays become numbers and lists.
    Errors: OSError.
    """
    replace_file(path, _json(value))


def keep_json(path: Path, value: Any) -> bool:
    """Write what `write_json` writes, later where that is impossible now; return whether it was possible."""
    return STORAGE.write(path, _json(value))


def _json(value: Any) -> bytes:
    return (json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_records(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines; skips what is none, such as the last line of a killed run.

    Nothing is read from a pipe or a device.
    """
    if os.path.isfile(path):
        yield from (record for record in json_lines(path) if record is not None)


def json_lines(path: str | Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line that is not empty; None where it is none."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None


def plain(value: Any) -> Any:
    """Return `value` as values of strict JSON. Errors: TypeError for other objects."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no place in a JSON file")


# A folder is safe to write if it is the user's own and no name that a run uses leads outside. Other programs keep files
# there too (W&B, TensorBoard, plug-ins): these are neither looked at nor changed. All checks use descriptors of folders
# and follow no links. A world-writable folder is first closed to others, so what has been checked stays so. The group
# is trusted: the user decides whether it may write.
OWN = re.compile(
    r"(config|env_info|card|summary|run|saved|continued_from|wandb)\.json|metrics\.jsonl|lock(\..+)?"
    r"|plots|replays|pretrain_buffer|set_aside|logs(/rank_\d+\.log)?|episodes(/rank_\d+\.jsonl)?"
    r"|profile(/.+_rank\d+\.json)?|checkpoints(/.*)?|models(/(\d+|pretrain_stage\d(_best)?)(/.*)?)?",
    re.DOTALL,
)
"""What a run reads or writes in its folder. Other files of its own are replaced as a whole or get new names."""

ENTERED = re.compile(r"logs|episodes|profile|models(/.+)?|checkpoints(/.+)?", re.DOTALL)
"""Folders in which a run uses names of its own."""

WRITTEN_ONCE = frozenset({"checkpoints", "models"})
"""Folders whose files are replaced as a whole, never changed: another name of such a file elsewhere is safe."""


class Untrusted(Exception):
    """A folder that must not be written; the message is the reason."""


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Within, new files are not world-writable, whatever the umask: others could put links there."""
    before = os.umask(0o777)
    os.umask(before | stat.S_IWOTH)
    try:
        yield
    finally:
        os.umask(before)


def require_own(folder: Path) -> None:
    """Check a run's folder; make a file that has another name outside a copy of its own. Errors: Untrusted, OSError."""
    if not folder.name.isprintable():
        raise Untrusted("its name holds control characters")
    with opened(folder.parent, os.O_DIRECTORY) as root:
        mode = os.fstat(root).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise Untrusted("everybody may replace it: the folder around it is writable by all, without a sticky bit")
        about = os.stat(folder.name, dir_fd=root, follow_symlinks=False)
        if not stat.S_ISDIR(about.st_mode):
            raise Untrusted("it is a link, not a folder")
        own = _own_ids(about.st_uid, root)
        with opened(folder.name, FOLDER, root) as handle:
            _check(handle, (), own)


def unlinked(folder: Path, name: str) -> Path:
    """Return a path in a run's folder, to write to. Errors: Untrusted where a part of its `name` is a link."""
    path = folder / name
    for part in (path, *path.parents[: len(Path(name).parts) - 1]):
        if part.is_symlink():
            raise Untrusted(f"{part} is a link, and nothing is written there")
    return path


def _own_ids(found: int, root: int) -> frozenset[int]:
    """Return the user ids of this process's files, of which one may be `found`.

    Some file systems show files of root as those of another user.
    """
    own = {os.geteuid()}
    if found in own:
        return frozenset(own)
    name = f".owner_{secrets.token_hex(8)}.tmp"
    with contextlib.suppress(OSError):
        probe = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=root)
        own.add(os.fstat(probe).st_uid)
        os.close(probe)
        os.unlink(name, dir_fd=root)
    return frozenset(own)


def _check(handle: int, place: tuple[str, ...], own: frozenset[int]) -> None:
    """Check an open folder and the names in it that a run uses, depth first. Errors: Untrusted, OSError."""
    about = os.fstat(handle)
    if about.st_uid not in own:
        raise Untrusted(f"{_named(place)} belongs to another user")
    if about.st_mode & stat.S_IWOTH:
        os.fchmod(handle, stat.S_IMODE(about.st_mode) & ~stat.S_IWOTH)
    for name in os.listdir(handle):
        here = (*place, name)
        if not OWN.fullmatch("/".join(here)):
            continue
        found = os.stat(name, dir_fd=handle, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            raise Untrusted(f"it contains a link, {_named(here)}")
        elif found.st_uid not in own:
            raise Untrusted(f"{_named(here)} belongs to another user")
        elif stat.S_ISDIR(found.st_mode):
            if ENTERED.fullmatch("/".join(here)):
                with opened(name, FOLDER, handle) as inner:
                    _check(inner, here, own)
        elif not stat.S_ISREG(found.st_mode):
            raise Untrusted(f"it contains something that is neither a file nor a folder, {_named(here)}")
        elif found.st_nlink > 1 and here[0] not in WRITTEN_ONCE:
            _copy_in_place(handle, name)


def _copy_in_place(handle: int, name: str) -> None:
    """Replace a file with several hard links by a copy of its own: writing to it must not change the others."""
    beside = f".{secrets.token_hex(8)}.tmp"
    try:
        with opened(name, os.O_NOFOLLOW | os.O_NONBLOCK, handle) as source:
            mode = stat.S_IMODE(os.fstat(source).st_mode)
            target = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=handle)
            with open(target, "wb") as copy:
                while piece := os.read(source, 1 << 20):
                    copy.write(piece)
        os.replace(beside, name, src_dir_fd=handle, dst_dir_fd=handle)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=handle)
        raise


def _named(place: tuple[str, ...]) -> str:
    return readable("/".join(place))[:120] if place else "it"
