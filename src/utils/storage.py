"""Reading from disks that fail for a moment, and making names durable."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from omagd.utils.errors import UserError

T = TypeVar("T")
RETRY_SECONDS = (0.1, 0.4, 1.6)
"""Pauses between attempts to read what the system could not read."""

ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Unreadable(UserError):
    """The system could not read a path (EIO, EACCES, ESTALE, ...). This is no damage: nothing may follow from it."""


def patiently(path: Path, read: Callable[[], T]) -> T:
    """Return `read()`, which reads `path`; repeat it after an error of the system.

    Errors: FileNotFoundError and its like, at once; Unreadable, one line, for an error that stays.
    """
    for pause in (*RETRY_SECONDS, None):
        try:
            return read()
        except ABSENT:
            raise
        except OSError as problem:
            if pause is None:
                reason = problem.strerror or type(problem).__name__
                raise Unreadable(
                    f"{path} cannot be read ({reason}): check the disk and the permissions, then start again; nothing"
                    " was changed"
                ) from problem
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def listed(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder by name; none where there is no folder. Errors: Unreadable."""

    def read() -> list[os.DirEntry[str]]:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)

    try:
        return patiently(path, read)
    except ABSENT:
        return []


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
