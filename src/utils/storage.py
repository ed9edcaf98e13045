"""Read from disks that fail for a moment and from files that others may have made; hold the folders in use.

A folder in use may be renamed, moved, deleted or replaced, by a person or by an environment. Writing by path would then
make it again, and each place would hold half of the run: a write below a held folder that is gone ends the run.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from omagd.utils.errors import UserError

T = TypeVar("T")
RETRY_SECONDS = (0.1, 0.4, 1.6)
"""Pauses between attempts to read what the system could not read."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

FAILING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of the system, not of a file."""

LONGEST_ENTRY = 1 << 20


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


def try_folder(folder: Path) -> None:
    """Raise OSError if a folder cannot be made, or nothing can be written in it; leave nothing behind."""
    missing = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    finally:
        for place in missing:
            with suppress(OSError):
                place.rmdir()


def is_number(value: object) -> bool:
    """Return whether a value from a JSON file is a finite number; a whole number that no float can hold is none."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_own(path: Path) -> bool:
    """Return whether a file is this user's; where its folder cannot be entered, whether that folder is."""
    for place in (path, path.parent):
        with suppress(OSError):
            return place.lstat().st_uid == os.geteuid()
    return False


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
