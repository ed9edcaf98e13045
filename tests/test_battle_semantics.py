"""SMAC's semantics, vectorised, against a slow scalar account of the same rules, on a back-end of random units."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from omagd.envs.battle.args import SMAC, BattleArgs, SkirmishArgs, SmacArgs
from omagd.envs.battle.backend import Order, Terrain, Units
from omagd.envs.battle.features import entity_layout, state_dim
from omagd.envs.battle.reward import Ending, RewardLedger, judge
from omagd.envs.battle.semantics import BattleSemantics

NAMES = ["zealot", "marine", "medivac", "stalker", "marauder", "colossus", "baneling", "zergling", "spine_crawler"]
HEALTH = {"zealot": 100, "marine": 45, "medivac": 150, "stalker": 80, "marauder": 125, "colossus": 200, "baneling": 30,
          "zergling": 35, "spine_crawler": 300}  # fmt: skip
SHIELD = {"zealot": 50, "stalker": 80, "colossus": 150}
COOLDOWN = {"zealot": 22, "marine": 15, "medivac": 200, "stalker": 35, "marauder": 25, "colossus": 24, "baneling": 1,
            "zergling": 11}  # fmt: skip


def make_spec(allies, enemies, races, map_type="marines", ally_types=(), limit=10):
    return SimpleNamespace(
        allies=allies, enemies=enemies, n_agents=len(allies), n_enemies=len(enemies), limit=limit, a_race=races[0],
        b_race=races[1], unit_type_bits=len(ally_types), map_type=map_type, ally_types=ally_types,
    )  # fmt: skip


SPECS = {
    "5m_vs_6m": make_spec(["marine"] * 5, ["marine"] * 6, "TT"),
    "2s3z": make_spec(["stalker"] * 2 + ["zealot"] * 3, ["zealot", "stalker"] * 2 + ["zealot"], "PP",
                      "stalkers_and_zealots", ("stalker", "zealot")),
    "1c3s5z": make_spec(["colossus"] + ["stalker"] * 3 + ["zealot"] * 5, ["stalker"] * 3 + ["zealot", "colossus"] * 3,
                        "PP", "colossi_stalkers_zealots", ("colossus", "stalker", "zealot")),
    "MMM2": make_spec(["marauder"] * 2 + ["marine"] * 6 + ["medivac"] * 2,
                      ["marauder"] * 3 + ["medivac"] + ["marine"] * 7 + ["medivac"], "TT", "MMM",
                      ("marauder", "marine", "medivac")),
    "bane_vs_bane": make_spec(["baneling"] * 2 + ["zergling"] * 5, ["zergling"] * 5 + ["baneling"] * 2, "ZZ", "bane",
                              ("baneling", "zergling")),
    "2s_vs_1sc": make_spec(["stalker"] * 2, ["spine_crawler"], "PZ", "stalkers"),
    "2m_vs_1z": make_spec(["marine"] * 2, ["zealot"], "TP"),
}  # fmt: skip

FLAGS = {
    "published": {},
    "all on": dict(obs_last_action=True, obs_pathing_grid=True, obs_terrain_height=True, obs_timestep_number=True,
                   state_timestep_number=True),
    "no health": dict(obs_all_health=False, obs_own_health=False, state_last_action=False, move_amount=3),
    "own health": dict(obs_all_health=False, obs_instead_of_state=True, obs_timestep_number=True),
}  # fmt: skip


class RandomBackend:
    """A back-end without physics: tests write the units themselves."""

    def __init__(self, spec, n_slots, rng):
        self.n_slots, self.rng, self.spec = n_slots, rng, spec
        self.terrain = Terrain(24, 20, (2.0, 1.0, 22.0, 19.0), rng.random((24, 20)) < 0.7,
                               rng.random((24, 20)).astype(np.float32))  # fmt: skip
        names = [*spec.allies, *spec.enemies]
        full = lambda values: np.tile(np.array(values, np.float32), (n_slots, 1))  # noqa: E731
        self.health_max, self.shield_max = full([HEALTH[v] for v in names]), full([SHIELD.get(v, 0) for v in names])
        self.type_id = np.tile(np.array([NAMES.index(v) for v in names], np.int16), (n_slots, 1))
        self.scatter()

    def scatter(self, dead=0.25):
        shape, rng = self.health_max.shape, self.rng
        alive = rng.random(shape) >= dead
        self.units = Units(
            x=rng.uniform(-0.5, 24.5, shape).astype(np.float32), y=rng.uniform(-0.5, 20.5, shape).astype(np.float32),
            health=(self.health_max * rng.uniform(0.01, 1, shape) * alive).astype(np.float32),
            health_max=self.health_max, shield=(self.shield_max * rng.random(shape)).astype(np.float32),
            shield_max=self.shield_max, energy=rng.uniform(0, 200, shape).astype(np.float32),
            cooldown=rng.uniform(0, 15, shape).astype(np.float32), type_id=self.type_id, alive=alive,
        )  # fmt: skip


# The slow account: one unit at a time, plain floats, written from the published rules.


class Slow:
    def __init__(self, spec, args, backend, slot, last_action, steps):
        self.spec, self.args, self.terrain, self.steps = spec, args, backend.terrain, steps
        names = [*spec.allies, *spec.enemies]
        rows = []
        for i, name in enumerate(names):
            u = backend.units
            rows.append(SimpleNamespace(
                name=name, x=float(u.x[slot, i]), y=float(u.y[slot, i]), hp=float(u.health[slot, i]),
                hp_max=float(u.health_max[slot, i]), sh=float(u.shield[slot, i]), sh_max=float(u.shield_max[slot, i]),
                energy=float(u.energy[slot, i]), cd=float(u.cooldown[slot, i]),
                alive=bool(u.health[slot, i] > 0)))  # fmt: skip
        self.allies, self.enemies = rows[: spec.n_agents], rows[spec.n_agents :]
        self.last_action = last_action

    def onehot(self, unit, is_enemy):
        order = list(self.spec.ally_types)
        if is_enemy and self.spec.map_type == "stalkers_and_zealots":
            order = ["zealot", "stalker"]
        return [float(unit.name == name) for name in order]

    def cell(self, x, y, grid, outside):
        inside = 0 <= x < self.terrain.map_x and 0 <= y < self.terrain.map_y
        return float(grid[x, y]) if inside else outside

    def mask(self, a):
        me, out = self.allies[a], [0] * (6 + self.spec.n_enemies)
        if not me.alive:
            out[0] = 1
            return out
        out[1] = 1
        half = self.args.move_amount / 2
        for action, (dx, dy) in {2: (0, half), 3: (0, -half), 4: (half, 0), 5: (-half, 0)}.items():
            out[action] = int(self.cell(int(me.x + dx), int(me.y + dy), self.terrain.pathing, 0.0))
        heals = self.spec.map_type == "MMM" and me.name == "medivac"
        for i, other in enumerate(self.allies if heals else self.enemies):
            if other.alive and not (heals and other.name == "medivac"):
                out[6 + i] = int(math.hypot(other.x - me.x, other.y - me.y) <= 6)
        return out

    def other(self, me, other, first, shields, is_enemy, last_action, full):
        args, dist = self.args, math.hypot(other.x - me.x, other.y - me.y)
        values = [first, dist / 9, (other.x - me.x) / 9, (other.y - me.y) / 9]
        if args.obs_all_health:
            values += [other.hp / other.hp_max] + ([other.sh / other.sh_max] if shields else [])
        values += self.onehot(other, is_enemy)
        if args.obs_last_action and not is_enemy:
            values += list(last_action)
        seen = other.alive and (full or dist < 9)
        return values if seen else [0.0] * len(values)

    def obs(self, a, full=False):
        args, spec, me, mask = self.args, self.spec, self.allies[a], self.mask(a)
        ally_shields, enemy_shields = spec.a_race == "P", spec.b_race == "P"
        values = [float(v) for v in mask[2:6]]
        ix, iy, ma = int(me.x), int(me.y), int(args.move_amount)
        around = [(0, 2), (0, -2), (2, 0), (-2, 0), (1, 1), (-1, -1), (1, -1), (-1, 1)]
        if args.obs_pathing_grid:
            values += [self.cell(ix + p * ma, iy + q * ma, self.terrain.pathing, 1.0) for p, q in around]
        if args.obs_terrain_height:
            values += [self.cell(ix + p * ma, iy + q * ma, self.terrain.height, 1.0) for p, q in [*around, (0, 0)]]
        for i, enemy in enumerate(self.enemies):
            values += self.other(me, enemy, float(mask[6 + i]), enemy_shields, True, None, full)
        for i, ally in enumerate(self.allies):
            if i != a:
                values += self.other(me, ally, 1.0, ally_shields, False, self.last_action[i], full)
        if args.obs_own_health or args.obs_all_health:
            values += [me.hp / me.hp_max] + ([me.sh / me.sh_max] if ally_shields else [])
        values += self.onehot(me, False)
        if args.obs_timestep_number:
            values.append(0.0)
        if not me.alive:
            values = [0.0] * len(values)
        return values + ([self.steps / spec.limit] if args.obs_timestep_number else [])

    def state(self):
        args, spec, values = self.args, self.spec, []
        if args.obs_instead_of_state:
            return [v for a in range(spec.n_agents) for v in self.obs(a)]
        x0, y0, x1, y1 = self.terrain.playable
        for unit in [*self.allies, *self.enemies]:
            is_enemy = any(unit is e for e in self.enemies)
            place = [(unit.x - self.terrain.map_x / 2) / (x1 - x0), (unit.y - self.terrain.map_y / 2) / (y1 - y0)]
            left = unit.energy / 200 if unit.name == "medivac" else unit.cd / COOLDOWN.get(unit.name, 15)
            row = [unit.hp / unit.hp_max] + ([] if is_enemy else [left]) + place
            if (spec.b_race if is_enemy else spec.a_race) == "P":
                row.append(unit.sh / unit.sh_max)
            row += self.onehot(unit, is_enemy)
            values += row if unit.alive else [0.0] * len(row)
        if args.state_last_action:
            values += [v for row in self.last_action for v in row]
        return values + ([self.steps / spec.limit] if args.state_timestep_number else [])


def play_random_step(semantics, backend, rng):
    """One step in which the units jump anywhere. Returns the actions."""
    avail = semantics.avail_actions()
    actions = np.where(avail, rng.random(avail.shape), -1).argmax(-1)
    semantics.orders(actions, ~semantics.ended)
    backend.scatter()
    semantics.finish_step(~semantics.ended)
    return actions


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", SPECS)
def test_observations_state_and_mask_follow_the_published_rules(name, flags):
    rng, spec, args, slots = np.random.default_rng(7), SPECS[name], BattleArgs(**FLAGS[flags]), 8
    backend = RandomBackend(spec, slots, rng)
    semantics = BattleSemantics(spec, args, backend, NAMES)
    semantics.begin(np.ones(slots, bool))
    last, steps = np.zeros((slots, spec.n_agents, semantics.n_actions)), np.zeros(slots)
    for event in ("start", "step", "some slots start again"):
        if event == "step":
            last, steps = np.eye(semantics.n_actions)[play_random_step(semantics, backend, rng)], steps + 1
        elif event != "start":
            again = np.arange(slots) % 2 == 0
            semantics.begin(again)
            last[again], steps[again] = 0, 0
        got = semantics.observe(full=True)
        for b in range(slots):
            slow = Slow(spec, args, backend, b, last[b], steps[b])
            agents = range(spec.n_agents)
            np.testing.assert_array_equal(got.avail_actions[b], [slow.mask(a) for a in agents])
            np.testing.assert_array_equal(got.obs[b], np.array([slow.obs(a) for a in agents], np.float32))
            np.testing.assert_array_equal(got.full_obs[b], np.array([slow.obs(a, True) for a in agents], np.float32))
            np.testing.assert_array_equal(got.state[b], np.array(slow.state(), np.float32))


@pytest.mark.parametrize("name", ["MMM2", "2s3z"])
def test_seen_nodes_are_equal_in_both_observations_and_the_dead_are_zero(name):
    spec, args = SPECS[name], BattleArgs()
    backend = RandomBackend(spec, 16, np.random.default_rng(3))
    semantics = BattleSemantics(spec, args, backend, NAMES)
    semantics.begin(np.ones(16, bool))
    got, layout, n = semantics.observe(full=True), semantics.layout, spec.n_agents
    alive = backend.units.alive
    assert not got.obs[~alive[:, :n]].any() and not got.full_obs[~alive[:, :n]].any()
    start = layout.move_dim
    sizes = [(layout.n_enemies, layout.enemy_dim), (layout.n_allies, layout.ally_dim)]
    unseen = 0
    for count, dim in sizes:
        seen, true = (v[..., start : start + count * dim].reshape(16, n, count, dim) for v in (got.obs, got.full_obs))
        shown = (seen != 0).any(-1)
        assert np.array_equal(seen[shown].view(np.int32), true[shown].view(np.int32))
        assert not np.signbit(seen[~shown]).any()
        unseen += ((true != 0).any(-1) & ~shown).sum()
        start += count * dim
    assert unseen > 50  # the comparison has something to compare
    enemies = got.full_obs[..., 4 : 4 + layout.n_enemies * layout.enemy_dim].reshape(16, n, -1, layout.enemy_dim)
    assert np.array_equal((enemies != 0).any(-1), alive[:, :n, None] & alive[:, None, n:])


def test_ranges_are_strict_for_sight_and_inclusive_for_attack():
    spec = make_spec(["marine"] * 2, ["marine"] * 2, "TT")
    backend = RandomBackend(spec, 1, np.random.default_rng(0))
    backend.scatter(dead=0)
    backend.units.x[:] = [[5, 14, 11, 14]]
    backend.units.y[:] = 5
    semantics = BattleSemantics(spec, BattleArgs(), backend, NAMES)
    semantics.begin(np.ones(1, bool))
    got = semantics.observe()
    assert got.full_obs is None
    assert got.avail_actions[0, 0, 6:].tolist() == [True, False]
    blocks = got.obs[0, 0, 4:].reshape(-1)[: 3 * 5].reshape(3, 5)
    assert blocks[0, 0] == 1 and blocks[0, 1] == np.float32(6 / 9)
    assert not blocks[1].any() and not blocks[2].any()  # both stand exactly 9 away
    assert semantics.visibility()[0].tolist() == [[False, False, True, False], [False, False, True, True]]


def test_healing_reaches_exactly_as_far_as_attacks():
    spec = make_spec(["marine"] * 2 + ["medivac"], ["marine"] * 2, "TT", "MMM", ("marauder", "marine", "medivac"))
    backend = RandomBackend(spec, 1, np.random.default_rng(0))
    backend.scatter(dead=0)
    backend.units.x[:] = [[11, np.nextafter(np.float32(11), np.float32(12)), 5, 20, 20]]
    backend.units.y[:] = 5
    semantics = BattleSemantics(spec, BattleArgs(), backend, NAMES)
    semantics.begin(np.ones(1, bool))
    assert semantics.avail_actions()[0, 2, 6:].tolist() == [True, False, False]


def test_a_side_is_gone_when_none_of_its_units_is_listed():
    """SMAC's `update_units`: who is listed with health 0 is dead, but counts for the end of the battle."""
    units = SimpleNamespace(alive=np.array([[1, 1, 0, 0]], bool), listed=np.array([[1, 1, 0, 1]], bool))
    on, off = judge(units, 2, None, np.zeros(1, bool)), SimpleNamespace(alive=units.alive, listed=units.alive)
    assert (on.over[0], on.left.tolist()) == (False, [[2, 0]])
    ended = judge(off, 2, None, np.zeros(1, bool))
    assert (ended.over[0], ended.won[0]) == (True, True)
    only_medivacs = np.array([[True, True, False, False]])
    assert judge(units, 2, only_medivacs, np.zeros(1, bool)).lost[0]  # this rule counts health, as published


