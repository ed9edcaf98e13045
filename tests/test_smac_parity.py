"""Ours against SMAC and SMACv2 themselves: the same battles, the same actions, the same numbers in single precision.

Their side is stored (`smac_parity`, with the command that records it); the tapes play the game's part.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import sc2_stand_in
from sc2_stand_in.tape import DYNAMIC, REQUESTS, Tape
from sc2_stand_in.world import V2_TYPE_IDS
from smac_parity import DATA, GROUPS, INFO, SEED, V2_GROUPS, Log, interface_facts, moments_to_keep

from omagd.envs import REGISTRY
from omagd.envs.battle.args import BattleArgs, SmacV2Args, v2_map
from omagd.envs.battle.maps import MAPS, get_map
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.units import UNIT_ID, UNITS
from omagd.envs.battle.v2_semantics import EnemyVisibility, V2Semantics

ON = np.ones(1, bool)
SCRIPTED = ("heuristic_ai", "heuristic_rest")  # here the environment itself plays, not the semantics' orders
CASES = [(name, number) for name, group in GROUPS.items() for number in range(len(group.cases))]
PLAIN = [(name, number) for name, number in CASES if not set(GROUPS[name].args) & set(SCRIPTED)]
V2_PLAIN = [name for name, group in V2_GROUPS.items() if not set(group.args) & set(SCRIPTED)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return sc2_stand_in.install(tmp_path_factory.mktemp("sc2") / "StarCraftII")


@pytest.fixture
def game(installed, monkeypatch):
    """Return the folder of a stand-in that $SC2PATH names."""
    monkeypatch.setenv("SC2PATH", str(installed))
    return installed


def stored(name):
    with np.load(DATA / f"{name}.npz") as data:
        return dict(data)


def battles(arrays):
    return np.split(arrays["actions"], np.cumsum(arrays["steps"])[:-1])


class Semantics:
    """The shared semantics on a tape, as a single environment."""

    def __init__(self, name, args):
        names = [unit.name for unit in UNITS]
        if name in GROUPS:
            spec, lingers = get_map(GROUPS[name].map_name), GROUPS[name].lingers
            self._tape = Tape(DATA / f"{name}.npz", spec.n_agents, spec.unit_ids(), lingers)
            self._semantics = BattleSemantics(spec, BattleArgs(map_name=spec.name, **args), self._tape, names)
        else:
            spec = v2_map(SmacV2Args(**args))
            self._tape = SortedTape(name, spec.n_agents)
            self._semantics = V2Semantics(spec, SmacV2Args(**args), self._tape, names)
        self.units = self._tape.units

    def reset(self):
        self._tape.reset(ON, np.zeros(1))
        self._semantics.begin(ON)

    def look(self):
        seen = self._semantics.observe(full=True)
        return seen.obs[0], seen.state[0], seen.avail_actions[0], self._semantics.visibility()[0], seen.full_obs[0]

    def step(self, actions):
        order, target, dest = self._semantics.orders(actions[None].astype(np.int64), ON)
        self._tape.advance(order, target, dest, ON)
        result = self._semantics.finish_step(ON)
        info = {name: int(values[0]) for name, values in result.info.items()}
        return float(result.reward[0]), bool(result.terminated[0]), info

    def facts(self):
        semantics = self._semantics
        return {"n_actions": semantics.n_actions, "obs_shape": semantics.obs_dim, "state_shape": semantics.state_dim}

    def stats(self):
        return self._semantics.stats()


def replay(env, arrays, first_case):
    """Return what `env` returns over the battles of a group."""
    log = Log()
    for actions in battles(arrays):
        env.reset()
        for moment in range(len(actions) + 1):
            keep = moment in moments_to_keep(len(actions), first_case)
            if "order" in arrays:  # of SMACv2
                keep = len(log.digests) % 10 == 0
            log.see(*env.look()[:4], keep)
            if moment < len(actions):
                log.note(*env.step(actions[moment]))
    return log


def compare(log, arrays, number, continuing):
    """Demand that `log` is what SMAC returned in case `number`."""
    kept = log.kept if f"moments_{number}" in arrays else []
    for at, (moment, obs, state) in enumerate(kept):
        assert moment == arrays[f"moments_{number}"][at]
        np.testing.assert_array_equal(obs, arrays[f"obs_{number}"][at], err_msg=f"observations, moment {moment}")
        np.testing.assert_array_equal(state, arrays[f"states_{number}"][at], err_msg=f"state, moment {moment}")
    for column, what in enumerate(("observations", "state", "mask", "visibility")):
        wrong = np.flatnonzero(np.array(log.digests, np.uint32)[:, column] != arrays["digests"][number][:, column])
        assert not wrong.size, f"{what} differ at the moments {wrong.tolist()}"
    np.testing.assert_array_equal(np.array(log.rewards, np.float32), arrays["rewards"][number])
    ours, theirs = np.array(log.outcomes, np.int8), arrays["outcomes"][number].copy()
    limit = 1 + INFO.index("episode_limit")
    if continuing:  # else SMAC does not say that it was the limit
        theirs[:, limit] = np.maximum(theirs[:, limit], 0)
        np.testing.assert_array_equal(ours, theirs)
    else:
        assert (theirs[:, limit] == -1).all()
        np.testing.assert_array_equal(ours[:, :limit], theirs[:, :limit])


@pytest.mark.parametrize(("name", "number"), PLAIN)
def test_semantics_equal_smac(name, number):
    group, arrays = GROUPS[name], stored(name)
    args = {**group.args, **group.cases[number]}
    env = Semantics(name, args)
    log = replay(env, arrays, number == 0)
    compare(log, arrays, number, args.get("continuing_episode", False))
    theirs, ours = json.loads(str(arrays["facts"][number])), env.facts()
    if args.get("obs_timestep_number"):  # SMAC's observations are one longer than it says
        n_agents = theirs["info"]["n_agents"]
        ours["obs_shape"] -= 1
        ours["state_shape"] -= n_agents * args.get("obs_instead_of_state", False)
    assert ours == {key: theirs["info"][key] for key in ours}
    assert env.stats() == pytest.approx(theirs["stats"])


class SortedTape(Tape):
    """A tape of SMACv2, whose units change from battle to battle; agents stand sorted by (type, x, y)."""

    def __init__(self, name, n_agents):
        super().__init__(DATA / f"{name}.npz", n_agents)
        self._teams = [lineup["team_gen"] for lineup in v2_facts(name)[1]]
        self._column = np.arange(self.units.x.shape[1])

    def reset(self, which, seeds):
        self._column = np.arange(len(self._column))
        super().reset(which, seeds)
        team, units = self._teams[self._battle], self.units
        kinds = [*sorted(team["ally_team"], key=V2_TYPE_IDS.get), *team["enemy_team"]]
        keys = [(V2_TYPE_IDS[kinds[i]], units.x[0, i], units.y[0, i]) for i in range(self._n)]
        self._column[: self._n] = sorted(range(self._n), key=keys.__getitem__)
        units.type_id[0] = [UNIT_ID[kinds[column]] for column in self._column]
        for values in (units.health_max, units.shield_max):
            values[0] = values[0, self._column]
        self._show()

    def _show(self):
        super()._show()
        for name in (*DYNAMIC, "alive"):
            values = getattr(self.units, name)
            values[0] = values[0, self._column]

    def advance(self, order, target, dest, active):
        agent = np.argsort(self._column)
        self.units.alive[0] = self.units.alive[0, agent]
        mine = agent[: self._n]
        super().advance(order[:, mine], self._column[target[:, mine]], dest[:, mine], active)


def v2_facts(name):
    """Return `env_args` and line-ups of a group of SMACv2."""
    arrays = stored(name)
    args = json.loads(str(arrays["args"]))
    config = args["capability_config"]
    for part in ("team_gen", "start_positions"):  # SMACv2 itself writes more into it
        config[part] = {key: value for key, value in config[part].items() if key not in ("env_key", "n_units")}
    del config["team_gen"]["n_enemies"]
    return args, json.loads(str(arrays["resets"]))


@pytest.fixture
def recorded_orders(monkeypatch):
    """Return a function that lets agents be looked at in the orders in which SMACv2 has done it in a group."""

    def use(name):
        arrays, orders, start = stored(name), [], 0
        for number, steps in enumerate(arrays["steps"]):
            orders += [arrays["order_at_reset"][number], *arrays["order"][start : start + steps + 1]]
            start += steps + 1
        left = iter(orders)
        monkeypatch.setattr(EnemyVisibility, "order", lambda self, slot: next(left))

    return use


@pytest.mark.parametrize("name", V2_PLAIN)
def test_semantics_equal_smacv2(name, recorded_orders):
    recorded_orders(name)
    arrays, env = stored(name), Semantics(name, v2_facts(name)[0])
    compare(replay(env, arrays, True), arrays, 0, False)
    theirs, ours = json.loads(str(arrays["facts"][0])), env.facts()
    assert ours == {key: theirs["info"][key] for key in ours}
    assert env.stats() == pytest.approx(theirs["stats"])


def in_sight_of_all(units, n):
    """Return [n] bool: the agent lives and all others that live are nearer than SMAC's sight."""
    distance = np.hypot(units.x[0, :n, None] - units.x[0], units.y[0, :n, None] - units.y[0])
    return units.alive[0, :n] & ((distance < 8.999) | ~units.alive[0]).all(axis=1)


