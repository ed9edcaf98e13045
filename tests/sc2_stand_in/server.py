"""The stand-in's process: listens like the game and passes requests to `Game`."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from sc2_stand_in.wire import Connection, Gone

if TYPE_CHECKING:
    from sc2_stand_in.game import Game

PREFIX = "SC2_STAND_IN_"
NO_FAULTS = {"STAY", "MAPS", "ROUGH", "LINGER", "RECORD", "TAPE"}
WAIT = 60.0  # seconds without a client after which the process ends


def read_settings() -> dict[str, str]:
    """Return the variables of the environment; without faults if another process got them (ONCE)."""
    settings = {key.removeprefix(PREFIX): value for key, value in os.environ.items() if key.startswith(PREFIX)}
    if "ONCE" in settings:
        try:
            with open(settings["ONCE"], "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return {key: value for key, value in settings.items() if key in NO_FAULTS}
    return settings


def serve(listener: socket.socket, game: Game, stay: bool) -> None:
    """Serve clients one after another until one quits, or goes. Errors: TimeoutError if nobody connects."""
    while True:
        sock, _ = listener.accept()
        with sock:
            try:
                connection = Connection(sock)
            except (Gone, OSError):
                continue
            try:
                while (reply := game.answer(connection.receive())) is not None:
                    connection.answer(reply)
                return
            except Gone:
                if not stay:
                    return


def listen(host: str, port: int, settings: dict[str, str]) -> socket.socket:
    """Return the listening socket; late or never on request."""
    if settings.get("REFUSE") == "exit":
        print("stand-in: asked not to start", file=sys.stderr, flush=True)
        os._exit(3)
    if "REFUSE" in settings:
        time.sleep(WAIT)
        os._exit(3)
    time.sleep(float(settings.get("DELAY", 0)))
    listener = socket.create_server((host, port), backlog=4)
    listener.settimeout(WAIT)
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
    settings = read_settings()
    listener = listen(options.listen, options.port, settings)
    from sc2_stand_in.game import Game  # slow: imported while the client connects

    if "TAPE" not in settings:
        import battle_toys  # noqa: F401  # slow, too: Numba, for which no request shall wait
    game = Game(options.build, settings)
    signal.signal(signal.SIGTERM, stop)
    try:
        serve(listener, game, "STAY" in settings)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        game.finish()


if __name__ == "__main__":
    main()
