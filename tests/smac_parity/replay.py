"""Our environments on recorded battles, and the comparison of their results with SMAC's."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sc2_stand_in.tape import DYNAMIC, REQUESTS, Tape
from sc2_stand_in.world import V2_TYPE_IDS

from omagd.envs.battle.args import SmacArgs, SmacV2Args, v2_map
from omagd.envs.battle.features import battle_info
from omagd.envs.battle.interface import SmacInterface, SmacV2Interface
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.battle.units import UNIT_ID
from omagd.envs.battle.v2_semantics import V2Semantics
from smac_parity import DATA, GROUPS, INFO, SEED, play

SCRIPTED = ("heuristic_ai", "heuristic_rest")  # here the environment itself plays, not the semantics' orders
CASES = [(name, number) for name, group in GROUPS.items() for number in range(len(group.cases))]
PLAIN = [(name, number) for name, number in CASES if not set(GROUPS[name].args) & set(SCRIPTED)]


def stored(name):
    with np.load(DATA / f"{name}.npz") as data:
        return dict(data)


def battles(arrays):
    return np.split(arrays["actions"], np.cumsum(arrays["steps"])[:-1])


def args_of(name, number=0):
    """Return the checked `env_args` of a case."""
    group = GROUPS[name]
    if not group.second:
        return SmacArgs(map_name=group.map_name, seed=SEED, **group.args, **group.cases[number])
    args = json.loads(str(stored(name)["args"]))
    config = args["capability_config"]
    for part in ("team_gen", "start_positions"):  # SMACv2 itself writes more into it
        config[part] = {key: value for key, value in config[part].items() if key not in ("env_key", "n_units")}
    del config["team_gen"]["n_enemies"]
    return SmacV2Args(**args)


class SortedTape(Tape):
    """A tape of SMACv2, whose units change from battle to battle; agents stand sorted by (type, x, y)."""

    def __init__(self, name, n_agents):
        super().__init__(DATA / f"{name}.npz", n_agents)
        self._teams = [lineup["team_gen"] for lineup in json.loads(str(stored(name)["resets"]))]
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


class TapeBattle(SkirmishEnv):
    """`skirmish` with a tape in place of the simulator."""

    def __init__(self, name, args):
        group, self.args, self.n_slots, self._seed = GROUPS[name], args, 1, None
        self.spec = v2_map(args) if group.second else get_map(group.map_name)
        self.info = battle_info("tape", self.spec, args)
        rules, n = V2Semantics if group.second else BattleSemantics, self.spec.n_agents
        tape = (DATA / f"{name}.npz", n, self.spec.unit_ids(), group.lingers)
        self._simulator = SortedTape(name, n) if group.second else Tape(*tape)
        self._semantics = rules(self.spec, args, self._simulator)


def tape_env(name, args):
    """Return the shared semantics on the tape of a group, with SMAC's methods."""
    return (SmacV2Interface if GROUPS[name].second else SmacInterface)(TapeBattle(name, args))


def replay(env, name, number):
    """Play the battles of a group; demand that all results are those of SMAC in case `number`."""
    arrays, args = stored(name), args_of(name, number)
    log, _ = play(env, GROUPS[name], number, battles(arrays), lambda battle: env.reset(seed=SEED))
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
    if args.continuing_episode:  # otherwise SMAC does not report whether it was the limit
        theirs[:, limit] = np.maximum(theirs[:, limit], 0)
        np.testing.assert_array_equal(ours, theirs)
    else:
        assert (theirs[:, limit] == -1).all()
        np.testing.assert_array_equal(ours[:, :limit], theirs[:, :limit])
    compare_facts(log.facts, json.loads(str(arrays["facts"][number])), args, GROUPS[name].second)


def compare_facts(ours, theirs, args, second):
    """Demand SMAC's sizes, names and counters."""
    if args.obs_timestep_number and not second:  # SMAC's observations are one longer than it says (docs/smac.md)
        info, sizes = ours["info"], ours["sizes"]
        more_state = theirs["info"]["n_agents"] * args.obs_instead_of_state
        for key, more in (("obs_shape", 1), ("state_shape", more_state)):
            info[key] -= more
        for key, more in (("get_obs_size", 1), ("get_obs_own_feats_size", 1), ("get_state_size", more_state)):
            sizes[key][0] -= more
    for part in ("info", "sizes", "state_dict"):
        assert {key: ours[part][key] for key in theirs[part]} == theirs[part], part
    assert {key: ours["stats"][key] for key in theirs["stats"]} == pytest.approx(theirs["stats"])


READS = ("observation", "data")  # change nothing in the game, and SMACv2 asks for them more often


def compare_requests(path, name):
    """Demand that a tape of ours holds SMAC's requests outside of battles, and no orders for dead units.

    SMAC's own script (`heuristic_ai`) gives orders to dead units, which the game ignores; ours leaves them out.
    """
    arrays, group = stored(name), GROUPS[name]
    with np.load(path) as tape:
        ours, dead = tape["requests"], tape["dead_orders"]
    left_out = [REQUESTS.index(read) for read in READS] if group.second else []
    kept = [rows[~np.isin(rows[:, 1], left_out)].tolist() for rows in (ours, arrays["requests"])]
    assert kept[0] == kept[1]
    assert not dead.any()
    assert arrays["dead_orders"].any() == bool(group.args.get("heuristic_ai"))
