"""Find the folder of an unfinished run of the same configuration, or create one, and lock it.

One process per run folder, by `flock`, which ends with its holder: `lock` is locked by the process that started the run
and holds who that is; the ranks at work share a lock of `lock.ranks`. Some network file systems have no `flock`: then
nothing is locked, and a warning says so.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from omagd.config.loading import read_saved, validate
from omagd.config.schema import Config, with_removed
from omagd.run.checkpoint.store import digest, free_finished
from omagd.run.checkpoint.weights import ADDED, CONTINUED, continue_whole
from omagd.run.reporting.card import NO_EFFECT
from omagd.run.run_folder import (
    RUN_FILE,
    RunFolder,
    Untrusted,
    closed_to_others,
    fingerprint,
    keep_json,
    read_entry,
    require_own,
    write_json,
)
from omagd.utils.errors import UserError, readable
from omagd.utils.logging import PACKAGE, duration, setup_logging
from omagd.utils.storage import ABSENT, STORAGE, Identity, held, listed, patiently

LOG = logging.getLogger(PACKAGE)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


LOCK, RANKS = "lock", "lock.ranks"
UNSUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Errors of `flock` on file systems without locks."""

ENTRY = 400
"""Bytes of a holder's entry: ranks overwrite each other's."""

FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Busy(Exception):
    """Another process has the lock; the message says which one, if known."""


def take(folder: Path) -> FileIO:
    """Return a run's lock, held until it is closed. Errors: Busy; OSError where nothing can be written."""
    return _taken(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)


def mark_rank(folder: Path) -> FileIO:
    """Mark that a rank works in a folder, until the mark is closed. Errors: OSError."""
    return _taken(folder / RANKS, fcntl.LOCK_SH)


def busy_run(folder: Path, strict: bool = False) -> Busy | None:
    """Return who has the lock of a run's folder, or works there as a rank; changes nothing.

    strict: whether a file system without locks is an error. Errors: OSError.
    """
    return _busy(folder / LOCK, strict) or busy_rank(folder)


def busy_rank(folder: Path) -> Busy | None:
    """Return a rank that works in a folder, None if there is none. Errors: OSError."""
    return _busy(folder / RANKS)


def _taken(path: Path, kind: int) -> FileIO:
    with ExitStack() as unless_taken:
        lock = unless_taken.enter_context(FileIO(os.open(path, FLAGS | os.O_CREAT, 0o644), "r+"))
        if not _flock(lock.fileno(), kind):
            raise Busy(_holder(lock.fileno()))
        with suppress(OSError):  # on a full disk the lock is held all the same, without the holder's name
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
            lock.write(json.dumps(holder).encode().ljust(ENTRY) + b"\n")
        unless_taken.pop_all()
        return lock


def _busy(path: Path, strict: bool = False) -> Busy | None:
    with suppress(FileNotFoundError):
        try:
            handle = os.open(path, FLAGS)
        except OSError as problem:
            if problem.errno not in {errno.EACCES, errno.EROFS}:
                raise
            handle = os.open(path, FLAGS & ~os.O_RDWR)  # another user's, or a disk that is only read: enough to ask
        try:
            return None if _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, strict) else Busy(_holder(handle))
        finally:
            os.close(handle)
    return None


def _flock(handle: int, kind: int, strict: bool = False) -> bool:
    """Return whether the lock was taken, or, unless `strict`, none exist here; False where another process has it."""
    try:
        fcntl.flock(handle, kind)
    except BlockingIOError:
        return False
    except OSError as problem:
        if strict or problem.errno not in UNSUPPORTED:
            raise
        if kind & fcntl.LOCK_NB:  # once a start, not in each rank
            LOG.warning("this file system has no locks (flock): nothing keeps a second process out of the folder")
    return True


def _holder(handle: int) -> str:
    """Return host, pid and age of the process that has a lock, as text."""
    try:
        entry = json.loads(os.pread(handle, ENTRY + 1, 0))
        age = duration(max(0.0, time.time() - entry["since"]))
        return readable(f"process {entry['pid']} on host {entry['host']}, for {age}")
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "another process"


ELSEWHERE = NO_EFFECT - {"save_model", "save_model_interval", "save_pretrain_buffer"} | frozenset(
    {"name", "use_cuda", "dist_backend", "bucket_cap_mb", "num_workers", "graph_updates"}
)
"""Keys that may change when resuming: where the run is executed, on how many ranks, and what it logs."""

