"""Playing episodes, against a small world whose every number follows from the seed, the step and the actions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plugin_toys import own_names
from runner_toys import FakeEnv, Probe, identity, length_of, reward_at, runner_of, seen_at

from omagd.config.loading import resolve
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.controllers.types import Exploration
from omagd.run.training.build import PURPOSES, build_session
from omagd.run.training.stages.rl import greedy_episodes
from omagd.runners import REGISTRY
from omagd.runners.rollout import EpisodeSeeds
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder
from omagd.utils.seeding import stream_seed

torch.set_num_threads(1)


def test_rows_hold_what_happened_and_the_closing_row_what_was_seen_last():
    env = FakeEnv(3)
    rollout = runner_of(env).run(Probe(), explore=None, episodes_per_slot=4, full_obs=True)
    by_identity = {seed % 1000: seed for _, seed in env.begun}
    assert len(rollout.episodes) == rollout.n_episodes == 12 == len(by_identity)
    for episode in rollout.episodes:
        seed = by_identity[identity(episode)]
        steps = length_of(seed)
        played = [entry for entry in env.log if entry[1] == seed]
        assert [entry[2] for entry in played] == list(range(steps))
        assert all(len(values) == steps + 1 for values in episode.values())
        seen = np.array([seen_at(seed, t) for t in range(steps + 1)], np.float32)
        assert (episode["obs"].numpy() == seen[:, None, None]).all()
        assert (episode["full_obs"].numpy() == -seen[:, None, None]).all()
        assert (episode["note"].numpy() == (seen + 0.5).astype(np.float16)[:, None, None]).all()
        assert episode["age"].tolist() == list(range(steps + 1)) == episode["state"][:, 1].tolist()
        assert episode["actions"].tolist() == [*(entry[3] for entry in played), [0, 0]]
        rewards = [reward_at(seed, entry[2], np.array(entry[3])) for entry in played]
        assert episode["reward"].tolist() == [*rewards, 0.0]
        terminal = 0 if steps % 2 == 0 else 1
        assert episode["terminated"].tolist() == [0] * (steps - 1) + [terminal, 0]
        mask = episode["avail_actions"].numpy()
        assert mask[:steps, :, 1].all()
        assert (mask[:steps, :, 3] == (np.arange(steps) % 2 == 0)[:, None]).all()
        assert mask[steps].tolist() == [[1, 0, 0, 0]] * 2


def test_fields_are_compact_exact_and_of_the_agreed_dtypes():
    episode = runner_of(FakeEnv(2)).run(Probe(), explore=None).episodes[0]
    kinds = {name: values.dtype for name, values in episode.items()}
    assert kinds == {
        "obs": torch.float32,
        "state": torch.float32,
        "avail_actions": torch.uint8,
        "actions": torch.uint8,
        "reward": torch.float32,
        "terminated": torch.uint8,
        "note": torch.float16,
        "age": torch.int16,
    }
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in episode.values())
    many = runner_of(FakeEnv(1, n_actions=300)).run(Probe(), explore=None).episodes[0]
    assert many["actions"].dtype == torch.int16


def test_every_slot_plays_its_quota_without_a_pause():
    env = FakeEnv(4)
    rollout = runner_of(env).run(Probe(), explore=None, episodes_per_slot=5)
    played = {slot: [length_of(seed) for s, seed in env.begun if s == slot] for slot in range(4)}
    assert all(len(lengths) == 5 for lengths in played.values())
    # One tick per step and one to look at the last moment; the last episode's look needs no step.
    assert env.ticks <= max(sum(lengths) + len(lengths) - 1 for lengths in played.values())
    assert rollout.steps == sum(map(sum, played.values())) == len(env.log)


def test_episodes_stand_in_order_of_their_last_tick_and_then_of_their_slot():
    env = FakeEnv(5)
    episodes = runner_of(env).run(Probe(), explore=None, episodes_per_slot=3).episodes
    expected = []
    for slot in range(5):
        tick = 0
        for seed in [seed for s, seed in env.begun if s == slot]:
            tick += length_of(seed) + 1
            expected.append((tick, slot, seed % 1000))
    assert [identity(episode) for episode in episodes] == [number for _, _, number in sorted(expected)]


def test_stats_are_sums_and_counts_over_episodes():
    env = FakeEnv(3)
    rollout = runner_of(env).run(Probe(), explore=None, episodes_per_slot=2, keep=False)
    seeds = [seed for _, seed in env.begun]
    assert rollout.episodes == []
    assert rollout.n_episodes == 6
    assert rollout.stats["ep_length"] == (sum(map(length_of, seeds)), 6)
    assert rollout.stats["battle_won"] == (sum(seed % 3 == 0 for seed in seeds), 6)
    assert rollout.stats["dead_enemies"] == (sum(seed % 5 for seed in seeds), 6)
    total = sum(float(reward_at(seed, t, np.array(actions))) for _, seed, t, actions in env.log)
    assert rollout.stats["return"] == (pytest.approx(total), 6)


def test_a_batch_plays_the_same_episodes_as_its_slots_alone():
    together = runner_of(FakeEnv(3)).run(Probe(), explore=None, episodes_per_slot=2).episodes
    found = {identity(episode): episode for episode in together}
    for slot in range(3):
        for number in range(2):
            env = FakeEnv(1)
            seed = stream_seed(11, "env/train", 0, slot, number)
            runner = runner_of(env, name="episode")
            runner.stream.draw = lambda which, seed=seed: np.array([seed])
            (alone,) = runner.run(Probe(), explore=None).episodes
            for name, values in alone.items():
                assert torch.equal(values, found[seed % 1000][name])


def test_every_purpose_rank_slot_and_number_has_a_seed_of_its_own():
    everyone = np.ones(4, bool)
    drawn = [
        seed
        for purpose in ("train", "test", "pretrain")
        for rank in (0, 1)
        for stream in [EpisodeSeeds(3, purpose, rank)]
        for _ in range(5)
        for seed in stream.draw(everyone)
    ]
    assert len(set(drawn)) == 3 * 2 * 5 * 4
    assert min(drawn) >= 0


def test_no_rank_or_purpose_of_a_run_plays_the_episodes_of_another(tmp_path):
    config = resolve(
        "qmix", "skirmish", {"env_args.map_name": "3m", "batch_size_run": 3, "enable_checkpointing": False}
    )
    drawn = []
    for rank in range(2):
        folder = RunFolder(tmp_path / str(rank))
        session = build_session(config, Dist(rank, 2), folder, SimpleNamespace(info=print))
        for purpose in PURPOSES:
            drawn += session.runners[purpose].stream.draw(np.ones(3, bool)).tolist()
        session.close()
    assert len(set(drawn)) == 2 * len(PURPOSES) * 3


def test_test_episodes_are_played_greedily_and_as_many_in_each_slot():
    runner, policy = runner_of(FakeEnv(4), "test"), Probe()
    session = SimpleNamespace(runners={"test": runner}, rounds=lambda wanted: wanted // 4, dist=Dist())
    values = greedy_episodes(session, policy, 12)
    assert set(policy.explored) == {None}
    assert runner.stream.state_dict()["played"] == [3] * 4
    assert {"test_return_mean", "test_ep_length_mean", "test_battle_won_mean"} <= values.keys()


@pytest.mark.parametrize("name", ["parallel", "stream"])
def test_the_log_tells_every_episode_in_the_order_in_which_it_is_counted(name):
    env = FakeEnv(3)
    runner, probe = runner_of(env, name=name), Probe()
    rollouts = [runner.collect(probe, explore=None) for _ in range(4)]
    rollouts.append(runner.drain(probe, explore=None))
    log = [entry for rollout in rollouts for entry in rollout.log]
    assert sorted((entry["slot"], entry["seed"]) for entry in log) == sorted(env.begun)
    for rollout in rollouts:
        assert [entry["seed"] % 1000 for entry in rollout.log] == [identity(e) for e in rollout.episodes]
        assert sum(entry["length"] for entry in rollout.log) == rollout.steps
    for entry in log:
        seed = entry["seed"]
        actions = [played for _, s, _, played in env.log if s == seed]
        brought = sum(float(reward_at(seed, t, np.array(a))) for t, a in enumerate(actions))
        expected = {"slot": entry["slot"], "seed": seed, "length": length_of(seed), "return": brought}
        assert entry == {**expected, "battle_won": float(seed % 3 == 0), "dead_enemies": float(seed % 5)}
        assert [type(value) for value in list(entry.values())[:4]] == [int, int, int, float]
    kept = runner_of(FakeEnv(3), name=name).run(Probe(), explore=None, episodes_per_slot=2, keep=False).log
    assert len(kept) == 6 and all(entry["length"] == length_of(entry["seed"]) for entry in kept)


def test_renewed_seeds_are_others_and_reproducible():
    everyone = np.ones(3, bool)

    def drawn(generation: int, times: int = 4) -> list[int]:
        stream = EpisodeSeeds(3, "train", 1)
        stream.draw(everyone)
        if generation:
            stream.renew(generation)
        again = EpisodeSeeds(3, "train", 1)
        again.load_state_dict(stream.state_dict())
        seeds = [stream.draw(everyone) for _ in range(times)]
        assert all((again.draw(everyone) == each).all() for each in seeds)
        return [int(seed) for each in seeds for seed in each]

    everything = [seed for generation in range(4) for seed in drawn(generation)]
    assert len(set(everything)) == len(everything) == 4 * 4 * 3
    assert drawn(2) == drawn(2)
    runner, other = runner_of(FakeEnv(2)), runner_of(FakeEnv(2))
    runner.renew(5)
    first = runner.run(Probe(), explore=None).log
    other.restore(runner.snapshot(), None)
    assert first != runner_of(FakeEnv(2)).run(Probe(), explore=None).log
    assert runner.run(Probe(), explore=None).log == other.run(Probe(), explore=None).log


def test_play_goes_on_with_new_episodes_and_can_be_continued_from_a_state():
    env = FakeEnv(2)
    runner = runner_of(env)
    runner.run(Probe(), explore=None, episodes_per_slot=2)
    state = runner.snapshot()
    second = runner.run(Probe(), explore=None, episodes_per_slot=2)
    assert len({seed for _, seed in env.begun}) == 8
    again = runner_of(FakeEnv(2))
    again.restore(state, None)
    third = again.run(Probe(), explore=None, episodes_per_slot=2)
    assert third.stats == second.stats
    for one, other in zip(second.episodes, third.episodes, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_tests_do_not_disturb_training_on_the_same_environment():
    def played(with_tests: bool) -> list[int]:
        env = FakeEnv(2)
        train, test = runner_of(env, "train"), runner_of(env, "test")
        numbers: list[int] = []
        for _ in range(3):
            numbers += [identity(e) for e in train.run(Probe(), explore=None).episodes]
            if with_tests:
                test.run(Probe(), explore=None, episodes_per_slot=2, keep=False)
        return numbers

    assert played(True) == played(False)


def test_exploration_reaches_the_policy_and_full_obs_only_who_asks():
    explore = Exploration(0.3, np.random.default_rng(0))
    probe = Probe()
    episode = runner_of(FakeEnv(2)).run(probe, explore=explore).episodes[0]
    assert all(given is explore for given in probe.explored)
    assert not any(probe.full)
    assert "full_obs" not in episode
    oracle = Probe(wants_full_obs=True)
    episode = runner_of(FakeEnv(2)).run(oracle, explore=None).episodes[0]
    assert all(oracle.full)
    assert "full_obs" not in episode


def test_one_runner_serves_policies_with_different_fields():
    env = FakeEnv(2)
    runner = runner_of(env)
    assert "note" in runner.run(Probe(), explore=None).episodes[0]
    plain = ScriptedPolicy(env, ("low",), 0.0, np.random.default_rng(0))
    assert "note" not in runner.run(plain, explore=None).episodes[0]
    assert "note" in runner.run(Probe(), explore=None).episodes[0]


def test_an_endless_episode_is_a_fault_of_the_environment():
    told = "the episode goes on after its limit of 9 steps; correct the environment"
    with pytest.raises(UserError, match=rf"^env=fake, slot 0, seed \d+, step 9: {told}$"):
        runner_of(FakeEnv(2, endless=True)).run(Probe(), explore=None)


def test_the_episode_runner_plays_one_slot():
    assert own_names(REGISTRY) == ["episode", "parallel", "stream", "ticks"]
    with pytest.raises(UserError, match="runner=parallel"):
        runner_of(FakeEnv(2), name="episode")


def test_scripted_play_follows_its_scripts_and_mixes_chance_in():
    def share_of_low(policies: tuple[str, ...], random_share: float) -> tuple[float, np.ndarray]:
        env = FakeEnv(8)
        policy = ScriptedPolicy(env, policies, random_share, np.random.default_rng(1))
        rollout = runner_of(env).run(policy, explore=None, episodes_per_slot=30)
        # Where both actions were open (even steps): was it the low one? Once per episode, and over all.
        choices = [(e["actions"][:-1:2] == 1).float() for e in rollout.episodes]
        assert all((e["obs"] >= 0).all() for e in rollout.episodes)
        return float(torch.cat(choices).mean()), np.array([float(c.mean()) for c in choices])

    assert share_of_low(("low",), 0.0)[0] == 1.0
    assert share_of_low(("high",), 0.0)[0] == 0.0
    mean, each = share_of_low(("low", "high"), 0.0)
    assert set(each) == {0.0, 1.0}
    assert 0.35 < each.mean() < 0.65
    assert abs(share_of_low(("random",), 0.0)[0] - 0.5) < 0.06
    assert abs(share_of_low((), 0.7)[0] - 0.5) < 0.06
    assert abs(share_of_low(("low",), 1.0)[0] - 0.5) < 0.06
    assert abs(share_of_low(("low",), 0.5)[0] - 0.75) < 0.06


def test_scripted_play_is_determined_by_its_generator():
    def played() -> list[list[list[int]]]:
        env = FakeEnv(3)
        policy = ScriptedPolicy(env, ("low", "high", "random"), 0.4, np.random.default_rng(5))
        return [e["actions"].tolist() for e in runner_of(env).run(policy, explore=None, episodes_per_slot=3).episodes]

    assert played() == played()


def test_an_unknown_script_is_refused():
    with pytest.raises(UserError, match="no scripted policy clever"):
        ScriptedPolicy(FakeEnv(1), ("clever",), 0.1, np.random.default_rng(0))
