"""Ranks that start quickly: while this process still checks the run, another one imports what all ranks need.

Ranks are forked from it then; it has joined no group and touched no GPU. Only the command line asks for it: there this
process is new, so that what the ranks find around them is what it found itself.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import select
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omagd.config.schema import Config
from omagd.run.checkpoint.run_lock import ProcessIdentity, start_ticks
from omagd.utils.signals import CLOSING_SECONDS, SAVING, STARTED_BY, ask_to_end

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


LAUNCHERS = frozenset(
    {"TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MPI_LOCALRANKID"}
)
"""Variables of torchrun, srun and MPI's launchers in the environment of the ranks that they start."""

MODULES = ("omagd.run.launch.rank_modules",)
_begun = False


def begin(config: Config) -> None:
    """Start to import, in the background, if `config` may need several ranks that are started here.

    What killed processes have left in the temporary folder is removed first.
    """
    global _begun
    remove_left_behind()
    several = config.world_size is None and shutil.which("nvidia-smi") is not None or (config.world_size or 1) > 1
    wanted = config.run == "ddp" and config.use_ddp and several and "RANK" not in os.environ
    if not wanted or _begun or sys.platform != "linux":
        return
    from multiprocessing import forkserver

    multiprocessing.get_context("forkserver").set_forkserver_preload(list(MODULES))
    try:
        with _nameless(), _out_of_reach():
            forkserver.ensure_running()
    except OSError:  # a temporary folder with too long a name for a socket: ranks are started each from nothing
        return
    _begun = True


@contextmanager
def _out_of_reach() -> Iterator[None]:
    """Start a process within that no signal to the whole group ends: the ranks' exit codes come through it.

    SIGHUP of a terminal reaches the group, as does SIGTERM of some batch systems. Ranks unblock both in `stoppable`.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it unblocks SIGTERM when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SAVING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _nameless() -> Iterator[None]:
    """Take the address of the prepared process out of the file system again, where a kill would leave it for ever.

    It stays reachable by a descriptor of this process: Linux connects to a socket without a name through /proc.
    """
    from multiprocessing import forkserver

    settings: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if settings.get("tempdir") is not None:
        yield
        return
    with temporary_folder("omagd_") as folder:
        settings["tempdir"] = str(folder)
        try:
            yield
        finally:
            settings["tempdir"] = None
        server: Any = forkserver._forkserver
        if server._forkserver_address is not None:
            entry = os.open(server._forkserver_address, os.O_PATH | os.O_CLOEXEC)
            server._forkserver_address = f"/proc/self/fd/{entry}"


def start_method() -> str:
    """Return how ranks are started: from the prepared process where there is one, else each from nothing."""
    return "forkserver" if _begun else "spawn"


def end_with_parent() -> None:
    """End this spawned rank, as on Ctrl-C, once the process that started the run is gone; a forked rank's parent is
    another one.
    """
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        _when_over(lambda: wait([parent.sentinel]), parent.pid)


def end_with_launcher() -> None:
    """End this rank, as on Ctrl-C, once the launcher that started it is gone.

    Only a known launcher (`LAUNCHERS`) is watched, not a shell in which somebody has set RANK.
    """
    if not LAUNCHERS & os.environ.keys() or STARTED_BY == 0:  # 0: outside this container, where it cannot be seen
        return
    _when_over(lambda: _wait_for_end(STARTED_BY), STARTED_BY)


def _wait_for_end(parent: int) -> None:
    """Return once the process `parent`, of which this one is a child, is gone."""
    poll = select.poll()
    try:
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except (OSError, AttributeError):  # gone already, or a system without pidfd
        while os.getppid() == parent:
            time.sleep(1.0)
    else:
        while os.getppid() == parent:
            poll.poll(5000)


def _when_over(wait: Callable[[], object], launcher: int | None) -> None:
    """In a thread, once `wait` returns since `launcher` has ended: ask this process to end, else end it."""

    def watch() -> None:
        wait()
        ask_to_end(f"the launcher (process {launcher}) has ended")
        time.sleep(CLOSING_SECONDS)
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