def test_nobody_wins_where_both_sides_are_gone():
    gone = np.zeros((1, 4), bool)
    ended = judge(SimpleNamespace(alive=gone, listed=gone), 2, None, np.zeros(1, bool))
    assert (ended.over[0], ended.draw[0], ended.won[0], ended.lost[0]) == (True, True, False, False)


def test_a_unit_that_has_died_pays_nothing_more():
    """SMAC's `death_tracker`: not even when the game lists the unit alive again."""
    ledger = RewardLedger(BattleArgs(reward_scale=False), 1, 1, 1)
    nobody = np.zeros(1, bool)
    units = SimpleNamespace(
        alive=np.ones((1, 2), bool), health=np.array([[45.0, 6.0]]), shield=np.zeros((1, 2)),
        health_max=np.full((1, 2), 45.0), shield_max=np.zeros((1, 2)),
    )  # fmt: skip
    ledger.reset(~nobody, units)
    paid = []
    for health in (0.0, 6.0, 0.0):
        units.health = np.array([[45.0, health]])
        units.alive = units.health > 0
        paid.append(float(ledger.step(units, Ending(*[nobody] * 5, np.ones((1, 2), int)))[0]))
    assert paid == [6 + 10, 0, 0]


def test_orders_of_every_action():
    spec = SPECS["MMM2"]
    backend = RandomBackend(spec, 1, np.random.default_rng(0))
    backend.scatter(dead=0)
    backend.terrain.pathing[:] = True
    backend.units.x[:], backend.units.y[:] = 10.25, 8.5
    semantics = BattleSemantics(spec, BattleArgs(), backend, NAMES)
    semantics.begin(np.ones(1, bool))
    actions = np.array([[1, 2, 3, 4, 5, 6, 17, 8, 1, 9]])
    order, target, dest = semantics.orders(actions, np.ones(1, bool))
    move, attack = Order.MOVE, Order.ATTACK
    assert order[0].tolist() == [Order.STOP, move, move, move, move, attack, attack, attack, Order.STOP, Order.HEAL]
    assert target[0, 5:8].tolist() == [10, 21, 12] and target[0, 9] == 3
    assert dest[0, 1:5].tolist() == [[10.25, 10.5], [10.25, 6.5], [12.25, 8.5], [8.25, 8.5]]


