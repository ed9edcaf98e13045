"""Check that a run's folder is safe to write: it is the user's own, and no name that a run uses leads outside.

Other programs keep files there too (W&B, TensorBoard, plug-ins): these are neither looked at nor changed. Sinks that
write there reject links themselves (`unlinked`).

All checks use descriptors of the folders and follow no links. A world-writable folder is first closed to others, so
what has been checked stays unchanged. The group is trusted: the user decides whether it may write (umask, or a folder
shared with colleagues).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omagd.utils.errors import readable
from omagd.utils.storage import opened

FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW
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
