"""Parity with SMAC and SMACv2: in recorded battles with recorded actions, all numbers are equal in single precision.

`smac_parity` holds the recordings and the command that records them; tapes take the place of the game.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import sc2_stand_in
from sc2_stand_in import battle_seed
from smac_parity import DATA, GROUPS, SEED
from smac_parity.replay import PLAIN, args_of, compare_requests, replay, stored, tape_env

from omagd.envs import REGISTRY
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.interface import SmacInterface
from omagd.envs.battle.maps import MAPS
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.battle.v2_semantics import EnemyVisibility


@pytest.fixture
def as_recorded(monkeypatch):
    """Return a function that lets SMACv2's teams, start positions and orders of looking be those of a group."""

    def use(name):
        from omagd.envs.sc2 import v2_backend  # slow: imports pysc2

        def next_lineup(config, seed, attempt):
            drawn = next(lineups)
            team = drawn["team_gen"]
            places = (np.array(drawn[f"{side}_start_positions"]["item"]) for side in ("ally", "enemy"))
            return v2_backend.Lineup(tuple(team["ally_team"]), tuple(team["enemy_team"]), *places)

        arrays = stored(name)
        looks = np.split(arrays["order"], np.cumsum(arrays["steps"] + 1)[:-1])
        orders = [order for number, rows in enumerate(looks) for order in (arrays["order_at_reset"][number], *rows)]
        left, lineups = iter(orders), iter(json.loads(str(arrays["resets"])))
        monkeypatch.setattr(EnemyVisibility, "order", lambda self, slot: next(left))
        monkeypatch.setattr(v2_backend, "draw_lineup", next_lineup)

    return use


# Every flag of the maps that have all of them, on two of these four.
TOGGLED = [name for name, group in GROUPS.items() if len(group.cases) > 2]
PAIRED = [(name, n) for name, n in PLAIN if name not in TOGGLED or not n or (n + TOGGLED.index(name)) % 2]


@pytest.mark.parametrize(("name", "number"), PAIRED)
def test_semantics_equal_smac(name, number, as_recorded):
    if GROUPS[name].second:
        as_recorded(name)
    replay(tape_env(name, args_of(name, number)), name, number)


class Recorded(SkirmishEnv):
    """`skirmish` from the seeds of the recorded battles, whose units the same rules of physics moved."""

    battles = 0

    def reset(self, which, seeds):
        super().reset(which, np.array([battle_seed(SEED, self.battles)]))
        self.battles += 1

    def seed(self):
        return SEED


@pytest.mark.parametrize(("name", "number"), [case for case in PAIRED if case[0] in MAPS])
def test_kernels_equal_smac(name, number):
    """Battles, observations and rewards of `skirmish`."""
    group = GROUPS[name]
    replay(SmacInterface(Recorded(SkirmishArgs(map_name=name, **group.args, **group.cases[number]), 1)), name, number)


# Every unit type, and every kind of group that is not a plain map. An older game sends another format of terrain.
PLAYED = {
    "2s_vs_1sc", "1c3s5z", "8m-move-1.3", "3m-lingering", "MMM-heuristic", "MMM-heuristic-rest", "v2-zerg-conic",
    "v2-protoss-untold", "v2-terran-conic-heuristic-rest",
}  # fmt: skip
VERSIONS = [*((name, "4.10") for name in sorted(PLAYED)), ("corridor-rough-move-1", "4.6.2")]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_the_game_environment_equals_smac(name, version, as_recorded, tmp_path, monkeypatch):
    """The whole way: our commands reach the game's units, and its answers our observations, as SMAC's do."""
    group, folder = GROUPS[name], sc2_stand_in.install(tmp_path / "StarCraftII", version)
    monkeypatch.setenv("SC2PATH", str(folder))
    monkeypatch.setenv("SC2_STAND_IN_TAPE", str(DATA / f"{name}.npz"))
    monkeypatch.setenv("SC2_STAND_IN_RECORD", str(tmp_path / "ours.npz"))
    if group.lingers:
        monkeypatch.setenv("SC2_STAND_IN_LINGER", "1")
    if group.second:
        as_recorded(name)
    number = len(group.cases) - 1 if len(group.cases) == 2 else 0
    env = REGISTRY.get("sc2_v2" if group.second else "sc2")(args_of(name, number))
    try:
        replay(env, name, number)
    finally:
        env.close()
    compare_requests(tmp_path / "ours.npz", name)
    assert sc2_stand_in.running(folder) == []