def test_actions_that_are_not_available_are_refused():
    spec = SPECS["5m_vs_6m"]
    backend = RandomBackend(spec, 2, np.random.default_rng(0))
    backend.scatter(dead=0)
    semantics = BattleSemantics(spec, BattleArgs(), backend, NAMES)
    semantics.begin(np.array([True, False]))
    both = np.ones(2, bool)
    with pytest.raises(ValueError, match="slot 0, agent 3: action 0"):
        semantics.orders(np.array([[1, 1, 1, 0, 1]] * 2), np.array([True, False]))
    with pytest.raises(ValueError, match="action 12"):
        semantics.orders(np.array([[12, 1, 1, 1, 1]] * 2), np.array([True, False]))
    with pytest.raises(ValueError, match=r"\[1\] have ended"):
        semantics.orders(np.ones((2, 5), np.int64), both)
    semantics.orders(np.array([[1] * 5, [99] * 5]), np.array([True, False]))


def slow_reward(spec, args, before, after, gone):
    """The published account for one battle; `gone` are units whose death has been paid for."""
    n, ally, enemy, deaths = spec.n_agents, 0.0, 0.0, 0.0
    for i in range(n + spec.n_enemies):
        if i in gone:
            continue
        had, dead = before[i][0] + before[i][1], after[i][0] == 0
        lost = had if dead else had - after[i][0] - after[i][1]
        if dead:
            gone.add(i)
        if i < n:
            ally += lost * args.reward_negative_scale
            deaths -= args.reward_death_value * args.reward_negative_scale * dead * (not args.reward_only_positive)
        else:
            enemy += lost
            deaths += args.reward_death_value * dead
    if not args.reward_only_positive:
        return enemy + deaths - ally
    return max(enemy + deaths, 0) if args.reward_shield_fix else abs(enemy + deaths)


