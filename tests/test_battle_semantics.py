"""Cases of SMAC's rules that the recorded battles of `test_smac_parity` do not reach, on units placed by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from battle_toys import Simulator

from omagd.envs.battle.args import BattleArgs
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.reward import Ending, RewardLedger, judge
from omagd.envs.battle.semantics import BattleSemantics

ON, OFF = np.ones(1, bool), np.zeros(1, bool)
SPECS = {
    "2m": replace(get_map("3m"), allies=("marine",) * 2, enemies=("marine",) * 2),
    "2m1d": replace(get_map("MMM"), allies=("marine", "marine", "medivac"), enemies=("marine",) * 2),
    "1m2d": replace(get_map("MMM"), allies=("marine", "medivac", "medivac"), enemies=("marine", "medivac", "medivac")),
}


def make_battle(name, **flags):
    """Return the semantics of a started battle of at most 10 steps, and its units, all in one place."""
    spec = replace(SPECS.get(name) or get_map(name), limit=10)
    backend = Simulator(spec, 1)
    backend.reset(ON, np.zeros(1, np.int64))
    backend.units.x[:], backend.units.y[:] = 10.25, 8.5
    semantics = BattleSemantics(spec, BattleArgs(**flags), backend)
    semantics.begin(ON)
    return semantics, backend.units


def test_ranges_are_strict_for_sight_and_inclusive_for_attack():
    semantics, units = make_battle("2m")
    units.x[:] = [[5, 14, 11, 14]]
    got = semantics.observe()
    assert got.full_obs is None
    assert got.avail_actions[0, 0, 6:].tolist() == [True, False]
    blocks = got.obs[0, 0, 4 : 4 + 3 * 5].reshape(3, 5)
    assert blocks[0, 0] == 1 and blocks[0, 1] == np.float32(6 / 9)
    assert not blocks[1:].any()  # both stand exactly 9 away
    assert semantics.visibility()[0].tolist() == [[False, False, True, False], [False, False, True, True]]


def test_healing_reaches_exactly_as_far_as_attacks():
    semantics, units = make_battle("2m1d")
    units.x[:] = [[11, np.nextafter(np.float32(11), np.float32(12)), 5, 20, 20]]
    assert semantics.avail_actions()[0, 2, 6:].tolist() == [True, False, False]


def ends(alive, listed=None, medivac=None):
    """Return SMAC's verdict on [U] units of two allies, as a list of names, and the numbers of living units."""
    units = SimpleNamespace(alive=np.array([alive], bool), listed=np.array([listed or alive], bool))
    ending = judge(units, 2, None if medivac is None else np.array([medivac], bool), OFF)
    return [name for name in ("won", "lost", "draw", "over") if getattr(ending, name)[0]], ending.left[0].tolist()


def test_a_side_is_gone_when_no_unit_is_listed():
    """SMAC's `update_units`: who is listed with health 0 is dead, but counts for the end of the battle."""
    assert ends([1, 1, 0, 0], listed=[1, 1, 0, 1]) == ([], [2, 0])
    assert ends([1, 1, 0, 0]) == (["won", "over"], [2, 0])
    only_medivacs = [1, 1, 0, 0]  # this rule counts health, as published
    assert ends([1, 1, 0, 0], [1, 1, 0, 1], only_medivacs)[0] == ["lost", "over"]


def test_nobody_wins_where_both_sides_are_gone():
    assert ends([0, 0, 0, 0]) == (["draw", "over"], [0, 0])


def test_a_death_is_rewarded_once():
    """SMAC's `death_tracker`: not even when the game lists the unit alive again."""
    ledger = RewardLedger(BattleArgs(reward_scale=False), 1, 1, 1)
    units = Simulator(replace(get_map("3m"), allies=("marine",), enemies=("marine",)), 1).units
    units.health[:] = 45.0, 6.0
    units.alive[:] = True
    ledger.reset(ON, units)
    paid = []
    for health in (0.0, 6.0, 0.0):
        units.health[0, 1] = health
        units.alive[0, 1] = health > 0
        paid.append(float(ledger.step(units, Ending(*[OFF] * 5, np.ones((1, 2), int)))[0]))
    assert paid == [6 + 10, 0, 0]


def ending(name, alive, steps=1, **flags):
    """Play `steps` steps, of which the last leaves the units `alive` [U]; return its reward, and what is true of it."""
    semantics, units = make_battle(name, **flags)
    for step in range(1, steps + 1):
        semantics.orders(np.ones((1, semantics.layout.n_allies + 1), np.int64), ON)
        if step == steps:
            units.alive[:] = alive
            units.health[:] *= units.alive
        result = semantics.finish_step(ON)
    flags = {"terminated": result.terminated, "truncated": result.truncated, **result.info}
    return float(result.reward[0]), [key for key, flag in flags.items() if flag[0] and not key.startswith("dead")]


@pytest.mark.parametrize(("alive", "expected"), [
    ([0, 1, 1, 1, 1, 1], ["terminated"]),
    ([1, 1, 1, 0, 1, 0], ["terminated", "battle_won"]),
    ([0, 1, 1, 0, 1, 0], ["terminated"]),
    ([0, 0, 0, 0, 0, 0], ["terminated"]),  # as published: lost, not drawn, on this map type
    ([1, 1, 1, 0, 1, 1], []),  # as published: two enemy medivacs fight on
    ([1, 1, 1, 1, 0, 0], []),
])  # fmt: skip
def test_who_wins_when_only_medivacs_are_left(alive, expected):
    assert ending("1m2d", alive)[1] == expected


EVERYONE, WIN = np.ones(11, bool), np.arange(11) < 5


def test_the_step_limit_terminates_or_truncates():
    assert ending("5m_vs_6m", EVERYONE, 9)[1] == []
    assert ending("5m_vs_6m", EVERYONE, 10)[1] == ["terminated", "episode_limit"]
    assert ending("5m_vs_6m", EVERYONE, 10, continuing_episode=True) == (
        0,
        ["terminated", "truncated", "episode_limit"],
    )
    assert ending("5m_vs_6m", WIN, 10, continuing_episode=True)[1] == ["terminated", "battle_won"]


def test_regenerating_enemy_shields_are_rewarded_unless_fixed():
    for fixed, expected in ((False, 12.0), (True, 0.0)):
        semantics, units = make_battle("2m_vs_1z", reward_scale=False, reward_shield_fix=fixed)
        units.shield[0, 2] = 20
        semantics.begin(ON)
        semantics.orders(np.ones((1, 2), np.int64), ON)
        units.shield[0, 2] = 32
        assert semantics.finish_step(ON).reward[0] == expected
