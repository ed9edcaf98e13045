"""Playing episodes, against an environment whose every number follows from the seed, the step and the actions."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runner_toys import (
    AGENTS,
    FakeEnv,
    LossyEnv,
    Probe,
    collected,
    length_of,
    reward_at,
    rounds,
    runner_of,
    same,
    seen_at,
)

from omagd.config.loading import resolve
from omagd.controllers.scripted_mac import ScriptedPolicy
from omagd.envs.protocol import LOST_IN_A_ROW
from omagd.run.reporting.metrics import Metrics
from omagd.run.run_folder import RunFolder
from omagd.run.training import evaluate
from omagd.run.training.build import PURPOSES, build_session
from omagd.run.training.evaluate import play_tests
from omagd.runners.rollout import Recorder
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import Episode
from omagd.utils.seeding import EpisodeSeeds, Generators, stream_seed, stream_seeds


def test_rows_hold_what_happened_and_the_closing_row_the_last_observation():
    env = FakeEnv(3)
    rollout = rounds(env, 4, full_obs=True)
    assert sorted((episode.meta.slot, episode.meta.seed) for episode in rollout.episodes) == sorted(env.begun)
    for episode in rollout.episodes:
        seed = episode.meta.seed
        steps = length_of(seed)
        played = [entry for entry in env.log if entry[1] == seed]
        assert [entry[2] for entry in played] == list(range(steps))
        assert all(len(values) == steps + 1 for values in episode.values())
        seen = np.array([seen_at(seed, t) for t in range(steps + 1)], np.float32)
        assert (episode["obs"].numpy() == seen[:, None, None]).all()
        assert (episode["full_obs"].numpy() == -seen[:, None, None]).all()
        assert (episode["note"].numpy() == (seen + 0.5).astype(np.float16)[:, None, None]).all()
        assert episode["state"].tolist() == [[seed % 1000, t] for t in range(steps + 1)]
        assert episode["age"].tolist() == list(range(steps + 1))
        assert episode["actions"].tolist() == [*(entry[3] for entry in played), [0, 0]]
        rewards = [reward_at(seed, entry[2], np.array(entry[3])) for entry in played]
        assert episode["reward"].tolist() == [*rewards, 0.0]
        assert episode["terminated"].tolist() == [0] * (steps - 1) + [steps % 2, 0]
        mask = episode["avail_actions"].numpy()
        assert mask[:steps, :, 1].all()
        assert (mask[:steps, :, 3] == (np.arange(steps) % 2 == 0)[:, None]).all()
        assert mask[steps].tolist() == [[1, 0, 0, 0]] * 2
    kinds = {name: str(values.dtype).removeprefix("torch.") for name, values in rollout.episodes[0].items()}
    floats = {"obs": "float32", "full_obs": "float32", "state": "float32", "reward": "float32", "note": "float16"}
    assert kinds == floats | {"avail_actions": "uint8", "actions": "uint8", "terminated": "uint8", "age": "int16"}
    assert all(v.untyped_storage().nbytes() == v.nbytes for v in rollout.episodes[0].values())
    assert rounds(FakeEnv(1, n_actions=300)).episodes[0]["actions"].dtype == torch.int16
    unrecorded = rounds(FakeEnv(3), 4, keep=False)
    assert (unrecorded.episodes, unrecorded.stats, unrecorded.log) == ([], rollout.stats, rollout.log)


@pytest.mark.parametrize("name", ["parallel", "stream"])
def test_episodes_come_in_the_order_of_ticks_and_slots(name):
    """Slots never pause; a stream plays the episodes of rounds, as many at least as there are slots per iteration."""
    env = FakeEnv(5)
    played = [rounds(env, 20)] if name == "parallel" else collected(env, name, 4)[1]
    episodes = [episode for rollout in played for episode in rollout.episodes]
    expected = []
    for slot in range(5):
        seeds = [seed for s, seed in env.begun if s == slot]
        ticks = np.cumsum([length_of(seed) + 1 for seed in seeds])  # one tick for the closing row
        expected += zip(ticks, [slot] * len(seeds), seeds, strict=True)
    assert [(e.meta.slot, e.meta.seed) for e in episodes] == [(slot, seed) for _, slot, seed in sorted(expected)]
    assert env.ticks <= max(expected)[0] - 1  # after the last step of all, the closing row needs no step
    if name == "stream":
        assert all(5 <= rollout.n_episodes == len(rollout.episodes) < 10 for rollout in played[:-1])
        found = {e.meta: e for e in rounds(FakeEnv(5), 20).episodes}
        assert all(same(episode, found[episode.meta]) for episode in episodes)


@pytest.mark.parametrize("kind", [FakeEnv, LossyEnv])
@pytest.mark.parametrize("name", ["parallel", "episode", "stream", "ticks"])
def test_every_episode_is_counted_and_logged_once_unless_it_is_lost(name, kind):
    env = kind(1 if name == "episode" else 5)
    runner, rollouts = collected(env, name, 30)
    kept = [(slot, seed) for slot, seed in env.begun if kind is FakeEnv or seed % 4]
    log = [entry for rollout in rollouts for entry in rollout.log]
    assert sorted((entry["slot"], entry["seed"]) for entry in log) == sorted(kept)
    assert sum(rollout.lost for rollout in rollouts) == runner.lost == len(env.begun) - len(kept)
    for entry in log:
        seed = entry["seed"]
        actions = [played for _, s, _, played in env.log if s == seed]
        reward = sum(float(reward_at(seed, t, np.array(a))) for t, a in enumerate(actions))
        expected = {"slot": entry["slot"], "seed": seed, "length": length_of(seed), "return": reward}
        assert entry == {**expected, "battle_won": float(seed % 3 == 0), "dead_enemies": float(seed % 5)}
        assert [type(value) for value in list(entry.values())[:4]] == [int, int, int, float]
    for rollout in rollouts:
        assert rollout.n_episodes == len(rollout.log)
        for stat, key in (("return", "return"), ("ep_length", "length"), ("battle_won", "battle_won")):
            values = [entry[key] for entry in rollout.log]
            assert rollout.stats.get(stat, (0, 0)) == (pytest.approx(sum(values)), len(values))
        if name == "ticks":
            assert rollout.steps == len(rollout.episodes)
        else:
            assert rollout.steps == sum(entry["length"] for entry in rollout.log)
            assert [e.meta.seed for e in rollout.episodes] == [entry["seed"] for entry in rollout.log]
    if kind is FakeEnv:
        assert sum(rollout.steps for rollout in rollouts) == len(env.log) == sum(length_of(seed) for _, seed in kept)


def test_steps_are_the_rows_of_the_episodes_that_rounds_play():
    expected: dict[tuple[float, ...], list[Episode]] = {}
    for episode in rounds(FakeEnv(4), 12).episodes:
        for t in range(len(episode["reward"]) - 1):
            step = {name: value[t : t + 2].clone() for name, value in episode.items()}
            for name in ("actions", "reward", "terminated"):
                step[name][1] = 0
            expected.setdefault(tuple(step["state"][0].tolist()), []).append(step)
    steps = [step for rollout in collected(FakeEnv(4), "ticks", 25)[1] for step in rollout.episodes]
    assert len(steps) > 60
    assert all(any(same(step, other) for other in expected[tuple(step["state"][0].tolist())]) for step in steps)
    whole = runner_of(FakeEnv(3), "beliefs", "ticks").run(Probe(), explore=None, episodes_per_slot=2)
    assert whole.n_episodes == len(whole.episodes) == 6
    assert whole.steps == sum(len(episode["reward"]) - 1 for episode in whole.episodes)


def test_every_purpose_rank_slot_number_and_generation_has_its_own_seed():
    everyone, drawn = np.ones(4, bool), []
    for purpose in ("train", "test", "pretrain"):
        for rank in (0, 1):
            for generation in range(3):
                stream, again = EpisodeSeeds(3, purpose, rank), EpisodeSeeds(3, purpose, rank)
                if generation:
                    stream.renew(generation)
                drawn += stream.draw(everyone).tolist()
                again.load_state_dict(stream.state_dict())
                for _ in range(4):
                    drawn += stream.draw(everyone).tolist()
                    assert again.draw(everyone).tolist() == drawn[-4:]
    assert len(set(drawn)) == len(drawn) == 3 * 2 * 3 * 5 * 4
    assert min(drawn) >= 0
    made, renewed = Generators(3, 0), Generators(3, 0)
    renewed.renew(1)
    assert made.rng("replay").random() != renewed.rng("replay").random(), "also of generators that are made later"


def test_the_ranks_and_purposes_of_a_run_have_different_seeds(tmp_path):
    updates = {"env_args.map_name": "3m", "batch_size_run": 3, "enable_checkpointing": False}
    drawn = []
    for rank in range(2):
        folder, log = RunFolder(tmp_path / str(rank)), SimpleNamespace(info=print)
        session = build_session(resolve("qmix", "skirmish", updates), Dist(rank, 2), folder, log)
        drawn += [session.runners[purpose].stream.draw(np.ones(3, bool)) for purpose in PURPOSES]
        session.close()
    assert len(np.unique(drawn)) == 2 * len(PURPOSES) * 3


def test_test_episodes_are_played_greedily_and_as_many_in_each_slot():
    runner, policy, config = runner_of(FakeEnv(4), "test"), Probe(), SimpleNamespace(test_greedy=True, seed=1)
    session = SimpleNamespace(
        runners={"test": runner}, info=runner.info, rounds=lambda wanted: wanted // 4, dist=Dist(), config=config
    )
    assert {"test_return_mean", "test_ep_length_mean", "test_battle_won_mean"} <= play_tests(session, policy, 12).keys()
    assert set(policy.explored) == {None}
    assert runner.stream.state_dict()["played"] == [3] * 4
    config.test_greedy = False
    drawn = [(play_tests(session, policy, 12), policy.explored[-1])[1] for _ in range(2)]
    assert [explore.epsilon for explore in drawn] == [0.0, 0.0], "nobody explores"
    assert drawn[0].rng.random() == drawn[1].rng.random(), "a resumed run's tests draw as before"


def test_a_result_that_an_episode_lacks_counts_as_0_there():
    played = Metrics()
    of_map = {"map/ep_length": (4.0, 2.0), "map/won": (1.0, 1.0)}
    played.add(evaluate.means({"ep_length": (8.0, 4.0), "won": (1.0, 1.0), "agent/won": (2.0, 1.0), **of_map}))
    of_map = {"train/map/ep_length_mean": 2.0, "train/map/won_mean": 0.5}
    assert played.reduce(Dist()) == {"ep_length_mean": 2.0, "won_mean": 0.25, "agent/won_mean": 0.5, **of_map}


def test_the_absolute_metric_is_of_the_weights_of_the_best_test(monkeypatch):
    agent = torch.nn.Linear(1, 1, bias=False)

    def play(session, mac, wanted, log=len, recorder=None):
        weight = agent.weight.item()
        log([{"return": weight, "length": wanted}, {"return": weight, "length": wanted, "battle_won": 1.0}])
        return {"test_return_mean": weight, **({"test_battle_won_mean": 0.5} if 1 < weight < 9 else {})}

    monkeypatch.setattr(evaluate, "play_tests", play)
    config = SimpleNamespace(absolute_episodes=320, test_nepisode=32, log_video=False)
    tests = evaluate.Tests(SimpleNamespace(config=config, dist=Dist()), SimpleNamespace(agent=agent))
    for t_env, weight in enumerate((1.0, 3.0, 2.0, 9.0)):
        torch.nn.init.constant_(agent.weight, weight)
        tests.begin()
        tests.play(t_env, "a test", ends=t_env == 3)
        assert tests.improved == (t_env < 2), "a test without a win rate has won nothing"
    values, raw = tests.absolute()
    assert values == {"absolute_battle_won_mean": 0.5, "absolute_return_mean": 3.0}, "returns decide between win rates"
    assert raw == {"t_env": 1, "length": [320, 320], "return": [3.0, 3.0], "battle_won": [0.0, 1.0]}
    assert agent.weight.item() == 9.0, "the run's own weights are back"


def test_rows_of_running_episodes_come_back_with_the_policys_own_fields():
    """The snapshot is a copy, holds every row that was asked for, and does not change when play goes on."""
    env = FakeEnv(2)
    env.reset(np.ones(2, bool), np.array([5, 6]))
    first, again, both = Recorder(env.info, 2, False), Recorder(env.info, 2, False), np.arange(2)

    def play(recorder, step, note):
        steps = np.full(2, step)
        recorder.record_observations(both, steps, env.observe())
        recorder.record_actions(
            both, steps, np.full((2, AGENTS), step + 1), {"note": np.full((2, 3), note, np.float16)}
        )

    for step in range(3):
        play(first, step, step + 0.5)
    kept = first.snapshot(3)
    play(first, 0, 9.0)
    again.restore(kept)
    episode = again.take(1, 3)
    assert episode["note"][:3, 0].tolist() == [0.5, 1.5, 2.5] and episode["note"].dtype == torch.float16
    assert episode["actions"][:3, 0].tolist() == [1, 2, 3]
    again.begin()
    finer = {"note": np.full((2, 3), 0.1, np.float32)}
    again.record_actions(both, np.zeros(2, int), np.ones((2, AGENTS), int), finer)
    assert again.take(0, 0)["note"].tolist() == [[pytest.approx(0.1, abs=1e-7)] * 3], "another type"
    again.begin()
    with pytest.raises(ValueError, match="may not store a field called reward"):
        again.record_actions(both, np.zeros(2, int), np.ones((2, AGENTS), int), {"reward": np.zeros((2, 1))})


@pytest.mark.parametrize("generation", [0, 5])
def test_play_continues_from_a_snapshot_with_new_or_renewed_episodes(generation):
    """Tests in the same environment change nothing."""
    env, env2 = FakeEnv(2), FakeEnv(2)
    runner, again = runner_of(env), runner_of(env2)
    runner.run(Probe(), explore=None, episodes_per_slot=2)
    if generation:
        runner.renew(generation)
    snapshot = runner.snapshot()
    runner_of(env, "test").run(Probe(), explore=None, keep=False)
    expected = runner.run(Probe(), explore=None, episodes_per_slot=2)
    assert len({seed for _, seed in env.begun}) == 10
    again.restore(snapshot)
    found = again.run(Probe(), explore=None, episodes_per_slot=2)
    assert (found.stats, found.log) == (expected.stats, expected.log)
    assert all(same(*pair) for pair in zip(found.episodes, expected.episodes, strict=True))


def test_wrong_environments_and_scripts_are_rejected():
    with pytest.raises(UserError, match=r"^env=fake, slot 0, seed \d+, step 9: .* limit of 9 steps"):
        rounds(FakeEnv(2, endless=True))
    with pytest.raises(UserError, match="scripted policy=clever is not known"):
        ScriptedPolicy(FakeEnv(1), ("clever",), 0.1, np.random.default_rng(0))


def test_scripted_play_follows_its_scripts_and_mixes_in_random_actions():
    def shares_of_low(policies: tuple[str, ...], random_share: float) -> np.ndarray:
        """Return how often each episode took the low action where both were available (even steps)."""
        env = FakeEnv(8)
        policy = ScriptedPolicy(env, policies, random_share, np.random.default_rng(1))
        episodes = runner_of(env).run(policy, explore=None, episodes_per_slot=15).episodes
        assert all((episode["obs"] >= 0).all() for episode in episodes)
        return np.array([float((episode["actions"][:-1:2] == 1).float().mean()) for episode in episodes])

    mixed = ("low", "high", "random")
    assert (shares_of_low(mixed, 0.4) == shares_of_low(mixed, 0.4)).all(), "a function of its generator"
    for policies, random_share, expected in (
        (("low",), 0.0, 1.0), (("high",), 0.0, 0.0), (("random",), 0.0, 0.5), ((), 0.7, 0.5), (("low",), 1.0, 0.5),
        (("low",), 0.5, 0.75),
    ):  # fmt: skip
        tolerance = 0.08 * (0 < expected < 1)
        assert shares_of_low(policies, random_share).mean() == pytest.approx(expected, abs=tolerance)
    either = shares_of_low(("low", "high"), 0.0)
    assert set(either) == {0.0, 1.0} and 0.35 < either.mean() < 0.65


def test_lost_episodes_are_replaced_until_every_slot_has_its_quota():
    env = LossyEnv(4)
    rollout = rounds(env, 12)
    for slot in range(4):
        assert sum(seed % 4 > 0 for s, seed in env.begun if s == slot) == 12
    found = {episode.meta: episode for episode in rounds(FakeEnv(4), 50).episodes}
    assert all(same(episode, found[episode.meta]) for episode in rollout.episodes)  # as without losses


class Hopeless(LossyEnv):
    """Slot 1 loses all its episodes."""

    def losing(self) -> np.ndarray:
        return np.arange(self.n_slots) == 1

    @property
    def n_begun(self) -> int:
        """Number of episodes that slot 1 has begun."""
        return sum(slot == 1 for slot, _ in self.begun)


@pytest.mark.parametrize("name", ["parallel", "stream", "ticks"])
def test_a_slot_that_loses_every_episode_ends_the_run_after_ten(name):
    env = Hopeless(3)
    with pytest.raises(UserError, match=r"^env=fake, slot 1, seed \d+, step 1: .*lost, as the 9 episodes of the slot"):
        collected(env, name, 100)
    assert env.n_begun == LOST_IN_A_ROW == 10


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**70])
def test_the_seeds_of_many_slots_are_those_of_numpys_seed_sequence(seed):
    rng = np.random.default_rng(0)
    for place in ((rng.integers(0, 2**32, 9),), (3, np.arange(9), rng.integers(0, 2**32, 9)), (0, 1, 2, np.arange(9))):
        rows = np.stack(np.broadcast_arrays(*place)).T.tolist()
        each = [stream_seed(seed, "env/train", *row) for row in rows]
        assert stream_seeds(seed, "env/train", *place).tolist() == each