@pytest.mark.parametrize("flags", [{}, {"reward_only_positive": False, "reward_defeat": -7, "reward_scale": False},
                                   {"reward_shield_fix": True, "reward_scale_rate": 10}])  # fmt: skip
def test_rewards_of_whole_episodes(flags):
    spec, args, rng = SPECS["2s3z"], BattleArgs(**flags), np.random.default_rng(11)
    backend = RandomBackend(spec, 6, rng)
    semantics = BattleSemantics(spec, args, backend, NAMES)
    backend.scatter(dead=0)
    semantics.begin(np.ones(6, bool))
    gone = [set() for _ in range(6)]
    pair = lambda b: list(zip(backend.units.health[b].tolist(), backend.units.shield[b].tolist(), strict=True))  # noqa: E731
    best = 200 + 5 * 10 + sum(HEALTH[v] + SHIELD[v] for v in spec.enemies)
    scale = best / args.reward_scale_rate if args.reward_scale else 1.0
    for _ in range(4):
        before, running = [pair(b) for b in range(6)], ~semantics.ended
        avail = semantics.avail_actions()
        semantics.orders(np.where(avail, rng.random(avail.shape), -1).argmax(-1), running)
        dead_before = ~backend.units.alive
        backend.scatter(dead=0.4)
        backend.units.health[dead_before] = 0
        backend.units.alive[:] = backend.units.health > 0
        result = semantics.finish_step(running)
        for b in range(6):
            if not running[b]:
                assert result.reward[b] == 0 and not result.terminated[b]
                continue
            expected = slow_reward(spec, args, before[b], pair(b), gone[b])
            allies, enemies = backend.units.alive[b, :5].sum(), backend.units.alive[b, 5:].sum()
            expected += 200 * (enemies == 0 < allies) + args.reward_defeat * (allies == 0 < enemies)
            assert result.reward[b] == pytest.approx(expected / scale, rel=1e-6, abs=1e-6)
            assert result.terminated[b] == (allies == 0 or enemies == 0)
            assert result.info["battle_won"][b] == (enemies == 0 < allies)
            assert result.info["battle_draw"][b] == (allies == 0 == enemies)
            assert result.info["dead_allies"][b] == 5 - allies and result.info["dead_enemies"][b] == 5 - enemies
    assert semantics.ended.any()


