"""Types of the doctor: settings, checks, findings. Imports nothing that may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from omagd.config.schema import Config

INSTALL = "pip install -e . -c constraints.txt"


@dataclass(frozen=True)
class Settings:
    """The part of the configuration that the checks read.

    Attributes:
        results: `local_results_path`. ranks: number of ranks on this machine.
    """

    env: str = "skirmish"
    map_name: str = ""
    game_version: str | None = None
    ddp_port: int = 12355
    results: str = "results"
    torch_threads: int = 1
    ranks: int = 1

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings of a configuration."""
        version = config.env_args.get("game_version", None)
        return cls(
            env=config.env,
            map_name=config.map_name,
            game_version=None if version is None else str(version),
            ddp_port=config.ddp_port,
            results=config.local_results_path,
            torch_threads=config.torch_threads,
            ranks=config.world_size or 1,
        )


@dataclass(frozen=True)
class Finding:
    """Result of a check: status, what was found, and a fix if one is needed."""

    OK: ClassVar[str] = "ok"
    WARNING: ClassVar[str] = "warning"
    MISSING: ClassVar[str] = "missing"

    mark: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        needed: environments that cannot be played without it; "all" means every one. fix: shown if the check itself
            fails.
    """

    name: str
    look: Callable[[Settings], Finding]
    needed: frozenset[str] = frozenset()
    fix: str = INSTALL


def ok(text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(Finding.OK, text)


def warning(text: str, fix: str) -> Finding:
    """Return a finding that limits runs."""
    return Finding(Finding.WARNING, text, fix)


def missing(text: str, fix: str) -> Finding:
    """Return a finding of something missing."""
    return Finding(Finding.MISSING, text, fix)


def listed(names: list[str], most: int = 6) -> str:
    """Return the first `most` names and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
