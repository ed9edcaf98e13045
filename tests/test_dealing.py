"""Maps dealt to ranks: shares and balance, exact weights, groups, statistics over ranks, errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ddp_harness import run_ranks
from runner_toys import FakeEnv, LossyEnv, Probe

from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.envs.factory import make_env
from omagd.run.cli.preflight import preflight
from omagd.run.training.tasks import Record, TrainingTasks, apportioned, balanced, excess, in_turn
from omagd.runners.runner import DealtStarts, ParallelRunner
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

MAPS = ("3m", "4m", "5m")
SMALL = {
    "use_cuda": False, "rnn_hidden_dim": 8, "batch_size_run": 4, "batch_size": 4, "test_nepisode": 1, "t_max": 600,
    "test_interval": 10**6, "log_interval": 150, "runner_log_interval": 150, "learner_log_interval": 150,
    "checkpoint_interval": 0, "env_args.map_name": list(MAPS), "sync_every_n_steps": 2,
}  # fmt: skip


def config_of(results: Path | str = "results", **updates) -> Config:
    return resolve("hpn_mappo", "skirmish", {**SMALL, "local_results_path": str(results), **updates})


class Data:
    """What a stage reckons with."""

    sampled = False

    def expect(self, episodes: int, batch_size: int) -> None:
        self.episodes, self.batch_size = episodes, batch_size


class Listed(DealtStarts):
    """Starts that keep what was dealt."""

    def deal(self, tasks) -> None:
        self.list = list(tasks)


def tasks_of_rank(dist: Dist, names=MAPS, slots: int = 4, group_size: int = 1, **updates) -> TrainingTasks:
    """Return the training maps as a rank sees them, with `starts` that list what it plays."""
    info = SimpleNamespace(tasks=(*names, "held out"), n_training=len(names))
    config, spent = config_of(task_dealing="sharded", **updates), np.zeros(len(info.tasks))
    starts = Listed(1, "train", dist.rank, weights=[1.0] * len(info.tasks), group_size=group_size)
    tasks = TrainingTasks(config, info, dist, starts, slots, lambda: spent)
    tasks.starts, tasks.data = starts, Data()
    return tasks


def ranks_of(n_ranks: int, **given) -> list[TrainingTasks]:
    """Return the training maps as every rank sees them."""
    return [tasks_of_rank(Dist(rank, n_ranks), **given) for rank in range(n_ranks)]


def test_no_rank_is_idle_or_busier_than_the_tolerance_and_few_maps_are_divided():
    rng = np.random.default_rng(0)
    for _ in range(300):
        n, n_ranks = int(rng.integers(1, 14)), int(rng.integers(1, 9))
        least, loads = int(rng.integers(1, min(n, 3) + 1)), rng.exponential(size=n) + 0.01
        shares = balanced(loads, n_ranks, least)
        busy = (shares * loads).sum(1)
        assert np.allclose(shares.sum(0), 1) and ((shares > 0).sum(1) >= least).all()
        assert least > 1 or (shares > 0).sum() < n + n_ranks
        assert busy.max() <= 1.05 * loads.sum() / n_ranks + 1e-9
        assert excess(shares, loads) == pytest.approx(busy.max() * n_ranks / loads.sum() - 1)
        plain = in_turn(n, n_ranks, least)
        assert np.allclose(plain.sum(0), 1) and ((plain > 0).sum(1) >= least).all()
        numbers = apportioned(int(rng.integers(n_ranks, 99)), busy.tolist())
        assert min(numbers) >= 1
    assert in_turn(5, 2).tolist() == [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]
    assert balanced(np.array([4.0, 1.0, 2.0, 3.0]), 2).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    assert apportioned(10, [0.5, 0.3, 0.2]) == [5, 3, 2] and apportioned(4, [0.98, 0.01, 0.01]) == [2, 1, 1]


@pytest.mark.parametrize(("n_ranks", "balance", "least", "slots", "batch"), [
    (2, False, 1, 4, 42), (3, True, 1, 4, 4), (5, True, 1, 1, 1), (2, True, 2, 4, 4), (5, False, 2, 1, 1),
])  # fmt: skip
def test_weights_are_exact_whoever_plays_and_no_rank_is_without_a_start(n_ranks, balance, least, slots, batch):
    ranks = ranks_of(
        n_ranks, slots=slots, batch_size=batch, task_weights={"4m": 2.0, "5m": 0.5},
        balance_tasks_across_gpus=balance, min_tasks_per_gpu=least,
    )  # fmt: skip
    counts, sizes = np.zeros((n_ranks, len(MAPS))), []
    for _ in range(50):
        for rank, tasks in enumerate(ranks):
            tasks.deal(tasks.data)
            counts[rank] += np.bincount(tasks.starts.list, minlength=len(MAPS))
            assert tasks.data.episodes == len(tasks.starts.list) > 0
        sizes.append([tasks.data.batch_size for tasks in ranks])
    total, everyone = counts.sum(), batch * n_ranks
    assert total >= 50 * everyone
    assert np.abs(counts.sum(0) / total - np.array([1, 2, 0.5]) / 3.5).max() * total < 3
    shares = ranks[0].shares
    assert ((counts > 0) == (shares > 0)).all() and ((shares > 0).sum(1) >= least).all()
    assert np.abs(counts - shares * counts.sum(0)).max() < 4
    assert all(sum(each) == everyone for each in sizes), "the batch of all ranks keeps its size"
    assert np.abs(np.array(sizes[0]) - counts.sum(1) / total * everyone).max() < 1.01


def test_measured_seconds_deal_anew_and_a_resume_goes_on_with_the_same_shares(monkeypatch):
    names = {"names": ("a", "b", "c", "d"), "task_weights": {"b": 4.0}}
    ranks = ranks_of(2, **names)
    first = ranks[0].shares.copy()
    seconds, episodes = np.array([8.0, 1.0, 1.0, 7.0]), np.ones(4)
    loads = seconds * np.array([1, 4, 1, 1])
    half = [{**vars(Record()), "visits": 0.5, "seconds": each / 2} for each in seconds]
    measured = dict(zip("abcd", half, strict=True))
    monkeypatch.setattr(Dist, "gather", lambda self, value: [measured, measured])
    changed = [tasks.synchronise() for tasks in ranks]
    assert all(changed) or excess(first, loads) <= 0.05
    for tasks in ranks:
        assert excess(tasks.shares, loads) <= 0.06
        assert not tasks.synchronise(), "the same seconds change nothing"
        assert np.array_equal(tasks.costs, 1.5 * np.stack([seconds, episodes])), "older ones count half"
        tasks.deal(tasks.data)
    state = ranks[0].state_dict()
    again, fewer, more = ranks_of(2, **names)[1], ranks_of(1, **names)[0], ranks_of(3, **names)[0]
    for tasks in (again, fewer, more):
        tasks.load_state_dict(state)
    assert more.shares.shape == (3, 4) and excess(more.shares, loads) <= 0.06
    assert np.array_equal(again.shares, ranks[1].shares) and np.array_equal(again.costs, ranks[1].costs)
    assert fewer.shares.tolist() == [[1.0] * 4]
    for _ in range(3):
        for tasks in (again, ranks[1]):
            tasks.deal(tasks.data)
        assert again.starts.list == ranks[1].starts.list


class LosesOnce(LossyEnv):
    """The second slot loses its first episode, of whichever seed."""

    once = True

    def losing(self) -> np.ndarray:
        lost = self.once & (np.arange(self.n_slots) == 1)
        self.once = False
        return lost


def dealt_round(env, tasks, group_size=1):
    """Return what a runner plays of dealt tasks, with the tasks that its environment was asked for."""
    asked = []
    env.set_tasks = lambda which, chosen: asked.extend(chosen[which].tolist())
    starts = DealtStarts(3, "train", 0, weights=[1.0, 1.0], group_size=group_size)
    runner = ParallelRunner(env, config_of(), env.info, starts)
    starts.deal(tasks)
    rollout = runner.collect(Probe(), explore=None)
    return rollout, asked, runner


@pytest.mark.parametrize("tasks", [[], [1], [0, 1, 1, 0, 1, 0, 0]])
def test_a_rank_plays_what_was_dealt_in_whichever_slots_are_free(tasks, monkeypatch):
    monkeypatch.setattr(FakeEnv, "seconds", np.zeros(2), raising=False)
    rollout, asked, runner = dealt_round(FakeEnv(3), iter(tasks))
    assert sorted(asked) == sorted(tasks) and rollout.n_episodes == len(tasks) == len(rollout.episodes)
    assert sorted(episode.meta.task for episode in rollout.episodes) == sorted(tasks)
    assert len({line["seed"] for line in rollout.log}) == len(tasks)
    assert runner.collect(Probe(), explore=None).n_episodes == 0, "nothing more was dealt"


def test_groups_of_dealt_starts_share_their_seed_and_lost_episodes_keep_their_task(monkeypatch):
    monkeypatch.setattr(FakeEnv, "seconds", np.zeros(2), raising=False)
    rollout, _, _ = dealt_round(FakeEnv(4), [0, 1, 1, 0, 1], group_size=2)
    groups = {}
    for episode in rollout.episodes:
        groups.setdefault(episode.meta.group, []).append((episode.meta.task, episode.meta.seed))
    assert len(groups) == 5 and all(len(each) == 2 and len(set(each)) == 1 for each in groups.values())
    assert sorted(each[0][0] for each in groups.values()) == [0, 0, 1, 1, 1]
    rollout, _, _ = dealt_round(LosesOnce(2), [1], group_size=2)
    assert rollout.lost == 1 and len({str(replace(e.meta, slot=0, outcome=0)) for e in rollout.episodes}) == 1
    assert len(rollout.episodes) == 2 and rollout.episodes[0].meta.task == 1, "the partner's start is played again"
    rollout, asked, _ = dealt_round(LossyEnv(3), [0] * 4 + [1] * 8)
    assert rollout.lost > 0 and len(asked) == 12 + rollout.lost
    assert np.bincount([episode.meta.task for episode in rollout.episodes]).tolist() == [4, 8]


def test_seconds_go_to_the_task_that_took_them():
    env = make_env("skirmish", {"map_name": "3m,10m"}, 2, processes=False)
    before = env.seconds.copy()
    env.set_tasks(np.ones(2, bool), np.array([1, 1]))
    env.reset(np.ones(2, bool), np.arange(2))
    env.observe()
    spent = env.seconds - before
    env.close()
    assert spent[1] > 0 and spent[0] == 0

    (tasks,), clock = ranks_of(1), iter((10.0, 14.0))
    environment = [np.zeros(4), np.array([1.0, 0.0, 0.5, 9.0])]  # tests of held-out maps are not training
    tasks._seconds, tasks._clock = lambda: environment.pop(0), lambda: next(clock)
    tasks.begin()
    tasks.played([{"task": name, "length": n} for name, n in (("3m", 4), ("5m", 3), ("3m", 1))])
    tasks.synchronise()
    # 4 seconds less 1.5 in environments: 2.5 over 5 and 3 steps.
    assert [facts.get("seconds_per_episode") for facts in tasks.facts()["tasks"].values()] == [
        pytest.approx((1 + 2.5 * 5 / 8) / 2), None, pytest.approx(0.5 + 2.5 * 3 / 8),
    ]  # fmt: skip


def counted(rank, dist, _):
    """Return the statistics after each turn, and the states at the end."""
    tasks = tasks_of_rank(dist)
    seen = []
    for turn in range(3):
        tasks.begin()
        won = [{"task": "3m", "length": 2, "battle_won": float(rank == turn)}] * (rank + 1)
        tasks.played([*won, {"task": "5m", "length": 5}])
        if turn < 2:
            tasks.synchronise()
        seen.append(tasks.facts()["tasks"])
    return seen, tasks.state_dict(), tasks.own.state_dict()


@pytest.mark.processes
def test_increments_are_added_once():
    ranks = run_ranks(counted, world_size=3)
    for seen, _, _ in ranks:
        assert [facts["3m"]["visits"] for facts in seen] == [6, 12, 12]
        assert [facts["3m"]["wins"] for facts in seen] == [1, 3, 3]
        assert seen[1]["5m"]["visits"] == 6 and "wins" not in seen[1]["5m"] and seen[1]["4m"]["visits"] == 0
    _, shared, _ = ranks[0]
    alone = ranks_of(1)[0]
    old = {name: {**record, "steps": 1, "starts": {}} for name, record in shared["tally"].items()}
    alone.load_state_dict({**shared, "tally": old, "iteration": 3})  # as earlier versions wrote it
    alone.own.merge([own for *_, own in ranks])
    alone.synchronise()
    facts = alone.facts()["tasks"]
    assert (facts["3m"]["visits"], facts["3m"]["wins"], facts["5m"]["visits"]) == (18, 6, 9)
    assert sum(alone.all["3m"].last) == 6
    results = Record(last=[0] * 60)
    results.add(Record(last=[1] * 60))
    assert results.last == [0] * 40 + [1] * 60, "the newest 100"


@pytest.mark.parametrize(("updates", "message"), [
    ({"task_weights": {"9m": 1.0}}, "task_weights.9m=1.0: is not trained on here. Maps: 3m, 4m, 5m"),
    ({"task_weights": {"3m": 0.0, "4m": 0.0, "5m": 0.0}}, "no map has a positive weight"),
    ({"min_tasks_per_gpu": 2}, "min_tasks_per_gpu=2: needs task_dealing=sharded, not round_robin"),
    ({"enable_task_sharding": True, "task_dealing": "round_robin"}, "enable_task_sharding=True: contradicts"),
    ({"enable_task_sharding": True, "min_tasks_per_gpu": 4}, "there are 3 map(s) to play: 3m, 4m, 5m"),
    ({"task_dealing": "sharded", "runner": "stream"}, "runner=stream: task_dealing=sharded deals rounds"),
    ({"env_args.map_name": "3m", "sync_every_n_steps": 7}, "sync_every_n_steps=7: has no meaning for one map"),
])  # fmt: skip
def test_keys_that_mean_nothing_are_rejected_in_one_line(updates, message):
    with pytest.raises(UserError) as error:
        preflight(config_of(**{"sync_every_n_steps": 5, **updates}))
    assert message in error.value.message and "\n" not in error.value.message
