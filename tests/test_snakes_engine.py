"""The 3v3 snakes engine: 1,040 games of the public engine replayed step by step, and what these do not show."""

from __future__ import annotations

import numpy as np
import pytest
from snakes_parity import GAMES, chained, load, state_values
from snakes_reference import Dice

from omagd.envs.snakes.board import NEXT_CELL
from omagd.envs.snakes.engine import RING, Engine
from omagd.envs.snakes.observer import Observer, state_features
from omagd.envs.snakes.opponents import SCRIPTS
from omagd.envs.snakes.rewards import Ledger
from omagd.envs.snakes.snakes_env import prepare

prepare()
UP, DOWN, LEFT, RIGHT = range(4)


def begun(seeds: np.ndarray) -> tuple[Engine, np.ndarray]:
    """Return an engine whose boards have new games, and the numbers of its boards."""
    engine, rows = Engine(len(seeds)), np.arange(len(seeds))
    engine.reset(rows, seeds)
    return engine, rows


def test_every_step_of_every_stored_game_is_the_same():
    actions, draws, expected = load()
    n = len(actions)
    assert n >= 1000 and GAMES.stat().st_size < 1_000_000
    engine, everyone = Engine(n, draws), np.arange(n)
    engine.reset(everyone, np.zeros(n, np.int64))
    board, digest, over = engine.board, np.zeros(n, np.uint64), np.zeros(n, bool)
    deaths, longest = 0, 0
    for t in range(actions.shape[1]):
        rows = everyone[~over]
        outcome = engine.step(actions[rows, t], rows)
        lengths = board.lengths[rows]
        back, (ring, top, _) = np.arange(lengths.max()), (part[rows] for part in engine._bodies)
        cells = np.take_along_axis(ring.astype(np.int64), (top[..., None] - back) % RING, axis=-1)
        bodies = np.where(back < lengths[..., None], cells, -1)
        facts = (board.directions[rows], board.beans[rows], outcome.raw, outcome.hit, lengths - 3, outcome.over)
        digest[rows] = chained(digest[rows], state_values(bodies, *facts))
        wrong = rows[(digest[rows] & np.uint64(255)) != expected["digests"][rows, t]]
        assert not len(wrong), f"step {t + 1}: {len(wrong)} games differ, the first is {wrong[0]}"
        over[rows] = outcome.over
        np.testing.assert_array_equal(outcome.over, expected["steps"][rows] == t + 1)
        deaths, longest = deaths + int(outcome.hit.sum()), max(longest, int(lengths.max()))
    np.testing.assert_array_equal(digest, expected["final"])
    assert over.all() and deaths > 10_000 and longest > 15, "the stored games are worth comparing"


def test_starts_turns_and_beans_are_drawn_as_in_plain_python():
    seeds = np.array([0, 1, 7, 2**40, 2**62 + 3, 99])
    (engine, rows), dice = begun(seeds), [Dice(int(seed)) for seed in seeds]
    board, rng, turns, laid = engine.board, np.random.default_rng(0), 0, 0

    def check_beans(row: int, moment: int, first: int) -> int:
        for place in range(first, 5):
            taken = {*(cell for body in engine.segments(row) for cell in body), *board.beans[row, :place].tolist()}
            free = [cell for cell in range(200) if cell not in taken]
            assert board.beans[row, place] == dice[row].bean(moment, place, free)
        return 5 - first

    for row in rows.tolist():
        assert engine.segments(row) == dice[row].start()
        check_beans(row, 0, 0)
    for moment in range(1, 150):
        before, beans, actions = board.directions.copy(), board.beans.copy(), rng.integers(0, 4, (6, 6))
        hit = engine.step(actions, rows).hit
        for row, snake in zip(*np.nonzero((actions == before ^ 1) & ~hit), strict=True):
            assert board.directions[row, snake] == dice[row].turn(moment, int(snake), int(before[row, snake]))
            turns += 1
        for row in rows[~hit.any(1)].tolist():
            laid += check_beans(row, moment, sum(cell in board.beans[row] for cell in beans[row].tolist()))
    assert turns > 500 and laid > 50


