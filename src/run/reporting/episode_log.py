"""The log of episodes: `episodes/rank_<r>.jsonl`, one line for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omagd.utils.run_folder import plain
from omagd.utils.writing import STORAGE, AppendFile


class EpisodeLog:
    """Appends episodes to a rank's file; a resumed run truncates the file first.

    Args:
        path: the file, created with the first episode.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)

    def write(self, episodes: Iterable[Mapping[str, Any]], **common: Any) -> None:
        """Write episodes, each with the `common` values in front."""
        lines = [json.dumps(plain({**common, **episode, **common}), allow_nan=False) for episode in episodes]
        if lines:
            self._file.write(("\n".join(lines) + "\n").encode())

    def size(self) -> int:
        """Return the bytes of all lines so far, including lines that wait for space on the disk."""
        return STORAGE.size(self.path)

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()
