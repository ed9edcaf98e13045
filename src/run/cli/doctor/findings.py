"""Types of the doctor: settings, checks, findings. Imports nothing that may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from omagd.config.schema import Config

INSTALL = "pip install -e . -c constraints.txt"


@dataclass(frozen=True)
class Settings:
    """The keys of the configuration that the checks read, and the game's version in `env_args`."""

    env: str = "skirmish"
    map_name: str = ""
    ddp_port: int = 12355
    local_results_path: str = "results"
    torch_threads: int = 1
    world_size: int | None = None
    batch_size_run: int = 8
    env_processes: bool = False
    game_version: str | None = None

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return the settings of a configuration."""
        version = config.env_args.get("game_version", None)
        keys = [field.name for field in fields(cls) if field.name != "game_version"]
        given = {key: getattr(config, key) for key in keys}
        return cls(**given, game_version=None if version is None else str(version))


@dataclass(frozen=True)
class Finding:
    """Result of a check: what was found, and a fix if one is needed."""

    mark: Literal["ok", "warning", "missing"]
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
    return Finding("ok", text)


def warning(text: str, fix: str) -> Finding:
    """Return a finding that limits runs."""
    return Finding("warning", text, fix)


def missing(text: str, fix: str) -> Finding:
    """Return a finding of something missing."""
    return Finding("missing", text, fix)
