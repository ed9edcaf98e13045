"""Groups of episodes with one start: how they are played, compared, dropped and counted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interruption import interrupted_run, stage_of
from q_toys import make_learner, random_episode, toy_config
from run_equality import differences

from omagd.components.data import GroupData
from omagd.components.episode_buffer import UNLIMITED, EpisodeBuffer
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.learners.rloo_learner import _groups
from omagd.run.checkpoint.weights import find_step_folder
from omagd.run.cli.preflight import describe_env, preflight
from omagd.run.launch.launcher import launch
from omagd.run.training.checks import check_groups
from omagd.utils.errors import UserError
from omagd.utils.packing import EpisodeMeta, RecordedEpisode, pack_episodes

SMALL: dict[str, Any] = {
    "use_cuda": False, "rnn_hidden_dim": 8, "test_nepisode": 4, "checkpoint_interval": 0, "log_interval": 60,
    "runner_log_interval": 60, "learner_log_interval": 60, "batch_size_run": 4, "batch_size": 4, "group_size": 2,
}  # fmt: skip


def config_of(results: Path | str = "results", **updates: Any) -> Config:
    """Return a small configuration of RLOO on a matrix game."""
    return resolve("rloo", updates.pop("env", "matrix_game"), {**SMALL, "local_results_path": str(results), **updates})


def groups_of(*outcomes: tuple[float, ...]) -> list[RecordedEpisode]:
    """Return made-up episodes of different lengths, one group for each tuple of outcomes; an empty name for one."""
    made, lengths = [], itertools.cycle((4, 1, 6, 2, 3))
    for number, group in enumerate(outcomes):
        for outcome in group:
            meta = EpisodeMeta(seed=number, group=str(number) if len(group) > 1 else "", outcome=outcome)
            made.append(RecordedEpisode(random_episode(len(made), next(lengths), truncated=len(made) % 2 == 1), meta))
    return made


def test_groups_of_one_name_and_different_starts_stay_apart():
    metas = [EpisodeMeta(seed=seed, group="0", outcome=1.0) for seed in (1, 2)]
    batch = pack_episodes([RecordedEpisode(random_episode(0, 3), meta) for meta in metas])
    assert _groups(batch.meta)[1].tolist() == [0, 0]


@pytest.mark.parametrize("args", [{}, {"score": "return"}, {"normalise_advantages": True}])
def test_an_advantage_is_the_score_minus_the_mean_of_the_others(args):
    config = toy_config(learner="rloo_learner", learner_args=args, action_selector="softmax", mixer="none", gamma=0.9)
    learner = make_learner(config, dtype=torch.float64)
    episodes = groups_of((1.0, 0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0,))
    rows = learner.all_rows(pack_episodes(episodes))
    packing = pack_episodes(episodes).packing
    order = pack_episodes(episodes).sample_index

    def score(episode: RecordedEpisode) -> float:
        if not args.get("score"):
            return episode.meta.outcome
        rewards = episode["reward"].double().tolist()[:-1]
        return sum(0.9**t * reward for t, reward in enumerate(rewards))

    wanted, weights = [], []
    for row in range(len(packing.step)):
        own = episodes[order[int(packing.episode[row])]]
        others = [score(e) for e in episodes if e is not own and e.meta.group and e.meta == own.meta]
        wanted.append(score(own) - np.mean(others) if others else 0.0)
        weights.append(rows.weight[row].tolist())
    wanted, weights = np.array(wanted)[:, None] * np.ones((1, 3)), np.array(weights)
    if args.get("normalise_advantages"):
        mean = (wanted * weights).sum() / weights.sum()
        wanted = (wanted - mean) / np.sqrt((weights * (wanted - mean) ** 2).sum() / weights.sum())
    np.testing.assert_allclose(rows.advantage, wanted * weights, atol=1e-6)
    assert np.abs(wanted * weights).max() > 0.3 and set(learner.modules()) == {"agent"}


def test_without_outcomes_they_are_not_compared():
    config = toy_config(learner="rloo_learner", action_selector="softmax", mixer="none")
    with pytest.raises(UserError, match=r"score=outcome.*battle_won.*score=return"):
        make_learner(config).update(pack_episodes(groups_of((1.0, math.nan))), episodes=0)
    make_learner(config).update(pack_episodes(groups_of((1.0, 0.0), (math.nan,))), episodes=0)  # compared with none
    config = config_of()
    for updates in ({}, {"enable_dynamic_sampling": True}):
        given = config.model_copy(update={"learner_args": {"score": "return"} if updates else {}})  # default: outcome
        given, info = given.model_copy(update=updates), describe_env(config)
        check_groups(given, info)
        with pytest.raises(UserError, match="battle_won"):
            check_groups(given, replace(info, has_win=False))


def test_a_group_has_one_start_and_plays_apart(tmp_path):
    """Its episodes have one seed, task and first observation, but their own actions and outcomes."""
    config = config_of(tmp_path, env="skirmish", env_args={"map_name": "3m"}, batch_size_run=6)
    stage = stage_of(config, tmp_path / "run")
    rounds = [stage.session.runners["train"].collect(stage.mac, explore=stage._exploration()) for _ in range(2)]
    stage.session.close()
    groups: dict[str, list[RecordedEpisode]] = {}
    for rollout in rounds:
        assert len(rollout.episodes) == 6
        for episode in rollout.episodes:
            groups.setdefault(episode.meta.group, []).append(episode)
    assert len(groups) == 6 and len({group[0].meta.seed for group in groups.values()}) == 6
    for one, other in groups.values():
        assert one.meta.seed == other.meta.seed and abs(one.meta.slot - other.meta.slot) == 1
        assert torch.equal(one["obs"][0], other["obs"][0]) and one.meta.outcome in (0.0, 1.0)
    apart = [
        len(a["actions"]) != len(b["actions"]) or not torch.equal(a["actions"], b["actions"])
        for a, b in groups.values()
    ]
    assert all(apart)
    logged = [entry["battle_won"] for rollout in rounds for entry in rollout.log]
    assert logged == [e.meta.outcome for rollout in rounds for e in rollout.episodes]


def data_of(**updates: Any) -> GroupData:
    buffer = EpisodeBuffer(UNLIMITED)
    data = GroupData(config_of(**{"enable_dynamic_sampling": True, **updates}), buffer, buffer.batch)
    data.begin()
    return data


def test_groups_with_equal_outcomes_are_dropped_whole_and_others_collected():
    data = data_of(batch_size=5, group_size=3, batch_size_run=6, max_sampling_attempts=2)
    same, mixed = (1.0, 1.0, 1.0), (0.0, 1.0, 1.0)
    assert data.wants_more
    data.add(groups_of(same, mixed))
    assert data.wants_more and data.ready and data.stats() == {"groups_dropped": (1, 2)}, "two groups are wanted"
    data.add(groups_of((0.0, 0.0, 0.0), same))
    assert data.wants_more
    data.add(groups_of(same, (math.nan, 1.0, 1.0)))
    assert not data.wants_more and data.stats() == {"groups_dropped": (4, 6)}
    (batch,) = data.batches()
    assert sorted(meta.outcome for meta in batch.meta)[:2] == [0.0, 1.0] and len(batch.meta) == 6
    data.begin()
    for number in range(3):  # one round is needed; after two more the rank gives up
        assert data.wants_more, number
        data.add(groups_of(same, same))
    assert not (data.wants_more or data.ready)
    (batch,) = data.batches()
    assert batch.packing.lengths == (1,) and not batch.valid_mask.any() and batch.meta[0].group == ""
    kept = data_of(enable_dynamic_sampling=False)
    kept.add(groups_of((1.0, 1.0), (0.0, 0.0)))
    assert not kept.wants_more and kept.stats() == {} and len(kept.buffer) == 4


SAMPLING = {"enable_dynamic_sampling": True, "learner_args": {"epochs": 2, "minibatches": 2}, "group_size": 2}


def kept_of(episodes: list[RecordedEpisode]) -> list[RecordedEpisode]:
    """Return the episodes whose group has won and lost."""
    outcomes: dict[str, set[float]] = {}
    for episode in episodes:
        outcomes.setdefault(episode.meta.group, set()).add(episode.meta.outcome)
    return [episode for episode in episodes if len(outcomes[episode.meta.group]) > 1]


def test_dropped_groups_are_replaced_where_maps_are_dealt(tmp_path, monkeypatch):
    """A further round plays as many groups of each map as were dropped."""
    maps = {"env": "skirmish", "env_args": {"map_name": ["2m", "3m"]}, "agent": "hpn_rnn", "obs_agent_id": False}
    config = config_of(tmp_path, **maps, **SAMPLING, task_dealing="sharded", t_max=10**5, batch_size=8)
    stage = stage_of(config, tmp_path / "run")
    rounds: list[list[RecordedEpisode]] = []
    store = stage._store
    monkeypatch.setattr(stage, "_store", lambda rollout: rounds.append(rollout.episodes) or store(rollout))
    for _ in range(2):
        rounds.clear()
        stage.collect()
        played = [sorted(e.meta.task for e in episodes) for episodes in rounds]
        kept = [sorted(e.meta.task for e in kept_of(episodes)) for episodes in rounds]
        assert len(stage.data.buffer) == sum(map(len, kept)) and len(rounds) > 1
        assert played[0] == [0] * 4 + [1] * 4
        for first, left, second in zip(played, kept, played[1:], strict=False):
            assert Counter(second) == Counter(first) - Counter(left)
        list(stage.data.batches())
    stage.session.close()


def test_ten_updates_without_groups_end_the_run(tmp_path):
    config = config_of(tmp_path, **SAMPLING)
    groups, other = (stage_of(config, tmp_path / name).shapers[0] for name in ("run", "other"))
    for _ in range(9):
        assert not groups.ready(0, "stage3")
    assert groups.ready(2, "stage3") and groups.state_dict()["counts"] == [9, 0]
    other.load_state_dict(groups.state_dict())
    assert groups.record() == other.record() == {"updates_without_groups": 9.0}
    with pytest.raises(
        UserError, match=r"stage3, t_env 5: 10 updates in a row.*group_size=2.*checkpoint_path.*score=return"
    ):
        for _ in range(10):
            groups.ready(0, "stage3, t_env 5")


def test_the_folder_of_a_run_with_another_learner_means_its_weights(tmp_path, capfd):
    reason = "learner=ppo_learner, not rloo_learner"
    sizes = {**SMALL, "group_size": 1, "local_results_path": str(tmp_path), "t_max": 20}
    run = Path(launch(resolve("ippo", "matrix_game", sizes), "first")["folder"])
    sizes |= {"t_max": 40, "group_size": 2}
    config = resolve("rloo", "matrix_game", {**sizes, "checkpoint_path": str(run)})
    assert preflight(config).stages == ("stage3",)
    capfd.readouterr()
    summary = launch(config, "second")
    shown = "".join(capfd.readouterr())
    assert shown.count("so this one starts from the weights") == 1 and f"a run with {reason}" in shown
    assert summary["stages"]["stage3"]["clock"]["t_env"] >= 40
    begun = find_step_folder(str(run))
    logged = (Path(summary["folder"]) / "logs/rank_0.log").read_text()
    assert f"continuing from {begun} at t_env {begun.name}: steps count on from there to t_max" in logged
    state = config.model_copy(update={"checkpoint_path": str(run / "checkpoints")})
    for start in (preflight, lambda asked: launch(asked, "third")):
        with pytest.raises(UserError, match=f"a state with {reason}. Give {run}/models"):
            start(state)
    assert not (tmp_path / "third").exists()


def test_it_resumes_bit_for_bit(tmp_path):
    sizes = {"t_max": 200, "test_interval": 60, **SAMPLING, "max_sampling_attempts": 2}
    whole = launch(config_of(tmp_path / "whole", **sizes), "whole")["folder"]
    given = config_of(tmp_path / "cut", auto_resume=True, **sizes)
    for iteration in (2, 5):
        interrupted_run(given, iteration)
    assert differences(Path(whole), Path(launch(given, "cut")["folder"])) == []


@pytest.mark.parametrize(("updates", "words"), [
    ({"group_size": 1}, ["group_size=1", "learner=rloo_learner", "group_size=8"]),
    ({"group_size": 3}, ["group_size=3", "batch_size_run=4"]),
    ({"runner": "stream"}, ["group_size=2", "runner=parallel", "runner=stream"]),
    (
        {"learner": "nq_learner", "learner_args": {}, "action_selector": "epsilon_greedy"},
        ["group_size=2", "learner=nq_learner", "group_size=1"],
    ),
    ({"max_sampling_attempts": 7}, ["max_sampling_attempts=7", "enable_dynamic_sampling=True"]),
    ({"learner_args": {"returns_to_go": True}}, ["learner_args.returns_to_go=True"]),
])  # fmt: skip
def test_what_does_not_fit_is_rejected_at_the_start(updates, words):
    config = config_of().model_copy(update=updates)
    if "learner_args" not in updates:  # an evaluation plays no groups
        check_groups(config.model_copy(update={"evaluate": True}), describe_env(config))
    with pytest.raises(UserError) as caught:
        preflight(config)
    assert [word for word in words if word not in caught.value.render()] == []
