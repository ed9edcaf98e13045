"""Folders for what can be made again: compiled programs, in the user's cache."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(*names: str) -> Path:
    """Return a folder below `omagd` in the user's cache (`XDG_CACHE_HOME`, else `~/.cache`); it may not exist."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home, "omagd", *names)
