"""Cases of SMAC's rules that the recorded battles of `test_smac_parity` do not reach, on units placed by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.backend import Order, Terrain, Units
from omagd.envs.battle.reward import Ending, RewardLedger, judge
from omagd.envs.battle.semantics import BattleSemantics

NAMES = ["zealot", "marine", "medivac", "stalker", "marauder"]
HEALTH = {"zealot": 100, "marine": 45, "medivac": 150, "stalker": 80, "marauder": 125}
ON = np.ones(1, bool)


def make_spec(allies, enemies, races, map_type="marines", ally_types=()):
    return SimpleNamespace(
        allies=allies, enemies=enemies, n_agents=len(allies), n_enemies=len(enemies), limit=10, a_race=races[0],
        b_race=races[1], unit_type_bits=len(ally_types), map_type=map_type, ally_types=ally_types,
    )  # fmt: skip


BIO = ("marauder", "marine", "medivac")
SPECS = {
    "2m": make_spec(["marine"] * 2, ["marine"] * 2, "TT"),
    "5m_vs_6m": make_spec(["marine"] * 5, ["marine"] * 6, "TT"),
    "2m1d": make_spec(["marine"] * 2 + ["medivac"], ["marine"] * 2, "TT", "MMM", BIO),
    "MMM2": make_spec(["marauder"] * 2 + ["marine"] * 6 + ["medivac"] * 2,
                      ["marauder"] * 3 + ["medivac"] + ["marine"] * 7 + ["medivac"], "TT", "MMM", BIO),
    "2m_vs_1z": make_spec(["marine"] * 2, ["zealot"], "TP"),
}  # fmt: skip


def make_battle(name, slots=1, begin=ON, **flags):
    """Return the semantics of a started battle and its back-end: units in one place, without physics."""
    spec, zero = SPECS[name], np.zeros((slots, len(SPECS[name].allies) + len(SPECS[name].enemies)), np.float32)
    names = [*spec.allies, *spec.enemies]
    health = zero + np.array([HEALTH[v] for v in names], np.float32)
    kinds = np.tile(np.array([NAMES.index(v) for v in names], np.int16), (slots, 1))
    shield = zero + np.array([50.0 * (v == "zealot") for v in names], np.float32)
    units = Units(zero + np.float32(10.25), zero + np.float32(8.5), health, health.copy(), shield, shield.copy(),
                  zero.copy(), zero.copy(), kinds, health > 0)  # fmt: skip
    terrain = Terrain(24, 20, (2.0, 1.0, 22.0, 19.0), np.ones((24, 20), bool), np.zeros((24, 20), np.float32))
    backend = SimpleNamespace(n_slots=slots, terrain=terrain, units=units)
    semantics = BattleSemantics(spec, BattleArgs(**flags), backend, NAMES)
    semantics.begin(begin)
    return semantics, units


def test_ranges_are_strict_for_sight_and_inclusive_for_attack():
    semantics, units = make_battle("2m")
    units.x[:] = [[5, 14, 11, 14]]
    got = semantics.observe()
    assert got.full_obs is None
    assert got.avail_actions[0, 0, 6:].tolist() == [True, False]
    blocks = got.obs[0, 0, 4:].reshape(-1)[: 3 * 5].reshape(3, 5)
    assert blocks[0, 0] == 1 and blocks[0, 1] == np.float32(6 / 9)
    assert not blocks[1].any() and not blocks[2].any()  # both stand exactly 9 away
    assert semantics.visibility()[0].tolist() == [[False, False, True, False], [False, False, True, True]]


def test_healing_reaches_exactly_as_far_as_attacks():
    semantics, units = make_battle("2m1d")
    units.x[:] = [[11, np.nextafter(np.float32(11), np.float32(12)), 5, 20, 20]]
    assert semantics.avail_actions()[0, 2, 6:].tolist() == [True, False, False]


def test_a_side_is_gone_when_no_unit_is_listed():
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


def test_a_death_is_rewarded_once():
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
    semantics, _ = make_battle("MMM2")
    actions = np.array([[1, 2, 3, 4, 5, 6, 17, 8, 1, 9]])
    order, target, dest = semantics.orders(actions, ON)
    move, attack = Order.MOVE, Order.ATTACK
    assert order[0].tolist() == [Order.STOP, move, move, move, move, attack, attack, attack, Order.STOP, Order.HEAL]
    assert target[0, 5:8].tolist() == [10, 21, 12] and target[0, 9] == 3
    assert dest[0, 1:5].tolist() == [[10.25, 10.5], [10.25, 6.5], [12.25, 8.5], [8.25, 8.5]]


def test_unavailable_actions_are_rejected():
    semantics, _ = make_battle("5m_vs_6m", 2, np.array([True, False]))
    both = np.ones(2, bool)
    with pytest.raises(ValueError, match="slot 0, agent 3: action 0"):
        semantics.orders(np.array([[1, 1, 1, 0, 1]] * 2), np.array([True, False]))
    with pytest.raises(ValueError, match="action 12"):
        semantics.orders(np.array([[12, 1, 1, 1, 1]] * 2), np.array([True, False]))
    with pytest.raises(ValueError, match=r"\[1\] have ended"):
        semantics.orders(np.ones((2, 5), np.int64), both)
    semantics.orders(np.array([[1] * 5, [99] * 5]), np.array([True, False]))


def ending(spec_name, alive, flags=None, steps=1):
    """Play one step that leaves the units of the map `alive` [U]; return its result."""
    semantics, units = make_battle(spec_name, **(flags or {}))
    for step in range(steps):
        semantics.orders(np.ones((1, SPECS[spec_name].n_agents), np.int64), ON)
        if step == steps - 1:
            units.alive[:] = alive
            units.health[~units.alive] = 0
        result = semantics.finish_step(ON)
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


def test_regenerating_enemy_shields_are_rewarded_unless_fixed():
    for fixed, expected in ((False, 12.0), (True, 0.0)):
        semantics, units = make_battle("2m_vs_1z", reward_scale=False, reward_shield_fix=fixed)
        units.shield[0, 2] = 20
        semantics.begin(ON)
        semantics.orders(np.ones((1, 2), np.int64), ON)
        units.shield[0, 2] = 32
        assert semantics.finish_step(ON).reward[0] == expected