READ = ("pretrained_tokenizer_path", "pretrained_mask_predictor_path", "pretrain_buffer_path", "checkpoint_path")
"""Keys with paths: the content at the path is part of the identity, the path itself is not."""

OLD_RANKS_SECONDS = 60.0
"""How long to wait until the ranks of a killed launcher have ended."""

WAITING_SECONDS = 60.0
"""Pause between two messages while waiting for another process."""

COPYING = "copying"
"""File of a run folder until it notes what the run is: whatever else is there may be half of another run's state."""

STARTING = re.compile(rf"{LOCK}(\.ranks)?|config\.json|\.(config|run)\.json\..+\.tmp")
"""Files that a start makes before it notes what the run is."""


@dataclass(frozen=True)
class RunLock:
    """A locked run folder and the configuration to run there. identity: of the folder, for other processes."""

    path: str
    config: Config
    identity: Identity


@contextmanager
def locked_folder(config: Config, token: str, waits: Callable[[], object] = lambda: None) -> Iterator[RunLock]:
    """Return the folder of a run, locked until the context or the process ends.

    Args:
        config: of the run. token: name of a new folder. waits: called every second while another process uses the run.
    Errors: UserError where nothing can be written, another process uses the run, or `checkpoint_path` holds no
        complete checkpoint.
    """
    setup_logging(None)
    identity = identity_of(config)
    resumes = config.auto_resume and not config.evaluate
    claimed = None
    while claimed is None:
        if resumes and (claimed := _unfinished(config, identity, waits)):
            LOG.info(f"auto_resume=True: continuing the unfinished run {claimed[0].path}")
        else:
            claimed = _new_run(config, token, identity, waits)
    folder, lock = claimed
    STORAGE.begin(folder.path)
    with lock, closed_to_others(), held(folder.path, RUN_FILE) as place:
        if (folder.path / CONTINUED).exists():
            config = config.model_copy(update={"checkpoint_path": ""})
        yield RunLock(str(folder.path), config, place)
        # Last: a run that is killed while it writes its final files must be resumed.
        written = keep_json(folder.path / RUN_FILE, {"identity": identity, "finished": True})
        if written and not config.keep_checkpoints:
            free_finished(folder)


def _new_run(config: Config, token: str, identity: str, waits: Callable[[], object]) -> tuple[RunFolder, FileIO] | None:
    """Make the folder of a new run and lock it; one that cannot be completed is removed.

    With `auto_resume` an empty folder of that name is used: a start was killed before it had noted what the run is.
    Return None where another start was quicker and has noted something there. Errors: UserError.
    """
    own = Path(config.local_results_path).expanduser().absolute() / config.unique_token
    adopts = config.auto_resume and not config.evaluate and bool(config.unique_token)
    left = adopts and _holds_nothing(own) and is_trusted(own, "is empty, and is not used")
    if not left:
        require_free_token(config)
    made: RunFolder | None = None
    lock: FileIO | None = None
    try:
        made = RunFolder.create(config.local_results_path, token, generated=not config.unique_token, left=left)
        lock = take(made.path)
        if not _holds_nothing(made.path):
            lock.close()
            return None
        if (made.path / COPYING).exists():
            _clear(made)
        (made.path / COPYING).touch()
        continue_whole(config, made)
        write_json(made.config_json, config.model_dump(mode="json"))
        write_json(made.path / RUN_FILE, {"identity": identity})
        (made.path / COPYING).unlink()
    except Busy:
        _locked(made or RunFolder(own), config.auto_resume_wait, waits).close()
        return None
    except (OSError, UserError) as problem:
        if made is None and adopts and isinstance(problem, FileExistsError) and own.is_dir():
            return None
        if made is None:
            require_free_token(config)  # another process may have taken it a moment ago
        elif lock is not None or not any(made.path.glob(f"{LOCK}*")):  # nobody else has begun to use it
            shutil.rmtree(made.path, ignore_errors=True)
        if isinstance(problem, UserError):
            raise
        raise _not_writable(Path(config.local_results_path), problem) from problem
    return made, lock


def _clear(folder: RunFolder) -> None:
    """Remove what a start that was killed while it copied another run's state has left."""
    for entry in listed(folder.path):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != COPYING and not entry.name.startswith(LOCK):
            os.unlink(entry.path)
    for part in folder.made_first:
        part.mkdir(mode=0o755)


