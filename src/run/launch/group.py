"""One rank of a process group: join it, check the shared folder, close within a time limit."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from omagd.config.schema import Config
from omagd.run.launch.watchdog import Heartbeat, Hung, Watchdog
from omagd.run.topology import Plan, require_own_gpus
from omagd.utils.dist_utils import (
    Dist,
    abort_distributed,
    broken_exchange,
    cleanup_distributed,
    open_board,
    setup_distributed,
)
from omagd.utils.errors import USER_ERROR_EXIT_CODE, RankFailed, UserError
from omagd.utils.signals import CLOSING_SECONDS, Stopped, stop_requested

LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "communicator was aborted",
)
"""Messages of gloo and NCCL after the other rank of an exchange has ended."""

WAITS = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each attempt to read a file: a network file system may show new files late."""


@contextmanager
def joined_group(
    rank: int,
    plan: Plan,
    place: int,
    port: int,
    config: Config,
    attempt: int,
    hung: Hung,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> Iterator[Dist]:
    """Join the process group for the duration of a block, with heartbeat and watchdog.

    After an error the group is not left in the normal way, which can wait for other ranks forever: a spawned rank keeps
    it until its process ends; under torchrun pending exchanges are aborted first.

    Args:
        place: rank on this host.
        hung: called in a thread if this rank hangs, or if another one misses an exchange.
        failed: called with the error that ends the run, before anything is closed.
    """
    device = plan.device(place)
    if plan.cuda:
        torch.cuda.set_device(device)
    hosted, minutes = not plan.joins, config.dist_timeout_minutes
    # The heartbeat names the missing rank at the timeout; the backend, which cannot, times out a little later.
    later = minutes + min(1.0, minutes)
    setup_distributed(rank, plan.world_size, plan.backend, port, later, hosted=hosted, attempt=attempt)
    with _closing_in_time(failed) as on_error:
        try:
            dist = Dist(rank, plan.world_size, device)
            dist.waits.on_error = on_error
            board = open_board(rank, port, minutes, hosted=hosted, attempt=attempt)
            with Heartbeat(dist, board, 60 * minutes, hung), Watchdog(dist, 60 * minutes, hung):
                if plan.joins and plan.backend == "nccl":
                    gpu = str(torch.cuda.get_device_properties(device).uuid)
                    require_own_gpus(dist.gather((socket.gethostname(), gpu)))
                yield dist
        except BaseException as error:
            on_error(error)
            if plan.joins:
                abort_distributed()
                cleanup_distributed()
            raise
        cleanup_distributed()


@contextmanager
def _closing_in_time(failed: Callable[[BaseException], None]) -> Iterator[Callable[[BaseException], None]]:
    """Yield a function to call with an error before anything is closed; the process then has `CLOSING_SECONDS`.

    Closing may wait for other ranks, a GPU or a disk that never answers; after that time the process exits.
    """
    timers: list[threading.Timer] = []

    def on_error(error: BaseException) -> None:
        if timers or isinstance(error, Stopped) or stop_requested():
            return
        failed(error)

        def end() -> None:
            sys.stderr.write(f"error: {error or type(error).__name__} (and closing the run did not finish)\n")
            sys.stderr.flush()
            os._exit(exit_code(error))

        timers.append(threading.Timer(CLOSING_SECONDS, end))
        timers[0].daemon = True
        timers[0].start()

    try:
        yield on_error
    finally:
        for timer in timers:
            timer.cancel()


def exit_code(error: BaseException) -> int:
    """Return the exit code of a rank that ended with `error`."""
    return USER_ERROR_EXIT_CODE if isinstance(error, UserError) else 1


@contextmanager
def naming_a_lost_rank(rank: int) -> Iterator[None]:
    """Reduce an exchange that broke because another rank ended to one line; the report of that rank says why."""
    try:
        yield
    except (UserError, RankFailed):
        raise
    except Exception as error:
        text = str(broken_exchange(error) or "")
        words = next((words for words in LOST_CONNECTION if words in text), "")
        if not words:
            raise
        line = f"rank {rank}: the connection to another rank broke ({words}): that rank has ended"
        raise RankFailed(f"{line}; its own report, above or below, says why") from error


def require_shared_folder(dist: Dist, path: str | Path) -> None:
    """Check that every rank sees the files of rank 0 in the folder `path` and can write there. A collective.

    Errors: UserError, the same on all ranks, naming the hosts that see another folder or may not write.
    """
    if dist.world_size == 1:
        return
    folder, host = Path(path), socket.gethostname()
    with _mark(folder, dist) as (mark, content):
        trouble = _trouble(folder, mark, content, dist.rank)
        found = {where: what for where, what in reversed(dist.gather((host, trouble))) if what}
    if found:
        where = ", ".join(f"{what} on host {name}" for name, what in sorted(found.items()))
        fix = "give a folder of a file system that all hosts share (NFS, Lustre, …), under the same name everywhere"
        shown = dist.broadcast(str(folder))
        raise UserError(f"local_results_path: the run's folder {shown} {where}; {fix}")


@contextmanager
def _mark(folder: Path, dist: Dist) -> Iterator[tuple[str, str]]:
    """Let rank 0 write a file with a random name; yield its name and content on every rank."""
    name, content = dist.broadcast((f".shared_{secrets.token_hex(8)}", secrets.token_hex(32)))
    if dist.is_main:
        with suppress(OSError):  # every rank, this one too, reports what it finds
            (folder / name).write_text(content)
    dist.all(True)  # from here on the file is there
    try:
        yield name, content
    finally:
        if dist.is_main:
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)


def _trouble(folder: Path, name: str, content: str, rank: int) -> str:
    """Return what is wrong with the folder on this rank; empty if it is rank 0's and can be written."""
    for seconds in () if rank == 0 else WAITS:
        time.sleep(seconds)
        try:
            with suppress(FileNotFoundError):
                if (folder / name).read_text() == content:
                    break
            list(folder.iterdir())  # makes NFS ask its server again
        except OSError:
            continue
    else:
        if rank != 0:
            return "is not rank 0's"
    own = folder / f"{name}_{rank}"
    try:
        own.write_text(content)
        own.unlink()
    except OSError as problem:
        return f"cannot be written ({problem.strerror})"
    return ""
