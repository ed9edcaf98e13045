"""The embedded simulator: expected numbers are computed by hand, and properties hold in every battle."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from omagd.envs.battle.backend import Order
from omagd.envs.battle.maps import MAPS, MapSpec, Wall, get_map
from omagd.envs.battle.simulator import Simulator
from omagd.envs.battle.units import UNITS
from omagd.utils.errors import UserError

LOOPS = 22.4
VARIED = ["3m", "MMM", "3s5z", "corridor", "so_many_baneling", "bane_vs_bane", "2c_vs_64zg", "2m_vs_1z", "2s_vs_1sc"]


def build(allies, enemies, ally_at=(13.0, 16.0), enemy_at=(17.0, 16.0), slots=1, map_type="marines", **kw):
    """Start a battle of named units at two places."""
    spec = MapSpec(
        "bench", tuple(allies), tuple(enemies), 60, "T", "T", 0, map_type, (ally_at,), (enemy_at,), **kw
    )  # fmt: skip
    sim = Simulator(spec, slots)
    sim.reset(np.ones(slots, bool), np.arange(slots))
    return sim


def command(sim, n, order, target=0, dest=(0.0, 0.0)):
    """Give all allies of all slots the same order and play one step."""
    shape = (sim.n_slots, n)
    where = np.broadcast_to(np.asarray(dest, float), (*shape, 2))
    sim.advance(np.full(shape, order), np.full(shape, target), where, np.ones(sim.n_slots, bool))


def random_orders(sim, n, rng):
    """Random orders, senseless ones included."""
    b, u = sim.n_slots, sim.units.x.shape[1]
    order = rng.integers(0, 5, (b, n))
    step = np.array([(2, 0), (-2, 0), (0, 2), (0, -2)])[rng.integers(0, 4, (b, n))]
    dest = np.stack([sim.units.x[:, :n], sim.units.y[:, :n]], axis=-1) + step
    return order, rng.integers(0, u, (b, n)), dest


def charge(sim, n, slots):
    """All allies attack the first living enemy."""
    target = n + sim.units.alive[:, n:].argmax(axis=1)
    return np.full((slots, n), Order.ATTACK), np.repeat(target[:, None], n, 1), np.zeros((slots, n, 2))


def everything(sim):
    u = sim.units
    return {k: getattr(u, k).copy() for k in ("x", "y", "health", "shield", "energy", "cooldown", "alive", "type_id")}


def same(a, b):
    return all(np.array_equal(a[k], b[k]) for k in a)


def test_maps_list_their_allies_in_smacs_order():
    assert len(MAPS) == 23  # sizes and limits: test_smac_parity.py
    with pytest.raises(UserError, match="5m_vs_6m"):
        get_map("5m_v_6m")
    for spec in MAPS.values():
        ranks = [spec.ally_types.index(name) for name in spec.allies]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize("name", VARIED)
def test_properties_of_random_battles(name):
    spec, slots = get_map(name), 6
    n, rng = spec.n_agents, np.random.default_rng(1)
    sim = Simulator(spec, slots)
    sim.reset(np.ones(slots, bool), np.arange(slots) + 50)
    terrain, units = sim.terrain, sim.units
    x0, y0, x1, y1 = terrain.playable
    fastest = max(unit.speed for unit in UNITS) * 8 / LOOPS + 4 * 0.4 * math.sqrt(2) + 1e-3
    for step in range(40):
        before = everything(sim)
        orders = charge(sim, n, slots) if step % 3 == 2 else random_orders(sim, n, rng)
        sim.advance(*orders, np.ones(slots, bool))
        assert (units.x >= x0).all() and (units.x <= x1).all() and (units.y >= y0).all() and (units.y <= y1).all()
        assert terrain.pathing[units.x.astype(int), units.y.astype(int)].all()
        assert (units.health >= 0).all() and (units.health <= units.health_max).all()
        assert (units.shield >= 0).all() and (units.shield <= units.shield_max).all()
        assert (units.energy >= 0).all() and (units.cooldown >= 0).all()
        assert np.array_equal(units.alive, units.health > 0)
        dead = ~before["alive"]
        assert not (units.alive & dead).any()
        assert (units.x[dead] == before["x"][dead]).all() and (units.y[dead] == before["y"][dead]).all()
        assert np.hypot(units.x - before["x"], units.y - before["y"]).max() <= fastest
        assert all(np.isfinite(v).all() for v in everything(sim).values())


@pytest.mark.parametrize("name", ["MMM2", "bane_vs_bane", "2c_vs_64zg", "2m_vs_1z", "2s_vs_1sc", "1c3s5z"])
def test_a_batch_is_bit_for_bit_its_single_battles(name):
    spec, slots, picked = get_map(name), 64, (0, 17, 63)
    n, rng = spec.n_agents, np.random.default_rng(2)
    batch = Simulator(spec, slots)
    batch.reset(np.ones(slots, bool), np.arange(slots) * 7)
    singles = {b: Simulator(spec, 1) for b in picked}
    for b, sim in singles.items():
        sim.reset(np.ones(1, bool), np.array([b * 7]))
    for step in range(25):
        orders = charge(batch, n, slots) if step % 2 else random_orders(batch, n, rng)
        batch.advance(*orders, np.ones(slots, bool))
        for b, sim in singles.items():
            sim.advance(*(part[b : b + 1] for part in orders), np.ones(1, bool))
            assert same({k: v[b : b + 1] for k, v in everything(batch).items()}, everything(sim)), (step, b)


def test_many_slots_are_computed_in_equal_pieces():
    spec = get_map("27m_vs_30m")
    n, rng = spec.n_agents, np.random.default_rng(6)
    large, small = Simulator(spec, 100), Simulator(spec, 30)
    large.reset(np.ones(100, bool), np.arange(100))
    small.reset(np.ones(30, bool), np.arange(70, 100))
    for _ in range(12):
        orders = charge(large, n, 100) if rng.random() < 0.5 else random_orders(large, n, rng)
        large.advance(*orders, np.ones(100, bool))
        small.advance(*(part[70:] for part in orders), np.ones(30, bool))
    assert same({k: v[70:] for k, v in everything(large).items()}, everything(small))


def test_battles_follow_from_seeds_and_inactive_slots_do_not_change():
    spec = get_map("3s5z")
    n, rng = spec.n_agents, np.random.default_rng(3)
    sim = Simulator(spec, 4)
    sim.reset(np.ones(4, bool), np.array([5, 5, 6, 6]))
    assert np.array_equal(sim.units.x[0], sim.units.x[1])
    assert not np.array_equal(sim.units.x[1], sim.units.x[2])
    for _ in range(20):
        order, target, dest = (np.repeat(part[::2], 2, axis=0) for part in random_orders(sim, n, rng))
        still = everything(sim)
        sim.advance(order, target, dest, np.array([True, True, True, False]))
        now = everything(sim)
        assert same({k: v[3:] for k, v in still.items()}, {k: v[3:] for k, v in now.items()})
        assert same({k: v[:1] for k, v in now.items()}, {k: v[1:2] for k, v in now.items()})
    sim.advance(*random_orders(sim, n, rng), np.zeros(4, bool))
    assert same(everything(sim), now)
    sim.reset(np.array([False, True, False, False]), np.array([5, 5, 6, 6]))
    assert sim.units.alive[1].all()
    assert np.array_equal(sim.units.x[0], now["x"][0])


def test_allies_start_sorted_by_type_then_x():
    spec = get_map("MMM")
    sim = Simulator(spec, 8)
    sim.reset(np.ones(8, bool), np.arange(8))
    names = np.array(spec.allies)
    for kind in set(spec.allies):
        x = sim.units.x[:, :10][:, names == kind]
        assert (np.diff(x, axis=1) >= 0).all()
    gap = sim.units.x[:, 10:].min(axis=1) - sim.units.x[:, :10].max(axis=1)
    assert (gap > 8).all()


def test_snapshot_and_restore_continue_alike():
    spec = get_map("MMM")
    n, rng = spec.n_agents, np.random.default_rng(4)
    sim = Simulator(spec, 5)
    sim.reset(np.ones(5, bool), np.arange(5))
    for _ in range(8):
        sim.advance(*charge(sim, n, 5), np.ones(5, bool))
    other = Simulator(spec, 5)
    other.restore(sim.snapshot())
    for _ in range(12):
        orders = random_orders(sim, n, rng)
        sim.advance(*orders, np.ones(5, bool))
        other.advance(*orders, np.ones(5, bool))
        assert same(everything(sim), everything(other))


def test_a_snapshot_with_another_number_of_slots_is_rejected():
    one, two = Simulator(get_map("3m"), 1), Simulator(get_map("3m"), 2)
    with pytest.raises(ValueError, match="6 units in 1 slots, not 6 in 2"):
        two.restore(one.snapshot())


def test_an_enemy_does_not_answer_shots_from_beyond_its_target_range():
    # At difficulty "1" the enemy looks 6 cells far; two stalkers reach 6 + 0.625 + 0.625.
    answered = {}
    for difficulty in ("1", "7"):
        sim = Simulator(dataclasses.replace(get_map("2s3z"), allies=("stalker",), enemies=("stalker",)), 1,
                        difficulty=difficulty)  # fmt: skip
        sim.reset(np.ones(1, bool), np.zeros(1, np.int64))
        sim.units.x[0], sim.units.y[0] = (9.0, 16.0), (16.0, 16.0)
        command(sim, 1, Order.ATTACK, target=1)
        answered[difficulty] = bool(sim.units.shield[0, 0] < 80)
        assert sim.units.shield[0, 1] == 80 - 18
    assert answered == {"1": False, "7": True}


def test_marine_duel_takes_the_time_of_eight_shots():
    # 45 health, 6 a shot: 8 shots, the first at once, then 7 cooldowns of 0.61 s = 13.664 loops.
    sim = build(["marine"], ["marine"])
    last_shot = 7 * 0.61 * LOOPS
    expected = int(math.ceil(last_shot / 2) * 2 // 8) + 1
    steps = 0
    while sim.units.alive.all():
        command(sim, 1, Order.ATTACK, target=1)
        steps += 1
        assert (sim.units.health[0] % 6 == 45 % 6).all() or not sim.units.alive.any()
    assert steps == expected
    assert not sim.units.alive.any()


def test_dead_units_do_not_shoot():
    for allies, enemies, short in ((1, 2, slice(0, 1)), (2, 1, slice(2, 3))):
        sim = build(["marine"] * allies, ["marine"] * enemies)
        sim.units.health[0, short] = 6.0  # one shot
        for _ in range(5):
            command(sim, allies, Order.ATTACK, target=allies)
        assert (~sim.units.alive[0]).nonzero()[0].tolist() == list(range(3))[short]
        assert sim.units.health[0].sum() == 2 * 45 - 6, "it fired once, at the moment of its death"


def test_units_do_not_shoot_at_dead_units():
    sim = build(["marine"] * 2, ["marine"] * 2)
    sim.units.health[0, 2] = 6.0
    sim._battle.timer[1, 0] = 2.0  # ready two loops after the first one has killed the target
    command(sim, 2, Order.ATTACK, target=2)
    assert not sim.units.alive[0, 2]
    assert sim.units.health[0, 3] == 45 - 6, "the shot is kept for the enemy that lives"


def test_the_enemy_keeps_its_target_while_that_is_in_reach():
    sim = build(["marine"] * 2, ["marine"])
    for place in ((13.0, 12.0), (12.0, 13.0), (12.0, 13.0), (12.0, 13.0)):  # marines reach 5.75 cells
        sim.units.x[0], sim.units.y[0] = (*place, 17.0), 16.0
        sim.units.health[0, 2] = 45.0
        command(sim, 2, Order.NONE)
    assert sim.units.health[0, 0] < 45 - 6
    assert sim.units.health[0, 1] == 45


def test_shields_take_full_damage_and_armour_protects_health():
    # A zealot (50 shield, 100 health, armour 1) walks on the spot and is shot by a marine, 6 a shot.
    sim = build(["zealot"], ["marine"], map_type="zealots")
    place = (float(sim.units.x[0, 0]), float(sim.units.y[0, 0]))
    shield, health, seen = 50.0, 100.0, 0
    for _ in range(40):
        before = sim.units.shield[0, 0] + sim.units.health[0, 0]
        command(sim, 1, Order.MOVE, dest=place)
        if sim.units.shield[0, 0] + sim.units.health[0, 0] == before:
            continue
        seen += 1
        absorbed = min(shield, 6.0)
        shield -= absorbed
        health -= (6.0 - absorbed) / 6.0 * 5.0
        assert sim.units.shield[0, 0] == pytest.approx(shield, abs=1e-4)
        assert sim.units.health[0, 0] == pytest.approx(health, abs=1e-3)
    # 40 steps are 320 loops: shots at 0, 13.664, ... below 320.
    assert seen == int(320 // (0.61 * LOOPS)) + 1
    assert sim.units.health[0, 1] == 45


def test_bonus_damage_and_weapons_that_cannot_hit_air():
    sim = build(["marauder"], ["stalker"], map_type="MMM")
    command(sim, 1, Order.ATTACK, target=1)
    assert sim.units.shield[0, 1] == 80 - 20
    sim = build(["marauder"], ["medivac"], map_type="MMM")
    for _ in range(10):
        command(sim, 1, Order.ATTACK, target=1)
    assert sim.units.health[0, 1] == 150
    sim = build(["marine"], ["medivac"])
    command(sim, 1, Order.ATTACK, target=1)
    assert sim.units.health[0, 1] == 150 - 5


def test_idle_allies_shoot_but_do_not_move_and_movers_do_not_shoot():
    sim = build(["marine"], ["marine"])
    x = float(sim.units.x[0, 0])
    command(sim, 1, Order.STOP)
    assert sim.units.x[0, 0] == pytest.approx(x, abs=1e-6)
    assert sim.units.health[0, 1] == 39
    sim = build(["marine"], ["marine"])
    command(sim, 1, Order.MOVE, dest=(11.0, 16.0))
    assert sim.units.health[0, 1] == 45


def test_speed_and_persistent_orders():
    sim = build(["stalker"], ["spine_crawler"], enemy_at=(29.0, 16.0), map_type="stalkers")
    x, y = float(sim.units.x[0, 0]), float(sim.units.y[0, 0])
    command(sim, 1, Order.MOVE, dest=(x, y + 2))
    assert sim.units.y[0, 0] - y == pytest.approx(4.13 * 8 / LOOPS, rel=1e-3)
    command(sim, 1, Order.NONE)
    assert sim.units.y[0, 0] == pytest.approx(y + 2, abs=1e-3)
    assert sim.units.x[0, 0] == pytest.approx(x, abs=1e-3)
    crawler = float(sim.units.x[0, 1])
    for _ in range(20):
        command(sim, 1, Order.ATTACK, target=1)
    assert sim.units.x[0, 1] == crawler
    reach = 6 + 0.625 + 0.9
    distance = math.hypot(sim.units.x[0, 0] - crawler, sim.units.y[0, 0] - sim.units.y[0, 1])
    assert reach - 0.1 <= distance <= reach


def test_medivac_heals_at_its_rate_and_uses_energy():
    sim = build(["marine", "medivac"], ["spine_crawler"], enemy_at=(29.0, 16.0), map_type="MMM")
    sim.units.health[0, 0] = 20.0
    command(sim, 2, Order.HEAL, target=0)
    healed = 12.6 * 8 / LOOPS
    assert sim.units.health[0, 0] == pytest.approx(20 + healed, rel=1e-4)
    assert sim.units.energy[0, 1] == pytest.approx(50 - healed / 3 + 0.7875 * 8 / LOOPS, rel=1e-4)
    sim.units.energy[0, 1] = 0.0
    command(sim, 2, Order.HEAL, target=0)
    assert sim.units.health[0, 0] == pytest.approx(20 + healed, abs=0.5)
    sim.units.energy[0, 1] = 200.0
    for _ in range(10):
        command(sim, 2, Order.HEAL, target=0)
    assert sim.units.health[0, 0] == 45
    sim.units.energy[0, 1] = 100.0
    command(sim, 2, Order.HEAL, target=0)
    assert sim.units.energy[0, 1] == pytest.approx(100 + 0.7875 * 8 / LOOPS, rel=1e-4), "full health costs nothing"


def test_healing_does_not_revive():
    sim = build(["marine", "medivac"], ["marine"], map_type="MMM")
    sim.units.health[0, 0] = 6.0
    sim.units.x[0, 1] -= 2  # the enemy shoots the marine
    command(sim, 2, Order.HEAL, target=0)
    assert not sim.units.alive[0, 0]
    assert sim.units.health[0, 0] == 0


def test_medivacs_fly_to_their_targets():
    sim = build(["marine", "medivac"], ["spine_crawler"], enemy_at=(29.0, 16.0), map_type="MMM")
    sim.units.health[0, 0] = 20.0
    sim.units.x[0, 1] = sim.units.x[0, 0] - 5.9  # the mask allows it; the beam reaches 4 + 0.375 + 0.75
    for _ in range(2):
        command(sim, 2, Order.HEAL, target=0)
    assert sim.units.health[0, 0] > 20
    sim = build(["zealot"], ["marine", "medivac"], ally_at=(5.0, 16.0), enemy_at=(24.0, 16.0), map_type="zealots")
    start = float(sim.units.x[0, 2])
    for _ in range(10):
        command(sim, 1, Order.STOP)
    assert sim.units.x[0, 2] < start - 3


def test_shields_and_zerg_health_regenerate():
    sim = build(["stalker"], ["spine_crawler"], enemy_at=(29.0, 16.0), map_type="stalkers")
    sim.units.shield[0, 0], sim.units.health[0, 0], sim.units.health[0, 1] = 10.0, 50.0, 100.0
    for _ in range(28):  # 224 loops: 10 s
        command(sim, 1, Order.STOP)
    assert sim.units.shield[0, 0] == 10
    for _ in range(14):
        command(sim, 1, Order.STOP)
    assert sim.units.shield[0, 0] == pytest.approx(10 + 2 * 14 * 8 / LOOPS, rel=1e-4)
    assert sim.units.health[0, 0] == 50
    assert sim.units.health[0, 1] == pytest.approx(100 + 0.38 * 42 * 8 / LOOPS, rel=1e-4)


def test_banelings_explode_on_contact_and_when_killed():
    # Two zealots stand together: one blast hits both. 20 + 15 against light.
    sim = build(["zealot", "zealot"], ["baneling"], enemy_at=(14.8, 16.0), map_type="zealots", spacing=1.0)
    for _ in range(4):
        command(sim, 2, Order.MOVE, dest=(13.0, 16.0))
    assert not sim.units.alive[0, 2]
    assert sim.units.shield[0, :2].tolist() == [15, 15]
    # Killed from afar it explodes too, but harms only what is near: a second baneling is its friend.
    sim = build(["marine"], ["baneling", "baneling"], enemy_at=(18.0, 16.0), spacing=0.8)
    sim.units.health[0, 1:] = 6.0
    command(sim, 1, Order.ATTACK, target=1)
    assert sim.units.alive[0].tolist() == [True, False, True]
    assert sim.units.health[0, 0] == 45
    sim.units.x[0, 2], sim.units.y[0, 2] = sim.units.x[0, 0] + 2.2, sim.units.y[0, 0]
    for _ in range(2):
        command(sim, 1, Order.ATTACK, target=2)
    assert not sim.units.alive[0, 2]
    assert sim.units.health[0, 0] == 10


def test_colossus_burns_a_strip_across_its_line_of_fire():
    sim = build(["colossus"], ["zergling"] * 3, enemy_at=(18.0, 16.0), map_type="colossus", slots=1)
    sim.units.x[0], sim.units.y[0] = (12.0, 18.0, 18.0, 18.0), (16.0, 16.0, 17.0, 18.6)
    command(sim, 1, Order.ATTACK, target=1)
    assert sim.units.health[0, 0] == 200
    lost = 35 - sim.units.health[0, 1:] + 0.38 * 8 / LOOPS
    assert lost == pytest.approx([30, 30, 0], abs=0.2)


def test_living_units_keep_apart_and_dead_ones_do_not_collide():
    sim = build(["marine"] * 6, ["spine_crawler"], enemy_at=(29.0, 29.0), spacing=0.3)
    for _ in range(12):
        command(sim, 6, Order.STOP)
    x, y = sim.units.x[0, :6], sim.units.y[0, :6]
    distance = np.hypot(x[:, None] - x, y[:, None] - y)[np.triu_indices(6, 1)]
    assert distance.min() > 0.6
    sim = build(["marine", "marine"], ["spine_crawler"], enemy_at=(29.0, 29.0))
    sim.units.health[0, 1] = 0.0
    sim.restore({**sim.snapshot(), "ints": np.where(np.arange(3)[:, None] == 1, 0, sim.snapshot()["ints"])})
    sim.units.x[0, 0], sim.units.y[0, 0] = sim.units.x[0, 1], sim.units.y[0, 1]
    spot = float(sim.units.x[0, 0])
    command(sim, 2, Order.STOP)
    assert sim.units.x[0, 0] == spot


def test_units_find_the_gap_in_a_wall_and_only_colossi_cross_a_cliff():
    wall = Wall(14.0, 17.0, 22.0, 26.0)
    sim = build(["zergling", "zergling"], ["spine_crawler"], (8.0, 8.0), (24.0, 8.0), map_type="bane", wall=wall)
    for _ in range(40):
        command(sim, 2, Order.ATTACK, target=2)
    assert sim.units.health[0, 2] < 300 or not sim.units.alive[0, :2].any()
    cliff = dataclasses.replace(wall, cliff=True)
    sim = build(["colossus"], ["zergling"], (12.0, 8.0), (28.0, 28.0), map_type="colossus", wall=cliff)
    assert sim.terrain.pathing[15, 8] and sim.terrain.height[5, 8] > sim.terrain.height[25, 8]
    for _ in range(8):
        command(sim, 1, Order.MOVE, dest=(20.0, 8.0))
    assert sim.units.x[0, 0] > 17


def test_the_enemy_advances_and_attacks_the_nearest():
    sim = build(["zealot", "zealot"], ["stalker"], (8.0, 16.0), (24.0, 16.0), map_type="zealots", spacing=6.0)
    start = float(sim.units.x[0, 2])
    command(sim, 2, Order.STOP)
    assert sim.units.x[0, 2] < start
    sim.units.y[0, 2] = sim.units.y[0, 1] + 1.0
    for _ in range(12):
        command(sim, 2, Order.STOP)
    assert sim.units.shield[0, 1] < 50
    assert sim.units.shield[0, 0] == 50
