"""Run lock: one process per run folder; the lock ends with its holder, also on file systems without `flock`.

`lock` is locked by `flock`, and holds who locked it. Where the file system does not support that (some network file
systems), the lock is a numbered file `lock.<n>` that only one process can create. Its holder renews the time of the
file; it is stale when the same host says that the holder has ended, or after `STALE_SECONDS` without a renewal. A
stale or released lock is followed by the next number, never replaced: of two processes that find it stale only one can
create the next. Ranks at work mark themselves in the same two ways (`lock.ranks`, `lock.ranks.<host>.<pid>`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from omagd.utils.progress import duration

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
HEARTBEAT_SECONDS = 20.0
STALE_SECONDS = 300.0
UNSUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Errors of `flock` on file systems without locks."""

ENTRY = 400
"""Bytes of a holder's entry."""

FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
RELEASED = b"released\n"


class Busy(Exception):
    """Another process has the lock.

    Attributes:
        holder: that process; None if unknown.
    """

    def __init__(self, holder: ProcessIdentity | None) -> None:
        super().__init__("another process" if holder is None else holder.describe())
        self.holder = holder


class Lock:
    """A lock that this process holds until `release` or its end.

    Args:
        handle: open file of the lock. renews: renew the time of the file. path: removed by `release`, if given.
    """

    def __init__(self, handle: int, renews: bool = False, path: Path | None = None) -> None:
        self._handle, self._path, self._exclusive = handle, path, renews
        self._released = threading.Event()
        if renews:
            threading.Thread(target=self._beat, name="lock", daemon=True).start()

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._released.is_set():
            return
        self._released.set()
        with contextlib.suppress(OSError):
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            elif self._exclusive:
                _write(self._handle, RELEASED)
        os.close(self._handle)

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self._handle)


def take(folder: Path) -> Lock:
    """Return the lock of a run's folder. Errors: Busy; OSError where nothing can be written."""
    return _flocked(folder / LOCK, fcntl.LOCK_EX) or _take_numbered(folder)


def busy_run(folder: Path) -> Busy | None:
    """Return who has the lock of a run's folder, or works there as a rank; changes nothing. Errors: OSError."""
    for name in (LOCK, RANKS):
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder / name, FLAGS)
            try:
                if _flock(handle, fcntl.LOCK_EX) is False:
                    return Busy(_holder(handle))
            finally:
                os.close(handle)
    numbered = [_numbered(folder, number)] if (number := _last(folder)) else []
    return next(filter(None, map(_busy, (*numbered, *folder.glob(f"{RANKS}.*")))), None)


def mark_rank(folder: Path) -> Lock:
    """Mark that a rank works in a folder, until `release` or the end of this process."""
    lock = _flocked(folder / RANKS, fcntl.LOCK_SH, wait=True)
    if lock is not None:
        return lock
    own = ProcessIdentity.own()
    path = folder / f"{RANKS}.{re.sub(r'[^A-Za-z0-9-]', '-', own.host)}.{own.pid}"
    handle = os.open(path, FLAGS | os.O_CREAT, 0o644)
    _write(handle, _own())
    return Lock(handle, renews=True, path=path)


def busy_rank(folder: Path) -> Busy | None:
    """Return a rank that works in a folder, None if there is none."""
    handle = os.open(folder / RANKS, FLAGS | os.O_CREAT, 0o644)
    try:
        if _flock(handle, fcntl.LOCK_EX) is False:
            return Busy(_holder(handle))
    finally:
        os.close(handle)
    for path in folder.glob(f"{RANKS}.*"):
        with contextlib.suppress(FileNotFoundError):
            busy = _busy(path)
            if busy is not None:
                return busy
            path.unlink(missing_ok=True)
    return None


def _flocked(path: Path, kind: int, wait: bool = False) -> Lock | None:
    """Return the lock of a file that `flock` locks, None where there are no such locks. Errors: Busy, OSError."""
    handle = os.open(path, FLAGS | os.O_CREAT, 0o644)
    try:
        found = _flock(handle, kind, wait)
        if found is False:
            raise Busy(_holder(handle))
        if found is True:
            _write(handle, _own())
            return Lock(handle)
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _flock(handle: int, kind: int, wait: bool = False) -> bool | None:
    """Return whether the lock was taken, False where another process has it, None where there are no such locks."""
    try:
        fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno in UNSUPPORTED:
            return None
        raise
    return True


def _take_numbered(folder: Path) -> Lock:
    """Create the next numbered lock if the last one is stale or released. Errors: Busy, OSError."""
    number = _last(folder)
    path = _numbered(folder, number + 1)
    try:
        if number and (busy := _busy(_numbered(folder, number))) is not None:
            raise busy
        handle = os.open(path, FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
    except FileNotFoundError:  # another process has just taken the next number and removed this one
        raise Busy(None) from None
    except FileExistsError:
        raise _busy(path) or Busy(None) from None
    _write(handle, _own())
    if _last(folder) != number + 1:  # this process was slow: others have taken and released in the meantime
        os.close(handle)
        path.unlink(missing_ok=True)
        raise Busy(None)
    for old in range(max(1, number - 1), number + 1):
        _numbered(folder, old).unlink(missing_ok=True)
    return Lock(handle, renews=True)


def _numbered(folder: Path, number: int) -> Path:
    return folder / f"{LOCK}.{number}"


def _last(folder: Path) -> int:
    """Return the highest number of a lock, 0 if there is none."""
    names = (name.rpartition(".") for name in os.listdir(folder))
    return max((int(end) for start, _, end in names if start == LOCK and end.isdecimal()), default=0)


def _busy(path: Path) -> Busy | None:
    """Return the holder of a numbered lock, None if it is free."""
    handle = os.open(path, FLAGS)
    try:
        if os.pread(handle, len(RELEASED), 0) == RELEASED:
            return None
        holder = _holder(handle)
        runs = None if holder is None else holder.runs()
        if runs is False:
            return None
        if runs is None and _silent_for(handle, path.parent) > STALE_SECONDS:
            return None
        return Busy(holder)
    finally:
        os.close(handle)


def _silent_for(handle: int, folder: Path) -> float:
    """Return the seconds since the last renewal, by the clock of the file system: those of hosts may differ."""
    with tempfile.TemporaryFile(dir=folder, prefix=".clock.", suffix=".tmp") as probe:
        return os.fstat(probe.fileno()).st_mtime - os.fstat(handle).st_mtime


def _own() -> bytes:
    """Return the entry of this process, padded to a fixed length: ranks overwrite each other's."""
    return ProcessIdentity.own().model_dump_json().encode().ljust(ENTRY) + b"\n"


def _holder(handle: int) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.read(json.loads(os.pread(handle, ENTRY + 1, 0)))
    except (OSError, ValueError):
        return None


def _write(handle: int, content: bytes) -> None:
    """Write at the beginning. On a full disk the lock is held all the same, without the holder's name."""
    with contextlib.suppress(OSError):
        os.pwrite(handle, content, 0)
