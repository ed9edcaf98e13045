"""What stored games do not show of the 3v3 snakes engine: bean slots, independent boards, crowded boards, draws."""

from __future__ import annotations

import numpy as np
import pytest
from snakes_reference import bodies_of

from omagd.envs.snakes.board import NEXT_CELL
from omagd.envs.snakes.draws import Draws, below, draw, keys_of
from omagd.envs.snakes.engine import Engine, respawn
from omagd.envs.snakes.opponents import SCRIPTS

BOARDS = 48


def _joint(engine: Engine, script: str) -> np.ndarray:
    b = len(engine.board)
    teams = [SCRIPTS[script].act(engine.board, np.full(b, team)) for team in (0, 1)]
    return np.concatenate(teams, 1)


def _begun(n: int = BOARDS, first_seed: int = 0) -> Engine:
    engine = Engine(n)
    engine.reset(np.arange(n), np.arange(n) + first_seed)
    return engine


def test_a_bean_keeps_its_number_while_it_lies_there():
    engine, rows = _begun(), np.arange(BOARDS)
    moved = 0
    for _ in range(60):
        before, list_before = engine.board.beans_by_slot(), engine.board.beans.copy()
        outcome = engine.step(_joint(engine, "greedy"), rows)
        after = engine.board.beans_by_slot()
        for row in rows[~outcome.hit.any(1)]:  # where two meet on a bean and die, a new one may lie on the same cell
            stay = [cell for cell in list_before[row] if cell in engine.board.beans[row]]
            assert engine.board.beans[row, : len(stay)].tolist() == stay
            kept = np.isin(before[row], stay)
            np.testing.assert_array_equal(after[row][kept], before[row][kept])
            moved += 5 - len(stay)
    assert moved > 100


def test_boards_are_the_same_alone_as_among_others_and_when_others_stand_still():
    together, alone = _begun(6, 100), _begun(1, 104)
    rng = np.random.default_rng(0)
    for step in range(80):
        actions = rng.integers(0, 4, (6, 6))
        rows = np.array([4, 1, 0]) if step % 3 else np.array([2, 4])
        still = np.setdiff1d(np.arange(6), rows)
        before = together.board.codes[still].copy()
        outcome = together.step(actions[: len(rows)], rows)
        place = int(np.flatnonzero(rows == 4)[0])
        one = alone.step(actions[place : place + 1], np.array([0]))
        np.testing.assert_array_equal(together.board.codes[still], before)
        for name in ("raw", "hit", "ate", "over"):
            np.testing.assert_array_equal(getattr(outcome, name)[place], getattr(one, name)[0])
        assert bodies_of(together, 4) == bodies_of(alone, 0)
        np.testing.assert_array_equal(together.board.beans[4], alone.board.beans[0])


def _scene(*bodies: list[int], beans: tuple[int, ...] = (195, 196, 197, 198, 199)) -> Engine:
    """Return one board with the six `bodies` (head first) and `beans`."""
    engine = _begun(1)
    board = engine.board
    board.codes[:] = 0
    board.beans[0] = beans
    board.codes[0, list(beans)] = 1
    for i, body in enumerate(bodies):
        ring = np.array(body[::-1])
        engine._ring[0, i, : len(body)] = ring
        engine._top[0, i] = len(body) - 1
        board.codes[0, body] = 2 + i
        board.heads[0, i], board.tails[0, i], board.lengths[0, i] = body[0], body[-1], len(body)
        board.directions[0, i] = int(np.flatnonzero(NEXT_CELL[body[1]] == body[0])[0])
    return engine


UP, DOWN, LEFT, RIGHT = range(4)


def test_a_reversal_goes_one_of_three_other_ways_each_as_often():
    old, n = np.repeat(np.arange(4), 3000), 12_000
    new = Draws().turn(np.zeros(n), keys_of(np.arange(n)), np.ones(n), np.zeros(n, np.int64), old)
    counts = np.zeros((4, 4))
    np.add.at(counts, (old, new), 1)
    for direction in range(4):
        assert counts[direction, direction ^ 1] == 0
        assert (np.abs(np.delete(counts[direction], direction ^ 1) - 1000) < 130).all()


