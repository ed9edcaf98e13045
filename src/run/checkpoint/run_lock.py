"""Run lock: one process per run folder, by `flock`, which ends with its holder.

`lock` is locked by the process that started the run and holds who that is; the ranks at work share a lock of
`lock.ranks`. Some network file systems have no `flock`: then nothing is locked, and a warning says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from omagd.utils.logging import PACKAGE, duration

LOG = logging.getLogger(PACKAGE)
PROC = Path("/proc")


class ProcessIdentity(BaseModel):
    """A process, unique over reboots, containers and hosts.

    Attributes:
        host: name. boot: id of the host's boot. space: the process-id namespace. pid: number in it.
        started: clock ticks from boot to the start of the process. since: seconds since the epoch.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    host: str
    boot: str
    space: str
    pid: int
    started: int
    since: float

    @classmethod
    def own(cls) -> Self:
        """Return the identity of this process, `since` now."""
        pid, now = os.getpid(), time.time()
        started = start_ticks(pid) or 0
        return cls(host=socket.gethostname(), boot=_boot(), space=_space(), pid=pid, started=started, since=now)

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """Return the identity in the JSON values of a lock; None if they are anything else."""
        try:
            return cls.model_validate(values)
        except ValidationError:
            return None

    def runs(self) -> bool | None:
        """Return whether the process still runs; None where that cannot be seen from here."""
        if not self.boot or self.boot != _boot() or self.space != _space():
            return None
        return self.started > 0 and start_ticks(self.pid) == self.started

    def describe(self) -> str:
        """Return host, pid and age as text."""
        return f"process {self.pid} on host {self.host}, for {duration(max(0.0, time.time() - self.since))}"


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks after boot; None if there is none or it has ended."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


LOCK, RANKS = "lock", "lock.ranks"
UNSUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Errors of `flock` on file systems without locks."""

ENTRY = 400
"""Bytes of a holder's entry: ranks overwrite each other's."""

FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Busy(Exception):
    """Another process has the lock.

    Attributes:
        holder: that process; None if unknown.
    """

    def __init__(self, holder: ProcessIdentity | None) -> None:
        super().__init__("another process" if holder is None else holder.describe())
        self.holder = holder


class Lock:
    """A lock that this process holds until `release` or its end. handle: open file of the lock."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def take(folder: Path) -> Lock:
    """Return the lock of a run's folder. Errors: Busy; OSError where nothing can be written."""
    return _locked(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)


def mark_rank(folder: Path) -> Lock:
    """Mark that a rank works in a folder, until `release` or the end of this process. Errors: OSError."""
    return _locked(folder / RANKS, fcntl.LOCK_SH)


def busy_run(folder: Path) -> Busy | None:
    """Return who has the lock of a run's folder, or works there as a rank; changes nothing. Errors: OSError."""
    return _busy(folder / LOCK) or busy_rank(folder)


def busy_rank(folder: Path) -> Busy | None:
    """Return a rank that works in a folder, None if there is none. Errors: OSError."""
    return _busy(folder / RANKS)


def _locked(path: Path, kind: int) -> Lock:
    handle = os.open(path, FLAGS | os.O_CREAT, 0o644)
    try:
        if not _flock(handle, kind):
            raise Busy(_holder(handle))
        with contextlib.suppress(OSError):  # on a full disk the lock is held all the same, without the holder's name
            os.pwrite(handle, ProcessIdentity.own().model_dump_json().encode().ljust(ENTRY) + b"\n", 0)
        return Lock(handle)
    except BaseException:
        os.close(handle)
        raise


def _busy(path: Path) -> Busy | None:
    with contextlib.suppress(FileNotFoundError):
        handle = os.open(path, FLAGS)
        try:
            return None if _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB) else Busy(_holder(handle))
        finally:
            os.close(handle)
    return None


def _flock(handle: int, kind: int) -> bool:
    """Return whether the lock was taken, or there are no locks here; False where another process has it."""
    try:
        fcntl.flock(handle, kind)
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno not in UNSUPPORTED:
            raise
        if kind & fcntl.LOCK_NB:  # once a start, not in each rank
            LOG.warning("this file system has no locks (flock): nothing keeps a second process out of the folder")
    return True


def _holder(handle: int) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.read(json.loads(os.pread(handle, ENTRY + 1, 0)))
    except (OSError, ValueError):
        return None
