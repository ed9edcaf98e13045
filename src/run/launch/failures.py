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
from pathlib import Path
from typing import Any

from omagd.utils.dist_utils import broken_exchange
from omagd.utils.errors import RankFailed, RunFailed, UserError, exit_line
from omagd.utils.signals import SAVING, Stopped

RESERVES, RESERVE_BYTES = 3, 1 << 15
"""Reserved files for notes on a full disk: a summary and two errors."""

ENDED = "all ranks have been ended"
CONSEQUENCES = frozenset({-signal.SIGABRT, 128 + signal.SIGINT})
"""Exit codes that the failure of another rank can cause."""


@contextmanager
def notes_of(path: str, attempt: int) -> Iterator[Path]:
    """Make the folder of an attempt's notes for the duration of a block; remove those of killed attempts."""
    for stale in Path(path).glob(".attempt_*"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = notes_folder(path, attempt)
    try:
        folder.mkdir(parents=True)
    except OSError as problem:
        raise UserError(f"local_results_path: {folder.parent} cannot be written ({problem.strerror})") from problem
    with suppress(OSError):
        for number in range(RESERVES):
            (folder / f"reserve_{number}").write_bytes(bytes(RESERVE_BYTES))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def notes_folder(path: str, attempt: int) -> Path:
    """Return the folder of an attempt's notes in the run's folder `path`."""
    return Path(path) / f".attempt_{attempt}"


def note(folder: Path, name: str, content: Any) -> None:
    """Write a note, completely or not at all."""
    temporary, text = folder / f".{name}", json.dumps(content).encode()
    try:
        temporary.write_bytes(text)
    except OSError:
        if not _into_reserve(folder, temporary, text):
            raise
    temporary.rename(folder / f"{name}.json")


def _into_reserve(folder: Path, target: Path, text: bytes) -> bool:
    """Write a note into a reserved file; return whether that was possible."""
    target.unlink(missing_ok=True)
    for reserve in folder.glob("reserve_*") if len(text) <= RESERVE_BYTES else ():
        with suppress(OSError):  # another rank may have taken this one
            reserve.rename(target)
            with target.open("r+b") as file:
                file.write(text)
                file.truncate()
            return True
    return False


def note_error(rank: int, folder: Path, error: BaseException) -> None:
    """Write the error of a rank as a note; only its first error counts."""
    if isinstance(error, UserError):
        _note_first(rank, folder, {"user": error.message})
    elif isinstance(error, SystemExit):
        _note_first(rank, folder, {"reason": exit_line(error)})
    elif isinstance(error, RunFailed):
        _note_first(rank, folder, {"failed": str(error)})
    else:
        trace = "".join(traceback.format_exception(error))
        _note_first(rank, folder, {"trace": trace, "exchange": broken_exchange(error) is not None})


def note_hung(rank: int, folder: Path, line: str, stack: str) -> None:
    """Write a note about a hanging rank. stack: of this rank, if it is the one that hangs."""
    _note_first(rank, folder, {"line": line, "stack": stack})


def summary_in(folder: Path) -> dict[str, Any]:
    """Return the summary in rank 0's note."""
    return dict(json.loads((folder / "summary.json").read_text()))


def hang_noted(folder: Path) -> bool:
    """Return whether a note names a hanging rank."""
    return any("line" in found for found in _notes(folder))


def without_result(codes: Mapping[int, int], folder: Path) -> dict[int, int]:
    """Return the exit codes by rank of those that ended with 0 before the end of the run, as by `os._exit(0)`."""
    return {rank: code for rank, code in codes.items() if code == 0 and not (folder / f"done_{rank}.json").exists()}


def _note_first(rank: int, folder: Path, content: dict[str, Any]) -> None:
    name = f"rank_{rank}"
    if not (folder / f"{name}.json").exists():
        note(folder, name, {"time": time.time(), "rank": rank, **content})


def _notes(folder: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(path.read_text()) for path in folder.glob("rank_*.json")), key=lambda note: note["time"])


@dataclass(frozen=True)
class Verdict:
    """Why an attempt ended.

    Attributes:
        error: to be raised. killed: "rank 1 was killed by SIGKILL" if a signal was the cause, when a restart may help;
            else empty.
    """

    error: BaseException
    killed: str = ""


def verdict(failed: Mapping[int, int], folder: Path, world_size: int) -> Verdict:
    """Return the first cause: a rank killed from outside, a rank that ended without a note, or the earliest note.

    Args:
        failed: exit code by rank, in order of time. folder: the ranks' notes. world_size: number of ranks.
    """
    codes = set(failed.values())
    if len(failed) == world_size > 1 and codes <= {128 + number for number in SAVING}:
        return Verdict(Stopped(min(codes) - 128))  # one received a signal and all stopped together
    found = _notes(folder)
    if found and "line" in found[0]:
        return Verdict(RankFailed(f"{found[0]['line']}; {ENDED}\n{found[0]['stack']}".rstrip()))
    for rank, code in _silent_causes(failed, found).items():
        if code == 128 + signal.SIGINT:
            return Verdict(Stopped(signal.SIGINT))
        number = -code if code < 0 else code - 128 if code - 128 in SAVING else 0
        if not number:
            return Verdict(RankFailed(f"rank {rank} ended with exit code {code} without an error message; {ENDED}"))
        killed = f"rank {rank} was killed by {signal.Signals(number).name}"
        return Verdict(RankFailed(f"{killed}{_hint(number)}; {ENDED}"), killed)
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


def _hint(number: int) -> str:
    if number != signal.SIGKILL:
        return ""
    return " (the system does that when memory runs out: lower buffer_size, batch_size_run or world_size)"
