"""Starts that come again: how they are drawn, skipped once they are mastered, and kept apart from those of tests."""

from __future__ import annotations

import numpy as np

from omagd.config.loading import resolve
from omagd.run.cli.preflight import describe_env
from omagd.run.training.tasks import episode_starts
from omagd.runners.runner import StartPool


def test_mastered_starts_are_skipped_and_forgotten():
    pool, sources = StartPool(1, 3, threshold=2), iter(range(10**6))
    starts = sorted({pool.draw(0, next(sources)) for _ in range(50)})
    assert len(starts) == 3 and not {pool.draw(1, next(sources)) for _ in range(50)} & set(starts)
    assert StartPool(1, 3).draw(0, 5) == StartPool(1, 3).draw(0, 5), "the same on all ranks"
    for seed, outcomes in zip(starts, [(1.0, 1.0), (1.0, 0.0), (1.0, 1.0)], strict=True):
        pool.note(0, seed, outcomes)
    assert starts[0] in {pool.draw(0, next(sources)) for _ in range(50)}, "before it is exchanged"
    pool.learn(pool.take_news())
    assert len(pool) == 2
    drawn = [pool.draw(0, next(sources)) for _ in range(4)]
    skipped = [start for start, _ in pool.take_news()]
    assert drawn.count(starts[1]) >= 3 and set(skipped) <= {(0, starts[0]), (0, starts[2])} and len(skipped) >= 2
    pool.learn([((0, starts[0]), "skipped")])
    saved = StartPool(1, 3, threshold=2)
    saved.load_state_dict(pool.state_dict())
    for each in (pool, saved):
        assert len(each) == 2
        each.learn([((0, starts[0]), "skipped"), ((0, starts[2]), "open"), ((0, starts[1]), "skipped")])
        assert len(each) == 0
    for seed in starts:
        pool.note(0, seed, (1.0,))
    pool.learn(pool.take_news())
    assert pool.draw(0, 1) in starts, "all are mastered: one is played all the same"


def test_starts_of_tests_are_apart_and_not_those_of_training():
    config = resolve("rloo", "matrix_game", {"n_starts": 3, "batch_size_run": 4, "group_size": 2})
    seeds = {}
    for purpose in ("train", "test"):
        starts = episode_starts(config, describe_env(config), purpose, 0)
        seeds[purpose] = [seed for _ in range(4) for seed in starts.origins(np.ones(4, bool)).seed.tolist()]
    assert len(set(seeds["train"])) <= 3 and len(set(seeds["test"])) == 16
    assert not set(seeds["train"]) & set(seeds["test"])
