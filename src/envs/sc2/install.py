"""The installed game: folder, builds, map files, names. Imports pysc2 only to look up versions."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.battle.backend import Terrain
from omagd.envs.battle.maps import is_custom
from omagd.utils.errors import UserError, require_extra

MAP_FOLDER = "SMAC_Maps"
RACES = {"T": "Terran", "P": "Protoss", "Z": "Zerg", "R": "Random"}

# Unit type numbers of the game; the units that the agents control have other numbers, defined by the maps.
GAME_TYPES = {
    4: "colossus", 9: "baneling", 48: "marine", 51: "marauder", 54: "medivac", 73: "zealot", 74: "stalker",
    98: "spine_crawler", 105: "zergling", 107: "hydralisk",
}  # fmt: skip


def map_path(name: str) -> str:
    """Return the file of the map `name` relative to the game's map folder, in the form that the game expects."""
    return f"{MAP_FOLDER}/{name}.SC2Map"


def map_data(game: Path, name: str) -> bytes:
    """Return the file of the map `name` of the game in the folder `game`. Errors: UserError if it is missing."""
    path = game / "Maps" / map_path(name)
    try:
        return path.read_bytes()
    except OSError:
        custom = is_custom(name)
        fix = "put the map of that package there" if custom else "get it with ./install_sc2.sh --maps-only"
        raise UserError(f"env_args.map_name={name}: the game has no file {path}; {fix}") from None


def read_terrain(facts: Any) -> Terrain:
    """Return the terrain in a ResponseGameInfo. Errors: ValueError for an image of the wrong size."""
    raw = facts.start_raw
    size = (raw.map_size.x, raw.map_size.y)
    low, high = raw.playable_area.p0, raw.playable_area.p1
    return Terrain(
        map_x=size[0],
        map_y=size[1],
        playable=(low.x, low.y, high.x, high.y),
        pathing=_pathing(raw.pathing_grid, size),
        height=(_upright(raw.terrain_height.data, size) / 255).astype(np.float32),
    )


def _pathing(image: Any, size: tuple[int, int]) -> np.ndarray:
    """Return [x, y] bool, walkable cells. Since about 4.8: one bit per cell, 1 is walkable; before: one byte, 0 is."""
    if image.bits_per_pixel == 1:
        bits = np.unpackbits(np.frombuffer(image.data, np.uint8))
        return np.ascontiguousarray(bits.reshape(size).T.astype(bool))
    return _upright(image.data, size) == 0


def _upright(data: bytes, size: tuple[int, int]) -> np.ndarray:
    """Return [x, y] uint8 of an image whose first row is the highest y."""
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(size).T[:, ::-1])


RUNS_TODAY = "what runs without the game: --env-config=skirmish (same maps, same observations)"
INSTALL = "./install_sc2.sh"
MODULES = ("pysc2", "s2clientprotocol", "google", "websocket", "absl")  # packages of the extra `full`
LATEST = "latest"  # pysc2's and SMAC's name of the newest installed version


def game_folder() -> Path:
    """Return the folder of StarCraft II: $SC2PATH, else ~/StarCraftII."""
    return Path(os.environ.get("SC2PATH") or "~/StarCraftII").expanduser()


def builds() -> list[int]:
    """Return the builds of the Linux game in `game_folder()`, ascending."""
    programs = (game_folder() / "Versions").glob("Base*/SC2_x64")
    return sorted(int(path.parent.name[4:]) for path in programs if path.parent.name[4:].isdigit())


def build_of(game_version: str | None) -> int:
    """Return the build of `game_version` ("4.10" is 4.10.0); the newest installed for None or "latest".

    Errors: UserError without a game, for an unknown version, or if its build is not installed.
    """
    require_extra("StarCraft II", "full", *MODULES)
    found, where = builds(), game_folder()
    if not found:
        raise UserError(
            f"env=sc2 needs StarCraft II: no Versions/Base*/SC2_x64 in {where}; {INSTALL} gets it, SC2PATH says where;"
            f" {RUNS_TODAY}"
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
    importlib.import_module("omagd.envs.sc2.client")  # creates the protobuf modules that pysc2 imports
    from pysc2.run_configs import lib

    return {version: int(entry.build_version) for version, entry in lib.VERSIONS.items()}
