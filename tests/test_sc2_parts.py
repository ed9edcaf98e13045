"""Parts of `sc2` without a game: messages, frames, ports, terrain, versions, files, SMAC's script."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import sc2_stand_in
from sc2_stand_in.wire import Connection

from omagd.envs.battle.args import SmacArgs
from omagd.envs.battle.backend import Order, Terrain, Units
from omagd.envs.battle.maps import MAPS
from omagd.envs.battle.units import UNIT_ID
from omagd.envs.sc2.client import Disconnected, Wire, frame, sc_pb
from omagd.envs.sc2.heuristic import Heuristic
from omagd.envs.sc2.install import build_of, read_terrain
from omagd.envs.sc2.resources import HOST, Scratch, claimed_port
from omagd.envs.sc2.sc2_env import SC2Env
from omagd.utils.errors import UserError

SAME_MESSAGES = """
from pysc2.lib import protocol, remote_controller
from s2clientprotocol import sc2api_pb2
from google.protobuf.internal import api_implementation
from omagd.envs.sc2.client import sc_pb, raw_pb
assert protocol.sc_pb is sc_pb is sc2api_pb2 and raw_pb.Unit(tag=7).tag == 7
assert api_implementation.Type() != "python"
"""


@pytest.mark.parametrize("module", ["install", "game", "backend"])
def test_each_module_can_be_imported_first_and_pysc2_uses_its_messages(module):
    """Without the environment variable that selects protobuf's slow implementation."""
    code = f"from omagd.envs.sc2 import {module}, install\nassert install.known_versions()['4.10.0'] == 75689"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PROTOCOL_BUFFERS")}
    done = subprocess.run([sys.executable, "-c", code + SAME_MESSAGES], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def served(serve):
    """Run `serve(connection)` on the other end of a Wire and yield the Wire."""
    with socket.create_server((HOST, 0)) as listener:

        def accept():
            connection = Connection(listener.accept()[0])
            with contextlib.suppress(Exception):
                serve(connection)
            connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        wire = Wire(f"ws://{HOST}:{listener.getsockname()[1]}/sc2api", 5.0)
        wire.set_timeout(0.3)
        yield wire
        wire.close()
        thread.join(5.0)


def test_messages_of_all_sizes_are_sent_together():
    sent = [os.urandom(size) for size in (0, 1, 125, 126, 65535, 65536, 300000)]

    def echo(connection):
        for _ in sent:
            connection.send(connection.receive())

    with served(echo) as wire:
        # The other end answers while it still reads: send from another thread, as the kernel's buffers are finite.
        threading.Thread(target=wire.send, args=(b"".join(map(frame, sent)),)).start()
        assert [wire.receive() for _ in sent] == sent


def test_fragments_pings_silence_and_the_end():
    def speak(connection):
        sock = connection._sock
        sock.sendall(b"\x02\x03abc" + b"\x89\x02hi" + b"\x80\x03def")
        assert connection._frame()[1:] == (10, b"hi")
        connection.receive()

    with served(speak) as wire:
        assert wire.receive() == b"abcdef"
        with pytest.raises(Disconnected, match="no answer in time"):
            wire.receive()
        wire.send(frame(b"go"))
        with pytest.raises(Disconnected):
            wire.receive()


class Says:
    """A wire that answers with messages given beforehand."""

    def __init__(self, *messages):
        self._left = list(messages)

    def send(self, frames):
        pass

    def receive(self):
        return self._left.pop(0)


@pytest.mark.parametrize("garbled", [0, 1, 2])
def test_each_answer_of_a_step_is_decoded(garbled):
    """Action, step, observation: one that is no message is a fault, though only the last is read."""
    from omagd.envs.sc2.game import Game, GameLost

    messages = [sc_pb.Response(status=sc_pb.in_game, observation=sc_pb.ResponseObservation()).SerializeToString()] * 3
    game = object.__new__(Game)
    game._wire = Says(*messages)
    assert game.exchange(b"", 3).HasField("observation") and game.in_game
    messages[garbled] = b"\x0a\xff\xff\xff\xff\x0f"
    game._wire = Says(*messages)
    with pytest.raises(GameLost, match="cannot be decoded"):
        game.exchange(b"", 3)


def test_incomplete_answers_are_faults():
    from omagd.envs.sc2.backend import GameBackend
    from omagd.envs.sc2.game import Game, GameLost

    game, empty = object.__new__(Game), sc_pb.Response(status=sc_pb.in_game)
    game._wire = Says(*[empty.SerializeToString()] * 2)
    with pytest.raises(GameLost, match="game_info is empty"):
        game.ask(game_info=sc_pb.RequestGameInfo())
    backend = GameBackend(MAPS["3m"], SmacArgs())
    backend.game = game
    with pytest.raises(GameLost, match="no observation"):
        backend._listed(game.exchange(b"", 1))


def test_claimed_ports_differ():
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(claimed_port()) for _ in range(200)]
        assert len(set(ports)) == 200
        for port in ports:  # and a game can listen there
            with socket.create_server((HOST, port)):
                pass


