"""The 3v3 snakes engine: 1,040 games of the public engine replayed step by step, and what these do not show."""

from __future__ import annotations

import numpy as np
import pytest
from snakes_parity import GAMES, chained, load, state_values
from snakes_reference import bodies_of

from omagd.envs.snakes.board import NEXT_CELL
from omagd.envs.snakes.compiled.engine import Recorded
from omagd.envs.snakes.compiled.start import compiled
from omagd.envs.snakes.draws import Draws, below, draw, keys_of
from omagd.envs.snakes.engine import Engine, respawn
from omagd.envs.snakes.opponents import SCRIPTS

UP, DOWN, LEFT, RIGHT = range(4)


ENGINES = [Engine, compiled()[0]]


def begun(seeds: np.ndarray, kind: type[Engine] = Engine) -> tuple[Engine, np.ndarray]:
    """Return an engine whose boards have new games, and the numbers of its boards."""
    engine, rows = kind(len(seeds)), np.arange(len(seeds))
    engine.reset(rows, seeds)
    return engine, rows


def test_every_step_of_every_stored_game_is_the_same():
    actions, draws, expected = load()
    n = len(actions)
    assert n >= 1000 and GAMES.stat().st_size < 1_000_000
    recorded = Recorded(draws.starts, draws.turns, draws.beans, draws.next_turn.copy(), draws.next_bean.copy())
    reference, everyone = Engine(n, draws), np.arange(n)
    engine = compiled()[0](n, recorded)
    for each in (reference, engine):
        each.reset(everyone, np.zeros(n, np.int64))
    board, digest, over = engine.board, np.zeros(n, np.uint64), np.zeros(n, bool)
    deaths, longest = 0, 0
    for t in range(actions.shape[1]):
        rows = everyone[~over]
        outcome, other = (each.step(actions[rows, t], rows) for each in (engine, reference))
        assert all(np.array_equal(value, vars(other)[name]) for name, value in vars(outcome).items())
        assert all(np.array_equal(value, vars(reference.board)[name]) for name, value in vars(board).items())
        segments, lengths = engine.segments(rows).astype(np.int64), board.lengths[rows]
        bodies = np.where(np.arange(segments.shape[2]) < lengths[..., None], segments, -1)
        facts = (board.directions[rows], board.beans[rows], outcome.raw, outcome.hit, lengths - 3, outcome.over)
        digest[rows] = chained(digest[rows], state_values(bodies, *facts))
        wrong = rows[(digest[rows] & np.uint64(255)) != expected["digests"][rows, t]]
        assert not len(wrong), f"step {t + 1}: {len(wrong)} games differ, the first is {wrong[0]}"
        over[rows] = outcome.over
        np.testing.assert_array_equal(outcome.over, expected["steps"][rows] == t + 1)
        deaths, longest = deaths + int(outcome.hit.sum()), max(longest, int(lengths.max()))
    np.testing.assert_array_equal(digest, expected["final"])
    assert np.array_equal(engine.snapshot()["ring"], reference.snapshot()["ring"]), "bodies"
    assert over.all() and deaths > 10_000 and longest > 15, "the stored games are worth comparing"


def test_a_bean_keeps_its_number_while_it_lies_there():
    (engine, rows), moved = begun(np.arange(48)), 0
    for _ in range(60):
        before, list_before = engine.board.beans_by_slot(), engine.board.beans.copy()
        teams = [SCRIPTS["greedy"].act(engine.board, np.full(48, team)) for team in (0, 1)]
        outcome = engine.step(np.concatenate(teams, 1), rows)
        after = engine.board.beans_by_slot()
        for row in rows[~outcome.hit.any(1)]:  # where two meet on a bean and die, a new one may lie on the same cell
            stay = [cell for cell in list_before[row] if cell in engine.board.beans[row]]
            assert engine.board.beans[row, : len(stay)].tolist() == stay
            kept = np.isin(before[row], stay)
            np.testing.assert_array_equal(after[row][kept], before[row][kept])
            moved += 5 - len(stay)
    assert moved > 100