def slow_respawn(codes: np.ndarray) -> list[int]:
    """Return where a dead snake returns, by a breadth-first search with a queue; empty if nowhere."""
    for start in np.flatnonzero(codes == 0).tolist():
        queue, done = [start], 0
        while done < len(queue) < 3:
            ways = NEXT_CELL[queue[done], [RIGHT, DOWN, UP, LEFT]].tolist()
            queue += [after for after in ways if not codes[after] and after not in queue]
            done += 1
        if len(queue) >= 3:
            start, first, third = queue[:3]
            corner = third in NEXT_CELL[start] and (start // 20 == first // 20) != (start // 20 == third // 20)
            return [first, start, third] if corner else [start, first, third]
    return []


def crowded(codes: np.ndarray) -> tuple[Engine, np.ndarray]:
    """Return boards with these `codes` [B, 200] outside of the top rows, where snake 0 is about to run into snake 2.

    Four go round in squares, so that no cell becomes free. All beans are in the last row.
    """
    engine, rows = begun(np.arange(len(codes)))
    board, bodies = engine.board, engine._bodies
    squares = [[c, c + 1, c + 21, c + 20] for c in (5, 8, 11, 14)]
    snakes = [[42, 41, 40], squares[0], [60, 80, 100], *squares[1:]]  # head first
    board.codes[:] = codes
    board.codes[:, :60] = 7
    board.codes[:, 195:], board.beans[:] = 1, np.arange(195, 200)
    for i, body in enumerate(snakes):
        bodies.ring[:, i, : len(body)], bodies.top[:, i] = body[::-1], len(body) - 1
        board.codes[:, body] = 2 + i
        board.heads[:, i], board.tails[:, i], board.lengths[:, i] = body[0], body[-1], len(body)
        board.directions[:, i] = NEXT_CELL[body[1]].tolist().index(body[0])
    board.codes[:, 43] = 7  # what snake 0 runs into
    return engine, rows


MOVES = np.array([[RIGHT, DOWN, UP, DOWN, DOWN, DOWN]])


def test_the_dead_return_on_crowded_boards_where_a_plain_search_finds_room_or_the_game_ends():
    rng, n = np.random.default_rng(3), 400
    codes = (rng.random((n, 200)) < rng.random((n, 1)) * 0.35 + 0.6).astype(np.uint8) * 7
    codes[0] = 7
    engine, rows = crowded(codes)
    around = engine.board.codes.copy()
    outcome = engine.step(np.repeat(MOVES, n, 0), rows)
    found = 0
    for row in rows.tolist():
        after = around[row].copy()
        after[[42, 41, 40, 100]] = 0  # the dead snake's cells and a tail
        for body in engine.segments(row)[1:]:
            after[body] = 7
        expected = slow_respawn(after)
        assert engine.segments(row)[0] == expected and outcome.hit[row].tolist() == [True] + 5 * [False]
        assert outcome.over[row] == (not expected)
        if expected:
            (r0, c0), (r1, c1) = (divmod(c, 20) for c in expected[:2])
            way = (RIGHT if c0 > c1 else LEFT) if r0 == r1 else (DOWN if r0 > r1 else UP)
            assert engine.board.directions[row, 0] == way
            found += 1
    assert found == n or 2 < n - found < 300


@pytest.mark.parametrize("free", [0, 1, 2, 9])
def test_full_boards_lay_what_beans_they_can_and_are_shown(free):
    """Kernels read memory without checks: beans without a place must not lead them elsewhere."""
    codes = np.full((1, 200), 7, np.uint8)
    codes[0, 121 : 121 + free] = 0
    engine, row = crowded(codes)
    board, dice = engine.board, Dice(0)
    board.codes[0, [195, 196, 197]], board.beans[0] = 7, [-1, 198, -1, -1, 199]
    round_and_round = [110, 130, 131, 111]  # snake 0, too; head first
    engine._bodies.ring[0, 0, :4], engine._bodies.top[0, 0] = round_and_round[::-1], 3
    board.codes[0, [40, 41, 42]], board.codes[0, round_and_round] = [0, 7, 7], 2
    board.heads[0, 0], board.tails[0, 0], board.lengths[0, 0], board.directions[0, 0] = 110, 111, 4, UP
    open_before = np.flatnonzero(board.codes[0] == 0).tolist()
    ledger = Ledger("potential", (0.3, 0.9, 1.0), 1)
    before = ledger.potential(board, row, row)
    outcome = engine.step(MOVES, row)
    assert not outcome.hit.any()
    free_now = [cell for cell in sorted([*open_before, 100]) if board.codes[0, cell] in (0, 1)]
    expected = [198, 199]
    while len(expected) < 5 and (left := [cell for cell in free_now if cell not in expected]):
        expected.append(dice.bean(1, len(expected), left))
    assert board.beans[0].tolist() == (expected + [-1] * 5)[:5]
    paid = ledger.pay(outcome, board, row, row, before)
    shown = [state_features(board, row), paid]
    for obs in ("26", "30", "35", "near", "entities"):
        shown += [Observer(obs).observe(board, row + team)[0] for team in (0, 1)]
    assert all(np.isfinite(values).all() for values in shown)
    acts = np.concatenate([script.act(board, row) for script in SCRIPTS.values()])
    assert acts.min() >= 0 and acts.max() <= 3


def test_arguments_of_other_types_and_layouts_are_converted_and_of_other_shapes_rejected():
    engine, other = Engine(6), Engine(6)
    engine.reset(np.arange(12, dtype=np.int32)[::2] // 2, np.arange(12, dtype=np.int32)[::2])
    engine.step(np.ones((6, 3), np.int32).T, np.arange(6, dtype=np.int16)[::2])
    other.reset(np.arange(6), np.arange(0, 12, 2))
    other.step(np.ones((3, 6), np.int64), np.array([0, 2, 4]))
    before = engine.snapshot()
    for name, values in other.snapshot().items():
        np.testing.assert_array_equal(before[name], values)
    for shape, rows in (((3, 5), 3), ((2, 6), 3)):
        with pytest.raises(ValueError, match="actions must have shape"):
            engine.step(np.zeros(shape, int), np.arange(rows))
    with pytest.raises(ValueError, match="seeds must have shape"):
        engine.reset(np.arange(3), np.arange(2))
    with pytest.raises(ValueError, match="teams"):
        SCRIPTS["greedy"].act(engine.board, np.zeros(2, int))
    for action in (4, -1, 2**40):
        with pytest.raises(ValueError, match=f"0 to 3.*{action}"):
            engine.step(np.full((6, 6), action), np.arange(6))
    assert all(np.array_equal(values, engine.snapshot()[name]) for name, values in before.items())
