"""Compiled snakes equal the NumPy reference bit for bit: boards, flags, opponents, snapshots, full boards, mistakes."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from omagd.envs.factory import make_env
from omagd.envs.snakes import snakes_env
from omagd.envs.snakes.board import Board
from omagd.envs.snakes.compiled.start import compiled
from omagd.envs.snakes.engine import Engine
from omagd.envs.snakes.features import state_features
from omagd.envs.snakes.observer import Observer
from omagd.envs.snakes.opponents import SCRIPTS, NetworkOpponent
from omagd.envs.snakes.rewards import Ledger, Prices
from omagd.utils import compiling

CompiledEngine, CompiledLedger = compiled()
FLAGS = [
    {"obs": "26", "opponent": "random", "reward": "score", "side": "both"},
    {"obs": "26_raw", "opponent": "l1", "reward": "baseline", "side": "a"},
    {"obs": "30", "opponent": "l3", "reward": "potential", "side": "b", "reward_win": 2.5},
    {"obs": "30", "normalise": False, "opponent": "greedy", "reward": "baseline"},
    {"obs": "35", "opponent": "l4", "reward": "score", "reward_win": 0.3, "side": "a"},
    {"obs": "35", "normalise": False, "opponent": "evasion", "reward": "baseline", "side": "b"},
    {"obs": "near", "reward": "potential", "potential_scale": 0.37, "potential_gamma": 0.9},
    {"obs": "planes", "opponent": "evasion", "reward": "potential"},
    {"obs": "planes", "centred": False, "opponent": "l4"},
    {"obs": "entities", "opponent": "greedy", "reward": "score"},
    {"obs": "entities", "sight": 3.5, "opponent": "evasion"},
]
OBSERVERS = [Observer(**{k: v for k, v in flags.items() if k in Observer.__dataclass_fields__}) for flags in FLAGS]


def both(n: int, **args) -> list[snakes_env.Snakes3v3]:
    """Return the environment by NumPy and the compiled one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snakes_env, "engine", lambda: (Engine, Ledger))
        reference = make_env("snakes_3v3", args, n, processes=False)
    pair = [reference, make_env("snakes_3v3", args, n, processes=False)]
    assert [type(env._engine) for env in pair] == [Engine, CompiledEngine]
    return pair


