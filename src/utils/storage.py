"""Files of runs: read from disks that fail for a moment, written on disks that fill up; and the folders in use.

A folder in use may be renamed, moved, deleted or replaced, by a person or by an environment. Writing by path would then
make it again, and each place would hold half of the run: a write below a held folder that is gone ends the run.

A full disk costs a line in the log, not the run. What cannot be written is kept in memory, within bounds, and written
once there is room: records of files that are only appended to (`AppendFile`), and files that are replaced as a whole
(`Storage.write`). One line reports what cannot be written, one that there is room again, one at the end what was lost.

A temporary folder goes with its owner: that removes it, or the next process that makes one does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from omagd.utils.errors import UserError, readable

T = TypeVar("T")
RETRY_SECONDS = (0.1, 0.4, 1.6)
"""Pauses between attempts to read what the system could not read."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

LONGEST_ENTRY, LONGEST_FILE = 1 << 20, 1 << 28
"""Bytes of a small file, and of one that names many runs or episodes, that are read as JSON."""

FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW
"""How to open a folder, but no link to one."""


class Unreadable(UserError):
    """The system could not read a path (EIO, EACCES, ESTALE, ...). The file is not damaged."""


def patiently(path: Path, read: Callable[[], T]) -> T:
    """Return `read()`, which reads `path`; repeat it after an error of the system.

    Errors: FileNotFoundError and its like, at once; Unreadable, one line, for an error that stays.
    """
    for pause in (*RETRY_SECONDS, 0):
        try:
            return read()
        except ABSENT:
            raise
        except OSError as problem:
            failed = problem
            time.sleep(pause)
    reason = failed.strerror or type(failed).__name__
    raise Unreadable(
        f"{path} cannot be read ({reason}): check the disk and the permissions, then start again; nothing was changed"
    ) from failed