def _holds_nothing(path: Path) -> bool:
    """Return whether a folder holds only what a start makes before it notes what the run is. Errors: Unreadable."""
    if not path.is_dir() or path.is_symlink():
        return False
    folder = RunFolder(path)
    if (path / COPYING).exists() and not (path / RUN_FILE).exists():
        return True
    for entry in listed(path):
        if entry.is_dir(follow_symlinks=False):
            if Path(entry.path) not in folder.made_first or listed(Path(entry.path)):
                return False
        elif not STARTING.fullmatch(entry.name):
            return False
    return True


def _not_writable(path: Path, problem: OSError) -> UserError:
    return UserError(
        f"local_results_path: {path} cannot be written ({problem.strerror}); give a folder that can be written"
    )


def require_free_token(config: Config, state: str = "exists already") -> None:
    """Raise UserError if `unique_token` is the name of an existing folder. state: what the message says about it."""
    folder = Path(config.local_results_path).expanduser().absolute() / config.unique_token
    if config.unique_token and os.path.lexists(folder):
        only = " only" if config.auto_resume else ""
        raise UserError(
            f"unique_token={config.unique_token}: {folder} {state}. Give another unique_token, or leave it out;"
            f" auto_resume=True continues{only} an unfinished run of that name and the same configuration"
        )


ADDED_ARGS: dict[str, dict[str, Any]] = {"skirmish": {"sight_range": 9, "start": "formation"}}
"""The same as `ADDED` for `env_args`, by environment."""

ADDED_INSIDE: dict[str, dict[str, Any]] = {
    "mask_predictor_config": {"kind": "masked"},
    "learner_args": {"joint": False, "twin": False, "target_noise": 0.0, "target_noise_clip": 0.5, "policy_delay": 1},
}
"""The same for keys of sections."""


def identity_of(config: Config) -> str:
    """Return the identity of a run: a hash of its configuration without the keys that may change when resuming."""
    values = with_removed(config.model_dump(mode="json"))  # earlier versions hashed them
    if config.belief_loss == "none":  # nothing reads it, and its default has changed
        values["belief_weight"] = ADDED["belief_weight"]
    if values["buffer_cpu_only"] is None:  # the default was True, which changes results by rounding at most
        values["buffer_cpu_only"] = True
    for section, added in ADDED_INSIDE.items():
        values[section] = {key: value for key, value in values[section].items() if value != added.get(key, ...)}
    kept = {key: value for key, value in values.items() if key not in ELSEWHERE and value != ADDED.get(key, ...)}
    later = ADDED_ARGS.get(config.env, {})
    kept["env_args"] = {key: value for key, value in values["env_args"].items() if value != later.get(key, ...)}
    for key in READ:
        kept[key] = _content_hash(Path(kept[key]).expanduser()) if kept[key] else ""
    policy = Path(config.graph_pretrain_policy).expanduser()
    kept["graph_pretrain_policy"] = _content_hash(policy) if policy.exists() else config.graph_pretrain_policy
    return fingerprint(kept)


def _content_hash(path: Path) -> str:
    """Return a hash of a file or of a folder's weights and episodes; the path of a folder that holds neither."""
    if path.is_file():
        return patiently(path, partial(digest, path))
    weights = {}
    for file in path.glob("*.th"):
        with suppress(FileNotFoundError):  # a running run replaces its checkpoints
            weights[file.name] = patiently(file, partial(digest, file))
    episodes = {p.name: str(p.stat().st_size) for p in path.glob("*.episodes")}
    found = sorted({**weights, **episodes}.items())
    return fingerprint(found) if found else str(path.resolve())


def _unfinished(config: Config, identity: str, waits: Callable[[], object]) -> tuple[RunFolder, FileIO] | None:
    """Return the newest unfinished run of this configuration and its lock; None if there is none.

    With `unique_token` it must have that name. Errors: UserError where another process uses it, the system cannot read
    it, or `unique_token` is the name of another run.
    """
    finished = None
    for path in same_runs(Path(config.local_results_path).expanduser(), identity):
        if config.unique_token not in {"", path.name}:
            continue
        if read_entry(path / RUN_FILE).get("finished"):
            finished = finished or path
            continue
        if is_trusted(path, "is neither continued nor changed"):
            return RunFolder(path), _locked(RunFolder(path), config.auto_resume_wait, waits)
    if finished is not None:
        require_free_token(config, "is finished already")
        LOG.info(f"auto_resume=True: {readable(str(finished))} is finished already; a new run begins")
    elif any(Path(config.local_results_path).expanduser().glob(f"*/{RUN_FILE}")):
        LOG.info(
            f"auto_resume=True: no run in {config.local_results_path} has this configuration; a new one begins."
            " With another t_max, checkpoint_path=<run> continues a run; with another lr, its models/"
        )
    return None


