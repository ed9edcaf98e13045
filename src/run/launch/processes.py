"""Processes of the ranks on this host: preload their imports, start, watch and end them; temporary folders."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omagd.run.checkpoint.run_lock import ProcessIdentity, start_ticks
from omagd.run.launchers import WATCHED, in_group
from omagd.utils.signals import BOUNDARY_SECONDS, CLOSING_SECONDS, SAVING, SAVING_SECONDS, STARTED_BY, ask_to_end

if TYPE_CHECKING:
    from omagd.config.schema import Config

GRACE_SECONDS = 5.0
"""Seconds that the other ranks get to end by themselves once one rank has failed or a stop was requested."""

MODULES = (
    "torch._dynamo",  # otherwise loaded by DistributedDataParallel and by the first optimizer
    "omagd.learners.nq_learner",
    "omagd.run.launch.launcher",
    "omagd.run.reporting.plots",
    "omagd.run.training.experiment",
)
"""Imports of a rank, which the fork server loads ahead of time."""

NAME = re.compile(r"omagd_(?:launch_)?(?P<pid>[0-9a-f]{1,8})-(?P<started>[0-9a-f]+)-(?P<here>[0-9a-f]*-[0-9a-f]*)_\w+")
"""Name of a temporary folder: process id and start time (in clock ticks) of its owner, PID namespace and boot id."""

_preloading = False


def preload(config: Config) -> None:
    """Start the fork server in the background if `config` may start several ranks on this host.

    It imports `MODULES` while this process checks the run; ranks are then forked from it. It has joined no process
    group and used no GPU. Only the command line calls this: there the process is new, so forked ranks see the same
    environment. Also removes temporary folders of killed processes.
    """
    global _preloading
    remove_left_behind()
    several = config.world_size is None and shutil.which("nvidia-smi") is not None or (config.world_size or 1) > 1
    wanted = config.run == "ddp" and config.use_ddp and several and not in_group()
    if not wanted or _preloading or sys.platform != "linux":
        return
    from multiprocessing import forkserver, util

    forkserver.set_forkserver_preload(list(MODULES))
    folder = ExitStack()
    util.Finalize(None, folder.close, exitpriority=-200)
    with contextlib.suppress(OSError):  # a path too long for a socket: ranks are spawned
        path = folder.enter_context(temporary_folder("omagd_"))
        # For its sockets: after a kill the next start removes the folder. If multiprocessing made one of its own, it
        # would print a traceback at the end where somebody has removed that.
        multiprocessing.current_process()._config["tempdir"] = str(path)  # type: ignore[attr-defined]
        with _stop_signals_blocked():
            forkserver.ensure_running()
        _preloading = True


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Block SIGTERM and SIGHUP in a process started within the block: the ranks' exit codes come through it.

    A closed terminal and some batch systems signal the whole process group. Ranks unblock both in `stoppable`.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # its start would unblock SIGTERM
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SAVING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_method() -> str:
    """Return how ranks are started: "forkserver" after `preload`, else "spawn"."""
    return "forkserver" if _preloading else "spawn"


class Ranks:
    """Rank processes of this host.

    saves: on SIGTERM and SIGHUP ranks save a checkpoint at the end of their iteration, so they get time for it.
    """

    def __init__(self, saves: bool = False) -> None:
        self.saves = saves
        self.processes: list[Any] = []

    def start(self, work: Callable[..., None], arguments: tuple[Any, ...], world_size: int) -> None:
        """Start `work(rank, *arguments)` in one process per rank."""
        import torch.multiprocessing as mp  # here, since `scripts/with_log.py` needs this module without torch

        how = start_method()
        context = mp.start_processes(work, args=arguments, nprocs=world_size, join=False, start_method=how)
        self.processes += context.processes

    def watch(self, hopeless: Callable[[], bool]) -> dict[int, int]:
        """Wait for all ranks; once one has failed, wait at most `GRACE_SECONDS` for the others.

        hopeless: called after a failure; True if waiting is pointless. Returns exit codes of failed ranks by rank, in
        the order in which they ended.
        """
        running = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        failed: dict[int, int] = {}
        deadline = float("inf")
        while running and time.monotonic() < deadline:
            timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            for sentinel in multiprocessing.connection.wait(list(running), timeout):
                rank = running.pop(sentinel)
                self.processes[rank].join()
                if self.processes[rank].exitcode != 0:
                    failed[rank] = self.processes[rank].exitcode
                    deadline = min(deadline, time.monotonic() + (0.5 if hopeless() else GRACE_SECONDS))
        return failed

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of ended ranks by rank."""
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def forward(self, number: int) -> None:
        """Send a signal to all ranks and give them time to end."""
        self._send(number)
        saving = self.saves and number in SAVING
        self._join(BOUNDARY_SECONDS + SAVING_SECONDS if saving else GRACE_SECONDS)

    def end(self, at_once: bool = False) -> None:
        """End all running ranks by SIGTERM, then SIGKILL; with `at_once` by SIGKILL only."""
        for stop in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
            self._send(stop)
            self._join(GRACE_SECONDS)

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))


