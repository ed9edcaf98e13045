"""Rounds that stay on a device: the episodes of `runner=parallel`, and no value read between first and last tick."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from q_toys import toy_config
from simulated_gpu import DEVICE, OnGPU, simulated_gpu

from omagd import runners
from omagd.config.loading import resolve
from omagd.controllers.basic_mac import NMAC
from omagd.controllers.types import Exploration
from omagd.envs.battle import skirmish_env
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.compiled import resident
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.runners.resident_loop import choose
from omagd.runners.starts import EpisodeSeeds
from omagd.utils.errors import UserError
from omagd.utils.seeding import uniform

torch.set_num_threads(1)
CPU = torch.device("cpu")
SLOTS = 6


def game(name: str = "3m", runner: str = "resident", device: torch.device = CPU, slots: int = SLOTS, **updates):
    """Return a runner and the controller that plays."""
    env = SkirmishEnv(SkirmishArgs(map_name=name, continuing_episode=True), slots)
    config = toy_config(runner=runner, batch_size_run=slots, rnn_hidden_dim=16, **updates)
    torch.manual_seed(0)
    mac = NMAC(config, env.info, device)
    with torch.no_grad():
        for parameter in mac.agent.parameters():
            parameter.mul_(3)  # values that differ between actions
    return runners.REGISTRY.get(runner)(env, config, env.info, EpisodeSeeds(1, "train")), mac


def explore(epsilon: float) -> Exploration:
    return Exploration(epsilon, np.random.default_rng(0))


def assert_same(one, other) -> None:
    assert one.log == other.log
    assert one.stats == other.stats
    assert len(one.episodes) == len(other.episodes)
    for a, b in zip(one.episodes, other.episodes, strict=True):
        assert a.meta == b.meta
        assert list(a) == list(b)
        assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("name", "limit", "options"), [
    ("3m", 27, {}),
    ("2s3z", 60, {"full_obs": True, "episodes_per_slot": 3}),
    ("MMM2", 60, {"episodes_per_slot": 2, "keep": False}),
])  # fmt: skip
def test_greedy_rounds_are_those_of_the_environment(monkeypatch, name, limit, options):
    """Some episodes are cut off at the step limit, which is not terminal here."""
    played, short = [], dataclasses.replace(get_map(name), limit=limit)
    monkeypatch.setattr(skirmish_env, "skirmish_map", lambda _: short)
    for runner in ("parallel", "resident"):
        plays, mac = game(name, runner)
        played.append([plays.run(mac, explore=None, **options) for _ in range(2)])
    for one, other in zip(*played, strict=True):
        assert one.n_episodes == SLOTS * options.get("episodes_per_slot", 1)
        assert sum(entry["episode_limit"] for entry in one.log) < one.n_episodes
        assert_same(one, other)


def test_an_episode_follows_from_its_seed_whatever_plays_beside_it():
    """With exploration: the same seeds in other slots, in another order, in rounds of another size."""
    plays, mac = game()
    first = plays.run(mac, explore=explore(0.4), episodes_per_slot=2)
    again, mac = game(slots=2 * SLOTS)
    starts = sorted({int(entry["seed"]) for entry in first.log}, reverse=True)

    class Given(EpisodeSeeds):
        def draw(self, which):
            return np.array(starts)

    again.stream = Given(1, "train")
    second = again.run(mac, explore=explore(0.4))
    by_seed = [{e.meta.seed: e for e in rollout.episodes} for rollout in (first, second)]
    assert set(by_seed[0]) == set(by_seed[1]) == set(starts)
    for seed in starts:
        one, other = by_seed[0][seed], by_seed[1][seed]
        assert torch.equal(one["actions"], other["actions"])
        assert torch.equal(one["obs"], other["obs"])
    assert any(len(e["reward"]) != len(first.episodes[0]["reward"]) for e in first.episodes)


def test_a_resumed_runner_plays_the_next_round_of_the_saved_one():
    plays, mac = game()
    plays.run(mac, explore=explore(0.5))
    saved = plays.snapshot()
    second = plays.run(mac, explore=explore(0.5))
    resumed, mac = game()
    resumed.restore(saved, mac)
    assert_same(resumed.run(mac, explore=explore(0.5)), second)


def test_actions_explore_by_epsilon_and_only_among_those_available():
    slots, n, actions = 4000, 3, 5
    torch.manual_seed(1)
    q, available = torch.randn(slots, n, actions), torch.rand(slots, n, actions) < 0.6
    available[..., 0] = True
    seed, step = torch.randint(2**62, (slots,)), torch.randint(100, (slots,))
    best = q.masked_fill(~available, -torch.inf).argmax(-1)
    for epsilon in (-1.0, 0.3, 1.0):
        chosen = choose(q, available, torch.tensor(epsilon, dtype=torch.float64), seed, step)
        assert available.gather(-1, chosen.unsqueeze(-1)).all()
        others = (available.sum(-1) - 1) / available.sum(-1)
        expected = max(epsilon, 0) * others.mean()
        assert abs((chosen != best).double().mean() - expected) < 0.02
    # All available actions are equally likely: the mean of their places among them.
    place = (available.cumsum(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - 1) / (available.sum(-1) - 1)
    assert abs(place[available.sum(-1) > 1].mean() - 0.5) < 0.02


def test_each_key_has_a_stream_of_its_own():
    keys, number = torch.tensor([[3], [2**61 + 7]]), torch.arange(10)
    drawn = uniform(number, keys)
    assert torch.equal(drawn, torch.stack([uniform(number, int(key)) for key in keys]))
    assert not torch.equal(drawn[0], drawn[1])


class Through(resident.CPUKernels):
    """The CPU's kernels, on the memory of simulated tensors."""

    def view(self, tensor):
        return tensor.value.numpy() if isinstance(tensor, OnGPU) else tensor.numpy()


def test_the_host_reads_nothing_while_a_round_is_played(monkeypatch):
    """On a simulated GPU: one look at the results of a round, and one copy for each field of an episode."""
    plays, mac = game()
    expected = plays.run(mac, explore=explore(0.3))
    monkeypatch.setattr(resident, "kernels_for", lambda device: Through())
    with simulated_gpu() as gpu:
        on_gpu, mac = game(device=DEVICE)
        on_gpu._resident(mac, 1, False, True)
        gpu.waits.clear()
        found = on_gpu.run(mac, explore=explore(0.3))
        waits = dict(gpu.waits)
    assert found.log == expected.log
    for one, other in zip(found.episodes, expected.episodes, strict=True):
        assert all(isinstance(one[name], OnGPU) and torch.equal(one[name].value, other[name]) for name in other)
    assert sum(waits.values()) == 1, waits


@pytest.mark.parametrize(("config", "env", "updates", "error"), [
    ("qmix", "matrix_game", {}, "env=matrix_game"),
    ("qmix", "skirmish", {"env_args": {"map_name": "marine-easy"}}, "one map"),
    ("gnn_qmix", "skirmish", {}, "mac=gnn_graph_mac"),
    ("qmix", "skirmish", {"action_selector": "softmax"}, "action_selector=softmax"),
    ("qmix", "skirmish", {"env_processes": True}, "env_processes=True"),
])  # fmt: skip
def test_what_cannot_be_played_on_a_device_is_one_line(config, env, updates, error):
    with pytest.raises(UserError, match=error) as raised:
        made = resolve(config=config, env_config=env, updates={"runner": "resident", **updates})
        runners.REGISTRY.get("resident").check(made)
    assert "\n" not in raised.value.render()
    assert "runner=parallel" in raised.value.render()