def ending(spec_name, alive, flags=None, steps=1):
    """Play one step that leaves the units of the map `alive` [U]; return its result."""
    spec = SPECS[spec_name]
    backend = RandomBackend(spec, 1, np.random.default_rng(0))
    backend.scatter(dead=0)
    semantics = BattleSemantics(spec, BattleArgs(**(flags or {})), backend, NAMES)
    semantics.begin(np.ones(1, bool))
    for step in range(steps):
        semantics.orders(np.ones((1, spec.n_agents), np.int64), np.ones(1, bool))
        if step == steps - 1:
            backend.units.alive[:] = alive
            backend.units.health[~backend.units.alive] = 0
        result = semantics.finish_step(np.ones(1, bool))
    return result


def test_who_wins_when_only_medivacs_are_left():
    allies, enemies = np.arange(10), np.arange(12)
    medivac_ally, medivac_enemy = allies >= 8, enemies == 3
    everyone = lambda *parts: np.concatenate(parts)  # noqa: E731
    lost = ending("MMM2", everyone(medivac_ally, enemies >= 0))
    assert lost.terminated[0] and not lost.info["battle_won"][0]
    won = ending("MMM2", everyone(allies >= 0, medivac_enemy))
    assert won.terminated[0] and won.info["battle_won"][0]
    both = ending("MMM2", everyone(medivac_ally, medivac_enemy))
    assert both.terminated[0] and not both.info["battle_won"][0]
    nobody = ending("MMM2", everyone(allies < 0, enemies < 0))  # as published: lost, not drawn, on this map type
    assert nobody.terminated[0] and not nobody.info["battle_draw"][0]
    two_medivacs = ending("MMM2", everyone(allies >= 0, medivac_enemy | (enemies == 11)))
    assert not two_medivacs.terminated[0]
    one_marine = ending("MMM2", everyone(allies >= 0, enemies == 0))
    assert not one_marine.terminated[0]


