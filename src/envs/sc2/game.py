"""One StarCraft II process: started with a deadline and retries, and ended with the process that owns it."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import websocket
from google.protobuf.message import DecodeError, Message

from omagd.envs.battle.args import SmacArgs
from omagd.envs.battle.maps import MapSpec
from omagd.envs.sc2.client import common_pb, sc_pb
from omagd.envs.sc2.install import RACES, build_of, game_folder, map_data, map_path
from omagd.utils.errors import UserError
from omagd.utils.storage import temporary_folder

# isort: split
# pysc2 takes the messages that omagd.envs.sc2.client has made.
from pysc2 import run_configs
from pysc2.lib import sc_process

HOST = "127.0.0.1"
# Above the range of pysc2's port picker, below that of Linux for outgoing connections.
LOWEST, HIGHEST = 25000, 32000
TRIES = 1000  # of ports
ATTEMPTS = 5
QUIT_SECONDS = 2.0
LAST_WORDS = 300  # bytes of the log of a game that has died
_QUIT = sc_pb.Request(quit=sc_pb.RequestQuit()).SerializeToString()
_parse = sc_pb.Response.FromString
_NEEDED = ("ping", "game_info", "data", "save_replay")  # requests whose answers are read
LOG = logging.getLogger("omagd.sc2")

# Runs in a new Python process that becomes the game: the kernel shall kill it when the thread that started it ends.
# Restores the signal handlers that Python has changed.
_FOLLOW_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


class GameLost(Exception):
    """The game has died, hangs, or refuses a request: the current battle is void."""


def requests(spec: MapSpec, difficulty: str, seed: int) -> tuple[Message, Message]:
    """Return the requests that load a map and join as the first player. Errors: UserError if its file is missing.

    difficulty: SMAC's scale. seed: of the game, 0 to 2**31 - 1.
    """
    ally_race, enemy_race = (common_pb.Race.Value(RACES[race]) for race in (spec.a_race, spec.b_race))
    local_map = sc_pb.LocalMap(map_path=map_path(spec.game_file), map_data=map_data(game_folder(), spec.game_file))
    create = sc_pb.RequestCreateGame(local_map=local_map, realtime=False, random_seed=seed)
    create.player_setup.add(type=sc_pb.Participant)
    level = int(difficulty, 16)  # SMAC's "1" to "9" and "A" are the game's 1 (VeryEasy) to 10
    create.player_setup.add(type=sc_pb.Computer, race=enemy_race, difficulty=level)
    options = sc_pb.InterfaceOptions(raw=True, score=False)
    return create, sc_pb.RequestJoinGame(race=ally_race, options=options)


@contextlib.contextmanager
def claimed_port() -> Iterator[int]:
    """Yield a free port that no other caller on this machine gets meanwhile. Errors: OSError without a free port.

    Bound names are abstract Unix sockets: seen by all users of the network namespace, released with the process.
    """
    chance = random.SystemRandom()  # unseeded: workers of the same seed must not try the same ports
    for _ in range(TRIES):
        port = chance.randrange(LOWEST, HIGHEST)
        with socket.socket(socket.AF_UNIX) as held:
            try:
                held.bind(f"\0omagd-sc2-port-{port}")
                socket.create_server((HOST, port)).close()
            except OSError:
                continue
            yield port
            return
    raise OSError(f"no free port between {LOWEST} and {HIGHEST}")


class _Process(sc_process.StarcraftProcess):  # type: ignore[misc]  # pysc2 has no types
    """pysc2's process, with its output in a file, isolated from Ctrl-C, killed when the calling thread ends."""

    popen: subprocess.Popen[bytes]

    def _launch(self, run_config: Any, args: list[str], log: Path, **_: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", _FOLLOW_PARENT, str(os.getpid()), *args]
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                command, cwd=run_config.cwd, env=run_config.env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self.popen


class Game:
    """A running game with one match, and the connection to it.

    The thread that constructs this object must outlive it: Linux kills the game when that thread ends.

    Attributes:
        facts: the game's ResponseGameInfo. version: reported by the game, "4.10.0.75689".

    Errors: UserError if the game or the map is missing, or the game does not start in five attempts.
    """

    facts: Any
    version: str

    def __init__(self, spec: MapSpec, args: SmacArgs, seed: int) -> None:
        self._version, self._timeout = args.game_version, args.game_timeout
        self._build = build_of(self._version)
        self._stack = contextlib.ExitStack()
        self._process: _Process | None = None
        self._web: websocket.WebSocket | None = None
        self._status = sc_pb.launched
        self._log: Path | None = None  # the output of the game
        create, join = requests(spec, args.difficulty, seed)
        reasons: list[str] = []
        while len(reasons) < ATTEMPTS:
            try:
                self._start(create, join)
                return
            except (GameLost, OSError, RuntimeError, sc_process.SC2LaunchError) as error:
                reasons.append(self._died(error))
                LOG.warning("StarCraft II did not start (attempt %d of %d): %s", len(reasons), ATTEMPTS, reasons[-1])
            except BaseException:
                self.close()
                raise
        raise UserError(f"StarCraft II (Base{self._build}) did not start in {ATTEMPTS} attempts: {reasons[-1]}")

    @property
    def pid(self) -> int | None:
        """Process id of the game, None once it is closed."""
        return self._process.popen.pid if self._process is not None else None

    def _start(self, create: Message, join: Message) -> None:
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(temporary_folder("omagd_game_"))
        self._log = folder / "game.log"
        port = self._stack.enter_context(claimed_port())
        config = run_configs.get(version=self._version)
        config.tmp_dir = str(folder)
        program = Path(config.data_dir, "Versions", f"Base{self._build:05d}", "SC2_x64")
        self._process = _Process(
            config, str(program), config.version, host=HOST, port=port, connect=False, log=self._log
        )
        self._web = self._connect(port)
        self.version = self.ask(ping=sc_pb.RequestPing()).game_version
        self._require("create_game", self.ask(create_game=create))
        self._require("join_game", self.ask(join_game=join))
        self.facts = self.ask(game_info=sc_pb.RequestGameInfo())

    def _connect(self, port: int) -> websocket.WebSocket:
        """Wait until the game listens; return the connection. Errors: GameLost."""
        assert self._process is not None
        deadline, pause = time.monotonic() + self._timeout, 0.02
        while (left := deadline - time.monotonic()) > 0:
            if self._process.popen.poll() is not None:
                raise GameLost("it ended before it listened")
            try:
                # By a socket of ours: the library would ask the proxy of `http_proxy` for one, and set this option.
                plain = socket.create_connection((HOST, port), left)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                web = websocket.create_connection(f"ws://{HOST}:{port}/sc2api", timeout=left, socket=plain)
            except websocket.WebSocketBadStatusException as error:
                if error.status_code != 404:  # 404: it listens, but is not ready yet
                    raise GameLost(str(error)) from None
            except websocket.WebSocketException as error:
                raise GameLost(f"{type(error).__name__}: {error}") from None
            except OSError:
                pass  # it does not listen yet
            else:
                web.settimeout(self._timeout)
                return web
            time.sleep(min(pause, max(left, 0.0)))
            pause = min(2 * pause, 0.5)
        raise GameLost(f"it did not listen within {self._timeout:g} s")

    @staticmethod
    def _require(what: str, response: Any) -> None:
        if response.HasField("error"):
            name = type(response).Error.Name(response.error)
            raise GameLost(f"{what} failed: {name} {response.error_details}".rstrip())

    def ask(self, **request: Message) -> Any:
        """Send one request by its name (`ping=RequestPing()`) and return its response. Errors: GameLost."""
        (name,) = request
        response = self.exchange(sc_pb.Request(**request).SerializeToString())
        if name in _NEEDED and not response.HasField(name):
            raise GameLost(f"its answer to {name} is empty")
        return getattr(response, name)

    def exchange(self, *requests: bytes) -> Any:
        """Send requests, then read their answers; return the Response to the last one. Errors: GameLost.

        The game accepts requests before it has answered earlier ones, and answers in order. All answers are decoded, so
        that invalid ones do not pass as steps that were played.
        """
        if self._web is None:
            raise GameLost("the game is closed")
        try:
            for request in requests:
                self._web.send_binary(request)
            for _ in requests:
                opcode, answer = self._web.recv_data()
                if opcode != websocket.ABNF.OPCODE_BINARY:
                    raise GameLost("it closed the connection")
                response = _parse(answer)
                if response.error:
                    raise GameLost("it answered: " + " ".join("; ".join(response.error).split()))
        except DecodeError as error:
            raise GameLost(f"its answer cannot be decoded: {error}") from None
        except websocket.WebSocketTimeoutException:
            raise GameLost("no answer in time") from None
        except (OSError, websocket.WebSocketException) as error:
            raise GameLost(str(error)) from None
        self._status = response.status
        return response

    @property
    def in_game(self) -> bool:
        """Whether a match was running at the last answer."""
        return bool(self._status == sc_pb.in_game)

    def save_replay(self, folder: str, prefix: str) -> Path:
        """Write the replay of all battles since the start; return the file. Errors: GameLost, OSError.

        A relative or empty `folder` is relative to the game's own folder of replays.
        """
        content = self.ask(save_replay=sc_pb.RequestSaveReplay()).data
        config = run_configs.get(version=self._version)
        Path(config.abs_replay_path(folder)).mkdir(parents=True, exist_ok=True)  # other workers do so, too
        return Path(config.save_replay(content, replay_dir=folder, prefix=prefix))

    def _died(self, error: BaseException) -> str:
        """End the remains of the game; return error, exit code and last output in one line."""
        parts = [str(error)]
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                parts.append(f"exit code {self._process.popen.wait(0.2)}")
        if self._log is not None and self._log.is_file():
            words = self._log.read_bytes()[-LAST_WORDS:].decode(errors="replace").split()
            parts += [f'"{" ".join(words)}"'] if words else []
        self.close(politely=False)
        return ", ".join(parts)

    def log_death(self, error: GameLost) -> None:
        """End a game that was lost; log the reason."""
        LOG.warning("StarCraft II was lost: %s", self._died(error))

    def close(self, politely: bool = True) -> None:
        """End the game, asking it first if `politely`, and remove its files. May be called twice."""
        web, self._web = self._web, None
        process, self._process = self._process, None
        if process is not None:
            if web is not None and politely:
                with contextlib.suppress(OSError, websocket.WebSocketException, subprocess.TimeoutExpired):
                    web.send_binary(_QUIT)
                    process.popen.wait(QUIT_SECONDS)
            process.popen.kill()  # nothing happens if it has ended
            process.popen.wait()
            process.close()
        if web is not None:
            web.shutdown()  # type: ignore[no-untyped-call]  # without a closing handshake
        self._stack.close()
