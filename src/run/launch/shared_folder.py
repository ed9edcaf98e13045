"""Several hosts write into one folder: whether all of them see the same one is checked before anything is trained."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

WAITS = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each look: a network file system may show a new file late."""


def require_shared_folder(dist: Dist, path: str | Path) -> None:
    """Make sure that every rank finds in the folder `path` what rank 0 writes there, and can write there itself.

    A collective; with one rank nothing happens. What is written for it is removed.

    Errors: UserError, the same on all ranks, naming the hosts that see another folder or may not write.
    """
    if dist.world_size == 1:
        return
    folder, host = Path(path), socket.gethostname()
    with _mark(folder, dist) as (mark, content):
        trouble = _trouble(folder, mark, content, dist.rank)
        found = {where: what for where, what in reversed(dist.gather((host, trouble))) if what}
    if found:
        where = ", ".join(f"{what} on host {name}" for name, what in sorted(found.items()))
        mend = "give a folder of a file system that all hosts share (NFS, Lustre, …), under the same name everywhere"
        shown = dist.broadcast(str(folder))
        raise UserError(f"local_results_path: the run's folder {shown} {where}; {mend}")


@contextmanager
def _mark(folder: Path, dist: Dist) -> Iterator[tuple[str, str]]:
    """Let rank 0 write a file that nobody could guess; give its name and content on every rank."""
    name, content = dist.broadcast((f".shared_{secrets.token_hex(8)}", secrets.token_hex(32)))
    if dist.is_main:
        with contextlib.suppress(OSError):  # every rank, this one too, tells what it finds
            (folder / name).write_text(content)
    dist.all(True)  # from here on the file is there
    try:
        yield name, content
    finally:
        if dist.is_main:
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)


def _trouble(folder: Path, name: str, content: str, rank: int) -> str:
    """Return what is wrong with the folder here, nothing if it is the one of rank 0 and can be written."""
    for wait in () if rank == 0 else WAITS:
        time.sleep(wait)
        try:
            with contextlib.suppress(FileNotFoundError):
                if (folder / name).read_text() == content:
                    break
            list(folder.iterdir())  # makes NFS ask its server again
        except OSError:
            continue
    else:
        if rank != 0:
            return "is not rank 0's"
    own = folder / f"{name}_{rank}"
    try:
        own.write_text(content)
        own.unlink()
    except OSError as problem:
        return f"cannot be written ({problem.strerror})"
    return ""
