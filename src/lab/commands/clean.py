"""`omagd clean FOLDER …`: free what finished runs no longer need."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from omagd.run.checkpoint.resuming import Busy, busy_run, take
from omagd.run.checkpoint.store import free_replay, is_finished
from omagd.run.run_folder import RUN_FILE, RunFolder, read_entry
from omagd.utils.errors import UserError, print_out, print_warning, readable

MEGABYTE = 1e6


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `clean`."""
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a run, or a folder of runs, studies or sweeps")
    parser.add_argument("--dry-run", action="store_true", help="show what would be freed, and change nothing")


def main(options: argparse.Namespace) -> int:
    """Remove the replay from the checkpoints of finished runs; print how much that frees."""
    total = runs = 0
    for given in options.folders:
        root = Path(given).expanduser()
        if root.is_symlink() or not root.is_dir():
            raise UserError(
                f"clean {given}: is {'a link' if root.is_symlink() else 'no folder'}. Give a folder of runs"
            )
        for path in _runs(root):
            if reason := _kept(path):
                if path == root:
                    raise UserError(f"clean {given}: {reason}")
                print_warning(f"{readable(str(path))} stays as it is: {reason}")
                continue
            size = _free(RunFolder(path), options.dry_run)
            if size is not None:
                total, runs = total + size, runs + 1
                print_out(f"{size / MEGABYTE:10.1f} MB  {readable(str(path))}: episodes in checkpoints/kept/\n")
    done = "would be freed" if options.dry_run else "freed"
    print_out(f"{total / MEGABYTE:10.1f} MB  {done} in {runs} finished run(s)\n")
    return 0


def _runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs at and below a folder, by name; links are not followed."""
    for place, names, files in os.walk(root):
        if RUN_FILE in files:
            if "logs" in names:  # a record of Sacred has a run.json, too
                yield Path(place)
            names.clear()
        names.sort()


def _kept(path: Path) -> str:
    """Return why a run keeps everything, empty if it does not."""
    try:
        busy = busy_run(path)
    except OSError as problem:
        return f"it cannot be read ({problem.strerror})"
    if busy is not None:
        return f"it is in use by {busy}"
    if not is_finished(RunFolder(path)):
        return "it is not finished, and continues from its checkpoints"
    if read_entry(RunFolder(path).config_json).get("keep_checkpoints"):
        return "it was started with keep_checkpoints=True"
    return ""


def _free(folder: RunFolder, dry_run: bool) -> int | None:
    """Return the bytes that are, or would be, freed in a run's folder; None where it has no replay.

    Errors: UserError where another process has locked it, or it cannot be changed.
    """
    where = readable(str(folder.path))
    try:
        files, size = free_replay(folder, remove=False)
        if not files or dry_run:
            return size if files else None
        with take(folder.path):
            return free_replay(folder)[1] if is_finished(folder) else None
    except Busy as busy:
        raise UserError(f"clean: {where} is in use by {busy}. Try again when that process has ended") from None
    except OSError as problem:
        raise UserError(f"clean: {where} cannot be changed ({problem.strerror})") from None
