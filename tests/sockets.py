"""Processes of this host: their descendants, the addresses that they listen on, waiting for what they do."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple, TypeVar

LISTEN = "0A"


T = TypeVar("T")


def wait_until(true: Callable[[], T], seconds: float = 60.0, what: str = "what this test waits for") -> T:
    """Return what `true()` returns as soon as it holds. Errors: AssertionError that names the limit and the load."""
    until = time.monotonic() + seconds
    while not (found := true()):
        load = f"the load is {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        assert time.monotonic() < until, f"{what} did not come within the limit of {seconds:g} s; {load}"
        time.sleep(0.02)
    return found


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening(pids: list[int]) -> dict[int, set[IPv4Address | IPv6Address]]:
    """Return the addresses of the TCP sockets that each process listens on; one that it has only inherited counts."""
    known = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN:
                known[f"socket:[{fields[9]}]"] = _address(fields[1].partition(":")[0])
    return {pid: {known[name] for name in _descriptors(pid) if name in known} for pid in pids}


class Process(NamedTuple):
    """A process that has not ended. line: its command line, words with a null byte behind each."""

    parent: int
    group: int
    session: int
    line: bytes


def living() -> dict[int, Process]:
    """Return all processes by id; a zombie has ended."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            state, *ids = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                found[int(place.name)] = Process(*map(int, ids), (place / "cmdline").read_bytes())
    return found


def tree(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    found, others = [pid], living()
    for one in found:
        found += [child for child, process in others.items() if process.parent == one]
    return found


def running(pid: int) -> bool:
    """Return whether a process is there and has not ended; a zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _descriptors(pid: int) -> set[str]:
    names = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            names.add(os.readlink(entry))
    return names


def _address(text: str) -> IPv4Address | IPv6Address:
    """Read the kernel's way to write an address: words of 32 bits, each with its bytes reversed."""
    raw = bytes.fromhex(text)
    words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
    return ip_address(b"".join(words))
