"""Rounds that stay on a device: the episodes of `runner=parallel`, and no value read between first and last tick."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from resident_toys import CPU, SLOTS, assert_same, explore, game, on_simulated_gpu, played
from simulated_gpu import DEVICE, SimulatedGPU, simulated_gpu, simulated_graphs
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from omagd import runners
from omagd.components import action_selectors
from omagd.components.action_selectors import LOG_PROB, EpsilonGreedy, Softmax, log_softmax
from omagd.components.data import ReplayData
from omagd.config.loading import resolve
from omagd.envs.battle import maps
from omagd.envs.battle.args import SkirmishArgs
from omagd.envs.battle.maps import get_map
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.task_set_env import TaskSetEnv
from omagd.envs.task_sets import TaskSet
from omagd.learners.nq_learner import NQLearner
from omagd.resident.replay import ResidentBuffer
from omagd.runners.runner import TaskStarts
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, RecordedEpisode
from omagd.utils.seeding import uniform


@pytest.mark.parametrize(("name", "limit", "options"), [
    ("3m", 27, {}),
    ("2s3z", 60, {"full_obs": True, "episodes_per_slot": 3}),
    ("MMM2", 60, {"episodes_per_slot": 2, "keep": False}),
])  # fmt: skip
def test_greedy_rounds_are_those_of_the_environment(monkeypatch, name, limit, options):
    """Some episodes are cut off at the step limit, which is not terminal here."""
    both, short = [], dataclasses.replace(get_map(name), limit=limit)
    monkeypatch.setattr(maps, "skirmish_map", lambda _: short)
    for runner in ("parallel", "resident"):
        plays, mac = game(name, runner)
        both.append([played(plays, mac, explore=None, **options) for _ in range(2)])
    for one, other in zip(*both, strict=True):
        assert one.n_episodes == SLOTS * options.get("episodes_per_slot", 1)
        assert sum(entry["episode_limit"] for entry in one.log) < one.n_episodes
        assert_same(one, other, ordered="episodes_per_slot" not in options)


PPO = {"learner": "ppo_learner", "action_selector": "softmax", "mixer": "none"}
GUESSES = {"mac": "n_graph_mac", "agent": "n_rnn", "use_graph_reconstruction": True}


@pytest.mark.parametrize("guesses", [{}, GUESSES, PPO])
def test_an_episode_follows_from_its_seed_whatever_plays_beside_it(guesses):
    """With exploration, and some episodes that show all units: in other slots, another order and another round."""
    how = {"explore": explore(0.4), "full_obs": guesses == GUESSES}
    plays, mac = game(**guesses)
    first = played(plays, mac, **how, episodes_per_slot=2)
    again, mac = game(slots=2 * SLOTS, **guesses)
    starts = np.array(sorted((int(entry["seed"]) for entry in first.log), reverse=True))
    again.stream.draw = lambda which: starts
    second = played(again, mac, **how)
    by_seed = [{e.meta.seed: e for e in rollout.episodes} for rollout in (first, second)]
    assert by_seed[0].keys() == by_seed[1].keys()
    for seed, one in by_seed[0].items():
        assert all(torch.equal(one[name], by_seed[1][seed][name]) for name in ("actions", "obs"))
        for name in {"recon", LOG_PROB} & one.keys():  # of closing rows too
            close = {"atol": 4e-3, "rtol": 4e-3} if name == "recon" else {}
            torch.testing.assert_close(one[name], by_seed[1][seed][name], **close)
    assert any(len(e["reward"]) != len(first.episodes[0]["reward"]) for e in first.episodes)


@pytest.mark.parametrize("options", [{}, GUESSES, PPO])
def test_a_round_has_the_same_episodes_however_many_slots_share_it(options):
    """And a slot that ends begins the next one: no slot is idle while an episode has not begun."""
    ticks, found = {}, []
    for slots in (None, 4, 5, 1):
        plays, mac = game(slots=12, resident_slots=slots, **options)
        counted: list[bool] = []
        plays.ticked = counted.append
        found.append([played(plays, mac, explore=explore(0.3), episodes_per_slot=each) for each in (1, 2)])
        ticks[slots] = sum(counted)
        for one, other in zip(found[0], found[-1], strict=True):
            assert_same(one, other, rounded=("recon", LOG_PROB), ordered=False)
    rows = [[len(e["reward"]) for e in rollout.episodes] for rollout in found[0]]
    assert ticks[1] == sum(map(sum, rows)), "every tick plays or closes"
    for slots in (4, 5):
        assert ticks[slots] <= sum(sum(each) / slots + max(each) for each in rows)
    lengths = [entry["length"] for entry in found[1][0].log]
    assert lengths != sorted(lengths), "not all of them began together"


@pytest.mark.parametrize("slots", [None, 5])
def test_maps_of_a_set_are_played_one_after_another(slots):
    """The rounds of the environment, in which they are played side by side; a test plays a held-out map alone."""
    both, tasks = [], TaskSet("some", ("3m", "5m_vs_6m"), ("4m",))
    for runner in ("parallel", "resident"):
        env = TaskSetEnv(lambda name, n: SkirmishEnv(SkirmishArgs(map_name=name), n), tasks, 8)
        stream, units = TaskStarts(1, "train", weights=(1, 2, 0)), {"agent": "hpn_rnn", "obs_agent_id": False}
        plays, mac = game(runner=runner, slots=8, env=env, stream=stream, resident_slots=slots, **units)
        both.append([played(plays, mac, explore=None, full_obs=True) for _ in range(2)])
        stream.set_weights((0, 0, 1))
        both[-1].append(played(plays, mac, explore=None, episodes_per_slot=2))
    for one, other in zip(*both, strict=True):
        assert_same(one, other, ordered=False)
    assert {e.meta.task for e in both[1][1].episodes} == {0, 1}
    assert {entry["task"] for entry in both[1][2].log} == {"4m"}
    if slots is None:
        assert [entry["seed"] for entry in both[0][0].log] == [entry["seed"] for entry in both[1][0].log]


def test_actions_explore_by_epsilon_and_only_among_those_available():
    slots, n, actions = 4000, 3, 5
    torch.manual_seed(1)
    q, available = torch.randn(slots, n, actions), torch.rand(slots, n, actions) < 0.6
    available[..., 0] = True
    seed, step = torch.randint(2**62, (slots,)), torch.randint(100, (slots,))
    best = q.masked_fill(~available, -torch.inf).argmax(-1)
    for epsilon in (-1.0, 0.3, 1.0):
        chosen, _ = EpsilonGreedy().on_device(q, available, torch.tensor(epsilon).double(), seed, step)
        assert available.gather(-1, chosen.unsqueeze(-1)).all()
        others = (available.sum(-1) - 1) / available.sum(-1)
        expected = max(epsilon, 0) * others.mean()
        assert abs((chosen != best).double().mean() - expected) < 0.02
    # The available action number floor(u times their number), and all are equally likely: the mean of their places.
    number = 2 * (step.unsqueeze(1) * n + torch.arange(n)) + 1
    wanted = (uniform(number, seed.unsqueeze(1)) * available.sum(-1)).floor()
    assert torch.equal(available.cumsum(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1), wanted.long() + 1)
    place = (available.cumsum(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - 1) / (available.sum(-1) - 1)
    assert abs(place[available.sum(-1) > 1].mean() - 0.5) < 0.02


def test_every_logit_has_a_random_number_of_its_own(monkeypatch):
    """Shared by agents, steps or actions, they would be correlated, which no frequency shows."""
    numbers: list[Tensor] = []

    def noted(number: Tensor, key: Tensor) -> Tensor:
        numbers.append(number)
        return uniform(number, key)

    monkeypatch.setattr(action_selectors, "uniform", noted)
    steps, agents, actions = 40, 3, 5
    q = torch.zeros(steps, agents, actions)
    Softmax().on_device(q, q == 0, torch.tensor(0.5), torch.zeros(steps, dtype=torch.int64), torch.arange(steps))
    assert torch.cat(numbers).unique().numel() == actions * steps * agents


def test_actions_are_drawn_from_the_softmax_of_available_logits():
    """And their log-probabilities are stored; without exploration the likeliest is taken."""
    rounds, agents, actions = 40_000, 2, 5
    torch.manual_seed(1)
    q, available = 2 * torch.randn(agents, actions), torch.rand(agents, actions) < 0.7
    p = torch.from_numpy(np.exp(log_softmax(q.numpy(), available.numpy())))
    many = q.expand(rounds, -1, -1), available.expand(rounds, -1, -1)
    keys = torch.randint(2**62, (rounds,)), torch.randint(100, (rounds,))
    chosen, beside = Softmax().on_device(*many, torch.tensor(0.0), *keys)
    counts = torch.stack([torch.bincount(chosen[:, i], minlength=actions) for i in range(agents)])
    assert (counts[~available] == 0).all()
    assert ((counts / rounds - p).abs() < 4 * (p * (1 - p) / rounds).sqrt() + 1e-9).all()
    together = torch.bincount(chosen[:, 0] * actions + chosen[:, 1], minlength=actions**2).view(actions, actions)
    assert (together / rounds - p[0].unsqueeze(1) * p[1]).abs().max() < 0.01  # agents draw independently
    torch.testing.assert_close(beside[LOG_PROB], p.log()[torch.arange(agents), chosen])
    greedy, _ = Softmax().on_device(*many, torch.tensor(-1.0), *keys)
    assert torch.equal(greedy, q.masked_fill(~available, -torch.inf).argmax(-1).expand(rounds, -1))


def test_a_group_has_one_start_and_each_episode_its_own_actions():
    plays, mac = game(stream=TaskStarts(1, "train", group_size=3), **PPO)
    both = [played(plays, mac, explore=explore(0.0)) for _ in range(2)]
    parallel, other = game(runner="parallel", stream=TaskStarts(1, "train", group_size=3), **PPO)
    wanted = [played(parallel, other, explore=explore(0.0)) for _ in range(2)]
    groups: dict[str, list[Any]] = {}
    for rollout, like in zip(both, wanted, strict=True):
        assert {e.meta for e in rollout.episodes} == {e.meta for e in like.episodes}
        assert list(rollout.episodes[0]) == list(like.episodes[0])
        assert {n: v.dtype for n, v in rollout.episodes[0].items()} == {n: v.dtype for n, v in like.episodes[0].items()}
        for episode in rollout.episodes:
            groups.setdefault(episode.meta.group, []).append(episode)
    assert len(groups) == 2 * SLOTS / 3
    for group in groups.values():
        assert all(torch.equal(e["obs"][0], group[0]["obs"][0]) for e in group)
        actions = {tuple(e["actions"][:8].flatten().tolist()) for e in group}
        assert len(actions) == len(group) == 3


def test_actions_that_are_not_available_are_an_error(monkeypatch):
    plays, mac = game()
    (loop,) = plays._resident(mac, SLOTS, False, True)
    monkeypatch.setattr(loop, "play", lambda *_: loop.game.faults.fill_(True))
    with pytest.raises(RuntimeError, match="given actions that are not available"):
        plays.run(mac, explore=None)
    monkeypatch.setattr(loop, "play", lambda *_: (loop.game.faults.zero_(), loop.round.results.fill_(torch.nan)))
    with pytest.raises(RuntimeError, match="not finite"):
        plays.run(mac, explore=None)


def test_acting_reads_the_weights_at_every_tick():
    """A captured tick is replayed without Python: it must not use what was computed from earlier weights."""
    plays, mac = game()
    first = played(plays, mac, explore=None)
    fresh, other = game()
    for controller in (mac, other):
        for parameter in controller.agent.parameters():
            parameter.data.neg_()  # a write that torch does not count
    fresh.restore({"stream": {"played": [1] * SLOTS, "generation": 0}, "lost": 0})
    second = played(plays, mac, explore=None)
    assert_same(second, played(fresh, other, explore=None))
    assert first.log != second.log


def iteration(device: torch.device) -> tuple[list[PackedBatch], Any]:
    """Play, store and learn from two rounds; return the batches, and what the host waited for."""
    plays, mac = game(device=device, buffer_cpu_only=False, buffer_size=10, batch_size=4)
    config, batches = plays.config, []
    learner = NQLearner(mac, config, plays.info, Dist(device=device))
    buffer = ResidentBuffer(config.buffer_size, device, plays.info.episode_limit + 1)
    data = ReplayData(config, np.random.default_rng(0), buffer, buffer.batch)
    plays._resident(mac, SLOTS, False, True)  # allocates
    with contextlib.nullcontext() if device == CPU else waiting() as waits:
        for _ in range(2):
            data.add(plays.collect(mac, explore=explore(0.3)).episodes)
            for batch in data.batches():
                learner.update(batch, episodes=0)
                batches.append(batch)
    return batches, waits


@contextlib.contextmanager
def waiting() -> Iterator[Counter[str]]:
    """Count what the host waits for."""
    mode = next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, SimulatedGPU))
    mode.waits.clear()
    yield mode.waits


def test_an_iteration_on_the_device_makes_the_host_wait_twice(monkeypatch):
    """For the results of the round, and for whether its episodes can be stored in short; not in an update."""
    on_simulated_gpu(monkeypatch)
    monkeypatch.setattr(maps, "skirmish_map", lambda _: dataclasses.replace(get_map("3m"), limit=15))
    expected, _ = iteration(CPU)
    with simulated_gpu():
        batches, waits = iteration(DEVICE)
    assert sum(waits.values()) == 2 * 2, waits
    first = zip(batches[:1], expected[:1], strict=True)
    assert all(torch.equal(one[name].value, other[name]) for one, other in first for name in other.data)


@pytest.mark.parametrize("options", [{}, GUESSES, PPO])
def test_a_tick_that_is_a_graph_plays_the_same_rounds(monkeypatch, options):
    """Of the second round Python launches nothing but replays."""
    how = {"explore": explore(0.3), "full_obs": options == GUESSES, "episodes_per_slot": 2}
    plays, mac = game(slots=3, **options)
    expected = [played(plays, mac, **how) for _ in range(2)]
    on_simulated_gpu(monkeypatch)
    with simulated_graphs():
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=bool, synchronize=bool))
        plays, mac = game(slots=3, device=DEVICE, **options)
        found = [played(plays, mac, **how) for _ in range(2)]
        assert all(part._graph for part in plays._made[1][0]._parts)
    for one, other in zip(expected, found, strict=True):
        inside = [RecordedEpisode({n: rows.value for n, rows in e.items()}, e.meta) for e in other.episodes]
        other.episodes = inside
        assert_same(one, other, rounded=("recon", LOG_PROB))


@pytest.mark.parametrize(("config", "env", "updates", "error"), [
    ("qmix", "matrix_game", {}, "env=matrix_game"),
    ("qmix", "skirmish", {"env_args": {"map_name": "marine-easy"}, "task_dealing": "sharded"}, "=sharded"),
    ("omagd_small", "skirmish", {"cpu_inference": True}, "cpu_inference=True"),
    ("qmix", "skirmish", {"action_selector": "other"}, "action_selector=other cannot choose on a device"),
    ("qmix", "skirmish", {"env_processes": True}, "env_processes=True"),
])  # fmt: skip
def test_what_cannot_be_played_on_a_device_is_one_line(config, env, updates, error, monkeypatch):
    class Other(EpsilonGreedy):
        """Chooses in another way, which `EpsilonGreedy.on_device` does not know."""

    monkeypatch.setitem(action_selectors.REGISTRY._objects, "other", Other)
    with pytest.raises(UserError, match=error) as raised:
        made = resolve(config=config, env_config=env, updates={"runner": "resident", **updates})
        runners.REGISTRY.get("resident").check(made)
    assert "\n" not in raised.value.render()
    assert "runner=parallel" in raised.value.render()
