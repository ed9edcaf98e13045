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
from omagd.utils.packing import EpisodeMeta
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


def test_stats_are_sums_and_counts_over_episodes():
    """Every slot plays its quota without a pause; episodes come in order of their last tick, then of their slot."""
    env = FakeEnv(4)
    rollout = runner_of(env).run(Probe(), explore=None, episodes_per_slot=5)
    played = {slot: [seed for s, seed in env.begun if s == slot] for slot in range(4)}
    # One tick for each step and one for the closing row; after the last step of all no closing row needs a step.
    assert env.ticks <= max(sum(map(length_of, seeds)) + len(seeds) - 1 for seeds in played.values())
    assert rollout.steps == len(env.log)
    ends = []
    for slot, seeds in played.items():
        ticks = np.cumsum([length_of(seed) + 1 for seed in seeds])
        ends += [(tick, EpisodeMeta(slot, seed)) for tick, seed in zip(ticks, seeds, strict=True)]
    expected = [meta for _, meta in sorted(ends, key=lambda end: (end[0], end[1].slot))]
    assert [episode.meta for episode in rollout.episodes] == expected
    assert [identity(episode) for episode in rollout.episodes] == [meta.seed % 1000 for meta in expected]
    seeds = [seed for _, seed in env.begun]
    total = sum(float(reward_at(seed, t, np.array(actions))) for _, seed, t, actions in env.log)
    assert rollout.stats == {
        "return": (pytest.approx(total), 20),
        "ep_length": (rollout.steps, 20),
        "battle_won": (sum(seed % 3 == 0 for seed in seeds), 20),
        "dead_enemies": (sum(seed % 5 for seed in seeds), 20),
    }
    kinds = {name: str(values.dtype).removeprefix("torch.") for name, values in rollout.episodes[0].items()}
    floats = {"obs": "float32", "state": "float32", "reward": "float32", "note": "float16"}
    assert kinds == floats | {"avail_actions": "uint8", "actions": "uint8", "terminated": "uint8", "age": "int16"}
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in rollout.episodes[0].values())
    many = runner_of(FakeEnv(1, n_actions=300)).run(Probe(), explore=None).episodes[0]
    assert many["actions"].dtype == torch.int16
    unrecorded = runner_of(FakeEnv(4)).run(Probe(), explore=None, episodes_per_slot=5, keep=False)
    assert (unrecorded.episodes, unrecorded.stats, unrecorded.log) == ([], rollout.stats, rollout.log)


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
def test_the_log_holds_every_episode_in_the_order_in_which_it_is_counted(name):
    env = FakeEnv(3)
    runner, probe = runner_of(env, name=name), Probe()
    rollouts = [runner.collect(probe, explore=None) for _ in range(4)]
    rollouts.append(runner.drain(probe, explore=None))
    log = [entry for rollout in rollouts for entry in rollout.log]
    assert sorted((entry["slot"], entry["seed"]) for entry in log) == sorted(env.begun)
    for rollout in rollouts:
        assert [(entry["slot"], entry["seed"]) for entry in rollout.log] == [
            (episode.meta.slot, episode.meta.seed) for episode in rollout.episodes
        ]
        assert sum(entry["length"] for entry in rollout.log) == rollout.steps
    for entry in log:
        seed = entry["seed"]
        actions = [played for _, s, _, played in env.log if s == seed]
        reward = sum(float(reward_at(seed, t, np.array(a))) for t, a in enumerate(actions))
        expected = {"slot": entry["slot"], "seed": seed, "length": length_of(seed), "return": reward}
        assert entry == {**expected, "battle_won": float(seed % 3 == 0), "dead_enemies": float(seed % 5)}
        assert [type(value) for value in list(entry.values())[:4]] == [int, int, int, float]


