"""Parts of `sc2` without a game: messages, terrain, versions."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import sc2_stand_in

from omagd.envs.battle.args import SmacArgs
from omagd.envs.sc2.client import sc_pb
from omagd.envs.sc2.install import build_of, read_terrain
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


def test_modules_can_be_imported_first_and_pysc2_uses_their_messages():
    """Without the environment variable that selects protobuf's slow implementation."""
    code = "from omagd.envs.sc2 import backend, install\nassert install.known_versions()['4.10.0'] == 75689"
    env = {key: value for key, value in os.environ.items() if not key.startswith("PROTOCOL_BUFFERS")}
    done = subprocess.run([sys.executable, "-c", code + SAME_MESSAGES], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def test_versions_and_maps_are_found_or_reported(sc2_game):
    sc2_stand_in.install(sc2_game, "4.6.2")
    assert build_of(None) == build_of("latest") == build_of("4.10") == 75689 and build_of("4.6.2") == 69232
    with pytest.raises(UserError, match="no version"):
        build_of("4.10.99")
    with pytest.raises(UserError, match="Base70154.*there: Base69232 Base75689"):
        build_of("4.7.0")
    SC2Env(SmacArgs(game_version="4.6.2"))
    assert sc2_stand_in.running(sc2_game) == []
    (sc2_game / "Maps" / "SMAC_Maps" / "8m.SC2Map").unlink()
    with pytest.raises(UserError, match="8m.*--maps-only"):
        SC2Env(SmacArgs(map_name="8m"))
