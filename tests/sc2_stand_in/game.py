"""The stand-in's game: answers requests, and fails on request."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from omagd.envs.sc2.client import sc_pb
from sc2_stand_in import BUILDS, N_UNIT_TYPES, battle_seed
from sc2_stand_in.server import WAIT
from sc2_stand_in.tape import REQUESTS
from sc2_stand_in.world import World

LAUNCHED, INIT_GAME, IN_GAME = 1, 2, 3
COMPUTER = 2
DIFFICULTIES = "0123456789A"
GARBAGE = b"\x0a\xff\xff\xff\xff\x0f"  # a field that is longer than the message: no protobuf message
NEED_NO_WORLD = ("ping", "create_game", "join_game")


class Game:
    """Answers requests.

    Args:
        build: number of the game's build. settings: faults and files, by the names of the variables.
    """

    def __init__(self, build: int, settings: dict[str, str]) -> None:
        self._version = next(version for version, number in BUILDS.items() if number == build)
        self._build, self._settings = build, settings
        self._status, self._steps, self._in_battle = LAUNCHED, 0, False
        self._world: World | None = None

    def _now(self, fault: str) -> bool:
        """Return whether this step request is the one that the fault hits."""
        return self._steps == int(self._settings.get(fault, 0))

    def answer(self, data: bytes) -> bytes | None:
        """Return the serialized response to a serialized request, None for the last one."""
        request = sc_pb.Request.FromString(data)
        name = request.WhichOneof("request")
        if name == "quit":
            return None
        response = sc_pb.Response(id=request.id)
        handler = getattr(self, f"_do_{name}", None)
        if handler is None:
            response.error.append(f"the stand-in does not know the request {name}")
        elif self._world is None and name not in NEED_NO_WORLD:
            response.error.append(f"{name}: no game runs")
        else:
            content = getattr(request, name)
            if name != "create_game":
                self._record(name, content)
            try:
                handler(content, getattr(response, name))
            except ValueError as error:
                response.error.append(str(error))
            if name == "create_game":
                self._record(name, content)
        response.status = self._status
        return GARBAGE if name == "step" and self._now("GARBLE_AFTER") else response.SerializeToString()

    def _record(self, name: str, content: Any) -> None:
        """Record a request unless it belongs to an agent step (action, step, observation) or only draws lines."""
        writer = self._world.writer if self._world is not None else None
        self._in_battle |= name == "action"
        draws = name == "debug" and all(command.HasField("draw") for command in content.debug)
        if writer is not None and name in REQUESTS and not self._in_battle and not draws:
            writer.asked(name, content)
        self._in_battle &= name != "observation"

    def _do_ping(self, request: Any, reply: Any) -> None:
        reply.game_version = f"{self._version}.{self._build}"
        reply.data_build = reply.base_build = self._build

    def _do_create_game(self, request: Any, reply: Any) -> None:
        computer = next(player for player in request.player_setup if player.type == COMPUTER)
        self._map = Path(request.local_map.map_path).stem
        custom = dict(pair.split("=") for pair in self._settings.get("MAPS", "").split())
        name, difficulty = custom.get(self._map, self._map), DIFFICULTIES[computer.difficulty]
        self._world = World(name, request.random_seed, difficulty, self._settings)
        self._seed, self._status = request.random_seed, INIT_GAME

    def _do_join_game(self, request: Any, reply: Any) -> None:
        reply.player_id, self._status = 1, IN_GAME

    def _do_game_info(self, request: Any, reply: Any) -> None:
        terrain, start = self._world.terrain, reply.start_raw
        reply.map_name, reply.local_map_path = self._map, f"{self._map}.SC2Map"
        start.map_size.x, start.map_size.y = terrain.map_x, terrain.map_y
        low, high = start.playable_area.p0, start.playable_area.p1
        low.x, low.y, high.x, high.y = (int(edge) for edge in terrain.playable)
        heights = np.rint(terrain.height.T[::-1].astype(np.float64) * 255).astype(np.uint8)
        self._image(start.terrain_height, 8, heights)
        if self._version == "4.6.2":
            self._image(start.pathing_grid, 8, np.where(terrain.pathing.T[::-1], 0, 255).astype(np.uint8))
        else:
            self._image(start.pathing_grid, 1, np.packbits(terrain.pathing.T, axis=1))

    def _image(self, image: Any, bits: int, rows: np.ndarray) -> None:
        """Write [map_y, bytes of a row] as image of `bits` per pixel."""
        image.bits_per_pixel, image.data = bits, rows.tobytes()
        image.size.x, image.size.y = self._world.terrain.map_x, self._world.terrain.map_y

    def _do_observation(self, request: Any, reply: Any) -> None:
        reply.observation.game_loop = self._world.loop
        reply.observation.player_common.player_id = 1
        late = self._world.steps_of_battle < int(self._settings.get("LATE_UNITS", 0))
        self._world.show(reply.observation.raw_data.units, hide_enemies=late)

    def _do_step(self, request: Any, reply: Any) -> None:
        self._steps += 1
        if self._now("DIE_AFTER"):
            os._exit(1)
        if self._now("HANG_AFTER"):
            time.sleep(WAIT)
            os._exit(2)
        if self._now("ERROR_AFTER"):
            raise ValueError("the stand-in was asked to fail")
        self._world.step(request.count or 1)
        reply.simulation_loop = self._world.loop

    def _do_action(self, request: Any, reply: Any) -> None:
        reply.result.extend(self._world.order(action.action_raw.unit_command) for action in request.actions)

    def _do_debug(self, request: Any, reply: Any) -> None:
        for command in request.debug:
            if command.HasField("kill_unit"):
                self._world.kill(command.kill_unit.tag)
            elif command.HasField("create_unit"):
                self._world.create(command.create_unit)

    def _do_data(self, request: Any, reply: Any) -> None:
        for number in range(N_UNIT_TYPES):
            reply.units.add(unit_id=number, name=f"type {number}", available=True, movement_speed=3.15)

    def _do_save_replay(self, request: Any, reply: Any) -> None:
        facts = {"map": self._map, "random_seed": self._seed, "first_battle": battle_seed(self._seed, 0)}
        reply.data = json.dumps({**facts, "battles": self._world.battles, "loop": self._world.loop}).encode()

    def finish(self) -> None:
        """Write the tape that the environment asks for."""
        if "RECORD" in self._settings and self._world is not None:
            self._world.writer.save(Path(self._settings["RECORD"]))
