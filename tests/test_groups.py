"""Groups of episodes with one start: how they are played, compared, dropped and counted."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from interruption import interrupted_run, stage_of
from q_toys import make_learner, random_episode, toy_config
from run_equality import differences

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.run.cli.preflight import preflight
from omagd.run.launch.launcher import launch
from omagd.utils.errors import UserError
from omagd.utils.packing import EpisodeMeta, RecordedEpisode, pack_episodes

torch.set_num_threads(1)
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


@pytest.mark.parametrize(
    "args", [{}, {"score": "return"}, {"score": "return", "returns_to_go": True}, {"normalise_advantages": True}]
)
def test_an_advantage_is_the_score_minus_the_mean_of_the_others(args):
    config = toy_config(learner="rloo_learner", learner_args=args, action_selector="softmax", mixer="none", gamma=0.9)
    learner = make_learner(config, dtype=torch.float64)
    episodes = groups_of((1.0, 0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0,))
    rows = learner._judged(pack_episodes(episodes))
    packing = pack_episodes(episodes).packing
    order = pack_episodes(episodes).sample_index

    def score(episode: RecordedEpisode, step: int) -> float:
        if not args.get("score"):
            return episode.meta.outcome
        rewards = episode["reward"].double().tolist()[step if args.get("returns_to_go") else 0 : -1]
        return sum(0.9**t * reward for t, reward in enumerate(rewards))

    wanted, weights = [], []
    for row in range(len(packing.step)):
        own = episodes[order[int(packing.episode[row])]]
        step = int(packing.step[row])
        others = [score(e, step) for e in episodes if e is not own and e.meta.group and e.meta == own.meta]
        wanted.append(score(own, step) - np.mean(others) if others else 0.0)
        weights.append(rows.weight[row].tolist())
    wanted, weights = np.array(wanted)[:, None] * np.ones((1, 3)), np.array(weights)
    if args.get("normalise_advantages"):
        mean = (wanted * weights).sum() / weights.sum()
        wanted = (wanted - mean) / np.sqrt((weights * (wanted - mean) ** 2).sum() / weights.sum())
    np.testing.assert_allclose(rows.advantage, wanted * weights, atol=1e-6)
    assert np.abs(wanted * weights).max() > 0.3 and learner.critic is None


def test_without_outcomes_they_are_not_compared():
    config = toy_config(learner="rloo_learner", action_selector="softmax", mixer="none")
    with pytest.raises(UserError, match=r"score=outcome.*battle_won.*score=return"):
        make_learner(config).update(pack_episodes(groups_of((1.0, math.nan))), episodes=0)


def test_outcomes_are_saved_with_episodes(tmp_path):
    episodes = groups_of((1.0, 0.0), (math.nan, 1.0))
    for kept in (episodes, episodes[2:3]):
        buffer, loaded, restored = (EpisodeBuffer(9) for _ in range(3))
        buffer.add(kept)
        buffer.save(tmp_path / "file")
        loaded.load(tmp_path / "file")
        restored.restore([buffer.since(0)], buffer.added)
        for found in (buffer, loaded, restored):
            outcomes = [meta.outcome for meta in found.batch(range(len(kept))).meta]
            wanted = [kept[i].meta.outcome for i in found.batch(range(len(kept))).sample_index]
            np.testing.assert_equal(outcomes, wanted)


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


def test_it_resumes_bit_for_bit(tmp_path):
    sizes = {"t_max": 200, "test_interval": 60}
    whole = launch(config_of(tmp_path / "whole", **sizes), "whole")["folder"]
    given = config_of(tmp_path / "cut", auto_resume=True, **sizes)
    for iteration in (2, 5):
        interrupted_run(given, iteration)
    assert differences(Path(whole), Path(launch(given, "cut")["folder"])) == []


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ({"group_size": 1}, ["group_size=1", "learner=rloo_learner", "group_size=8"]),
        ({"group_size": 3}, ["group_size=3", "batch_size_run=4"]),
        ({"runner": "stream"}, ["group_size=2", "runner=parallel", "runner=stream"]),
        (
            {"learner": "nq_learner", "learner_args": {}, "action_selector": "epsilon_greedy"},
            ["group_size=2", "learner=nq_learner", "group_size=1"],
        ),
        ({"learner_args": {"returns_to_go": True}}, ["returns_to_go=True", "score=return"]),
        ({"learner_args": {"critic": "state"}}, ["learner_args.critic"]),
    ],
)
def test_what_does_not_fit_is_rejected_at_the_start(updates, words):
    with pytest.raises(UserError) as caught:
        preflight(config_of().model_copy(update=updates))
    assert [word for word in words if word not in caught.value.render()] == []
