"""Limits of this machine and of this user that a run can hit: open files, processes, the size of a file."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
FILES, FILES_OF_WORKER, FILES_OF_RANK = 64, 4, 4
"""Open files of a process: its own, and those for each worker process and each other rank."""

USUAL_FILES = 1024
SHARED, LEAST_SHARED = Path("/dev/shm"), 0.25
"""Shared memory of the system, and the gigabytes that NCCL or a game may need there."""

THREADS, THREADS_OF_WORKER = 16, 2
"""Threads of a rank without `torch_threads`, and of a worker process."""


def files_needed(workers: int, ranks: int) -> int:
    """Return how many open files a rank with some worker processes may need. ranks: of all hosts."""
    return FILES + FILES_OF_WORKER * workers + FILES_OF_RANK * ranks


def processes_needed(workers: int, ranks: int, torch_threads: int) -> int:
    """Return how many processes and threads the ranks of a host need. workers: of each rank."""
    return ranks * (THREADS + torch_threads + THREADS_OF_WORKER * workers)


def raise_limit(files: int) -> None:
    """Raise the soft limit of open files of this process to so many, at most to the hard one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = map(_number, limits)
    if soft < (wanted := min(max(files, USUAL_FILES), hard)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))


def most_files() -> int:
    """Return how many files a process may open once its soft limit is raised."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def largest_file() -> int:
    """Return the bytes that a file may have."""
    return _number(resource.getrlimit(resource.RLIMIT_FSIZE)[0])


def processes_left(proc: Path = Path("/proc"), cgroups: Path = CGROUPS) -> tuple[int, str]:
    """Return how many processes and threads can still be started here, and what limits them ("" if nothing does)."""
    found = [(sys.maxsize, "")]
    most = _number(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    if os.geteuid() != 0 and most < sys.maxsize:  # root is not limited
        found.append((most - _threads_of_user(proc), f"ulimit -u: {most}"))
    for folder in _own_cgroups(proc, cgroups):
        with suppress(OSError, ValueError):  # "max" is no number
            most = int((folder / "pids.max").read_text())
            found.append((most - int((folder / "pids.current").read_text()), f"pids.max of this control group: {most}"))
    left, why = min(found)
    return max(0, left), why


def _own_cgroups(proc: Path, root: Path) -> list[Path]:
    """Return the folders of the control groups of this process: its own, and those around it."""
    folders = [root, root / "pids"]
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            base = root / "pids" if "pids" in kinds.split(",") else root
            own = base / path.lstrip("/")
            folders += [own, *(parent for parent in own.parents if base in parent.parents)]
    return list(dict.fromkeys(folders))


def _threads_of_user(proc: Path) -> int:
    """Return how many threads the processes of this user have; 0 where the system does not tell."""
    count = 0
    for process in proc.glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
    return count


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
