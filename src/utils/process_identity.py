"""Which process wrote a file, and whether it still runs: process ids are used again, across reboots and containers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, unique over reboots, containers and hosts.

    Attributes:
        host: name. boot: id of the host's boot. space: the process-id namespace. pid: number in it.
        started: clock ticks from boot to the start of the process. since: seconds since the epoch.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: int
    since: float

    @classmethod
    def own(cls) -> Self:
        """Return the identity of this process, `since` now."""
        pid = os.getpid()
        return cls(socket.gethostname(), _boot(), _space(), pid, start_ticks(pid) or 0, time.time())

    @classmethod
    def read(cls, values: Any) -> Self | None:
        """Return the identity in `values`, which `plain` wrote; None if they are anything else."""
        if not isinstance(values, Mapping):
            return None
        kinds: dict[str, tuple[type, ...]] = {
            "host": (str,), "boot": (str,), "space": (str,), "pid": (int,), "started": (int,), "since": (int, float),
        }  # fmt: skip
        if any(not isinstance(values.get(name), kind) for name, kind in kinds.items()):
            return None
        return cls(**{name: values[name] for name in kinds})

    def plain(self) -> dict[str, Any]:
        """Return the identity as JSON values."""
        return asdict(self)

    def runs(self) -> bool | None:
        """Return whether the process still runs; None where that cannot be seen from here."""
        if not self.boot or self.boot != _boot() or self.space != _space():
            return None
        return self.started > 0 and start_ticks(self.pid) == self.started

    def describe(self) -> str:
        """Return host, pid and age as text."""
        return f"process {self.pid} on host {self.host}, for {_age(max(0.0, time.time() - self.since))}"


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


def _age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