def test_the_step_limit_terminates_or_truncates():
    alive = np.ones(11, bool)
    ended = ending("5m_vs_6m", alive, steps=10)
    assert ended.terminated[0] and not ended.truncated[0] and ended.info["episode_limit"][0]
    cut = ending("5m_vs_6m", alive, {"continuing_episode": True}, steps=10)
    assert cut.terminated[0] and cut.truncated[0] and cut.reward[0] == 0
    won = ending("5m_vs_6m", np.arange(11) < 5, {"continuing_episode": True}, steps=10)
    assert won.terminated[0] and not won.truncated[0] and not won.info["episode_limit"][0]
    assert not ending("5m_vs_6m", alive, steps=9).terminated[0]


def test_sparse_rewards():
    best = 200 + 6 * 10 + 6 * 45
    win, loss = np.arange(11) < 5, np.arange(11) >= 5
    assert ending("5m_vs_6m", win, {"reward_sparse": True}).reward[0] == pytest.approx(20 / best)
    assert ending("5m_vs_6m", loss, {"reward_sparse": True, "reward_scale": False}).reward[0] == -1
    assert ending("5m_vs_6m", loss | win, {"reward_sparse": True}).reward[0] == 0


def test_regenerating_enemy_shields_pay_unless_fixed():
    for fixed, expected in ((False, 12.0), (True, 0.0)):
        spec = SPECS["2m_vs_1z"]
        backend = RandomBackend(spec, 1, np.random.default_rng(0))
        backend.scatter(dead=0)
        backend.units.shield[:] = [[0, 0, 20]]
        semantics = BattleSemantics(spec, BattleArgs(reward_scale=False, reward_shield_fix=fixed), backend, NAMES)
        semantics.begin(np.ones(1, bool))
        semantics.orders(np.ones((1, 2), np.int64), np.ones(1, bool))
        backend.units.shield[0, 2] = 32
        assert semantics.finish_step(np.ones(1, bool)).reward[0] == expected


