"""SMAC's class interface without the game (`test_smac_parity` compares the values), and maps of other packages."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import sc2_stand_in
from command_harness import ROOT

from omagd.envs.battle.maps import MAPS
from omagd.envs.smac import make_smac
from omagd.utils.errors import UserError


def test_a_loop_written_for_smac_plays_skirmish():
    """The loop of SMAC's own example, by its calls: sizes, one agent at a time, until the episode ends."""
    env = make_smac("skirmish", map_name="2s3z", obs_timestep_number=True, state_timestep_number=True)
    info, rng = env.get_env_info(), np.random.default_rng(0)
    assert env.seed() is None
    for returned, read in zip(env.reset(seed=7), (env.get_obs(), env.get_state()), strict=True):
        np.testing.assert_array_equal(returned, read)
    assert env.seed() == 7
    move, (m, width) = env.get_obs_move_feats_size(), env.get_obs_enemy_feats_size()
    enemies = slice(move, move + m * width)
    assert not env.get_obs_agent(0)[enemies].any()  # too far away at the start
    assert env.get_obs_agent(0, fully_observable=True)[enemies].reshape(m, width)[:, 1].all()
    terminated, steps = False, 0
    while not terminated:
        actions = []
        for agent_id in range(info["n_agents"]):
            assert env.get_obs_agent(agent_id).shape == (env.get_obs_size(),) == (info["obs_shape"],)
            available = env.get_avail_agent_actions(agent_id)
            assert available.shape == (env.get_total_actions(),)
            actions.append(int(rng.choice(np.nonzero(available)[0])))
        reward, terminated, more = env.step(actions)
        steps += 1
        parts = env.get_state_dict()
        np.testing.assert_array_equal(np.concatenate([np.ravel(part) for part in parts.values()]), env.get_state())
        np.testing.assert_array_equal(parts["allies"].ravel(), env.get_state()[: parts["allies"].size])
        assert parts["timestep"] == np.float32(steps / env.episode_limit)
        assert parts["last_action"].argmax(axis=1).tolist() == actions
        assert isinstance(reward, float) and {"battle_won", "dead_allies", "dead_enemies"} <= set(more)
    enemies, allies = env.get_obs_enemy_feats_size(), env.get_obs_ally_feats_size()
    parts = env.get_obs_move_feats_size() + np.prod(enemies) + np.prod(allies) + env.get_obs_own_feats_size()
    assert parts == env.get_obs_size() and (enemies[0], allies[0]) == (5, 4)
    assert info["agent_features"] == ["health", "energy/cooldown", "rel_x", "rel_y", "shield", "type_0", "type_1"]
    assert info["enemy_features"] == ["health", "rel_x", "rel_y", "shield", "type_0", "type_1"]
    assert (env.n_agents, env.n_enemies, env.map_type) == (5, 5, "stalkers_and_zealots")
    env.close()


def test_the_documented_loop_runs():
    page = (ROOT / "docs" / "smac.md").read_text()
    (loop,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "make_smac" in block)
    shown = {}
    exec(loop, shown)
    assert shown["terminated"] and shown["env"].get_stats()["battles_game"] == 1


MINE = {"n_agents": 2, "n_enemies": 1, "limit": 90, "a_race": "T", "b_race": "P", "unit_type_bits": 0,
        "map_type": "marines"}  # fmt: skip


@pytest.fixture
def add_maps(tmp_path, monkeypatch):
    """Return a function that installs a package whose registry of maps has this text."""

    def add(text, package="my_maps"):
        facts = tmp_path / "site" / f"{package}-1.0.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (facts / "entry_points.txt").write_text(f"[omagd.smac_maps]\nmine = {package}:MAPS\n")
        (tmp_path / "site" / f"{package}.py").write_text(f"MAPS = {text}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return add


@pytest.mark.processes
def test_a_map_of_another_package_can_be_played(add_maps, tmp_path, monkeypatch):
    """Its sizes follow from SMAC's keys, its units from the game."""
    folder = sc2_stand_in.install(tmp_path / "StarCraftII")
    (folder / "Maps" / "SMAC_Maps" / "my_map.SC2Map").write_bytes(b"mine")
    monkeypatch.setenv("SC2PATH", str(folder))
    monkeypatch.setenv("SC2_STAND_IN_MAPS", "my_map=2m_vs_1z")
    add_maps({"my_map": MINE, "3m": {**MINE, "limit": 1}})
    assert make_smac("sc2", map_name="3m").episode_limit == MAPS["3m"].limit  # our own maps stay as they are
    mine, known = (make_smac("sc2", map_name=name, seed=3) for name in ("my_map", "2m_vs_1z"))
    try:
        assert mine.get_env_info() == {**known.get_env_info(), "map_name": "my_map", "episode_limit": 90}
        for _ in range(2):
            for one, other in zip(mine.reset(), known.reset(), strict=True):
                np.testing.assert_array_equal(one, other)
            assert mine.step([1, 1])[0] == known.step([1, 1])[0]
        assert (mine.seed(), mine.map_name) == (3, "my_map")
    finally:
        mine.close()
        known.close()
    assert sc2_stand_in.running(folder) == []


def mine(**change):
    return {"my_map": {**MINE, **change}}


@pytest.mark.parametrize(("registry", "words"), [
    (mine(limit=0), "my_map.limit: .*greater than or equal to 1"),
    (mine(a_race="Terran"), "my_map.a_race: .*'T'"),
    (mine(map_type="MMN"), "my_map: map_type=MMN must be one of .*MMM"),
    ({"../my_map": MINE}, "without folder and ending"),
    ("__import__('no_such_package')", "no_such_package.*fix or uninstall"),
])  # fmt: skip
def test_invalid_maps_of_a_package_are_reported_in_one_line(add_maps, registry, words):
    add_maps(registry)
    with pytest.raises(UserError, match=f"mine=my_maps:MAPS of omagd.smac_maps.*{words}"):
        make_smac("sc2", map_name="my_map")


def test_names_that_cannot_be_played(add_maps):
    add_maps(mine())
    for name, keys, words in (
        ("smax", {}, "sc2, sc2_v2, skirmish"),
        ("skirmish", {"map_nam": "3m"}, "env_args.map_nam .*map_name"),
        ("skirmish", {"map_name": "my_map"}, "map_name=my_map needs the game: use --env-config=sc2"),
        ("sc2", {"map_name": "my_mapp"}, "Did you mean 'my_map'"),
    ):
        with pytest.raises(UserError, match=words):
            make_smac(name, **keys)
    add_maps(mine(), "other_maps")
    with pytest.raises(UserError, match="my_maps:MAPS and .*other_maps:MAPS|other_maps:MAPS and .*my_maps:MAPS"):
        make_smac("sc2", map_name="my_map")
