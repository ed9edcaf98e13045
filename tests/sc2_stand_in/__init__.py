"""A stand-in for StarCraft II: a process that speaks the game's protocol, with the skirmish simulator behind it.

For tests only. Unmodified pysc2, SMAC and SMACv2 start it, connect to it and play on it. The fixture `sc2_game`
installs it; `install` puts a version "4.10" or "4.6.2" into a folder.

What it plays
- The 23 SMAC maps, by the name of the map file. The random seed of `RequestCreateGame` and the number of the battle in
  this game give the seed of a battle (`battle_seed`): battle k is that of `Simulator(get_map(name), 1)` after
  `reset(..., seeds=[battle_seed(random_seed, k)])`, bit for bit. When nobody is alive, the next step starts the next.
- Tags change with each battle and come in no order. Allies' types are numbered from `FIRST_ALLY_TYPE` in SMAC's order
  of types. Allies are listed in a scrambled order among the enemies, enemies in the simulator's order until the first
  step that plays; later the list is rotated. Dead units are not listed.
- Other map files (SMACv2's `32x32_flat`, `10gen_*`) are empty fields of 32 x 32 cells: units come by debug commands
  `create_unit`, all of them before one step. The last nine types in the answer to `data` are those of SMACv2's allies.
- One call of the simulator is 8 game loops; steps of other lengths are summed up until there are 8.
- The pathing grid has 1 bit per pixel, in version 4.6.2 8 bits; heights have 8 bits.
- It ends with its client, on `quit`, on SIGTERM, or when nobody has connected for 60 seconds.

Environment variables SC2_STAND_IN_<name>, read when the process starts (n counts its step requests from 1):
- DIE_AFTER=n, HANG_AFTER=n, ERROR_AFTER=n, GARBLE_AFTER=n: at the n-th step request end without an answer, never answer
  again, answer with an error, answer with bytes that are no message
- REFUSE=1: live, but never listen; REFUSE=exit: end at once with a line on stderr (exit status 3)
- DELAY=seconds: listen only after that time. LATE_UNITS=n: the enemies of a battle appear only after n step requests
- ONCE=path: the faults above happen only in the process that creates this file and writes its pid
- STAY=1: live on when the client is gone, and accept the next one
- MAPS="mine=3m ...": play the map file `mine`, as a user may have made it, as 3m
- LINGER=1: list a unit that dies in battle for one more step, with health 0
- ROUGH=1: the images show a ground full of holes and of any height; units walk as they do without
- RECORD=path: write the battles as a tape (`tape.py`) at the end. TAPE=path: play the battles of a tape instead of the
  simulator; other orders are answered with errors
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from sockets import living

BUILDS = {"4.10": 75689, "4.6.2": 69232}
FIRST_ALLY_TYPE = 1970
N_UNIT_TYPES = 1979
V2_MAPS = ("32x32_flat", "10gen_empty", "10gen_terran", "10gen_protoss", "10gen_zerg")


def install(folder: Path, version: str = "4.10") -> Path:
    """Put the stand-in and its maps under `folder`, as a game of that version; return `folder` ($SC2PATH)."""
    from omagd.envs.battle.compiled.engine import compiled
    from omagd.envs.battle.maps import MAPS

    compiled()  # here, since nobody waits for a game that compiles
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
    words = {b"-dataDir", f"{folder}{os.sep}".encode()}
    return sorted(pid for pid, process in living().items() if words <= set(process.line.split(b"\0")))


def battle_seed(random_seed: int, number: int) -> int:
    """Return the seed of battle `number` (from 0) of a game that was created with `random_seed`."""
    return (random_seed * 1_000_003 + number * 7919) % 2**31
