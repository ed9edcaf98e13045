"""One line for each episode that training has played: `episodes/rank_<r>.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from omagd.utils.run_folder import plain
from omagd.utils.writing import STORAGE, AppendFile


class EpisodeLog:
    """Appends to a rank's notes; a run that goes on from a checkpoint cuts them back first.

    Args:
        path: the file; made with the first episode.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = AppendFile(path)

    def write(self, episodes: Iterable[Mapping[str, Any]], **common: Any) -> None:
        """Note episodes, each with what they have in `common` in front."""
        lines = [json.dumps(plain({**common, **episode, **common}), allow_nan=False) for episode in episodes]
        if lines:
            self._file.write(("\n".join(lines) + "\n").encode())

    def size(self) -> int:
        """Return the bytes of all lines so far, with those that wait for room on the disk."""
        return STORAGE.size(self.path)

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()
