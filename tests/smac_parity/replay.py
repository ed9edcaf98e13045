"""Replays recorded battles through the semantics, and compares the results with those of SMAC."""

from __future__ import annotations

import json

import numpy as np
from sc2_stand_in.tape import DYNAMIC, Tape
from sc2_stand_in.world import V2_TYPE_IDS

from omagd.envs.battle.args import BattleArgs, SmacV2Args, v2_map
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.semantics import BattleSemantics
from omagd.envs.battle.units import UNIT_ID, UNITS
from omagd.envs.battle.v2_semantics import V2Semantics
from smac_parity import DATA, GROUPS, INFO, V2_GROUPS, Log, moments_to_keep

ON = np.ones(1, bool)
SCRIPTED = ("heuristic_ai", "heuristic_rest")  # here the environment itself plays, not the semantics' orders
CASES = [(name, number) for name, group in GROUPS.items() for number in range(len(group.cases))]
PLAIN = [(name, number) for name, number in CASES if not set(GROUPS[name].args) & set(SCRIPTED)]
V2_PLAIN = [name for name, group in V2_GROUPS.items() if not set(group.args) & set(SCRIPTED)]


def stored(name):
    with np.load(DATA / f"{name}.npz") as data:
        return dict(data)


def battles(arrays):
    return np.split(arrays["actions"], np.cumsum(arrays["steps"])[:-1])


def v2_facts(name):
    """Return `env_args` and line-ups of a group of SMACv2."""
    arrays = stored(name)
    args = json.loads(str(arrays["args"]))
    config = args["capability_config"]
    for part in ("team_gen", "start_positions"):  # SMACv2 itself writes more into it
        config[part] = {key: value for key, value in config[part].items() if key not in ("env_key", "n_units")}
    del config["team_gen"]["n_enemies"]
    return args, json.loads(str(arrays["resets"]))


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
        self._spec, self.units, self.layout = spec, self._tape.units, self._semantics.layout

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
        sizes = {"n_actions": semantics.n_actions, "obs_shape": semantics.obs_dim, "state_shape": semantics.state_dim}
        return {**sizes, "n_agents": self._spec.n_agents, "episode_limit": self._spec.limit}

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
