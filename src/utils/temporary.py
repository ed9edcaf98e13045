"""Temporary folders that name the process they belong to, so that the next start removes what a kill has left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omagd.utils.process_identity import ProcessIdentity, start_ticks

NAME = re.compile(r"omagd_(?:launch_)?(?P<pid>[0-9a-f]{1,8})-(?P<started>[0-9a-f]+)-(?P<here>[0-9a-f]*-[0-9a-f]*)_\w+")
"""Process id, its start in clock ticks, then namespace and boot, within which the first two name one process."""


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for the duration of a block; remove those of processes that have ended without doing so.

    prefix: "omagd_" or "omagd_launch_". Errors: OSError.
    """
    remove_left_behind()
    own = ProcessIdentity.own()
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}{own.pid:x}-{own.started:x}-{_here(own)}_"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_left_behind() -> None:
    """Remove the temporary folders of this user's processes that have ended on this host. Follows no link."""
    here = _here(ProcessIdentity.own())
    with contextlib.suppress(OSError):
        root = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in os.listdir(root):
                found = NAME.fullmatch(name)
                # The name is there as soon as the folder is: none is taken for that of a process that has not begun.
                if found is not None and found["here"] == here and not _runs(found):
                    _remove(name, root)
        finally:
            os.close(root)


def _remove(name: str, root: int) -> None:
    with contextlib.suppress(OSError):
        about = os.stat(name, dir_fd=root, follow_symlinks=False)
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
            shutil.rmtree(name, ignore_errors=True, dir_fd=root)


def _runs(found: re.Match[str]) -> bool:
    return start_ticks(int(found["pid"], 16)) == int(found["started"], 16)


def _here(own: ProcessIdentity) -> str:
    """Return namespace and boot; without them, as on other systems than Linux, nothing is ever taken for left."""
    space, boot = re.sub(r"\D", "", own.space), own.boot.replace("-", "")[:8]
    return f"{int(space):x}-{boot}" if space and boot and own.started else f"-{own.pid:x}"