@pytest.mark.parametrize("name", sorted({name for name, _ in PLAIN}))
def test_full_observation_is_the_observation_of_what_is_in_sight(name):
    """It shows what SMAC shows, and nothing else to an agent in whose sight everyone is."""
    env, arrays = Semantics(name, GROUPS[name].args), stored(name)
    equal = 0
    for actions in battles(arrays):
        env.reset()
        for row in actions:
            obs, _, _, _, full = env.look()
            np.testing.assert_array_equal(full[obs != 0], obs[obs != 0])
            everyone = in_sight_of_all(env.units, len(obs))
            np.testing.assert_array_equal(full[everyone], obs[everyone])
            equal += everyone.sum()
            env.step(row)
    assert equal or len(env.units.x[0]) > 20  # big battles are never that close


def test_tapes_refuse_other_orders():
    env, arrays = Semantics("3m", {}), stored("3m")
    env.reset()
    other = np.ones_like(arrays["actions"][0])
    assert (other != arrays["actions"][0]).any()
    with pytest.raises(ValueError, match="orders are not those"):
        env.step(other)


def test_battles_cover_every_way_to_end():
    """A win, a defeat, and the limit are among the recorded battles, or equality would say little."""
    ends = np.concatenate([stored(name)["outcomes"][0] for name, number in PLAIN if number == 0])
    over, won = ends[:, 0] == 1, ends[:, 1] == 1
    assert won.sum() >= 3
    assert (over & ~won).sum() >= 10
    idle = stored("2s_vs_1sc")
    assert idle["steps"][-1] == get_map("2s_vs_1sc").limit
    assert idle["outcomes"][1][-1, 1 + INFO.index("episode_limit")] == 1


