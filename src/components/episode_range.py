"""Successive episodes of a replay buffer as they are stored there, and their file: written once, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from omagd.components.episode_codec import Codec
from omagd.components.episode_file import read_episodes, write_episodes
from omagd.utils.errors import UserError
from omagd.utils.packing import Episode
from omagd.utils.storage import ABSENT, Unreadable, patiently


@dataclass(frozen=True)
class EpisodeRange:
    """Episodes number `first` to `first + len(records) - 1` of all that were ever added.

    Attributes:
        codec: that the records are encoded with; None where there is none. records: of each episode, [L + 1, R] uint8.
    """

    first: int
    codec: Codec | None
    records: tuple[Tensor, ...]

    def describe(self) -> dict[str, Any]:
        """Return plain values that `load_stretch` needs beside the file."""
        codec = None if self.codec is None else self.codec.state_dict()
        return {"first": self.first, "count": len(self.records), "codec": codec}

    def save(self, path: Path) -> None:
        """Write the records to a file that appears whole or not at all."""
        write_episodes(path, [{"records": records} for records in self.records], {})

    def from_number(self, number: int) -> EpisodeRange:
        """Return the episodes from the `number`-th on."""
        skipped = min(max(0, number - self.first), len(self.records))
        return EpisodeRange(self.first + skipped, self.codec, self.records[skipped:])


def load_stretch(path: Path, said: Mapping[str, Any]) -> EpisodeRange:
    """Return the stretch of a file that `describe` has said something of.

    Errors: ValueError for what does not fit; Unreadable where the system cannot read the file.
    """
    try:
        records = [episode["records"] for episode in patiently(path, partial(_read, path, int(said["count"])))]
        codec = Codec.from_state(said["codec"])
    except Unreadable:
        raise
    except UserError as problem:
        raise ValueError(problem.message) from problem
    except ABSENT as problem:
        raise ValueError(f"{path.name} cannot be read: {problem.strerror}") from problem
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"what is said of {path.name} is incomplete ({problem})") from problem
    if len(records) != said["count"] or any(each.shape[1:] != (codec.width,) for each in records):
        raise ValueError(f"{path.name} does not hold what is said of it")
    return EpisodeRange(int(said["first"]), codec, tuple(records))


def _read(path: Path, most: int) -> list[Episode]:
    """Return the episodes of a file. Errors: UserError; OSError where the system cannot read it."""
    try:
        return read_episodes(path, {}, "episodes", most)
    except UserError as problem:
        if isinstance(problem.__cause__, OSError):
            raise problem.__cause__ from None
        raise