def test_beans_and_starts_are_uniform_over_what_is_free():
    n = 20_000
    draws, keys = Draws(), keys_of(np.arange(n))
    free = np.zeros((n, 200), bool)
    free[:, [3, 77, 150, 199]] = True  # few, so that draws by rank are among them
    cells = draws.bean(np.arange(n), keys, np.ones(n), 0, free)
    counts = np.bincount(cells, minlength=200)
    assert counts.sum() == n and (np.abs(counts[[3, 77, 150, 199]] - n / 4) < 300).all()
    cell, direction = draws.start(np.arange(n), keys, 2, 0)
    assert abs(cell.mean() - 99.5) < 2 and (np.bincount(cell, minlength=200) > 50).all()
    assert (np.abs(np.bincount(direction, minlength=4) - n / 4) < 300).all()
    assert abs(np.corrcoef(cell, direction)[0, 1]) < 0.03


def test_draws_differ_by_key_moment_and_index():
    keys = np.repeat(keys_of(np.arange(20)), 20)
    values = {int(v) for i in range(20) for v in draw(keys, np.tile(np.arange(20), 20), i)}
    assert len(values) == 20**3
    assert set(below(draw(keys, np.zeros(400), 1), 3).tolist()) == {0, 1, 2}


def _slow_respawn(codes: np.ndarray) -> list[int] | None:
    """Search breadth-first with a queue."""
    for start in range(200):
        if codes[start]:
            continue
        queue, found = [start], []
        while queue:
            cell = queue.pop(0)
            found.append(cell)
            if len(found) == 3:
                rows, cols = zip(*(divmod(c, 20) for c in found), strict=True)
                if start // 20 in rows[1:] and start % 20 in cols[1:] and len(set(rows)) == len(set(cols)) == 2:
                    bend = (rows[1] == rows[0]) != (rows[2] == rows[0])
                    found = [found[1], found[0], found[2]] if bend and cell in NEXT_CELL[start] else found
                return found
            for way in (RIGHT, DOWN, UP, LEFT):
                after = int(NEXT_CELL[cell, way])
                if not codes[after] and after not in found and after not in queue:
                    queue.append(after)
    return None


def test_respawns_on_crowded_boards_are_those_of_a_plain_search():
    rng = np.random.default_rng(3)
    crowd = rng.random((400, 1)) * 0.35 + 0.6
    codes = (rng.random((400, 200)) < crowd).astype(np.uint8) * 3
    codes[0] = 3
    cells, directions, found = respawn(codes)
    expected = [_slow_respawn(row) for row in codes]
    assert found.tolist() == [cells is not None for cells in expected]
    assert not found[0] and 2 < (~found).sum() < 300
    for row in np.flatnonzero(found):
        assert cells[row].tolist() == expected[row]
        (r0, c0), (r1, c1) = (divmod(int(c), 20) for c in cells[row, :2])
        assert directions[row] == ((RIGHT if c0 > c1 else LEFT) if r0 == r1 else (DOWN if r0 > r1 else UP))


@pytest.mark.parametrize("room", [False, True])
def test_the_game_ends_where_a_dead_snake_has_no_room_to_return(room):
    squares = [[c, c + 1, c + 21, c + 20] for c in (5, 8, 11, 14)]  # four that go round, so that no cell becomes free
    engine = _scene([42, 41, 40], squares[0], [60, 80, 100], *squares[1:])
    codes = engine.board.codes[0]
    codes[codes == 0] = 7
    codes[61] = 0 if room else 7
    outcome = engine.step(np.array([[RIGHT, DOWN, UP, DOWN, DOWN, DOWN]]), np.array([0]))
    assert outcome.hit.tolist() == [[True] + 5 * [False]] and outcome.raw.tolist() == [6 * [0]]
    assert outcome.over.tolist() == [not room]
    body = bodies_of(engine, 0)[0]
    assert body == ([42, 41, 61] if room else [])