def is_trusted(path: Path, otherwise: str) -> bool:
    """Return whether a run's folder is this user's and holds no links; if not, warn. Errors: Unreadable."""
    try:
        patiently(path, partial(require_own, path))
    except (Untrusted, *ABSENT) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        LOG.warning(f"auto_resume=True: {readable(str(path))} {otherwise}: {reason}")
        return False
    return True


def same_runs(root: Path, identity: str) -> list[Path]:
    """Return the folders that hold a run of this identity, newest first. Errors: UserError.

    A damaged note on what a run is, is written again.
    """
    found: list[tuple[float, Path]] = []
    for path in (Path(entry.path) for entry in listed(root)):
        entry = patiently(path / RUN_FILE, partial(read_entry, path / RUN_FILE, strict=True))
        # A run has logs/; a record of Sacred has a run.json, too. False where the folder cannot be entered.
        if "identity" not in entry and os.path.lexists(path / RUN_FILE) and os.path.isdir(path / "logs"):
            entry = _noted_again(path, identity)
        if entry.get("identity") == identity:
            with suppress(OSError):
                found.append(((path / RUN_FILE).stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def _noted_again(path: Path, identity: str) -> dict[str, Any]:
    """Write a run's damaged note again if its configuration has this identity; return the note, empty otherwise."""
    folder, note = RunFolder(path), readable(str(path / RUN_FILE))
    with suppress(UserError, OSError):  # no configuration of this version, or nothing can be written
        theirs = validate(read_saved(folder.config_json, note))
        if is_trusted(path, "is not continued") and identity_of(theirs) == identity:
            ended = read_entry(folder.summary_json).get("exit_state") == "completed"
            entry = {"identity": identity, **({"finished": True} if ended else {})}
            write_json(path / RUN_FILE, entry)
            LOG.warning(f"auto_resume=True: {note} was damaged, and is written again from config.json and summary.json")
            return entry
    LOG.warning(f"auto_resume=True: {note} is damaged: that run is not continued")
    return {}


def _locked(folder: RunFolder, minutes: float, waits: Callable[[], object]) -> FileIO:
    """Return the lock of an unfinished run, waiting for it as long as the user allows. Errors: UserError."""
    until, shown = time.monotonic() + 60 * minutes, -math.inf
    while True:
        try:
            lock = _try_lock(folder)
            break
        except Busy as busy:
            now = time.monotonic()
            if now >= until:
                fix = "wait with auto_resume_wait=<minutes>, or start another run (auto_resume=False or another seed)"
                raise UserError(f"auto_resume=True: {folder.path} is in use by {busy}; {fix}") from None
            if now - shown >= WAITING_SECONDS:
                shown = now
                LOG.info(f"waiting {duration(until - now)} at most: {folder.path} is in use by {busy}")
        except OSError as problem:
            raise _not_writable(folder.path, problem) from problem
        waits()
        time.sleep(min(1.0, max(0.0, until - now)))
    if read_entry(folder.path / RUN_FILE).get("finished"):
        lock.close()
        fix = "nothing is left to do; auto_resume=False starts a new run"
        raise UserError(f"auto_resume=True: {folder.path} was just finished by another process: {fix}")
    return lock


def _try_lock(folder: RunFolder) -> FileIO:
    """Return a run's lock once the ranks of an earlier start have ended, which are waited for. Errors: Busy."""
    lock = take(folder.path)
    until = time.monotonic() + OLD_RANKS_SECONDS
    try:
        while (busy := busy_rank(folder.path)) is not None:
            if time.monotonic() > until:
                raise busy
            time.sleep(0.05)
    except BaseException:
        lock.close()
        raise
    return lock


@contextmanager
def rank_at_work(folder: RunFolder) -> Iterator[None]:
    """Mark a folder as used by a rank, until the context or this process ends."""
    with held(folder.path, RUN_FILE), closed_to_others():
        try:
            mark = mark_rank(folder.path)
        except OSError as problem:
            raise _not_writable(folder.path, problem) from problem
        with mark:
            yield