def test_folders_of_dead_owners_are_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code = (
        "import os\nfrom omagd.envs.sc2.resources import Scratch\n"
        "place = Scratch(); print(place.path, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = done.stdout.strip()
    assert os.path.isdir(left)
    mine, other = Scratch(), Scratch()
    assert not os.path.exists(left) and mine.path.is_dir() and other.path.is_dir()
    mine.log.write_text("out of\nmemory\n")
    assert mine.last_words() == "out of memory"
    kept = mine.keep_log()
    mine.close()
    other.close()
    assert not mine.path.exists() and kept.read_text() == "out of\nmemory\n"


@pytest.mark.parametrize("bits", [1, 8])
def test_terrain_is_indexed_by_x_and_y(bits):
    pathing = np.zeros((16, 16), bool)
    pathing[3, 10] = pathing[12, 1] = True
    height = np.zeros((16, 16), np.uint8)
    height[5, 2] = 255
    facts = sc_pb.ResponseGameInfo()
    raw = facts.start_raw
    raw.map_size.x = raw.map_size.y = 16
    raw.playable_area.p0.x, raw.playable_area.p1.y = 1, 15
    raw.pathing_grid.bits_per_pixel = bits
    rows = np.packbits(pathing.T, axis=1) if bits == 1 else np.where(pathing, 0, 255).T[::-1].astype(np.uint8)
    raw.pathing_grid.data = rows.tobytes()
    raw.terrain_height.data = height.T[::-1].tobytes()
    terrain = read_terrain(facts)
    assert (terrain.pathing == pathing).all() and terrain.height[5, 2] == 1.0 and terrain.height.sum() == 1.0
    assert terrain.playable == (1, 0, 0, 15)


def test_versions_are_found_or_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "SC2")))
    sc2_stand_in.install(tmp_path / "SC2", "4.6.2")
    assert build_of(None) == build_of("latest") == build_of("4.10") == 75689 and build_of("4.6.2") == 69232
    with pytest.raises(UserError, match="no version"):
        build_of("4.10.99")
    with pytest.raises(UserError, match="Base70154.*there: Base69232 Base75689"):
        build_of("4.7.0")
    SC2Env(SmacArgs(game_version="4.6.2"))  # starts nothing
    assert sc2_stand_in.running(tmp_path / "SC2") == []
    (tmp_path / "SC2" / "Maps" / "SMAC_Maps" / "8m.SC2Map").unlink()
    with pytest.raises(UserError, match="8m.*--maps-only"):
        SC2Env(SmacArgs(map_name="8m"))


def test_sizes_are_known_before_the_game_starts(monkeypatch, tmp_path):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "SC2")))
    for map_name, spec in MAPS.items():
        facts = SC2Env(SmacArgs(map_name=map_name)).get_env_info()
        assert sum(facts["state_component"]) == facts["state_shape"]
        assert facts["n_agents"] * facts["state_ally_feats_size"] == facts["state_component"][0]
        assert facts["map_type"] == spec.map_type and facts["map_name"] == map_name
        (enemies, dim), (allies, _) = facts["obs_component"][1:3]
        assert (enemies, allies + 1) == (facts["n_enemies"], facts["n_agents"]) and dim >= 4


def scene(types: list[str], places: list[tuple[float, float]], health: list[float]) -> Units:
    x, y = (np.array([[place[axis] for place in places]], np.float32) for axis in (0, 1))
    points = np.array([health], np.float32)
    zero, full = np.zeros_like(x), np.full_like(x, 50.0)
    kinds = np.array([[UNIT_ID[name] for name in types]], np.int16)
    return Units(x, y, points, full, zero, zero, zero, zero, kinds, points > 0)


FIELD = Terrain(32, 32, (0, 0, 32, 32), np.ones((32, 32), bool), np.zeros((32, 32), np.float32))


def test_the_script_attacks_the_nearest_keeps_its_target_and_heals_the_hurt():
    units = scene(["marine", "medivac", "marine", "marine"], [(5, 5), (6, 5), (20, 5), (9, 5)], [20, 50, 50, 50])
    script = Heuristic(2, SmacArgs(heuristic_ai=True))
    avail = np.zeros((1, 2, 8), bool)
    order, target, _ = script.orders(units, FIELD, avail)
    assert order.tolist() == [[Order.ATTACK, Order.HEAL]] and target.tolist() == [[3, 0]]
    assert script.actions.tolist() == [7, 6]
    units.x[0, 2] = 6.0  # another comes nearer: the target stays
    assert script.orders(units, FIELD, avail)[1][0, 0] == 3
    units.alive[0, 3], units.health[0, 0] = False, 50.0
    order, target, _ = script.orders(units, FIELD, avail)
    assert target[0, 0] == 2 and order[0, 1] == Order.NONE and script.actions[1] == 0


def test_with_rest_the_script_walks_along_the_longer_axis():
    units = scene(["marine", "marine"], [(5, 5), (6, 12)], [50, 50])
    script = Heuristic(1, SmacArgs(heuristic_ai=True, heuristic_rest=True, move_amount=2))
    order, _, dest = script.orders(units, FIELD, np.zeros((1, 1, 7), bool))
    assert order[0, 0] == Order.MOVE and dest[0, 0].tolist() == [5.0, 7.0] and script.actions[0] == 2
    order, _, _ = script.orders(units, FIELD, np.ones((1, 1, 7), bool))
    assert order[0, 0] == Order.ATTACK
