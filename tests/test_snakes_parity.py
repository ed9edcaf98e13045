"""The engine against the public one: stored games, the same draws, every state of every step."""

from __future__ import annotations

import numpy as np
import pytest
from snakes_parity import GAMES, N_VALUES, chained, load

from omagd.envs.snakes.engine import Engine


def _values(engine: Engine, rows: np.ndarray, outcome) -> np.ndarray:
    """Return [k, N_VALUES] as `state_values` has them for one board."""
    board = engine.board
    values = np.full((len(rows), N_VALUES), -1, np.int64)
    segments, lengths = engine.segments(rows), board.lengths[rows]
    longest = segments.shape[2]
    bodies = np.where(np.arange(longest) < lengths[..., None], segments.astype(np.int64), -1)
    values[:, :1200].reshape(-1, 6, 200)[:, :, :longest] = bodies
    parts = [board.directions[rows], board.beans[rows], outcome.raw, outcome.hit, lengths - 3, outcome.over[:, None]]
    rest = np.concatenate(parts, 1)
    values[:, 1200 : 1200 + rest.shape[1]] = rest
    return values


@pytest.fixture(scope="module")
def stored():
    return load()


def test_every_step_of_every_stored_game_is_the_same(stored):
    actions, draws, expected = stored
    n = len(actions)
    assert n >= 1000 and GAMES.stat().st_size < 1_000_000
    engine, everyone = Engine(n, draws), np.arange(n)
    engine.reset(everyone, np.zeros(n, np.int64))
    digest = np.zeros(n, np.uint64)
    deaths, longest, over = 0, 0, np.zeros(n, bool)
    for t in range(actions.shape[1]):
        rows = everyone[~over]
        outcome = engine.step(actions[rows, t], rows)
        digest[rows] = chained(digest[rows], _values(engine, rows, outcome))
        wrong = rows[(digest[rows] & np.uint64(255)) != expected["digests"][rows, t]]
        assert not len(wrong), f"step {t + 1}: {len(wrong)} games differ, the first is {wrong[0]}"
        over[rows] = outcome.over
        np.testing.assert_array_equal(outcome.over, expected["steps"][rows] == t + 1)
        deaths += int(outcome.hit.sum())
        longest = max(longest, int(engine.board.lengths.max()))
    np.testing.assert_array_equal(digest, expected["final"])
    assert over.all() and deaths > 10_000 and longest > 15  # the stored games hold what is worth comparing
