"""A port and a temporary folder for each game; both are released however their owner ends.

Folders are in `<temporary folder>/omagd-sc2-<user>`. Each owner locks a file in its folder, and the next game removes
folders whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
# Above the range of pysc2's port picker, below that of Linux for outgoing connections.
LOWEST, HIGHEST = 25000, 32000
TRIES = 1000


@contextlib.contextmanager
def claimed_port() -> Iterator[int]:
    """Yield a free port that no other caller on this machine gets meanwhile. Errors: OSError without a free port.

    Bound names are abstract Unix sockets: seen by all users of the network namespace, released with the process.
    """
    chance = random.SystemRandom()  # unseeded: workers of the same seed must not try the same ports
    for _ in range(TRIES):
        port = chance.randrange(LOWEST, HIGHEST)
        with socket.socket(socket.AF_UNIX) as held:
            try:
                held.bind(f"\0omagd-sc2-port-{port}")
                socket.create_server((HOST, port)).close()
            except OSError:
                continue
            yield port
            return
    raise OSError(f"no free port between {LOWEST} and {HIGHEST}")


LAST_WORDS = 300


class Scratch:
    """A temporary folder; removed by `close`, with this object, or by a later one.

    Attributes:
        path: the folder. log: file for the game's output.
    """

    def __init__(self) -> None:
        self._root = _own_root()
        with (self._root / "lock").open("wb") as common:
            fcntl.flock(common, fcntl.LOCK_EX)
            _sweep(self._root)
            self.path = Path(tempfile.mkdtemp(prefix="game-", dir=self._root))
            self._lock: IO[bytes] = (self.path / "lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.log = self.path / "game.log"
        self._finalizer = weakref.finalize(self, _remove, self._lock, self.path)

    def last_words(self) -> str:
        """Return the end of the log as one line, empty if there is none."""
        text = self.log.read_bytes()[-LAST_WORDS:] if self.log.is_file() else b""
        return " ".join(text.decode(errors="replace").split())

    def close(self) -> None:
        """Remove the folder. May be called twice."""
        self._finalizer()


def _own_root() -> Path:
    """Return this user's folder, created if missing; skip names that belong to others."""
    for number in itertools.count(1):
        root = Path(tempfile.gettempdir()) / f"omagd-sc2-{os.getuid()}{f'-{number}' if number > 1 else ''}"
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        about = root.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & stat.S_IWOTH:
            return root
    raise AssertionError("there is always another number")


def _remove(lock: IO[bytes], path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    lock.close()


def _sweep(root: Path) -> None:
    """Remove folders whose owner is gone."""
    for folder in root.glob("game-*"):
        with contextlib.suppress(OSError), (folder / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
