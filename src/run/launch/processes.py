"""The processes of the ranks that this host starts: started together, watched, told, ended."""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from omagd.run.launch.preload import start_method
from omagd.utils.signals import BOUNDARY_SECONDS, SAVING, SAVING_SECONDS

GRACE_SECONDS = 5.0
"""How long ranks may take to notice that one has failed, or that all are to stop, before they are ended."""


class Ranks:
    """Processes by rank.

    saves: on SIGTERM and SIGHUP they save a checkpoint at the end of an iteration, which they get the time for.
    """

    def __init__(self, saves: bool = False) -> None:
        self.saves = saves
        self.processes: list[Any] = []

    def start(self, work: Callable[..., None], arguments: tuple[Any, ...], world_size: int) -> None:
        """Start `work(rank, *arguments)` in a process for each rank."""
        how = start_method()
        context = mp.start_processes(work, args=arguments, nprocs=world_size, join=False, start_method=how)
        self.processes += context.processes

    def watch(self, hopeless: Callable[[], bool]) -> dict[int, int]:
        """Wait for all ranks; once one has failed, only as long as the others may take to notice.

        hopeless: says, once one has failed, that there is nothing to wait for. Returns exit codes by rank of those that
        failed, the first first.
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
        """Return the exit codes by rank of those that have ended."""
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def tell(self, number: int) -> None:
        """Hand a signal on to all ranks and let them end by themselves."""
        self._send(number)
        saving = self.saves and number in SAVING
        self._join(BOUNDARY_SECONDS + SAVING_SECONDS if saving else GRACE_SECONDS)

    def end(self, at_once: bool = False) -> None:
        """End all that still run; `at_once`: without asking."""
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
