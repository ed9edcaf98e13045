"""On-policy data: collected, learned from once, discarded; and PQN, which learns from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_harness import records
from interruption import interrupted_run
from plugin_toys import CONFIGS, add_example
from q_toys import make_learner, random_episode, toy_config
from run_equality import differences

import omagd
from omagd.components.data import OnPolicyData
from omagd.components.episode_buffer import UNLIMITED, EpisodeBuffer
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners import policy_learner
from omagd.run.cli.preflight import preflight
from omagd.run.launch.launcher import launch
from omagd.utils.errors import UserError
from omagd.utils.packing import EpisodeMeta, RecordedEpisode, pack_episodes

add_example()
SIZES = {"batch_size_run": 3, "batch_size": 4}
SMALL = {
    "use_cuda": False, "rnn_hidden_dim": 8, "test_nepisode": 4, "checkpoint_interval": 0, "log_interval": 60,
    "learner_args": {"epochs": 2, "minibatches": 2}, "epsilon_anneal_time": 200,
}  # fmt: skip


def config_of(results: Path | str = "results", **updates: Any) -> Config:
    """Return a small configuration of PQN on the example's environment."""
    given = {**SMALL, "local_results_path": str(results), **updates}
    return resolve("pqn_vdn", str(CONFIGS / "envs" / "crossroads.yaml"), given)


def episodes_of(*lengths: int) -> list[RecordedEpisode]:
    """Return made-up episodes of these lengths."""
    made = []
    for i, length in enumerate(lengths):
        fields = random_episode(i, length, truncated=i % 2 == 1)
        del fields["recon"]
        made.append(RecordedEpisode(fields, EpisodeMeta(slot=i % 2, seed=i)))
    return made


def test_a_batch_holds_the_quota_and_is_forgotten():
    buffer = EpisodeBuffer(UNLIMITED)
    data = OnPolicyData(config_of(batch_size=3), buffer, buffer.batch)
    episodes = episodes_of(4, 2, 6, 1)
    for added, ready in ((1, False), (1, False), (2, True)):
        assert data.wants_more
        data.add([episodes.pop(0) for _ in range(added)])
        assert data.ready is ready and data.wants_more is not ready
    (batch,) = data.batches()
    assert [meta.seed for meta in batch.meta] == [2, 0, 1, 3], "all four, by length"
    assert batch.packing.lengths == (7, 5, 3, 2)
    assert (len(data.buffer), data.buffer.added, data.ready) == (0, 4, False)


def test_minibatches_keep_rows_and_origin_of_their_episodes():
    episodes = episodes_of(4, 2, 6, 1, 6)
    batch = pack_episodes(episodes)
    part = batch.select([4, 1, 2])
    places = [batch.sample_index[i] for i in (1, 2, 4)]
    expected = pack_episodes([episodes[place] for place in places])
    assert part.packing == expected.packing and part.sample_index == tuple(places)
    assert [meta.seed for meta in part.meta] == places
    assert all(torch.equal(part[name], expected[name]) for name in expected.data)


def test_each_epoch_of_each_update_draws_anew(monkeypatch):
    keys, drawn = [], policy_learner.generator
    monkeypatch.setattr(policy_learner, "generator", lambda *key: keys.append(key) or drawn(*key))
    learner = make_learner(toy_config(learner="pqn_learner", learner_args={"epochs": 3, "minibatches": 2}))
    asked, made = [], learner._lambda_returns
    monkeypatch.setattr(learner, "_lambda_returns", lambda batch: asked.append(batch) or made(batch))
    for _ in range(2):
        learner.update(pack_episodes([random_episode(i, 3) for i in range(4)]), episodes=0)
    assert [key[2] for key in keys] == [0, 2, 4, 6, 8, 10] and len(asked) == 2


@pytest.mark.parametrize(("runner", "tests"), [("parallel", 10**6), ("stream", 100)])
def test_every_episode_is_learned_from_exactly_once(runner, tests, tmp_path, monkeypatch):
    """Also those set aside while a test is played; the batch needs more than one round of the runner."""
    kind, learned = LEARNERS.get("pqn_learner"), []
    update = kind.update
    monkeypatch.setattr(kind, "update", lambda *args, **more: learned.append(args[1].meta) or update(*args, **more))
    summary = omagd.run(config_of(tmp_path, **SIZES, runner=runner, t_max=300, test_interval=tests))
    folder = Path(summary["folder"])
    seeds = [meta.seed for batch in learned for meta in batch]
    played = [json.loads(line)["seed"] for line in (folder / "episodes" / "rank_0.jsonl").read_text().splitlines()]
    assert sorted(seeds) == sorted(set(played)) and len(seeds) == len(played)
    assert {meta.slot for batch in learned for meta in batch} == set(range(3))
    assert all(len(batch) >= 4 for batch in learned) and (runner == "stream" or {len(b) for b in learned} <= {4, 6})
    clock = summary["stages"]["stage3"]["clock"]
    assert clock["updates"] == 4 * len(learned) and clock["episodes"] == len(played)
    assert summary["updates_per_iteration"] == summary["card"]["compared"]["updates_per_round"] == 4
    lines = records(folder)
    assert any(0.05 < line.get("epsilon", 1) < 1 for line in lines) and any(line.get("loss_td") for line in lines)
    assert "4 updates per on-policy batch" in (folder / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("fixed", [None, True])
def test_it_resumes_bit_for_bit(fixed, tmp_path):
    sizes = {**SIZES, "runner": "stream", "t_max": 400, "test_interval": 100, "graph_updates": fixed}
    whole = launch(config_of(tmp_path / "whole", **sizes), "whole")["folder"]
    given = config_of(tmp_path / "cut", auto_resume=True, **sizes)
    for iteration in (2, 3, 5):
        interrupted_run(given, iteration)
    assert differences(Path(whole), Path(launch(given, "cut")["folder"])) == []


@pytest.mark.parametrize(("updates", "words"), [
    ({"buffer_size": 100}, ["buffer_size=100", "on-policy", "buffer_size=5000"]),
    ({"learner": "nq_learner", "learner_args": {}, "batch_size": 6000}, ["batch_size=6000", "buffer_size=5000"]),
    ({"batch_size": 200, "t_max": 199}, ["batch_size=200", "t_max=199"]),
    ({"action_selector": "softmax"}, ["action_selector=softmax", "pqn_learner learns values"]),
])  # fmt: skip
def test_values_that_mean_nothing_to_the_learner_are_rejected(updates, words):
    with pytest.raises(UserError) as caught:
        preflight(config_of().model_copy(update=updates))
    assert [word for word in words if word not in caught.value.render()] == []
