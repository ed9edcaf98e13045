"""Failure notes of ranks, and the verdict on a failed attempt: which rank caused it, and whether to restart.

Each attempt of a run has a temporary folder of notes inside the run's folder.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from omagd.utils.dist_utils import broken_exchange
from omagd.utils.errors import RankFailed, RunFailed, UserError, exit_line
from omagd.utils.plugins import explained
from omagd.utils.signals import SAVING, Stopped
from omagd.utils.storage import make_folder, require_held

RESERVES, RESERVE_BYTES = 3, 1 << 15
"""Reserved files for notes on a full disk: a summary and two errors."""

ENDED = "all ranks have been ended"
OUT_OF_MEMORY = " (the system does that when memory runs out: lower buffer_size, batch_size_run or world_size)"
WITHOUT_FORK_SERVER = 255
"""Exit code that multiprocessing reports for each rank once the process that the ranks are forked from is gone."""
FORK_SERVER_GONE = (
    "the process that the ranks are forked from was killed, which ends the run and its ranks; continue with the same"
    " command and auto_resume=True"
)
CONSEQUENCES = frozenset({-signal.SIGABRT, 128 + signal.SIGINT})
"""Exit codes that the failure of another rank can cause."""


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended.

    Attributes:
        error: to be raised. killed: "rank 1 was killed by SIGKILL" if a signal was the cause, when a restart may help;
            else empty.
    """

    error: BaseException
    killed: str = ""


class Notes:
    """Notes of the ranks of one attempt, in a temporary folder inside the run's folder `path`."""

    def __init__(self, path: str | Path, attempt: int) -> None:
        self.folder = Path(path) / f".attempt_{attempt}"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder for the duration of a block; remove those of killed attempts."""
        path = self.folder.parent
        require_held(path)
        for stale in path.glob(".attempt_*"):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            make_folder(self.folder)
        except OSError as problem:
            raise UserError(f"local_results_path: {path} cannot be written ({problem.strerror})") from problem
        with suppress(OSError):
            for number in range(RESERVES):
                (self.folder / f"reserve_{number}").write_bytes(bytes(RESERVE_BYTES))
        try:
            yield
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, name: str, content: Any) -> None:
        """Write a note, completely or not at all."""
        temporary, text = self.folder / f".{name}", json.dumps(content).encode()
        require_held(self.folder)
        try:
            temporary.write_bytes(text)
        except OSError:
            if not self._into_reserve(temporary, text):
                raise
        temporary.rename(self._file(name))

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _into_reserve(self, target: Path, text: bytes) -> bool:
        """Write a note into a reserved file; return whether that was possible."""
        target.unlink(missing_ok=True)
        for reserve in self.folder.glob("reserve_*") if len(text) <= RESERVE_BYTES else ():
            with suppress(OSError):  # another rank may have taken this one
                reserve.rename(target)
                with target.open("r+b") as file:
                    file.write(text)
                    file.truncate()
                return True
        return False

    def error(self, rank: int, error: BaseException) -> None:
        """Note the error of a rank; only its first error counts."""
        error = explained(error) or error
        if isinstance(error, UserError):
            self._first(rank, user=error.message)
        elif isinstance(error, SystemExit):
            self._first(rank, reason=exit_line(error))
        elif isinstance(error, RunFailed):
            self._first(rank, failed=str(error))
        else:
            trace = "".join(traceback.format_exception(error))
            self._first(rank, trace=trace, exchange=broken_exchange(error) is not None)

    def hung(self, rank: int, line: str, stack: str) -> None:
        """Note a hanging rank. stack: of this rank, if it is the one that hangs."""
        self._first(rank, line=line, stack=stack)

    def _first(self, rank: int, **content: Any) -> None:
        if not self._file(f"rank_{rank}").exists():
            self.write(f"rank_{rank}", {"time": time.time(), "rank": rank, **content})

    def errors(self) -> list[dict[str, Any]]:
        """Return the notes of errors and hangs in order of time."""
        return sorted(
            (json.loads(path.read_text()) for path in self.folder.glob("rank_*.json")), key=itemgetter("time")
        )

    def summary(self) -> dict[str, Any]:
        """Return the summary in rank 0's note."""
        return dict(json.loads(self._file("summary").read_text()))

    def name_a_hang(self) -> bool:
        """Return whether a note names a hanging rank."""
        return any("line" in found for found in self.errors())

    def without_result(self, codes: Mapping[int, int]) -> dict[int, int]:
        """Return the exit codes by rank of those that ended with 0 before the end of the run, as by `os._exit(0)`."""
        return {rank: code for rank, code in codes.items() if code == 0 and not self._file(f"done_{rank}").exists()}


def verdict(failed: Mapping[int, int], found: list[dict[str, Any]], world_size: int) -> Verdict:
    """Return the first cause: a rank killed from outside, a rank that ended without a note, or the earliest note.

    Args:
        failed: exit code by rank, in order of time. found: `Notes.errors`. world_size: number of ranks.
    """
    codes = set(failed.values())
    if len(failed) == world_size > 1 and codes <= {128 + number for number in SAVING}:
        return Verdict(Stopped(min(codes) - 128))  # one received a signal and all stopped together
    if found and "line" in found[0]:
        return Verdict(RankFailed(f"{found[0]['line']}; {ENDED}\n{found[0]['stack']}".rstrip()))
    if len(failed) == world_size > 1 and codes == {WITHOUT_FORK_SERVER} and not found:
        return Verdict(RankFailed(FORK_SERVER_GONE))
    for rank, code in _silent_causes(failed, found).items():
        if code == 128 + signal.SIGINT:
            return Verdict(Stopped(signal.SIGINT))
        number = -code if code < 0 else code - 128 if code - 128 in SAVING else 0
        if not number:
            return Verdict(RankFailed(f"rank {rank} ended with exit code {code} without an error message; {ENDED}"))
        killed = f"rank {rank} was killed by {signal.Signals(number).name}"
        return Verdict(RankFailed(f"{killed}{OUT_OF_MEMORY * (number == signal.SIGKILL)}; {ENDED}"), killed)
    first = found[0]
    if "user" in first:
        return Verdict(UserError(first["user"]))
    if "failed" in first:
        return Verdict(RunFailed(first["failed"]))
    if "reason" in first:
        return Verdict(RankFailed(f"rank {first['rank']}: {first['reason']}; {ENDED}"))
    return Verdict(RankFailed(f"rank {first['rank']} failed; {ENDED}\n{first['trace']}"))


def _silent_causes(failed: Mapping[int, int], found: list[dict[str, Any]]) -> dict[int, int]:
    """Return the exit codes by rank of ranks that left no note and are the cause; none if the first note is the cause.

    The end of one rank can abort another one. So SIGABRT is the cause only if the first note reports a broken exchange,
    which is what other ranks see when a rank is gone. SIGTERM always comes from outside: before the verdict the
    launcher sends none.
    """
    silent = {rank: code for rank, code in failed.items() if rank not in {note["rank"] for note in found}}
    causes = {rank: code for rank, code in silent.items() if code not in CONSEQUENCES}
    if causes or not found:
        return causes or silent
    aborted = {rank: code for rank, code in silent.items() if code == -signal.SIGABRT}
    return aborted if found[0].get("exchange") else {}