def listed(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name; none where there is no folder. Errors: Unreadable."""

    try:
        return patiently(path, lambda: sorted(os.scandir(path), key=lambda entry: entry.name))
    except ABSENT:
        return []


@contextmanager
def opened(path: str | Path, flags: int = 0, folder: int | None = None) -> Iterator[int]:
    """Open a file or folder for reading, by its name in an open `folder` if given. Errors: OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    try:
        yield handle
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk."""
    with opened(path) as handle:
        os.fsync(handle)


def read_json(path: Path, most: int = LONGEST_ENTRY) -> Any:
    """Return the JSON value in a regular file of at most `most` bytes. For files that others may have made.

    Errors: OSError where it cannot be read or is a folder, a pipe or a device; ValueError where it holds no JSON, more
    bytes, or values nested too deeply.
    """
    with opened(path, os.O_NONBLOCK) as handle:  # a pipe would keep its reader waiting
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if about.st_size > most:
            raise ValueError(f"more than {most} bytes")
        try:
            return json.loads(os.read(handle, most))
        except RecursionError:
            raise ValueError("nested too deeply") from None


Identity = tuple[int, int]
"""Device and inode of a folder."""


class FolderGone(UserError):
    """A folder in use was moved, deleted or replaced."""


@dataclass
class _Held:
    """A folder in use.

    Attributes:
        path: where it was. handle: open, so that no other folder gets its inode, and the system knows where it is.
        identity: of the folder. sign: a file in it that is never removed, if there is one.
        gone: found to be somewhere else, which is never forgotten: nothing may make it again.
    """

    path: Path
    handle: int
    identity: Identity
    sign: Path | None
    gone: bool = False

    def check(self) -> None:
        """Raise FolderGone if the folder is not at its path."""
        replaced = ""
        try:
            if _identity(os.stat(self.path)) != self.identity:
                replaced = " and replaced"
            elif self.sign is None or os.stat(self.sign):
                return
        except ABSENT:
            pass
        except OSError:  # the write itself reports what is wrong with the disk
            return
        self.gone = True
        raise FolderGone(f"{self.path} was taken away{replaced} while it was in use: {self._now()}")

    def _now(self) -> str:
        """Return where the folder is now, in words."""
        try:
            place = os.readlink(f"/proc/self/fd/{self.handle}")
        except OSError:  # not Linux
            return "it was moved or deleted"
        if place == str(self.path) or place.endswith(" (deleted)") and not os.path.lexists(place):
            return "it was deleted"
        return f"it is now {place}. Move it back, then the same command with auto_resume=True continues it"


_held: dict[Path, _Held] = {}


def hold(path: Path, identity: Identity | None = None, sign: str = "") -> Identity:
    """Use a folder until `release` or the end of the process; return its identity.

    Args:
        identity: of the folder that is meant, where another process has locked it. sign: name of a file that is not
            removed while the folder is in use: where it is there and then missing, the folder counts as deleted.
    Errors: FolderGone, OSError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except ABSENT:
        raise FolderGone(f"{path} was taken away while it was in use: it was moved or deleted") from None
    found = _identity(os.fstat(handle))
    if identity not in (None, found):
        os.close(handle)
        raise FolderGone(f"{path} was taken away while it was in use: another folder is there now")
    release(path)
    _held[path] = _Held(path, handle, found, path / sign if sign and (path / sign).exists() else None)
    return found


def release(path: Path) -> None:
    """Use a folder no more."""
    if (folder := _held.pop(path, None)) is not None:
        os.close(folder.handle)


@contextmanager
def held(path: Path, sign: str = "") -> Iterator[Identity]:
    """Use a folder for the duration of a block, as `hold` does; nothing changes where it is in use already.

    Where the block or its end finds the folder gone, FolderGone replaces every other error: that may be a consequence.
    """
    outer = _held.get(path)
    if outer is not None and not outer.gone:
        outer.check()
        yield outer.identity
        return
    identity = hold(path, sign=sign)
    try:
        yield identity
    except BaseException as error:
        try:
            _held[path].check()
        except FolderGone as gone:
            raise gone from error
        release(path)
        raise
    _held[path].check()
    release(path)


def require_held(path: Path) -> Path | None:
    """Check the folder in use that `path` is or is below, and return it; None if there is none. Errors: FolderGone."""
    for folder in list(_held.values()):
        if path.is_relative_to(folder.path):
            folder.check()
            return folder.path
    return None


def make_folder(path: Path) -> None:
    """Make a folder and those around it, but never one that is in use. Errors: FolderGone, OSError."""
    folder = require_held(path)
    if folder is None:
        path.mkdir(parents=True, exist_ok=True)
        return
    missing = [place for place in (path, *path.parents) if place != folder and place.is_relative_to(folder)]
    for place in reversed(missing):
        place.mkdir(exist_ok=True)


def _identity(about: os.stat_result) -> Identity:
    return about.st_dev, about.st_ino


KEPT_BYTES = 256 << 20
"""Of files that could not be written, the newest ones stay in memory up to this size."""

PENDING_BYTES = 16 << 20
"""Of each file that is appended to."""

REMIND_SECONDS, AGAIN_SECONDS = 600.0, 60.0
"""Pauses between two messages: about what stays impossible, and about what comes and goes."""

NAMES_SHOWN = 6
APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Storage:
    """What this process could not write, and what it keeps to write later."""

    def __init__(self) -> None:
        self._base: Path | None = None
        self._over = False
        self._guard = threading.RLock()  # never held while something is logged: log files are written here too
        self._files = threading.RLock()
        self._local = threading.local()
        self._postponed: deque[tuple[int, str]] = deque(maxlen=20)
        self._kept: dict[Path, bytes] = {}
        self.open: set[AppendFile] = set()
        self._broken: dict[str, str] = {}
        self._lost: dict[str, int] = {}
        self._reasons: set[str] = set()  # of what was lost
        self._completed: set[str] = set()
        self._logged: dict[str, float] = {}  # when a reason was last logged
        self._announced = False  # a failure was logged since everything could last be written

    def begin(self, base: Path) -> None:
        """Begin a run; names are shown relative to its folder `base`."""
        self._base, self._over = base, False

    def write(self, path: Path, content: bytes) -> bool:
        """Replace a file as a whole; return whether that was possible. Files of one folder are written in order."""
        with self._files:
            if self._kept:
                self.retry()
            before = [other for other in self._kept if other.parent == path.parent and other != path]
            for other in before[:1]:
                self._broken.setdefault(self.name(path), self.why(other))
            if before or not self._replace(path, content):
                self._keep(path, content)
                return False
            self._kept.pop(path, None)
        return True

    def retry(self) -> None:
        """Try again to write what is kept. Called wherever a run logs."""
        for file in list(self.open):
            file.flush()
        self._emit()
        with self._files:
            for path, content in list(self._kept.items()):
                if not self._replace(path, content):
                    return
                self._kept.pop(path, None)

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Within, log messages are postponed: handlers of the log would wait for each other."""
        self._local.silent = True
        try:
            yield
        finally:
            self._local.silent = False

    @contextmanager
    def attempt(self, name: str, *kinds: type[Exception]) -> Iterator[None]:
        """Continue if the block cannot write (OSError, or `kinds`): its output is lost."""
        try:
            yield
        except Exception as problem:
            if not isinstance(problem, (OSError, *kinds)):
                raise
            self.failed(name, problem)
            self.lost(name)

    def unwritten(self, folder: Path) -> list[Path]:
        """Return the files below a folder that could not be written, after another try."""
        self.retry()
        return [path for path in self._kept if path.is_relative_to(folder)]

    def size(self, path: Path) -> int:
        """Return the bytes of a file that is appended to, with those that wait to be written."""
        waiting = sum(file.waiting for file in list(self.open) if file.path == path)
        return waiting + (path.stat().st_size if path.exists() else 0)

    def why(self, path: Path) -> str:
        """Return why a file cannot be written; empty where it can."""
        return self._broken.get(self.name(path), "")

    def name(self, path: Path) -> str:
        """Return how a file is called in the log."""
        base = self._base
        return readable(str(path.relative_to(base) if base is not None and path.is_relative_to(base) else path))

    def failed(self, name: str, problem: BaseException) -> None:
        """Note that something cannot be written; log the first failure of a kind, then at intervals."""
        reason = readable(str(getattr(problem, "strerror", None) or problem) or type(problem).__name__)[:200]
        with self._guard:
            first = reason not in self._broken.values()
            self._broken[name] = reason
            now, pause = time.monotonic(), AGAIN_SECONDS if first else REMIND_SECONDS
            due = not self._over and now - self._logged.get(reason, -math.inf) >= pause
            if due:
                self._logged[reason], self._announced = now, True
            names = [each for each, why in self._broken.items() if why == reason]
        if due:
            self._log(
                logging.WARNING, f"cannot be written ({reason}): {_listed(names)}; training continues and tries again"
            )

    def wrote(self, name: str) -> None:
        """Note that something could be written; log once that everything can."""
        with self._guard:
            if self._broken.pop(name, None) is None:
                return
            self._completed.add(name)
            if self._broken or not self._announced or self._over:
                return
            names = sorted(self._completed)
            self._completed, self._announced = set(), False
        self._log(logging.WARNING, f"there is room again: {_listed(names)} could be written")

    def lost(self, name: str, records: int = 0) -> None:
        """Count what is lost: records of a file, or the whole file."""
        with self._guard:
            self._lost[name] = self._lost.get(name, 0) + records
            self._reasons |= {reason} if (reason := self._broken.get(name)) else set()
            if not records:
                self._broken.pop(name, None)

    def close(self) -> None:
        """Try for the last time, log what was lost, and forget it. Nothing is logged after that."""
        with suppress(FolderGone):  # its error ends the run
            self.retry()
        for file in list(self.open):
            file.close()
        with self._guard:
            for path in self._kept:
                self.lost(self.name(path))
            lost = [f"{name} ({count} lines)" if count else name for name, count in sorted(self._lost.items())]
            why = ", ".join(sorted(self._reasons))
            for found in (self._kept, self._broken, self._lost, self._reasons, self._completed, self._logged):
                found.clear()
            already, self._over, self._announced = self._over, True, False
        if lost and not already:
            self._log(logging.ERROR, f"lost, since it could not be written ({why}): {_listed(lost)}")

    def _log(self, level: int, text: str) -> None:
        self._postponed.append((level, text))
        self._emit()

    def _emit(self) -> None:
        while self._postponed and not getattr(self._local, "silent", False):
            logging.getLogger("omagd").log(*self._postponed.popleft())

    def _replace(self, path: Path, content: bytes) -> bool:
        try:
            replace_file(path, content)
        except OSError as problem:
            self.failed(self.name(path), problem)
            return False
        self.wrote(self.name(path))
        return True

    def _keep(self, path: Path, content: bytes) -> None:
        self._kept[path] = content
        older = [other for other in self._kept if other.parent != path.parent]
        while older and sum(map(len, self._kept.values())) > KEPT_BYTES:
            oldest = older.pop(0)
            del self._kept[oldest]
            self.lost(self.name(oldest))


class AppendFile:
    """A file of records that is only appended to; a record is in it whole or not at all.

    Args:
        path: made with the first record. opens: opens it for appending, `open_lines` if None.

    Attributes:
        waiting: bytes that wait to be written.
    """

    def __init__(self, path: Path, opens: Callable[[Path], int] | None = None) -> None:
        self.path, self.waiting = path, 0
        self._opens = opens or open_lines
        self._handle: int | None = None
        self._size = 0
        self._pending: deque[bytes] = deque()
        self._guard = threading.RLock()

    def write(self, record: bytes) -> None:
        """Append a record of whole lines; where that is impossible, later."""
        STORAGE.open.add(self)
        with self._guard:
            self._pending.append(record)
            self.waiting += len(record)
        self.flush()
        with self._guard:
            while self.waiting > PENDING_BYTES:
                self._lose()

    def flush(self) -> None:
        """Write what is pending, if possible. Errors: FolderGone."""
        name = STORAGE.name(self.path)
        with self._guard:
            if not self._pending:
                return
            try:
                require_held(self.path)
                if self._handle is None:
                    self._handle = self._opens(self.path)
                    self._size = os.fstat(self._handle).st_size
                while self._pending:
                    self._append(self._pending[0])
                    self._drop()
                problem = None
            except OSError as found:
                self._release()
                problem = found
        STORAGE.wrote(name) if problem is None else STORAGE.failed(name, problem)

    def close(self) -> None:
        """Write what is pending, if possible, and close the file. May be called twice."""
        try:
            self.flush()
        except FolderGone:  # its error ends the run
            self._pending.clear()
        with self._guard:
            while self._pending:
                self._lose()
            self._release()
        STORAGE.open.discard(self)

    def _append(self, record: bytes) -> None:
        assert self._handle is not None
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            with suppress(OSError):  # else the next opening ends the half line
                os.ftruncate(self._handle, self._size)
            raise
        self._size += len(record)

    def _drop(self) -> bytes:
        record = self._pending.popleft()
        self.waiting -= len(record)
        return record

    def _lose(self) -> None:
        STORAGE.lost(STORAGE.name(self.path), self._drop().count(b"\n"))

    def _release(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                os.close(self._handle)
            self._handle = None


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all: into a temporary file beside it, which then takes its name.

    Errors: OSError, FolderGone.
    """
    make_folder(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        require_held(path)  # writing may have taken long
        os.replace(beside, path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all. Errors: OSError."""
    with atomic_file(path) as file:
        file.write(content)


def open_records(path: Path) -> int:
    """Open a file for appending, and return its descriptor."""
    make_folder(path.parent)
    return os.open(path, APPEND, 0o644)


def open_lines(path: Path) -> int:
    """Open a file of lines for appending; the half line that a kill left stays one bad line."""
    handle = open_records(path)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            os.write(handle, b"\n")
    except OSError:
        os.close(handle)
        raise
    return handle


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for the duration of a block; remove those of processes that were killed. Errors: OSError."""
    remove_left_behind()
    with ExitStack() as stack:
        path = _own_folder(prefix, stack)
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        yield path


def _own_folder(prefix: str, stack: ExitStack) -> Path:
    """Return a new folder, locked until the stack is closed or this process ends, however it ends."""
    while True:
        path = Path(tempfile.mkdtemp(".own", prefix))
        with suppress(FileNotFoundError):  # another start took it for one that was left behind
            lock = stack.enter_context(opened(path))
            with suppress(OSError):  # a file system without locks: nobody removes the folder
                fcntl.flock(lock, fcntl.LOCK_EX)
            path.stat()
            return path


def remove_left_behind() -> None:
    """Remove temporary folders of this user's processes that have ended. Follows no link."""
    for path in Path(tempfile.gettempdir()).glob("omagd_*.own"):
        with suppress(OSError), opened(path, FOLDER) as lock:  # its owner lives, or it is a link
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = os.fstat(lock)
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > 1.0:  # a new one gets its lock only now
                shutil.rmtree(path, ignore_errors=True)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


OUTPUT = "standard output"
STORAGE = Storage()
"""Of this process."""
