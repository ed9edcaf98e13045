"""Read from disks that fail for a moment and from files that others may have made; make names durable."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