# n_agents, n_enemies, type bits, races -> (obs, state, actions) that SMAC itself reports with the published flags.
KNOWN_SIZES = {
    "3m": (30, 48, 9), "8m": (80, 168, 14), "25m": (250, 950, 31), "5m_vs_6m": (55, 98, 12),
    "8m_vs_9m": (85, 179, 15), "10m_vs_11m": (105, 243, 17), "27m_vs_30m": (285, 1170, 36), "MMM": (160, 290, 16),
    "MMM2": (176, 322, 18), "2s3z": (80, 120, 11), "3s5z": (128, 216, 14), "3s5z_vs_3s6z": (136, 230, 15),
    "3s_vs_3z": (36, 54, 9), "3s_vs_4z": (42, 61, 10), "3s_vs_5z": (48, 68, 11), "1c3s5z": (162, 270, 15),
    "2m_vs_1z": (16, 26, 7), "corridor": (156, 282, 30), "6h_vs_8z": (78, 140, 14), "2s_vs_1sc": (17, 27, 7),
    "so_many_baneling": (202, 397, 38), "bane_vs_bane": (336, 984, 30), "2c_vs_64zg": (332, 342, 70),
}  # fmt: skip


def test_sizes_of_all_maps_are_smacs():
    from omagd.envs.battle.maps import MAPS

    assert set(MAPS) == set(KNOWN_SIZES)
    for name, spec in MAPS.items():
        sizes = (entity_layout(spec, BattleArgs()).obs_dim, state_dim(spec, BattleArgs()), SMAC.n_actions(spec))
        assert sizes == KNOWN_SIZES[name], name
    assert entity_layout(MAPS["5m_vs_6m"], BattleArgs()).obs_component == (4, (6, 5), (4, 5), 1)
    flags = BattleArgs(**FLAGS["all on"])
    # 4 moves + 8 + 9, 6 x 5, 4 x (5 + 12 actions), own 1 + 1 announced + 1 appended.
    assert entity_layout(MAPS["5m_vs_6m"], flags).obs_component == (21, (6, 5), (4, 17), 3)
    assert state_dim(MAPS["5m_vs_6m"], flags) == 99


def test_arguments_are_checked():
    published = SmacArgs()
    assert (published.difficulty, published.step_mul, published.reward_scale_rate) == ("7", 8, 20)
    for wrong in ({"no_such_key": 1}, {"move_amount": 0}, {"difficulty": "x"}, {"obs_all_health": "maybe"}):
        with pytest.raises(ValidationError):
            SkirmishArgs(**wrong)