def end_with_parent() -> None:
    """End this spawned rank, as on Ctrl-C, once the process that started the run is gone.

    A forked rank is a child of the fork server, so `os.getppid` is of no use.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        _when_over(lambda: multiprocessing.connection.wait([parent.sentinel]), parent.pid)


def end_with_launcher() -> None:
    """End this rank, as on Ctrl-C, once the launcher that started it is gone.

    Only known launchers (`WATCHED`) are watched, not a shell in which RANK was set by hand.
    """
    if not WATCHED & os.environ.keys() or STARTED_BY == 0:  # 0: the parent is outside this container
        return
    _when_over(lambda: _wait_for_end(STARTED_BY), STARTED_BY)


def _wait_for_end(parent: int) -> None:
    """Return once the process `parent`, of which this one is a child, is gone.

    By a file descriptor of the process where the system has them, so that all ranks notice at the same time: one that
    is later would see only the broken connection to the others, and report a failure.
    """
    with contextlib.suppress(AttributeError, OSError):  # not Linux, an old kernel, or already gone
        descriptor = os.pidfd_open(parent)
        try:
            if os.getppid() == parent:
                multiprocessing.connection.wait([descriptor])
        finally:
            os.close(descriptor)
    while os.getppid() == parent:
        time.sleep(0.5)


def _when_over(wait: Callable[[], object], launcher: int | None) -> None:
    """Start a thread that ends this process once `wait` returns: by a stop request, after a while by force."""

    def watch() -> None:
        wait()
        ask_to_end(f"the launcher (process {launcher}) has ended")
        time.sleep(CLOSING_SECONDS)
        os._exit(128 + signal.SIGINT)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for the duration of a block; remove those of processes that were killed.

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
    """Remove temporary folders of this user's processes that have ended on this host. Follows no link."""
    here = _here(ProcessIdentity.own())
    with contextlib.suppress(OSError):
        root = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in os.listdir(root):
                found = NAME.fullmatch(name)
                # Folders are created under their final name, so an unfinished one is never mistaken for an old one.
                if found is not None and found["here"] == here and not _is_running(found):
                    _remove(name, root)
        finally:
            os.close(root)


def _remove(name: str, root: int) -> None:
    with contextlib.suppress(OSError):
        about = os.stat(name, dir_fd=root, follow_symlinks=False)
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid():
            shutil.rmtree(name, ignore_errors=True, dir_fd=root)


def _is_running(found: re.Match[str]) -> bool:
    return start_ticks(int(found["pid"], 16)) == int(found["started"], 16)


def _here(own: ProcessIdentity) -> str:
    """Return PID namespace and boot id; where they are unknown (not Linux), a name that matches nothing later."""
    space, boot = re.sub(r"\D", "", own.space), own.boot.replace("-", "")[:8]
    return f"{int(space):x}-{boot}" if space and boot and own.started else f"-{own.pid:x}"
