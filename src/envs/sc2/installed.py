"""Where StarCraft II lies and which builds there are, without starting or importing anything of it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from omagd.utils.errors import UserError

RUNS_TODAY = "what runs without the game: --env-config=skirmish (same maps, same observations)"
INSTALL = "./install_sc2.sh"
LATEST = "latest"  # as pysc2 and SMAC name the newest version that is installed


def game_folder() -> Path:
    """Return where StarCraft II is looked for: $SC2PATH, else ~/StarCraftII."""
    return Path(os.environ.get("SC2PATH") or "~/StarCraftII").expanduser()


def builds() -> list[int]:
    """Return the builds of the Linux game in `game_folder()`, ascending."""
    programs = (game_folder() / "Versions").glob("Base*/SC2_x64")
    return sorted(int(path.parent.name[4:]) for path in programs if path.parent.name[4:].isdigit())


def build_of(game_version: str | None) -> int:
    """Return the build that is played: that of `game_version` ("4.10" is 4.10.0); the newest for None or "latest".

    Errors: UserError when there is no game, when the version is unknown, or when its build is not installed.
    """
    found, where = builds(), game_folder()
    if not found:
        raise UserError(
            f"env=sc2 needs StarCraft II: no Versions/Base*/SC2_x64 in {where}; {INSTALL} gets it, SC2PATH says where",
            RUNS_TODAY,
        )
    if game_version is None or game_version == LATEST:
        return found[-1]
    known = known_versions()
    version = game_version + ".0" * (game_version.count(".") == 1)
    if version not in known:
        raise UserError(
            f"env_args.game_version={game_version} is no version that pysc2 knows; use 4.10, or latest for the newest"
        )
    if known[version] not in found:
        there = " ".join(f"Base{build}" for build in found)
        short = version.removesuffix(".0")
        raise UserError(
            f"env_args.game_version={game_version}: no Base{known[version]} in {where}/Versions (there: {there});"
            f" SC2PATH=(a folder of its own) {INSTALL} --version {short} gets it"
        )
    return known[version]


def known_versions() -> dict[str, int]:
    """Return version -> build as pysc2 lists them."""
    importlib.import_module("omagd.envs.sc2.protocol")  # pysc2 takes the messages that it makes
    from pysc2.run_configs import lib

    return {version: int(entry.build_version) for version, entry in lib.VERSIONS.items()}
