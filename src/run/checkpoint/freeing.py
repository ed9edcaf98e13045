"""What a finished run no longer needs: the episodes of its replay, by far the largest part of its checkpoints."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from omagd.run.checkpoint.store import Checkpoint
from omagd.utils.logging import PACKAGE
from omagd.utils.owned_folder import FOLDER
from omagd.utils.run_folder import RUN_FILE, RunFolder
from omagd.utils.storage import ABSENT, opened, read_entry

LOG = logging.getLogger(PACKAGE)
EPISODES = ".episodes"


def is_finished(folder: RunFolder) -> bool:
    """Return whether a run has ended and written everything."""
    return bool(read_entry(folder.path / RUN_FILE).get("finished"))


def free_replay(folder: RunFolder, remove: bool = True) -> tuple[int, int]:
    """Remove the episodes of a finished run's checkpoints; return the number of files and the bytes that this frees.

    Every folder is opened by its name in the one before, following no links. A file that another run shares by a hard
    link frees nothing. remove: False only counts. Errors: OSError.
    """
    files = size = 0
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(opened(folder.path, FOLDER))
            for name in ("checkpoints", "kept"):
                handle = stack.enter_context(opened(name, FOLDER, handle))
        except ABSENT:
            return 0, 0
        for name in sorted(os.listdir(handle)):
            about = os.stat(name, dir_fd=handle, follow_symlinks=False)
            if not name.endswith(EPISODES) or not stat.S_ISREG(about.st_mode):
                continue
            files, size = files + 1, size + about.st_size * (about.st_nlink == 1)
            if remove:
                os.unlink(name, dir_fd=handle)
    return files, size


def free_finished(folder: RunFolder) -> None:
    """Remove the replay of a run that has just finished, and log how much that frees."""
    try:
        size = free_replay(folder)[1]
    except OSError as problem:
        LOG.warning(f"the replay of the finished run stays in its checkpoints: {problem}")
        return
    if size:
        LOG.info(f"freed {size / 1e6:.1f} MB: the replay in the checkpoints (keep_checkpoints=True keeps it)")


def episode_files(manifest: Mapping[str, Any]) -> set[str]:
    """Return the files of episodes that a manifest names."""
    return {part["file"] for rank in manifest["logs"] for log in rank.values() for part in log["parts"]}


def was_freed(found: Checkpoint) -> bool:
    """Return whether a checkpoint is one of a finished run whose replay was removed."""
    names = episode_files(found.manifest)
    gone = not any((found.path.parent / name).exists() for name in names)
    return bool(names) and gone and is_finished(RunFolder(found.path.parents[1]))