def assert_alike(one, two, what=""):
    """Compare types and bits of two results, arrays, or dictionaries and lists of them."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), what
        for name in one:
            assert_alike(one[name], two[name], f"{what} {name}")
    elif isinstance(one, list | tuple):
        for i, (mine, other) in enumerate(zip(one, two, strict=True)):
            assert_alike(mine, other, f"{what}[{i}]")
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (two.dtype, two.shape), what
        assert one.tobytes() == two.tobytes(), f"{what}: {np.argwhere(one != two)[:3].tolist()}"
    else:
        assert one == two, what


def walk(envs, steps, seed=0, begin=True):
    """Play the same actions in both environments, and compare everything that they return."""
    rng, n = np.random.default_rng(seed), envs[0].n_slots
    if begin:
        seeds = rng.integers(2**62, size=n)
        for env in envs:
            env.reset(np.ones(n, bool), seeds)
    for step in range(steps):
        assert_alike(*(vars(env.observe(full=step % 9 == 0)) for env in envs), f"step {step}")
        script = list(SCRIPTS)[1:][step % 5]
        chosen = [env.scripted_actions(script, rng) for env in envs]
        assert_alike(*chosen, script)
        actions = np.where(rng.random(chosen[0].shape) < 0.1, rng.integers(0, 4, chosen[0].shape), chosen[0])
        active = rng.random(n) < 0.95
        results = [env.step(actions, active) for env in envs]
        assert_alike(*(vars(result) for result in results), f"step {step}")
        if results[0].terminated.any():
            seeds = rng.integers(2**62, size=n)
            for env in envs:
                env.reset(results[0].terminated, seeds)
    assert_alike(*(env.snapshot() for env in envs), "snapshot")
    assert envs[0].get_stats() == envs[1].get_stats()


@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(map(str, flags.values())))
def test_games_with_any_flags_are_played_and_shown_alike(flags, n):
    envs = both(n, **flags)
    walk(envs, 240 if n == 7 else 30, seed=n)
    if n == 7:
        stats = envs[1].get_stats()
        assert stats["games"] >= 7 and envs[1].frame(3) == envs[0].frame(3)


def test_each_continues_the_others_snapshot_with_any_opponents():
    envs = both(9, obs="near", reward="potential")
    rng = np.random.default_rng(2)
    layers = [(rng.normal(size=(8, 174)), rng.normal(size=8)), (rng.normal(size=(4, 8)), rng.normal(size=4))]
    for env in envs:
        net = NetworkOpponent("net", layers, Observer("near"), sample=True)
        flat = NetworkOpponent("flat", [(layers[0][0][:4, :35], layers[1][1])], Observer("35"))
        env.set_opponents(["random", "evasion", net, "l3", flat])
    walk(envs, 120)
    assert len(set(envs[1].opponents)) > 2
    mine, other = (env.snapshot() for env in envs)
    swapped = both(9, obs="near", reward="potential")
    swapped[0].restore(other)
    swapped[1].restore(mine)
    for env, again in zip(envs, swapped, strict=True):
        again.get_stats().clear()
        assert_alike(env.snapshot(), again.snapshot(), "restored")
    walk(swapped, 110, seed=3, begin=False)


def crowded(kind: type[Engine], dies: bool, free: int) -> Engine:
    """Return a game on a board of walls with few `free` cells and two of five beans.

    Four or five snakes go round in squares, snake 2 goes up, and snake 0 may run into a wall.
    """
    engine, row = kind(1), np.zeros(1, np.int64)
    engine.reset(row, row)
    board = engine.board
    board.codes[:] = 7
    board.codes[0, [40, *range(61, 61 + free)]] = 0
    squares = [[c, c + 1, c + 21, c + 20] for c in (5, 8, 11, 14, 110)]
    for i, body in enumerate([[42, 41, 40] if dies else squares[4], squares[0], [60, 80, 100], *squares[1:4]]):
        engine._ring[0, i, : len(body)] = body[::-1]
        engine._top[0, i] = len(body) - 1
        board.codes[0, body] = 2 + i
        board.heads[0, i], board.tails[0, i], board.lengths[0, i] = body[0], body[-1], len(body)
        board.directions[0, i] = [-20, 20, -1, 1].index(body[0] - body[1])
    board.beans[0] = [-1, 195, -1, -1, 196]
    return engine


@pytest.mark.parametrize("free", [0, 1, 2, 9])
@pytest.mark.parametrize("dies", [False, True])
def test_boards_without_room_for_snakes_and_beans_are_played_and_shown_alike(dies, free):
    engines, one, beans = [crowded(kind, dies, free) for kind in (Engine, CompiledEngine)], np.zeros(1, np.int64), []
    for moves, team, reward in (([3 if dies else 1, 1, 0, 1, 1, 1], one, "potential"), ([3] * 6, one + 1, "baseline")):
        seen, prices = [], Prices(reward, 0.3, 0.9, 1.0)
        for engine, ledger in zip(engines, (Ledger(prices, 1), CompiledLedger(prices, 1)), strict=True):
            board, before = engine.board, ledger.potential(engine.board, team, one)
            outcome = engine.step(np.array([moves]), one)
            paid = ledger.pay(outcome, board, team, one, before)
            shown = [observer.observe(board, team)[0] for observer in OBSERVERS]
            acts = [script.act(board, team) for script in SCRIPTS.values()]
            seen.append([vars(outcome), paid, ledger.sums, state_features(board, team), shown, acts, engine.snapshot()])
        assert_alike(*seen)
        beans.append((board.beans >= 0).sum())
        if outcome.over[0]:
            break  # stuck, or in the second step
    stuck = dies and free == 0  # its body's cells are empty then
    assert beans[0] == (5 if stuck else min(3 + free - dies, 5)) and len(beans) == 2 - stuck


def test_some_of_the_boards_are_shown_like_all_of_them():
    engine, teams = CompiledEngine(12), np.arange(12) % 2
    engine.reset(np.arange(12), np.arange(12))
    part = np.array([11, 2, 5])
    some = engine.board.rows(part)
    plain = Board(**{each.name: getattr(some, each.name) for each in fields(Board)})
    assert some.kernels and not plain.kernels
    for observer in OBSERVERS:
        whole = observer.observe(engine.board, teams)[0][part]
        assert_alike([observer.observe(board, teams[part])[0] for board in (some, plain)], [whole, whole])
    assert_alike(some.random_bits(5, 12), plain.random_bits(5, 12))


def test_rows_and_actions_of_other_types_and_layouts_are_converted():
    engines = Engine(6), CompiledEngine(6)
    for engine in engines:
        engine.reset(np.arange(12, dtype=np.int32)[::2] // 2, np.arange(12, dtype=np.int32)[::2])
        engine.step(np.ones((6, 3), np.int32).T, np.arange(6, dtype=np.int16)[::2])
    assert_alike(*(engine.snapshot() for engine in engines))


def test_an_opponents_action_that_does_not_exist_is_an_error_and_nothing_happens():
    class Fixed:
        name = "fixed"

        def __init__(self, action):
            self.action = action

        def act(self, board, team):
            return np.full((len(board), 3), self.action)

    for action in (4, -1, 2**40):
        env = both(3)[1]
        env.set_opponents([Fixed(action)])
        env.reset(np.ones(3, bool), np.arange(3))
        before = env.snapshot()["engine"]
        with pytest.raises(ValueError, match=f"0 to 3.*{action}"):
            env.step(np.zeros((3, 3), int), np.ones(3, bool))
        assert_alike(before, env.snapshot()["engine"])
    with pytest.raises(ValueError, match="teams"):
        SCRIPTS["greedy"].act(env._engine.board, np.zeros(2, int))
    for actions, rows in ((np.zeros((3, 5), int), np.arange(3)), (np.zeros((2, 6), int), np.arange(3))):
        with pytest.raises(ValueError, match="actions must have shape"):
            env._engine.step(actions, rows)
    with pytest.raises(ValueError, match="seeds must have shape"):
        env._engine.reset(np.arange(3), np.arange(2))
    assert_alike(before, env.snapshot()["engine"])


def test_without_numba_the_reference_plays_with_one_warning(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "find_spec", lambda name: None)
    monkeypatch.setattr(compiling, "_warnings", [])
    snakes_env.engine.cache_clear()
    try:
        for _ in range(2):
            env = make_env("snakes_3v3", {}, 1, processes=False)
        assert type(env._engine) is Engine and type(env._ledger) is Ledger
        assert capsys.readouterr().err.count("battles and snakes take ten times as long") == 1
    finally:
        snakes_env.engine.cache_clear()
