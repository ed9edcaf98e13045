"""SMAC's maps as files of the game, and the game's words for races and difficulties.

The maps are not entered into pysc2's register, which knows each name once only and breaks where SMAC and SMACv2, which
share names, are both imported.
"""

from __future__ import annotations

from pathlib import Path

from omagd.envs.battle.custom_maps import is_custom
from omagd.utils.errors import UserError

MAP_FOLDER = "SMAC_Maps"
RACES = {"T": "Terran", "P": "Protoss", "Z": "Zerg", "R": "Random"}
DIFFICULTIES = {
    "1": "VeryEasy",
    "2": "Easy",
    "3": "Medium",
    "4": "MediumHard",
    "5": "Hard",
    "6": "Harder",
    "7": "VeryHard",
    "8": "CheatVision",
    "9": "CheatMoney",
    "A": "CheatInsane",
}

# Unit types of the game by number; SMAC's own units, which the agents control, have numbers of their own.
GAME_TYPES = {
    4: "colossus",
    9: "baneling",
    48: "marine",
    51: "marauder",
    54: "medivac",
    73: "zealot",
    74: "stalker",
    98: "spine_crawler",
    105: "zergling",
    107: "hydralisk",
}


def map_path(name: str) -> str:
    """Return the file of the map `name` below the game's folder of maps, as the game wants to hear it."""
    return f"{MAP_FOLDER}/{name}.SC2Map"


def map_data(game: Path, name: str) -> bytes:
    """Return the content of the map `name` of the game in the folder `game`. Errors: UserError when it is missing."""
    path = game / "Maps" / map_path(name)
    try:
        return path.read_bytes()
    except OSError:
        custom = is_custom(name)
        fix = "put the map of that package there" if custom else "get it with ./install_sc2.sh --maps-only"
        raise UserError(f"env_args.map_name={name}: the game has no file {path}; {fix}") from None


def require_map(game: Path, name: str) -> None:
    """Raise UserError unless the file of the map `name` is there."""
    if not (game / "Maps" / map_path(name)).is_file():
        map_data(game, name)