READS = ("observation", "data")  # change nothing in the game, and SMACv2 asks for them more often


def compare_requests(path, arrays, left_out, args):
    """Demand that a tape of ours holds SMAC's requests outside of battles, but those named, and none for the dead.

    SMAC's own script (`heuristic_ai`) gives orders to dead units, which the game ignores; ours leaves them out.
    """
    with np.load(path) as tape:
        ours, dead = tape["requests"], tape["dead_orders"]
    places = [REQUESTS.index(name) for name in left_out]
    kept = [rows[~np.isin(rows[:, 1], places)].tolist() for rows in (ours, arrays["requests"])]
    assert kept[0] == kept[1]
    assert not dead.any()
    assert arrays["dead_orders"].any() == bool(args.get("heuristic_ai"))


def compare_facts(ours, theirs):
    """Demand what SMAC says of itself, but of the observation's length where that is not its own (docs/sc2.md)."""
    for part in ("info", "sizes", "state_dict"):
        assert {key: ours[part][key] for key in theirs[part]} == theirs[part], part
    assert {key: ours["stats"][key] for key in theirs["stats"]} == pytest.approx(theirs["stats"])


class Played:
    """The environment `sc2` or `sc2_v2` on the stand-in, which plays a tape."""

    def __init__(self, name, args):
        env = REGISTRY.get(name)
        self._env = env(env.args_model(**args))

    def reset(self):
        self._env.reset(seed=1)

    def look(self):
        env = self._env
        full = env.get_obs(no_range_limit=True)
        return env.get_obs(), env.get_state(), env.get_avail_actions(), env.get_visibility_matrix(), full

    def step(self, actions):
        return self._env.step(actions.astype(np.int64))

    def facts(self):
        return interface_facts(self._env)

    def close(self):
        self._env.close()


