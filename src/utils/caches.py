"""Folders for what can be made again: compiled programs, in the user's cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def user_cache(*names: str) -> Path:
    """Return a folder below `omagd` in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`); it may not exist.

    A user without a home, as in some containers, has a folder of its own among the temporary files.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        home = str(_own_temporary_folder())
    return Path(home, "omagd", *names)


def _own_temporary_folder() -> Path:
    """Return a folder that no other user can have filled: what is loaded from a cache is executed."""
    folder = Path(tempfile.gettempdir(), f"omagd-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder if folder.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="omagd-"))
