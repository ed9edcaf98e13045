"""Folders that this process uses: a write below one ends the run if another folder, or none, has its path.

A folder in use may be renamed, moved, deleted or replaced, by a person or by an environment. Writing by path would then
make it again, and each place would hold half of the run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omagd.utils.errors import UserError
from omagd.utils.storage import ABSENT

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
