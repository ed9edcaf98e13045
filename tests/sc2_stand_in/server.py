"""The stand-in's process: listens like the game, answers its client's requests, and fails on request."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sc2_stand_in import BUILDS, N_UNIT_TYPES, battle_seed
from sc2_stand_in.tape import REQUESTS
from sc2_stand_in.wire import Connection, Gone

LAUNCHED, IN_GAME = 1, 3
DIFFICULTIES = "0123456789A"
GARBAGE = b"\x0a\xff\xff\xff\xff\x0f"  # a field that is longer than the message: no protobuf message
VERSION = {build: version for version, build in BUILDS.items()}


class Faults:
    """What shall go wrong, from the environment."""

    def __init__(self) -> None:
        def number(name: str) -> float:
            return float(os.environ.get(f"SC2_STAND_IN_{name}", 0))

        once = os.environ.get("SC2_STAND_IN_ONCE")
        mine = once is None or _create(once)
        self.die_after, self.hang_after, self.error_after, self.garble_after = (
            int(number(name)) * mine for name in ("DIE_AFTER", "HANG_AFTER", "ERROR_AFTER", "GARBLE_AFTER")
        )
        self.die_on = os.environ.get("SC2_STAND_IN_DIE_ON") if mine else None
        self.refuse = os.environ.get("SC2_STAND_IN_REFUSE") if mine else None
        self.delay, self.late_units = number("DELAY") * mine, int(number("LATE_UNITS")) * mine
        self.stay, self.wait = bool(number("STAY")), number("WAIT") or 60.0


def _create(path: str) -> bool:
    """Return whether this process is the one that makes the file, which then holds its id."""
    try:
        with open(path, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


class Game:
    """Answers requests.

    Args:
        build: number of the game's build. faults: what shall go wrong.
    """

    def __init__(self, build: int, faults: Faults) -> None:
        from sc2_stand_in import messages, world

        self._messages, self._new_world = messages.load(), world.World
        self._build, self._faults = build, faults
        self._status, self._world, self._steps = LAUNCHED, None, 0
        self._requests: Counter[str] = Counter()
        self._busy, self._in_battle = 0.0, False

    def timed_answer(self, data: bytes) -> bytes | None:
        """Return `answer(data)`; the time that it takes counts as time of the game."""
        start = time.perf_counter()
        reply = self.answer(data)
        self._busy += time.perf_counter() - start
        return reply

    def answer(self, data: bytes) -> bytes | None:
        """Return the serialized response to a serialized request, None for the last one."""
        request = self._messages.Request.FromString(data)
        name = request.WhichOneof("request")
        self._requests[name] += 1
        if name == self._faults.die_on:
            os._exit(1)
        if name == "quit":
            return None
        response = self._messages.Response(id=request.id)
        handler = getattr(self, f"_do_{name}", None)
        if handler is None:
            response.error.append(f"the stand-in does not know the request {name}")
        elif self._world is None and name in ("observation", "step", "action", "debug", "data", "game_info"):
            response.error.append(f"{name}: no game runs")
        else:
            self._note(name, getattr(request, name))
            handler(getattr(request, name), getattr(response, name), response)
            if name == "create_game":
                self._note(name, request.create_game)
        response.status = self._status
        garbled = name == "step" and self._steps == self._faults.garble_after
        return GARBAGE if garbled else response.SerializeToString()

    def _note(self, name: str, content: Any) -> None:
        """Record a request unless it belongs to an agent step (action, step, observation) or only draws lines."""
        writer = self._world.writer if self._world is not None else None
        self._in_battle |= name == "action"
        draws = name == "debug" and all(command.HasField("draw") for command in content.debug)
        if writer is not None and name in REQUESTS and not self._in_battle and not draws:
            writer.asked(name, content)
        self._in_battle &= name != "observation"

    def _do_ping(self, request: Any, reply: Any, response: Any) -> None:
        reply.game_version = f"{VERSION[self._build]}.{self._build}"
        reply.data_build = reply.base_build = self._build

    def _do_create_game(self, request: Any, reply: Any, response: Any) -> None:
        computer = next(p for p in request.player_setup if p.type == 2)
        tape = os.environ.get("SC2_STAND_IN_TAPE")
        self._map = request.local_map.map_path.rpartition("/")[2].removesuffix(".SC2Map")
        custom = dict(pair.split("=") for pair in os.environ.get("SC2_STAND_IN_MAPS", "").split())
        self._world = self._new_world(
            custom.get(self._map, self._map), request.random_seed, DIFFICULTIES[computer.difficulty], self._messages,
            Path(tape) if tape else None, "SC2_STAND_IN_RECORD" in os.environ, "SC2_STAND_IN_ROUGH" in os.environ,
            "SC2_STAND_IN_LINGER" in os.environ,
        )  # fmt: skip
        self._seed, self._status = request.random_seed, 2

    def _do_join_game(self, request: Any, reply: Any, response: Any) -> None:
        reply.player_id, self._status = 1, IN_GAME

    def _do_game_info(self, request: Any, reply: Any, response: Any) -> None:
        import numpy as np

        terrain, start = self._world.terrain, reply.start_raw
        reply.map_name, reply.local_map_path = self._map, f"{self._map}.SC2Map"
        start.map_size.x, start.map_size.y = terrain.map_x, terrain.map_y
        area = [int(edge) for edge in terrain.playable]
        start.playable_area.p0.x, start.playable_area.p0.y = area[:2]
        start.playable_area.p1.x, start.playable_area.p1.y = area[2:]
        heights = np.rint(terrain.height.T[::-1].astype(np.float64) * 255).astype(np.uint8)
        self._image(start.terrain_height, 8, heights)
        if VERSION[self._build] == "4.6.2":
            self._image(start.pathing_grid, 8, np.where(terrain.pathing.T[::-1], 0, 255).astype(np.uint8))
        else:
            self._image(start.pathing_grid, 1, np.packbits(terrain.pathing.T, axis=1))

    def _image(self, image: Any, bits: int, rows: Any) -> None:
        """Write [map_y, bytes of a row] as image of `bits` per pixel."""
        image.bits_per_pixel, image.data = bits, rows.tobytes()
        image.size.x, image.size.y = self._world.terrain.map_x, self._world.terrain.map_y

    def _do_observation(self, request: Any, reply: Any, response: Any) -> None:
        reply.observation.game_loop = self._world.loop
        reply.observation.player_common.player_id = 1
        late = getattr(self._world, "steps_of_battle", 0) < self._faults.late_units
        self._world.show(reply.observation.raw_data.units, hide_enemies=late)

    def _do_step(self, request: Any, reply: Any, response: Any) -> None:
        self._steps += 1
        if self._steps == self._faults.die_after:
            os._exit(1)
        if self._steps == self._faults.hang_after:
            time.sleep(self._faults.wait)
            os._exit(2)
        if self._steps == self._faults.error_after:
            response.error.append("the stand-in was asked to fail")
            return
        try:
            self._world.step(request.count or 1)
        except ValueError as error:
            response.error.append(str(error))
        reply.simulation_loop = self._world.loop

    def _do_action(self, request: Any, reply: Any, response: Any) -> None:
        for action in request.actions:
            reply.result.append(self._world.order(action.action_raw.unit_command))

    def _do_debug(self, request: Any, reply: Any, response: Any) -> None:
        for command in request.debug:
            if command.HasField("kill_unit"):
                self._world.kill(command.kill_unit.tag)
            elif command.HasField("create_unit"):
                try:
                    self._world.create(command.create_unit)
                except ValueError as error:
                    response.error.append(str(error))

    def _do_data(self, request: Any, reply: Any, response: Any) -> None:
        for number in range(N_UNIT_TYPES):
            reply.units.add(unit_id=number, name=f"type {number}", available=True, movement_speed=3.15)

    def _do_save_replay(self, request: Any, reply: Any, response: Any) -> None:
        reply.data = json.dumps(
            {"map": self._map, "random_seed": self._seed, "battles": self._world.battles, "loop": self._world.loop,
             "first_battle": battle_seed(self._seed, 0)}
        ).encode()  # fmt: skip

    def _do_leave_game(self, request: Any, reply: Any, response: Any) -> None:
        self._world, self._status = None, LAUNCHED

    def _do_available_maps(self, request: Any, reply: Any, response: Any) -> None:
        reply.local_map_paths.append("SMAC_Maps/3m.SC2Map")

    def finish(self) -> None:
        """Write the files that the environment asks for."""
        if "SC2_STAND_IN_RECORD" in os.environ and self._world is not None:
            self._world.writer.save(Path(os.environ["SC2_STAND_IN_RECORD"]))
        if "SC2_STAND_IN_STATS" in os.environ:
            line = {"pid": os.getpid(), "seconds": self._busy, "requests": dict(self._requests)}
            with open(os.environ["SC2_STAND_IN_STATS"], "a") as file:
                file.write(json.dumps(line) + "\n")


def serve(listener: socket.socket, game: Game, faults: Faults) -> None:
    """Serve clients one after another until one says quit, or goes. Errors: TimeoutError if nobody comes."""
    while True:
        sock, _ = listener.accept()
        try:
            connection = Connection(sock)
        except Gone:
            sock.close()
            continue
        try:
            while (reply := game.timed_answer(connection.receive())) is not None:
                connection.send(reply)
            return
        except Gone:
            if not faults.stay:
                return
        finally:
            connection.close()


def listen(options: SimpleNamespace, faults: Faults) -> socket.socket:
    """Return the listening socket, late or never on request."""
    if faults.refuse == "exit":
        print("stand-in: asked not to start", file=sys.stderr, flush=True)
        os._exit(3)
    if faults.refuse:
        time.sleep(faults.wait)
        os._exit(3)
    time.sleep(faults.delay)
    listener = socket.socket(socket.AF_INET6 if ":" in options.listen else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.listen, options.port))
    except OSError as error:
        print(f"stand-in: port {options.port}: {error}", file=sys.stderr, flush=True)
        os._exit(4)
    listener.listen(4)
    listener.settimeout(faults.wait)
    return listener


def stop(number: int, frame: Any) -> None:
    """End at the first SIGTERM, but not before the files are written."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    """Run one process of the stand-in."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-listen", default="127.0.0.1")
    parser.add_argument("-port", type=int, required=True)
    parser.add_argument("--build", type=int, required=True)
    options, _ = parser.parse_known_args()
    with open("/proc/self/comm", "w") as name:
        name.write("SC2_x64")
    faults = Faults()
    listener = listen(options, faults)
    game = Game(options.build, faults)
    signal.signal(signal.SIGTERM, stop)
    try:
        serve(listener, game, faults)
    except TimeoutError:
        print("stand-in: nobody came", file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        game.finish()


if __name__ == "__main__":
    main()
