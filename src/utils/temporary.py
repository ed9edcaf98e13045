"""Temporary folders that go with their owner: it removes them, or the next process that makes one does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omagd.utils.run_folder import FOLDER
from omagd.utils.storage import opened


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
        with contextlib.suppress(FileNotFoundError):  # another start took it for one that was left behind
            lock = stack.enter_context(opened(path))
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes the folder
                fcntl.flock(lock, fcntl.LOCK_EX)
            path.stat()
            return path


def remove_left_behind() -> None:
    """Remove temporary folders of this user's processes that have ended. Follows no link."""
    for path in Path(tempfile.gettempdir()).glob("omagd_*.own"):
        with contextlib.suppress(OSError), opened(path, FOLDER) as lock:  # its owner lives, or it is a link
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            about = os.fstat(lock)
            if about.st_uid == os.geteuid() and time.time() - about.st_mtime > 1.0:  # a new one gets its lock only now
                shutil.rmtree(path, ignore_errors=True)