def test_renewed_seeds_are_others_and_reproducible():
    everyone, everything = np.ones(3, bool), []
    for generation in range(4):
        stream, again = EpisodeSeeds(3, "train", 1), EpisodeSeeds(3, "train", 1)
        stream.draw(everyone)
        if generation:
            stream.renew(generation)
        again.load_state_dict(stream.state_dict())
        drawn = [stream.draw(everyone) for _ in range(4)]
        assert all((again.draw(everyone) == each).all() for each in drawn)
        everything += [int(seed) for each in drawn for seed in each]
    assert len(set(everything)) == len(everything) == 4 * 4 * 3
    runner, other = runner_of(FakeEnv(2)), runner_of(FakeEnv(2))
    runner.renew(5)
    other.restore(runner.snapshot(), None)
    first = runner.run(Probe(), explore=None).log
    assert first == other.run(Probe(), explore=None).log != runner_of(FakeEnv(2)).run(Probe(), explore=None).log


def test_play_goes_on_with_new_episodes_and_can_be_continued_from_a_state():
    """Tests in the same environment change nothing."""
    env = FakeEnv(2)
    runner, test = runner_of(env), runner_of(env, "test")
    runner.run(Probe(), explore=None, episodes_per_slot=2)
    state = runner.snapshot()
    test.run(Probe(), explore=None, keep=False)
    second = runner.run(Probe(), explore=None, episodes_per_slot=2)
    assert len({seed for _, seed in env.begun}) == 10
    again = runner_of(FakeEnv(2))
    again.restore(state, None)
    third = again.run(Probe(), explore=None, episodes_per_slot=2)
    assert third.stats == second.stats
    for one, other in zip(second.episodes, third.episodes, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_policies_get_what_they_ask_for_and_store_their_own_fields():
    env, explore = FakeEnv(2), Exploration(0.3, np.random.default_rng(0))
    runner, probe, oracle = runner_of(env), Probe(), Probe(wants_full_obs=True)
    plain = ScriptedPolicy(env, ("low",), 0.0, np.random.default_rng(0))
    for policy in (probe, plain, oracle):
        episode = runner.run(policy, explore=explore).episodes[0]
        assert "full_obs" not in episode and ("note" in episode) is (policy is not plain)
    assert all(given is explore for given in probe.explored)
    assert not any(probe.full) and all(oracle.full)


def test_wrong_environments_names_and_scripts_are_rejected():
    words = "the episode goes on after its limit of 9 steps; correct the environment"
    with pytest.raises(UserError, match=rf"^env=fake, slot 0, seed \d+, step 9: {words}$"):
        runner_of(FakeEnv(2, endless=True)).run(Probe(), explore=None)
    assert own_names(REGISTRY) == ["episode", "parallel", "stream", "ticks"]
    with pytest.raises(UserError, match="runner=parallel"):
        runner_of(FakeEnv(2), name="episode")
    with pytest.raises(UserError, match="scripted policy=clever is not known"):
        ScriptedPolicy(FakeEnv(1), ("clever",), 0.1, np.random.default_rng(0))


def test_scripted_play_follows_its_scripts_and_mixes_chance_in():
    def share_of_low(policies: tuple[str, ...], random_share: float) -> tuple[float, np.ndarray]:
        env = FakeEnv(8)
        policy = ScriptedPolicy(env, policies, random_share, np.random.default_rng(1))
        rollout = runner_of(env).run(policy, explore=None, episodes_per_slot=30)
        # Where both actions were open (even steps): was it the low one? Once per episode, and over all.
        choices = [(e["actions"][:-1:2] == 1).float() for e in rollout.episodes]
        assert all((e["obs"] >= 0).all() for e in rollout.episodes)
        return float(torch.cat(choices).mean()), np.array([float(c.mean()) for c in choices])

    one, other = share_of_low(("low", "high", "random"), 0.4), share_of_low(("low", "high", "random"), 0.4)
    assert one[0] == other[0] and (one[1] == other[1]).all(), "a function of its generator"
    assert share_of_low(("low",), 0.0)[0] == 1.0
    assert share_of_low(("high",), 0.0)[0] == 0.0
    mean, each = share_of_low(("low", "high"), 0.0)
    assert set(each) == {0.0, 1.0}
    assert 0.35 < each.mean() < 0.65
    assert abs(share_of_low(("random",), 0.0)[0] - 0.5) < 0.06
    assert abs(share_of_low((), 0.7)[0] - 0.5) < 0.06
    assert abs(share_of_low(("low",), 1.0)[0] - 0.5) < 0.06
    assert abs(share_of_low(("low",), 0.5)[0] - 0.75) < 0.06
