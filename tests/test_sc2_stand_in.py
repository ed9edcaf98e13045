"""The stand-in for the game is what it says: the simulator's battles under the game's rules for units and restarts."""

from __future__ import annotations

import numpy as np
import pytest
from sc2_stand_in import FIRST_ALLY_TYPE, N_UNIT_TYPES, battle_seed
from sc2_stand_in.messages import load
from sc2_stand_in.world import ATTACK, CANT_FIND_UNIT, MOVE, NOT_SUPPORTED, SUCCESS, World

from omagd.envs.battle.backend import Order
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.simulator import Simulator

ON = np.ones(1, bool)


@pytest.fixture(scope="module")
def messages():
    return load()


def listed(world, messages):
    """Return the allies sorted as SMAC sorts them, and the enemies as they come."""
    raw = messages.ObservationRaw()
    world.show(raw.units)
    allies = [unit for unit in raw.units if unit.owner == 1]
    allies.sort(key=lambda unit: (unit.unit_type, unit.pos.x, unit.pos.y))
    return allies, [unit for unit in raw.units if unit.owner == 2]


def values(units):
    return [(u.pos.x, u.pos.y, u.health, u.shield, u.energy, u.weapon_cooldown) for u in units]


def expected(simulator):
    units = simulator.units
    rows = zip(
        units.x[0], units.y[0], units.health[0], units.shield[0], units.energy[0], units.cooldown[0], strict=True
    )
    return [row for row, alive in zip(rows, units.alive[0], strict=True) if alive]


def test_battles_are_those_of_the_simulator(messages):
    world, simulator, n = World("2s3z", 7, "7", messages), Simulator(get_map("2s3z"), 1), 5
    for number in range(2):
        simulator.reset(ON, np.array([battle_seed(7, number)]))
        allies, enemies = listed(world, messages)
        assert values(allies + enemies) == expected(simulator)
        assert [unit.unit_type - FIRST_ALLY_TYPE for unit in allies] == [0, 0, 1, 1, 1]
        order, target = np.full((1, n), int(Order.ATTACK)), np.full((1, n), n)
        order[0, 0], dest = Order.MOVE, np.full((1, n, 2), 16.0, np.float32)
        for agent, unit in enumerate(allies):
            command = messages.ActionRawUnitCommand(ability_id=ATTACK if agent else MOVE, unit_tags=[unit.tag])
            if agent:
                command.target_unit_tag = enemies[0].tag
            else:
                command.target_world_space_pos.x = command.target_world_space_pos.y = 16.0
            assert world.order(command) == SUCCESS
        for _ in range(8):
            world.step(8)
            simulator.advance(order, target, dest, ON)
            order[:] = Order.NONE
            by_tag = {unit.tag: unit for side in listed(world, messages) for unit in side}
            assert values(by_tag[u.tag] for u in allies + enemies if u.tag in by_tag) == expected(simulator)
        world.kill(list(by_tag))
        world.step(2)
        fresh = {unit.tag for side in listed(world, messages) for unit in side}
        assert len(fresh) == 10
        assert not fresh & set(by_tag)


def test_commands_that_mean_nothing_are_refused(messages):
    world = World("3m", 1, "7", messages)
    allies, enemies = listed(world, messages)
    command = messages.ActionRawUnitCommand
    assert world.order(command(ability_id=1, unit_tags=[allies[0].tag])) == NOT_SUPPORTED
    assert world.order(command(ability_id=ATTACK, unit_tags=[allies[0].tag], target_unit_tag=5)) == CANT_FIND_UNIT
    assert world.order(command(ability_id=4, unit_tags=[enemies[0].tag])) == CANT_FIND_UNIT


def test_created_units_stand_where_they_were_put_and_do_not_come_back(messages):
    world = World("32x32_flat", 1, "7", messages)
    marine = N_UNIT_TYPES - 5
    for kind, owner, x, y in ((marine, 1, 9.0, 16.0), (marine, 1, 9.0, 20.0), (48, 2, 20.0, 16.0)):
        created = messages.DebugCreateUnit(unit_type=kind, owner=owner, quantity=1)
        created.pos.x, created.pos.y = x, y
        world.create(created)
    assert listed(world, messages) == ([], [])
    world.step(1)
    allies, enemies = listed(world, messages)
    assert [(u.unit_type, u.pos.x, u.pos.y) for u in allies] == [(marine, 9.0, 16.0), (marine, 9.0, 20.0)]
    assert [(u.unit_type, u.pos.x, u.pos.y) for u in enemies] == [(48, 20.0, 16.0)]
    world.kill([unit.tag for unit in allies + enemies])
    for _ in range(3):
        world.step(2)
        assert listed(world, messages) == ([], [])