@pytest.mark.parametrize("kind", ENGINES)
def test_boards_are_the_same_alone_as_among_others_and_when_others_stand_still(kind):
    (together, _), (alone, only) = begun(np.arange(100, 106), kind), begun(np.array([104]), kind)
    rng = np.random.default_rng(0)
    for step in range(80):
        actions = rng.integers(0, 4, (6, 6))
        rows = np.array([4, 1, 0]) if step % 3 else np.array([2, 4])
        still = np.setdiff1d(np.arange(6), rows)
        before = together.board.codes[still].copy()
        outcome = together.step(actions[: len(rows)], rows)
        place = rows.tolist().index(4)
        one = alone.step(actions[place : place + 1], only)
        np.testing.assert_array_equal(together.board.codes[still], before)
        for name in ("raw", "hit", "ate", "over"):
            np.testing.assert_array_equal(getattr(outcome, name)[place], getattr(one, name)[0])
        assert bodies_of(together, 4) == bodies_of(alone, 0)
        np.testing.assert_array_equal(together.board.beans[4], alone.board.beans[0])


def test_draws_are_uniform_over_what_is_possible():
    n, draws = 20_000, Draws()
    keys, moments, old = keys_of(np.arange(n)), np.ones(n), np.repeat(np.arange(4), n // 4)
    counts = np.zeros((4, 4))
    np.add.at(counts, (old, draws.turn(moments, keys, moments, np.zeros(n, np.int64), old)), 1)
    reversed_ = np.eye(4, dtype=bool)[np.arange(4) ^ 1]
    assert (counts[reversed_] == 0).all() and (np.abs(counts[~reversed_] - n / 12) < 170).all()
    free = np.zeros((n, 200), bool)
    free[:, [3, 77, 150, 199]] = True  # few, so that draws by rank are among them
    counts = np.bincount(draws.bean(moments, keys, moments, 0, free), minlength=200)
    assert counts.sum() == n and (np.abs(counts[[3, 77, 150, 199]] - n / 4) < 300).all()
    cell, direction = draws.start(moments, keys, 2, 0)
    assert abs(cell.mean() - 99.5) < 2 and (np.bincount(cell, minlength=200) > 50).all()
    assert (np.abs(np.bincount(direction, minlength=4) - n / 4) < 300).all()
    assert abs(np.corrcoef(cell, direction)[0, 1]) < 0.03
    keys = np.repeat(keys_of(np.arange(20)), 20)
    values = {int(v) for i in range(20) for v in draw(keys, np.tile(np.arange(20), 20), i)}
    assert len(values) == 20**3, "they differ by key, moment and index"
    assert set(below(draw(keys, np.zeros(400), 1), 3).tolist()) == {0, 1, 2}


def slow_respawn(codes: np.ndarray) -> list[int] | None:
    """Search breadth-first with a queue."""
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
    return None


def test_respawns_on_crowded_boards_are_those_of_a_plain_search():
    rng = np.random.default_rng(3)
    crowd = rng.random((400, 1)) * 0.35 + 0.6
    codes = (rng.random((400, 200)) < crowd).astype(np.uint8) * 3
    codes[0] = 3
    cells, directions, found = respawn(codes)
    expected = [slow_respawn(row) for row in codes]
    assert found.tolist() == [cells is not None for cells in expected]
    assert not found[0] and 2 < (~found).sum() < 300
    for row in np.flatnonzero(found):
        assert cells[row].tolist() == expected[row]
        (r0, c0), (r1, c1) = (divmod(int(c), 20) for c in cells[row, :2])
        assert directions[row] == ((RIGHT if c0 > c1 else LEFT) if r0 == r1 else (DOWN if r0 > r1 else UP))


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("room", [False, True])
def test_the_game_ends_where_a_dead_snake_has_no_room_to_return(room, kind):
    engine, row = begun(np.zeros(1, np.int64), kind)
    board = engine.board
    board.codes[:] = 7
    board.beans[0] = np.arange(195, 200)
    board.codes[0, 195:] = 1
    board.codes[0, 61] = 0 if room else 7
    squares = [[c, c + 1, c + 21, c + 20] for c in (5, 8, 11, 14)]  # four that go round, so that no cell becomes free
    for i, body in enumerate([[42, 41, 40], squares[0], [60, 80, 100], *squares[1:]]):  # head first
        engine._ring[0, i, : len(body)] = body[::-1]
        engine._top[0, i] = len(body) - 1
        board.codes[0, body] = 2 + i
        board.heads[0, i], board.tails[0, i], board.lengths[0, i] = body[0], body[-1], len(body)
        board.directions[0, i] = NEXT_CELL[body[1]].tolist().index(body[0])
    outcome = engine.step(np.array([[RIGHT, DOWN, UP, DOWN, DOWN, DOWN]]), row)
    assert outcome.hit.tolist() == [[True] + 5 * [False]] and outcome.raw.tolist() == [6 * [0]]
    assert outcome.over.tolist() == [not room]
    assert bodies_of(engine, 0)[0] == ([42, 41, 61] if room else [])
