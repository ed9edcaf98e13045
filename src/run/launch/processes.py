"""Processes of the ranks on this host: preload their imports, start, watch and end them; temporary folders."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from omagd.run.launchers import WATCHED, in_group
from omagd.run.signals import (
    BOUNDARY_SECONDS,
    CLOSING_SECONDS,
    SAVING_SECONDS,
    SIGNALS,
    STARTED_BY,
    ask_to_end,
    uninterrupted,
)
from omagd.utils.storage import remove_left_behind, temporary_folder

if TYPE_CHECKING:
    from omagd.config.schema import Config

GRACE_SECONDS = 5.0
"""Seconds that the other ranks get to end by themselves once one rank has failed or a stop was requested."""

MODULES = (
    "torch._dynamo",  # otherwise loaded by DistributedDataParallel and by the first optimizer
    "omagd.learners.nq_learner",
    "omagd.run.launch.launcher",
    "omagd.run.training.experiment",
)
"""Imports of a rank, which the fork server loads ahead of time."""

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
    from multiprocessing import forkserver, resource_tracker, util

    forkserver.set_forkserver_preload(list(MODULES))
    folder = ExitStack()
    util.Finalize(None, folder.close, exitpriority=-200)
    with contextlib.suppress(OSError):  # a path too long for a socket: ranks are spawned
        path = folder.enter_context(temporary_folder("omagd_"))
        # For its sockets: after a kill the next start removes the folder. If multiprocessing made one of its own, it
        # would print a traceback at the end where somebody has removed that.
        multiprocessing.current_process()._config["tempdir"] = str(path)  # type: ignore[attr-defined]
        resource_tracker.ensure_running()  # its start would unblock SIGTERM
        # The ranks' exit codes come through the server, and a closed terminal and some batch systems signal the whole
        # process group. Ranks unblock the signals in `stoppable`.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _preloading = True


def start_method() -> str:
    """Return how ranks are started: "forkserver" after `preload`, else "spawn"."""
    return "forkserver" if _preloading else "spawn"


class Ranks:
    """Rank processes of this host.

    Args:
        saves: after a signal ranks save a checkpoint at the end of their iteration, so they get time for it.
        sacred: the Sacred run that records the scalars of rank 0, or None.

    Attributes:
        notes: what the ranks have sent (`omagd.run.launch.launcher.Notes`).
    """

    def __init__(self, saves: bool = False, sacred: Any = None) -> None:
        self.saves, self.sacred = saves, sacred
        self.processes: list[Any] = []
        self.notes: list[dict[str, Any]] = []
        self._running: dict[Any, int] = {}
        self._open: list[Any] = []

    def start(self, work: Callable[..., None], arguments: tuple[Any, ...], world_size: int) -> None:
        """Start `work(rank, *arguments, connection)` in one process per rank."""
        context = multiprocessing.get_context(start_method())
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=work, args=(rank, *arguments, sender))  # type: ignore[attr-defined]
            process.start()
            sender.close()  # so that only the rank holds this end
            self.processes.append(process)
            self._running[process.sentinel] = rank
            self._open.append(receiver)

    def watch(self) -> dict[int, int]:
        """Wait for all ranks; once one has failed, wait at most `GRACE_SECONDS` for the others.

        Returns exit codes of failed ranks by rank, in the order in which they ended.
        """
        failed: dict[int, int] = {}
        deadline = float("inf")
        while self._running and time.monotonic() < deadline:
            for rank in self._next(deadline):
                if (code := self.processes[rank].exitcode) != 0:
                    failed[rank] = code
                    deadline = min(deadline, time.monotonic() + (0.5 if self.hung else GRACE_SECONDS))
        return failed

    def _next(self, deadline: float) -> list[int]:
        """Wait until ranks end or send notes, or until the deadline; return the ranks that have ended."""
        timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait([*self._running, *self._open], timeout)
        ended = [self._running.pop(sentinel) for sentinel in ready if sentinel in self._running]
        for rank in ended:
            self.processes[rank].join()
        with uninterrupted():  # a signal must not leave half a note in a pipe
            for connection in list(self._open):
                try:
                    while connection.poll():
                        self._take(connection.recv())
                except (EOFError, OSError):  # the rank has ended
                    self._open.remove(connection)
        return ended

    def _take(self, note: dict[str, Any]) -> None:
        if "scalar" not in note:
            self.notes.append(note)
        elif self.sacred is not None:
            try:
                self.sacred.log_scalar(*note["scalar"])
            except Exception as error:  # noqa: BLE001 (the run goes on without it)
                logging.getLogger("omagd").warning("Sacred rejects scalars: %s", error)
                self.sacred = None

    def errors(self) -> list[dict[str, Any]]:
        """Return the notes of errors and hangs in order of time."""
        return sorted((note for note in self.notes if "done" not in note), key=itemgetter("time"))

    @property
    def hung(self) -> bool:
        """Whether a note names a hanging rank; waiting for the others is pointless then."""
        return any(note.get("hung") for note in self.notes)

    def summary(self) -> dict[str, Any]:
        """Return the summary in rank 0's last note."""
        return next(note["summary"] for note in self.notes if note["rank"] == 0 and "done" in note)

    def without_result(self) -> dict[int, int]:
        """Return the exit codes by rank of those that ended with 0 before the end of the run, as by `os._exit(0)`."""
        done = {note["rank"] for note in self.notes if "done" in note}
        return {rank: 0 for rank, process in enumerate(self.processes) if process.exitcode == 0 and rank not in done}

    def forward(self, number: int) -> None:
        """Send a signal to all ranks and give them time to end."""
        self._send(number)
        self._join(BOUNDARY_SECONDS + SAVING_SECONDS if self.saves else GRACE_SECONDS)

    def end(self) -> None:
        """End all running ranks by SIGTERM, then SIGKILL; after a hang by SIGKILL only."""
        for stop in (signal.SIGKILL,) if self.hung else (signal.SIGTERM, signal.SIGKILL):
            self._send(stop)
            self._join(GRACE_SECONDS)

    def _send(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _join(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._running and time.monotonic() < until:
            self._next(until)


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
