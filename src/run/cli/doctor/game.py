"""StarCraft II: where it is, which versions, which maps, and whether it could listen."""

from __future__ import annotations

import os

from omagd.envs.sc2.install import INSTALL, build_of, builds, game_folder
from omagd.run.cli.doctor.findings import Finding, Settings, listed, missing, ok, warning

GET_MAPS = f"{INSTALL} --maps-only"


def game(settings: Settings) -> Finding:
    """Look for the game's builds."""
    from omagd.run.reporting.card import game_name

    where, said = game_folder(), "SC2PATH" if os.environ.get("SC2PATH") else "SC2PATH is not set"
    found = builds()
    if not found:
        what = "no Versions/Base*/SC2_x64" if where.is_dir() else "no such folder"
        return missing(f"{where} ({said}): {what}", f"{INSTALL} gets the game, SC2PATH says where it is")
    stuck = [build for build in found if not os.access(where / f"Versions/Base{build:05d}/SC2_x64", os.X_OK)]
    if stuck:
        return missing(f"{where} ({said}): Base{stuck[0]} may not be executed", f"chmod +x {where}/Versions/*/SC2_x64")
    chosen = game_name(build_of(settings.game_version))
    others = [game_name(build).removeprefix("StarCraft II ") for build in found if game_name(build) != chosen]
    return ok(f"{where} ({said}): {chosen} is played" + (f"; also there: {', '.join(others)}" if others else ""))


def smac_maps(settings: Settings) -> Finding:
    """Look for the files of SMAC's maps."""
    from omagd.envs.battle.maps import MAPS, is_custom

    chosen = settings.map_name if settings.env == "sc2" else ""
    names = [spec.game_file for spec in MAPS.values()]
    return _maps([*names, chosen] if chosen and is_custom(chosen) else names, chosen)


def smacv2_maps(_settings: Settings) -> Finding:
    """Look for the field of SMACv2's battles."""
    from omagd.envs.battle.args import FIELD

    return _maps([FIELD], FIELD)


def game_port(_settings: Settings) -> Finding:
    """Look whether a game would find a port."""
    from omagd.envs.sc2.resources import claimed_port

    with claimed_port() as port:
        return ok(f"a game could listen at {port}")


def _maps(names: list[str], chosen: str) -> Finding:
    from omagd.envs.sc2.install import map_path

    folder = game_folder() / "Maps"
    lacking = [name for name in names if not (folder / map_path(name)).is_file()]
    text = f"{len(names) - len(lacking)} of {len(names)} in {(folder / map_path('x')).parent}"
    if not lacking:
        return ok(text)
    text = f"{text}, not there: {listed(lacking)}"
    return missing(text, GET_MAPS) if chosen in lacking or len(lacking) == len(names) else warning(text, GET_MAPS)
