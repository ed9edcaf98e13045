"""The door to the real game. This version says what is missing; the game's back-end is a later version's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel

from omagd.envs.battle.args import SmacArgs
from omagd.utils.errors import UserError

RUNS_TODAY = "what runs today: --env-config=skirmish (same maps, same observations, no game needed)"


def game_folder() -> Path:
    """Return where StarCraft II is looked for: $SC2PATH, else ~/StarCraftII."""
    return Path(os.environ.get("SC2PATH") or "~/StarCraftII").expanduser()


def game_installed() -> bool:
    """Return whether a Linux build of StarCraft II lies in `game_folder()`."""
    return any((game_folder() / "Versions").glob("Base*/SC2_x64"))


class SC2Env:
    """The environment name `sc2`. Construction raises UserError: nothing here can drive the game yet.

    Args:
        args: the published keys. n_slots: number of games.
    """

    args_model: ClassVar[type[BaseModel]] = SmacArgs

    def __init__(self, args: SmacArgs, n_slots: int) -> None:
        if not game_installed():
            where = game_folder()
            raise UserError(
                f"env=sc2 needs StarCraft II: no Versions/Base*/SC2_x64 in {where}; install it or set SC2PATH",
                RUNS_TODAY,
            )
        raise UserError(
            f"env=sc2 (map {args.map_name}) cannot play yet: the game is there, its back-end comes in a later version",
            RUNS_TODAY,
        )
