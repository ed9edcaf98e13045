"""What a check finds, and what of the configuration the checks look at. Imports nothing that may be missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from omagd.config.schema import Config

INSTALL = "pip install -e . -c constraints.txt"


@dataclass(frozen=True)
class Settings:
    """What is asked about.

    Attributes:
        env, map_name, game_version: what is to be played. ddp_port, results, torch_threads: as in the configuration.
        ranks, environments: how many there will be on this machine; environments of one rank.
    """

    env: str = "skirmish"
    map_name: str = ""
    game_version: str | None = None
    ddp_port: int = 12355
    results: str = "results"
    torch_threads: int = 1
    ranks: int = 1
    environments: int = 8

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Return what a configuration asks for."""
        version = config.env_args.get("game_version", None)
        return cls(
            env=config.env,
            map_name=config.map_name,
            game_version=None if version is None else str(version),
            ddp_port=config.ddp_port,
            results=config.local_results_path,
            torch_threads=config.torch_threads,
            ranks=config.world_size or 1,
            environments=config.batch_size_run,
        )


@dataclass(frozen=True)
class Finding:
    """What one check has found: a mark, the facts, and the mend where there is something to mend."""

    OK: ClassVar[str] = "ok"
    WARNING: ClassVar[str] = "warning"
    MISSING: ClassVar[str] = "missing"

    mark: str
    text: str
    mend: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Attributes:
        name: how the line is called. look: finds. needed: environments that cannot do without; "all" stands for every.
        mend: what helps when looking itself fails.
    """

    name: str
    look: Callable[[Settings], Finding]
    needed: frozenset[str] = frozenset()
    mend: str = INSTALL


def ok(text: str) -> Finding:
    """Return that all is well."""
    return Finding(Finding.OK, text)


def warning(text: str, mend: str) -> Finding:
    """Return that it works, but."""
    return Finding(Finding.WARNING, text, mend)


def missing(text: str, mend: str) -> Finding:
    """Return that something is not there."""
    return Finding(Finding.MISSING, text, mend)


def listed(names: list[str], most: int = 6) -> str:
    """Return names in a row, the first `most` of them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
