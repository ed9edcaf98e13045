"""A stand-in for StarCraft II: a process that speaks the game's protocol, with the skirmish simulator behind it.

For tests only. Unmodified pysc2, SMAC and SMACv2 start it, connect to it and play on it as on the game::

    folder = sc2_stand_in.install(tmp_path / "StarCraftII")           # version="4.10" or "4.6.2"
    monkeypatch.setenv("SC2PATH", str(folder))
    ...
    sc2_stand_in.running(folder)                                       # pids of its processes: [] if nothing leaks

What it plays
- The 23 SMAC maps, by the name of the map file. Random seed of `RequestCreateGame` (0 if it has none) and the number
  of the battle in this game give the seed of a battle (`battle_seed`); the k-th battle of `Simulator(get_map(name), 1)`
  after `reset(..., seeds=[battle_seed(random_seed, k)])` is the same battle, bit for bit.
- When nobody is alive, the next step starts the next battle, with new tags. Allies' types are numbered from
  `FIRST_ALLY_TYPE` in SMAC's order of types; enemies have the game's own numbers (`world.TYPE_IDS`).
- Tags come in no order. Allies are listed in a scrambled order among the enemies; enemies in the simulator's order
  until the first step that plays, later the list is turned. Dead units are not listed.
- With SC2_STAND_IN_MAPS="mine=3m ..." the map file `mine`, as a user may have made it, is played as 3m.
- Other map files that are no SMAC map (SMACv2's `32x32_flat`, `10gen_*`) are empty fields of 32 x 32 cells: units come
  by debug commands `create_unit` (all of them before one step), and nothing comes back by itself. There are
  `N_UNIT_TYPES` types in the answer to `data`; the last nine are those of SMACv2's allies.
- One call of the simulator is 8 game loops; steps of other lengths are summed up until there are 8.
- The pathing grid has 1 bit per pixel, in version 4.6.2 (as in SMAC's other branch) 8 bits; heights have 8 bits.
- With SC2_STAND_IN_LINGER=1 a unit that dies in battle is listed for one more step, with health 0.
- With SC2_STAND_IN_ROUGH=1 the images show a ground full of holes and of any height; units walk as they do without.

How it ends: with its client, on `quit`, on SIGTERM, or when nobody has connected for `SC2_STAND_IN_WAIT` seconds (60).

Faults, by environment variable (all are read when the process starts; n counts step requests of the process, from 1):
- SC2_STAND_IN_DIE_AFTER=n     ends without an answer at the n-th step request (exit status 1)
- SC2_STAND_IN_HANG_AFTER=n    never answers the n-th step request, nor anything later
- SC2_STAND_IN_ERROR_AFTER=n   answers the n-th step request by an error
- SC2_STAND_IN_GARBLE_AFTER=n  answers the n-th step request by bytes that are no message
- SC2_STAND_IN_DIE_ON=name     ends at the first request of that name (create_game, join_game, game_info, debug, ...)
- SC2_STAND_IN_REFUSE=1        lives, but never listens; =exit ends at once with a line on stderr (exit status 3)
- SC2_STAND_IN_DELAY=seconds   listens only after that time
- SC2_STAND_IN_LATE_UNITS=n    the enemies of a battle appear only after n step requests
- SC2_STAND_IN_STAY=1          lives on when its client is gone (until WAIT is over), and takes the next one
- SC2_STAND_IN_ONCE=path       the faults above happen only in the process that creates this file, and writes its pid

Files, by environment variable:
- SC2_STAND_IN_RECORD=path     writes the battles of the game as a tape (`tape.py`) when the process ends
- SC2_STAND_IN_TAPE=path       plays the battles of a tape instead of the simulator; other orders are answered by errors
- SC2_STAND_IN_STATS=path      appends one JSON line at the end: pid, seconds (spent on answers), requests (by name)
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

BUILDS = {"4.10": 75689, "4.6.2": 69232}
FIRST_ALLY_TYPE = 1970
N_UNIT_TYPES = 1979
V2_MAPS = ("32x32_flat", "10gen_empty", "10gen_terran", "10gen_protoss", "10gen_zerg")


def install(folder: Path, version: str = "4.10") -> Path:
    """Put the stand-in and its maps under `folder`, as a game of that version; return `folder` ($SC2PATH)."""
    from omagd.envs.battle.maps import MAPS

    build = BUILDS[version]
    game = Path(folder) / "Versions" / f"Base{build}" / "SC2_x64"
    game.parent.mkdir(parents=True, exist_ok=True)
    game.write_text(_script(build))
    game.chmod(0o755)
    maps = Path(folder) / "Maps" / "SMAC_Maps"
    maps.mkdir(parents=True, exist_ok=True)
    for name in (*MAPS, *V2_MAPS):
        (maps / f"{name}.SC2Map").write_bytes(b"stand-in: " + name.encode())
    return Path(folder)


def _script(build: int) -> str:
    package = Path(importlib.util.find_spec("omagd").origin).parent
    homes = [str(Path(__file__).resolve().parents[1])]
    if package.name == "omagd":  # else it is installed in place, which the same Python knows
        homes.append(str(package.parent))
    python = f"{shlex.quote(sys.executable)} -m sc2_stand_in.server --build {build}"
    path = shlex.quote(os.pathsep.join(homes))
    return f'#!/bin/sh\nPYTHONPATH={path}:"$PYTHONPATH" OMP_NUM_THREADS=1 exec {python} "$@"\n'


def running(folder: Path) -> list[int]:
    """Return the pids of living stand-in processes that were started from `folder`."""
    mark = f"{Path(folder)}{os.sep}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue  # gone meanwhile
            if b"-dataDir" in words and mark in words:
                pids.append(int(entry.name))
    return sorted(pids)


def battle_seed(random_seed: int, number: int) -> int:
    """Return the seed of battle `number` (from 0) of a game that was created with `random_seed`."""
    return (random_seed * 1_000_003 + number * 7919) % 2**31
