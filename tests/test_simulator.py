"""The built-in simulator: expected numbers are computed by hand, and properties hold in every battle."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from battle_toys import Simulator

from omagd.envs.battle.backend import Order
from omagd.envs.battle.compiled.tables import ALIVE, TIMER
from omagd.envs.battle.maps import MAPS, MapSpec, Wall, get_map
from omagd.envs.battle.units import UNITS
from omagd.utils.errors import UserError

LOOPS = 22.4
FIELDS = ("x", "y", "health", "shield", "energy", "cooldown", "alive", "type_id")
VARIED = ["3m", "MMM", "3s5z", "corridor", "so_many_baneling", "bane_vs_bane", "2c_vs_64zg", "2m_vs_1z", "2s_vs_1sc"]


def start(spec, seeds, **flags):
    """Start one battle for each seed."""
    sim = Simulator(spec, len(seeds), **flags)
    sim.reset(np.ones(len(seeds), bool), np.array(seeds))
    return sim


def random_orders(sim, n, rng):
    """Return orders for n allies: every other time an attack on the first enemy, else random ones, even senseless."""
    b, u = sim.n_slots, sim.units
    if rng.random() < 0.5:
        target = n + u.alive[:, n:].argmax(axis=1)
        return np.full((b, n), Order.ATTACK), np.repeat(target[:, None], n, 1), np.zeros((b, n, 2))
    step = np.array([(2, 0), (-2, 0), (0, 2), (0, -2)])[rng.integers(0, 4, (b, n))]
    dest = np.stack([u.x[:, :n], u.y[:, :n]], axis=-1) + step
    return rng.integers(0, 5, (b, n)), rng.integers(0, u.x.shape[1], (b, n)), dest


def state(sim):
    """Return [fields, B, U]."""
    return np.stack([getattr(sim.units, name) for name in FIELDS])


class Bench:
    """One battle of named units at two places; x, health etc. are arrays [U], allies first, that tests may change."""

    def __init__(self, allies, enemies, ally_at=(13.0, 16.0), enemy_at=(17.0, 16.0), difficulty="7", **keys):
        allies, enemies = tuple(allies.split()), tuple(enemies.split())
        spec = MapSpec("bench", allies, enemies, 60, "T", "T", 0, "marines", (ally_at,), (enemy_at,), **keys)
        self.n, self.sim = len(allies), start(spec, [0], difficulty=difficulty)
        for name in FIELDS:
            setattr(self, name, getattr(self.sim.units, name)[0])

    def play(self, order, target=0, dest=None, steps=1):
        """Give all allies the same order and play."""
        dest = np.tile(np.array(dest or (0.0, 0.0)), (1, self.n, 1))
        orders = np.full((1, self.n), order), np.full((1, self.n), target), dest
        for _ in range(steps):
            self.sim.advance(*orders, np.ones(1, bool))


def test_maps_list_their_allies_in_smacs_order():
    assert len(MAPS) == 23  # sizes and limits: test_smac_parity.py
    with pytest.raises(UserError, match="5m_vs_6m"):
        get_map("5m_v_6m")
    for spec in MAPS.values():
        ranks = [spec.ally_types.index(name) for name in spec.allies]
        assert ranks == sorted(ranks)
    spec = get_map("MMM")  # within a type, allies start sorted by x
    ally_x, enemy_x = np.split(start(spec, range(8)).units.x, [10], axis=1)
    for kind in set(spec.allies):
        assert (np.diff(ally_x[:, np.array(spec.allies) == kind], axis=1) >= 0).all()
    assert (enemy_x.min(axis=1) - ally_x.max(axis=1) > 8).all()


@pytest.mark.parametrize("name", VARIED)
def test_properties_of_random_battles(name):
    spec, rng = get_map(name), np.random.default_rng(1)
    sim = start(spec, range(50, 56))
    terrain, units = sim.terrain, sim.units
    x0, y0, x1, y1 = terrain.playable
    fastest = max(unit.speed for unit in UNITS) * 8 / LOOPS + 4 * 0.4 * math.sqrt(2) + 1e-3
    for _ in range(40):
        x, y, dead = units.x.copy(), units.y.copy(), ~units.alive
        sim.advance(*random_orders(sim, spec.n_agents, rng), np.ones(6, bool))
        assert np.isfinite(state(sim)).all() and (state(sim)[2:6] >= 0).all()
        assert (units.x >= x0).all() and (units.x <= x1).all() and (units.y >= y0).all() and (units.y <= y1).all()
        assert terrain.pathing[units.x.astype(int), units.y.astype(int)].all()
        assert (units.health <= units.health_max).all() and (units.shield <= units.shield_max).all()
        assert np.array_equal(units.alive, units.health > 0)
        assert not (units.alive & dead).any()
        assert (units.x[dead] == x[dead]).all() and (units.y[dead] == y[dead]).all()
        assert np.hypot(units.x - x, units.y - y).max() <= fastest


STEP = 8 / LOOPS  # seconds
HEALED, REGAINED, ZERG = 12.6 * STEP, 0.7875 * STEP, 0.38 * STEP
FAR = {"enemy_at": (29.0, 16.0)}
APART = {"x": (9, 16), "y": (16, 16)}  # stalkers reach 6 + 0.625 + 0.625


@pytest.mark.parametrize(("allies", "enemies", "keys", "given", "orders", "expected"), [
    # The enemy does not answer shots from beyond its target range, 6 cells at difficulty "1".
    ("stalker", "stalker", {"difficulty": "1"}, APART, (Order.ATTACK, 1), {"shield": (80, 62)}),
    ("stalker", "stalker", {}, APART, (Order.ATTACK, 1), {"shield": (62, 62)}),
    # A unit that dies has fired once, at that moment.
    ("marine", "marine marine", {}, {"health": (6, 45, 45)}, (Order.ATTACK, 1, None, 5), {"health": (0, 39, 45)}),
    ("marine marine", "marine", {}, {"health": (45, 45, 6)}, (Order.ATTACK, 2, None, 5), {"health": (39, 45, 0)}),
    # Bonus against armoured units; weapons that cannot hit air.
    ("marauder", "stalker", {}, {}, (Order.ATTACK, 1), {"shield": (0, 60)}),
    ("marauder", "medivac", {}, {}, (Order.ATTACK, 1, None, 10), {"health": (125, 150)}),
    ("marine", "medivac", {}, {}, (Order.ATTACK, 1), {"health": (45, 145)}),
    # Idle allies shoot and do not move; movers do not shoot.
    ("marine", "marine", {}, {"x": (13, 17)}, (Order.STOP,), {"x": (13, None), "health": (39, 39)}),
    ("marine", "marine", {}, {"x": (13, 17), "y": (16, 16)}, (Order.MOVE, 0, (11, 16)),
     {"x": (13 - 3.15 * STEP, None), "health": (39, 45)}),
    # Healing has a rate and costs energy; full health costs nothing; the dead stay dead.
    ("marine medivac", "spine_crawler", FAR, {"health": (20, 150, 300)}, (Order.HEAL,),
     {"health": (20 + HEALED, 150, 300), "energy": (0, 50 - HEALED / 3 + REGAINED, 0)}),
    ("marine medivac", "spine_crawler", FAR, {"health": (20, 150, 300), "energy": (0, 0, 0)}, (Order.HEAL,),
     {"health": (20, 150, 300)}),
    ("marine medivac", "spine_crawler", FAR, {"health": (20, 150, 300), "energy": (0, 200, 0)},
     (Order.HEAL, 0, None, 10), {"health": (45, 150, 300)}),
    ("marine medivac", "spine_crawler", FAR, {"energy": (0, 100, 0)}, (Order.HEAL,),
     {"energy": (0, 100 + REGAINED, 0)}),
    ("marine medivac", "marine", {}, {"health": (6, 150, 45), "x": (13, 11, 17)}, (Order.HEAL,),
     {"health": (0, 150, 39)}),
    # Zerg health regenerates, and shields 10 s (224 loops) after the last damage.
    ("stalker", "spine_crawler", FAR, {"shield": (10, 0), "health": (50, 100)}, (Order.STOP, 0, None, 28),
     {"shield": (10, 0), "health": (50, 100 + 28 * ZERG)}),
    ("stalker", "spine_crawler", FAR, {"shield": (10, 0), "health": (50, 100)}, (Order.STOP, 0, None, 42),
     {"shield": (10 + 2 * 14 * STEP, 0), "health": (50, 100 + 42 * ZERG)}),
    # A baneling explodes on contact, 20 + 15 against light, or when killed, and harms only enemies that are near.
    ("zealot zealot", "baneling", {"enemy_at": (14.8, 16.0), "spacing": 1.0}, {}, (Order.MOVE, 0, (13, 16), 4),
     {"shield": (15, 15, 0), "health": (100, 100, 0)}),
    ("marine", "baneling baneling", {"enemy_at": (18.0, 16.0), "spacing": 0.8}, {"health": (45, 6, 6)},
     (Order.ATTACK, 1), {"health": (45, 0, 6 + ZERG)}),
    ("marine", "baneling", {}, {"x": (13, 15.2), "y": (16, 16), "health": (45, 6)}, (Order.ATTACK, 1),
     {"health": (10, 0)}),
    # A colossus burns a strip across its line of fire.
    ("colossus", "zergling zergling zergling", {}, {"x": (12, 18, 18, 18), "y": (16, 16, 17, 18.6)},
     (Order.ATTACK, 1), {"health": (200, 5 + ZERG, 5 + ZERG, 35)}),
])  # fmt: skip
def test_a_few_steps_end_as_computed_by_hand(allies, enemies, keys, given, orders, expected):
    bench = Bench(allies, enemies, **keys)
    for name, values in given.items():
        getattr(bench, name)[:] = values
    bench.play(*orders)
    for name, values in expected.items():
        found = [None if value is None else float(v) for v, value in zip(getattr(bench, name), values, strict=True)]
        assert found == [None if value is None else pytest.approx(value, rel=1e-4) for value in values], name


def test_units_do_not_shoot_at_dead_units():
    bench = Bench("marine marine", "marine marine")
    bench.health[2] = 6.0
    bench.sim._floats[TIMER, 1, 0] = 2.0  # ready two loops after the first one has killed the target
    bench.play(Order.ATTACK, 2)
    assert not bench.alive[2] and bench.health[3] == 45 - 6, "the shot is kept for the enemy that lives"


def test_the_enemy_keeps_its_target_while_that_is_in_reach():
    bench = Bench("marine marine", "marine")
    for place in ((13.0, 12.0), (12.0, 13.0), (12.0, 13.0), (12.0, 13.0)):  # marines reach 5.75 cells
        bench.x[:], bench.y[:], bench.health[2] = (*place, 17.0), 16.0, 45.0
        bench.play(Order.NONE)
    assert bench.health[0] < 45 - 6 and bench.health[1] == 45


def test_shields_take_full_damage_and_armour_protects_health():
    # A zealot (50 shield, 100 health, armour 1) walks on the spot and is shot by a marine, 6 a shot.
    bench = Bench("zealot", "marine")
    place, shots = (bench.x[0], bench.y[0]), 0
    for _ in range(40):
        before = bench.shield[0] + bench.health[0]
        bench.play(Order.MOVE, dest=place)
        shots += bench.shield[0] + bench.health[0] != before
        shield = max(50 - 6 * shots, 0)
        health = 100 - (6 * shots + shield - 50) / 6 * 5
        assert (bench.shield[0], bench.health[0]) == pytest.approx((shield, health), abs=1e-3)
    assert shots == int(320 // (0.61 * LOOPS)) + 1  # 40 steps are 320 loops: shots at 0, 13.664, ... below 320
    assert bench.health[1] == 45


def test_speed_and_persistent_orders():
    bench = Bench("stalker", "spine_crawler", enemy_at=(29.0, 16.0))
    (x, crawler), (y, _) = bench.x.copy(), bench.y.copy()
    bench.play(Order.MOVE, dest=(x, y + 2))
    assert bench.y[0] - y == pytest.approx(4.13 * 8 / LOOPS, rel=1e-3)
    bench.play(Order.NONE)
    assert (bench.x[0], bench.y[0]) == pytest.approx((x, y + 2), abs=1e-3)
    bench.play(Order.ATTACK, 1, steps=20)
    reach = 6 + 0.625 + 0.9
    assert reach - 0.1 <= math.hypot(bench.x[0] - bench.x[1], bench.y[0] - bench.y[1]) <= reach
    assert bench.x[1] == crawler


def test_medivacs_fly_to_their_targets():
    bench = Bench("marine medivac", "spine_crawler", enemy_at=(29.0, 16.0))
    bench.health[0], bench.x[1] = 20, bench.x[0] - 5.9  # the mask allows it; the beam reaches 4 + 0.375 + 0.75
    bench.play(Order.HEAL, steps=2)
    assert bench.health[0] > 20
    bench = Bench("zealot", "marine medivac", (5.0, 16.0), (24.0, 16.0))
    start = bench.x[2]
    bench.play(Order.STOP, steps=10)
    assert bench.x[2] < start - 3


def test_living_units_keep_apart_and_dead_ones_do_not_collide():
    bench = Bench("marine " * 6, "spine_crawler", enemy_at=(29.0, 29.0), spacing=0.3)
    bench.play(Order.STOP, steps=12)
    x, y = bench.x[:6], bench.y[:6]
    assert np.hypot(x[:, None] - x, y[:, None] - y)[np.triu_indices(6, 1)].min() > 0.6
    bench = Bench("marine marine", "spine_crawler", enemy_at=(29.0, 29.0))
    bench.health[1] = bench.sim._ints[ALIVE, 1] = 0
    bench.x[0], bench.y[0] = spot = bench.x[1], bench.y[1]
    bench.play(Order.STOP)
    assert (bench.x[0], bench.y[0]) == spot


def test_units_find_the_gap_in_a_wall_and_only_colossi_cross_a_cliff():
    wall = Wall(14.0, 17.0, 22.0, 26.0)
    bench = Bench("zergling zergling", "spine_crawler", (8.0, 8.0), (24.0, 8.0), wall=wall)
    bench.play(Order.ATTACK, 2, steps=40)
    assert bench.health[2] < 300 or not bench.alive[:2].any()
    cliff = dataclasses.replace(wall, cliff=True)
    bench = Bench("colossus zergling", "zergling", (12.0, 8.0), (28.0, 28.0), wall=cliff)
    terrain = bench.sim.terrain
    assert terrain.pathing[15, 8] and terrain.height[5, 8] > terrain.height[25, 8]
    bench.play(Order.MOVE, dest=(20.0, 8.0), steps=8)
    assert bench.x[0] > 17 > 14 > bench.x[1]


def test_the_enemy_advances_and_attacks_the_nearest():
    bench = Bench("zealot zealot", "stalker", (8.0, 16.0), (24.0, 16.0), spacing=6.0)
    start = bench.x[2]
    bench.play(Order.STOP)
    assert bench.x[2] < start
    bench.y[2] = bench.y[1] + 1.0
    bench.play(Order.STOP, steps=12)
    assert bench.shield[0] == 50 > bench.shield[1]