# Every unit type, every way to end, and every group that is not a plain map.
PLAYED = {"3m", "MMM", "1c3s5z", "6h_vs_8z", "2s_vs_1sc", "bane_vs_bane", "2c_vs_64zg"} | set(GROUPS) - set(MAPS)


@pytest.mark.processes
@pytest.mark.parametrize("name", sorted(PLAYED))
def test_the_game_environment_equals_smac(name, game, tmp_path, monkeypatch):
    """The whole way: our commands reach the game's units, and its answers our observations, as SMAC's do."""
    group, arrays, ours = GROUPS[name], stored(name), tmp_path / "ours.npz"
    monkeypatch.setenv("SC2_STAND_IN_TAPE", str(DATA / f"{name}.npz"))
    monkeypatch.setenv("SC2_STAND_IN_RECORD", str(ours))
    if group.lingers:
        monkeypatch.setenv("SC2_STAND_IN_LINGER", "1")
    number = len(group.cases) - 1 if len(group.cases) == 2 else 0
    args = {**group.args, **group.cases[number]}
    env = Played("sc2", {"map_name": group.map_name, "seed": SEED, **args})
    try:
        log = replay(env, arrays, number == 0)
        facts = env.facts()
    finally:
        env.close()
    compare(log, arrays, number, args.get("continuing_episode", False))
    compare_facts(facts, json.loads(str(arrays["facts"][number])))
    compare_requests(ours, arrays, (), group.args)
    assert sc2_stand_in.running(game) == []


@pytest.mark.processes
@pytest.mark.parametrize("name", ["corridor-rough-move-1"])
def test_an_older_game_sends_another_image_of_the_ground(name, tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "StarCraftII", version="4.6.2")))
    test_the_game_environment_equals_smac(name, tmp_path / "StarCraftII", tmp_path, monkeypatch)


@pytest.mark.processes
@pytest.mark.parametrize("name", V2_GROUPS)
def test_the_game_environment_equals_smacv2(name, game, recorded_orders, tmp_path, monkeypatch):
    """Line-ups, too, are those recorded: units are created where they say, and appear as the tape has them."""
    from omagd.envs.sc2 import v2_backend
    from omagd.envs.sc2.v2_backend import Lineup

    args, resets = v2_facts(name)
    lineups = iter(resets)

    def recorded_lineup(config, seed, attempt):
        drawn = next(lineups)
        team = drawn["team_gen"]
        places = (np.array(drawn[f"{side}_start_positions"]["item"]) for side in ("ally", "enemy"))
        return Lineup(tuple(team["ally_team"]), tuple(team["enemy_team"]), *places)

    recorded_orders(name)
    monkeypatch.setattr(v2_backend, "draw_lineup", recorded_lineup)
    monkeypatch.setenv("SC2_STAND_IN_TAPE", str(DATA / f"{name}.npz"))
    monkeypatch.setenv("SC2_STAND_IN_RECORD", str(tmp_path / "ours.npz"))
    arrays, env = stored(name), Played("sc2_v2", args)
    try:
        log = replay(env, arrays, True)
        facts = env.facts()
    finally:
        env.close()
    compare(log, arrays, 0, False)
    compare_facts(facts, json.loads(str(arrays["facts"][0])))
    compare_requests(tmp_path / "ours.npz", arrays, READS, V2_GROUPS[name].args)
    assert sc2_stand_in.running(game) == []
