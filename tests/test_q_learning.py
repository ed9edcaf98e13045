"""Targets, selection, memory of the controllers, and the update of the Q-learners."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ddpg_toys import make_ddpg
from graph_toys import graph_learner
from q_toys import (
    INFO,
    LAYOUT,
    SMALL,
    HalvingReconstructor,
    copy_learner,
    equal,
    gradients_of,
    make_learner,
    random_episode,
    state_of,
    toy_config,
)
from torch.nn import functional as F

import omagd
from omagd.components.action_selectors import EpsilonGreedy, Greedy, epsilon_at
from omagd.config.env_info import EnvInfo
from omagd.controllers import REGISTRY as MACS
from omagd.controllers.types import Tick
from omagd.envs.protocol import Observation
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.synced_optimizer import RunningMoments, lr_scale, standardised
from omagd.modules.mixers.mixer import VDNMixer
from omagd.resident.replay import FixedPacking
from omagd.run.cli.main import config_from
from omagd.run.training.build import build_learner
from omagd.run.training.stages.base import PretrainedModules
from omagd.utils import packing as of_packing
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import WEIGHT, Packing, pack_episodes, td_lambda_targets

CPU = torch.device("cpu")


def lambda_returns(reward, terminated, values, gamma, td_lambda):
    """The lambda-return of each step of one episode, as a weighted sum of its n-step returns."""
    result = []
    for t in range(len(reward)):
        total, n_step = 0.0, []
        for k in range(t, len(reward)):
            total += gamma ** (k - t) * reward[k]
            n_step.append(total + (0.0 if any(terminated[t : k + 1]) else gamma ** (k + 1 - t) * values[k + 1]))
        weights = [(1 - td_lambda) * td_lambda**i for i in range(len(n_step) - 1)]
        result.append(np.dot([*weights, td_lambda ** len(weights)], n_step))
    return result


def corrected_returns(reward, terminated, values, gamma, td_lambda, taken):
    """Q(lambda): the value of the action taken, and the sum of (gamma lambda)^k times the TD error k steps later."""
    ends = [gamma * (1 - end) for end in terminated]
    errors = [r + ends[k] * values[k + 1] - taken[k] for k, r in enumerate(reward)]
    times = [(gamma * td_lambda) ** k for k in range(len(reward))]
    return [taken[t] + np.dot(times[: len(reward) - t], errors[t:]) for t in range(len(reward))]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("td_lambda", [0.0, 0.6, 1.0])
def test_targets_equal_weighted_n_step_returns(td_lambda, on_gpu, monkeypatch):
    if on_gpu:
        monkeypatch.setattr(of_packing, "_step_by_step", of_packing.by_doubling)
    rng = np.random.default_rng(0)
    steps, truncated = [7, 7, 4, 1, 0], [False, True, True, False, True]
    packing = Packing(tuple(k + 1 for k in steps))
    reward, values = rng.normal(size=(2, 5, 8))
    terminated = np.zeros((5, 8))
    for i, k in enumerate(steps):
        if k and not truncated[i]:
            terminated[i, k - 1] = 1
    given = [torch.from_numpy(x) for x in (reward, terminated, values)]
    fixed = FixedPacking((8,) * 5, rows=torch.tensor(steps) + 1)
    packed = packing.pad(td_lambda_targets(*map(packing.pack, given), packing, 0.9, td_lambda))
    repeated = td_lambda_targets(*(x.t().flatten() for x in given), fixed, 0.9, td_lambda).view(8, 5).t()
    each = td_lambda_targets(*(x.t().reshape(-1, 1).expand(-1, 2) for x in given), fixed, 0.9, td_lambda)
    for got in (packed, repeated, each[:, 1].view(8, 5).t()):
        for i, k in enumerate(steps):
            wanted = lambda_returns(reward[i, :k], terminated[i, :k], values[i], 0.9, td_lambda)
            np.testing.assert_allclose(got[i, :k], wanted, atol=1e-12)
            assert (got[i, k:] == 0).all()


def test_rewards_are_divided_by_their_running_size_over_the_steps_of_all_batches():
    batches = [pack_episodes([random_episode(seed + 7 * k, 5 + k) for seed in range(3)]) for k in range(3)]
    batches[0]["reward"][-1] = 1e6  # of a closing row
    moments, means = RunningMoments(CPU), []
    for k, batch in enumerate(batches):
        (found,) = standardised([batch], moments, Dist())
        means.append(batch["reward"][batch.valid_mask].double().square().mean())
        size = np.sqrt(np.average(means, weights=0.99 ** np.arange(k, -1, -1)))
        torch.testing.assert_close(found["reward"], batch["reward"] / size)
        assert found["obs"] is batch["obs"]
    own = torch.tensor([[3.0, -3.0]]).expand(len(batch["reward"]), -1)  # of no sum
    (found,) = standardised([replace(batch, data={**batch.data, "agent_reward": own})], RunningMoments(CPU), Dist())
    torch.testing.assert_close(found["agent_reward"], own / 3)


def test_exploration_takes_available_actions_evenly_and_its_stream_ignores_who_is_alive():
    q, available, only_noop = np.zeros((4000, 2, 5)), np.ones((4000, 2, 5), bool), np.zeros((4000, 2, 5), bool)
    q[..., 3] = only_noop[..., 0] = 1
    available[:, 0, [0, 3]] = False
    rng, other = np.random.default_rng(1), np.random.default_rng(1)
    actions = EpsilonGreedy().select(q, available, 0.6, rng)
    shares = [np.bincount(actions[:, i], minlength=5) / 4000 for i in range(2)]
    # Agent 0: ties go to the first available action, 1.
    np.testing.assert_allclose(shares, [[0, 0.6, 0.2, 0, 0.2], [0.12, 0.12, 0.12, 0.52, 0.12]], atol=0.03)
    both = ((actions[:, 0] != 1) & (actions[:, 1] != 3)).mean()
    assert both == pytest.approx(0.4 * 0.48, abs=0.03), "each agent explores on its own"
    assert not EpsilonGreedy().select(q, only_noop, 0.0, other).any()
    assert rng.random() == other.random()
    greedy = Greedy().select(q, available, 1.0, rng)
    assert np.array_equal(EpsilonGreedy().select(q, available, 1.0, None), greedy) and (greedy == [1, 3]).all()


def test_epsilon_falls_in_a_straight_line_or_by_a_factor_and_stays():
    line = toy_config(epsilon_start=1.0, epsilon_finish=0.05, epsilon_anneal_time=1000)
    assert [epsilon_at(line, t) for t in (0, 500, 1000, 9999)] == pytest.approx([1.0, 0.525, 0.05, 0.05])
    curve = toy_config(epsilon_start=0.5, epsilon_finish=0.01, epsilon_speed=0.99)
    expected = [max(0.5 * 0.99**t, 0.01) for t in range(1000)]
    assert [epsilon_at(curve, t) for t in range(1000)] == pytest.approx(expected)


def reference_values(agent, episode):
    """The values [T, n, A] of PyMARL's agent, which reads one-hots, step by step."""
    hidden, ids = torch.zeros(INFO.n_agents, SMALL["rnn_hidden_dim"]).double(), torch.eye(INFO.n_agents).double()
    last, values = torch.zeros(INFO.n_agents, INFO.n_actions).double(), []
    for obs, actions in zip(episode["obs"].double(), episode["actions"].long(), strict=True):
        x = F.relu(F.linear(torch.cat([obs, last, ids], dim=-1), agent.fc1.weight, agent.fc1.bias))
        hidden = torch.gru_cell(x, hidden, *agent.rnn.parameters())
        values.append(agent.fc2(hidden))
        last = F.one_hot(actions, INFO.n_actions).double()
    return torch.stack(values)


def reference_mix(mixer, qs, state):
    """QMIX one step after another, or the sum of VDN: [T] from the agents' values [T, n] and the state."""
    if isinstance(mixer, VDNMixer):
        return sum(qs.t())
    hyper, embed = SMALL["hypernet_embed"], SMALL["mixing_embed_dim"]
    (a1, a2, a3, a4), (b1, b2, b3, b4) = (p.split([hyper, hyper, embed, embed]) for p in mixer.first.parameters())
    out = []
    for q, s in zip(qs, state.double(), strict=True):
        w1 = mixer.weight1(F.relu(a1 @ s + b1)).abs().view(-1, embed)
        w2 = mixer.weight2(F.relu(a2 @ s + b2)).abs()
        out.append(F.elu(q @ w1 + a3 @ s + b3) @ w2 + mixer.bias2(F.relu(a4 @ s + b4))[0])
    return torch.stack(out)


def reference_stats(learner, episodes):
    """PyMARL's loss, half the mean squared error of the (joint) values over the valid steps, and its logged means."""
    alone, taken, targets = learner.config.mixer == "none", [], []
    read = "agent_reward" if "agent_reward" in episodes[0] else "reward"
    squares = torch.cat([episode[read][:-1].double().square() for episode in episodes])
    size = squares.mean().sqrt() if learner.config.standardise_rewards else 1.0
    for episode in episodes:
        q, target_q = (reference_values(agent, episode) for agent in (learner.mac.agent, learner.target_agent))
        choosing = q if learner.config.double_q else target_q
        best = choosing.masked_fill(episode["avail_actions"] == 0, -1e9).argmax(-1)
        joint, of_targets = (x.gather(-1, episode["actions"].long().unsqueeze(-1)).squeeze(-1) for x in (q, target_q))
        values = target_q.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        if not alone:
            joint = reference_mix(learner.mixer, joint, episode["state"]).unsqueeze(-1)
            values, of_targets = (
                reference_mix(learner.target_mixer, x, episode["state"]).unsqueeze(-1) for x in (values, of_targets)
            )
        reward = episode.get("agent_reward", episode["reward"].unsqueeze(-1).expand_as(joint))
        of_agents = (joint.t(), (reward / size).t().tolist(), values.t().tolist(), of_targets.t().tolist())
        for of_agent, rewards, bootstrap, old in zip(*of_agents, strict=True):
            taken.append(of_agent[:-1])
            made = partial(corrected_returns, taken=old) if learner.config.q_lambda else lambda_returns
            targets += made(rewards[:-1], episode["terminated"].tolist(), bootstrap, 0.99, 0.6)
    taken, targets = torch.cat(taken), torch.tensor(targets)
    loss, per_agent = 0.5 * (taken - targets).square().mean(), 1 if alone else INFO.n_agents
    means = {"q_taken_mean": taken.mean() / per_agent, "target_mean": targets.mean() / per_agent}
    return {"loss_td": loss, "td_error_abs": loss, **means}


UPDATES = [
    {}, {"q_lambda": True}, {"q_lambda": True, "mixer": "none"}, {"double_q": False}, {"grad_norm_clip": 0.5},
    {"mixer": "none"}, {"mixer": "vdn"},
    {"learner": "pqn_learner", "learner_args": {"epochs": 1, "minibatches": 1}, "standardise_rewards": True},
]  # fmt: skip
OWN_REWARDS = {"mixer": "none", "standardise_rewards": True}


@pytest.mark.parametrize(("updates", "own_rewards"), [*((case, False) for case in UPDATES), (OWN_REWARDS, True)])
def test_update_equals_a_reference(updates, own_rewards):
    episodes = [random_episode(i, length, truncated=i % 2 == 1) for i, length in enumerate([3, 6, 1, 6, 4])]
    if own_rewards:
        episodes = [{**e, "agent_reward": torch.randn(len(e["reward"]), INFO.n_agents)} for e in episodes]
    config = toy_config(**{"grad_norm_clip": 1e9, **updates})
    learner, other = (make_learner(config, dtype=torch.float64, seed=seed) for seed in (0, 5))
    if config.learner == "pqn_learner":  # its targets are by its own network, and constants of its loss
        learner.target_agent, learner.target_mixer = learner.mac.agent, learner.mixer
    else:
        learner.target_agent.load_state_dict(other.mac.agent.state_dict())
        learner.target_mixer.load_state_dict(other.mixer.state_dict())
    expected = reference_stats(learner, episodes)
    wanted = torch.autograd.grad(expected["loss_td"], learner.optimizer.param_groups[0]["params"])
    expected["grad_norm"] = torch.cat([gradient.flatten() for gradient in wanted]).norm()
    assert expected["grad_norm"] > 0.5 or config.grad_norm_clip > 1  # or nothing would be clipped
    grads, stats = gradients_of(learner, episodes)
    assert stats["loss_td"][1] == stats["td_error_abs"][1] == 20
    for name, value in expected.items():
        assert float(stats[name][0] / stats[name][1]) == pytest.approx(float(value.detach()), rel=1e-6), name
    for got, want in zip(grads, wanted, strict=True):
        clipped = want * min(1.0, config.grad_norm_clip / expected["grad_norm"])
        torch.testing.assert_close(got, clipped, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("weighting", ["optimistic", "central"])
def test_a_weighted_update_equals_a_loop_over_steps(weighting):
    episodes = [random_episode(i, length, truncated=i % 2 == 1) for i, length in enumerate([3, 6, 1, 6, 4] * 4)]
    given = {"learner": "wqmix_learner", "learner_args": {"weighting": weighting, "alpha": 0.3}, "grad_norm_clip": 1e9}
    learner, other = (make_learner(toy_config(**given), dtype=torch.float64, seed=seed) for seed in (0, 5))
    copied, of_star = ([*agent.parameters()] for agent in (learner.target_agent, learner.central))
    assert all(map(torch.equal, copied, of_star)), "Q* bootstraps, not Q_tot"
    learner.target_agent.load_state_dict(other.central.state_dict())
    learner.target_mixer.load_state_dict(other.central_mixer.state_dict())
    losses, weights = [], set()
    for episode in episodes:
        state, taken = episode["state"].double(), episode["actions"].long()
        nets = learner.mac.agent, learner.central, learner.target_agent
        q, q_star, q_next = (reference_values(net, episode) for net in nets)
        greedy = q.masked_fill(episode["avail_actions"] == 0, -1e9).argmax(-1)
        of = lambda values, actions: values.gather(-1, actions.unsqueeze(-1)).squeeze(-1)  # noqa: E731
        joint = reference_mix(learner.mixer, of(q, taken), state)
        star, best = (learner.central_mixer(of(q_star, actions), state) for actions in (taken, greedy))
        values = learner.target_mixer(of(q_next, greedy), state).tolist()
        ends, rewards = episode["terminated"].tolist(), episode["reward"].tolist()[:-1]
        for t, y in enumerate(lambda_returns(rewards, ends, values, 0.99, 0.6)):
            whole = torch.equal(taken[t], greedy[t]) or y > best[t]
            weight = 1.0 if (joint[t] < y if weighting == "optimistic" else whole) else 0.3
            losses.append(0.5 * weight * (joint[t] - y).square() + 0.5 * (star[t] - y).square())
            weights.add(weight)
    assert weights == {1.0, 0.3}
    wanted = torch.autograd.grad(sum(losses) / len(losses), learner.optimizer.param_groups[0]["params"])
    torch.testing.assert_close(gradients_of(learner, episodes)[0], list(wanted), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("parts", [2, 5, 99])
def test_parts_of_a_batch_add_up_to_the_whole(parts):
    episodes = [random_episode(i, length) for i, length in enumerate([5, 9, 0, 3, 3, 1, 12])]
    configs = [toy_config(grad_norm_clip=1e9, accumulate=count, batch_size=128) for count in (1, parts)]
    whole, of_parts = (gradients_of(make_learner(config, dtype=torch.float64), episodes) for config in configs)
    torch.testing.assert_close(of_parts, whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("given", [{}, {"mixer": "none", "accumulate": 3}, {"learner": "wqmix_learner"}])
def test_weights_count_episodes_and_their_errors_come_back(given):
    episodes, weights = [random_episode(i, length) for i, length in enumerate([5, 9, 3, 1])], [0.5, 2.0, 1.0, 0.25]
    config = toy_config(grad_norm_clip=1e9, **given)
    found = [gradients_of(make_learner(config, dtype=torch.float64), [episode])[0] for episode in episodes]
    total = sum(w * (len(e["reward"]) - 1) for w, e in zip(weights, episodes, strict=True))
    shares = [w * (len(e["reward"]) - 1) / total for w, e in zip(weights, episodes, strict=True)]
    wanted = [sum(s * g for s, g in zip(shares, of_all, strict=True)) for of_all in zip(*found, strict=True)]
    weighted = [{**e, WEIGHT: torch.full_like(e["reward"], w)} for w, e in zip(weights, episodes, strict=True)]
    learner, seen = make_learner(config, dtype=torch.float64), []
    of_errors = learner.loss.error_loss
    learner.loss.error_loss = lambda error, values: seen.append(error) or of_errors(error, values)
    grads, stats = gradients_of(learner, weighted)
    torch.testing.assert_close(grads, wanted, atol=1e-12, rtol=1e-9)
    assert float(stats["loss_td"][1]) == pytest.approx(total)
    # sum_t |error| / sqrt(T): lengths differ, so an error at another episode's place would change this sum.
    n_steps = torch.tensor(pack_episodes(weighted).packing.lengths) - 1
    found = sum(error.detach().abs().sum() / error.shape[1:].numel() for error in seen)
    assert float(learner.errors() @ n_steps.sqrt()) == pytest.approx(float(found), rel=1e-5)


def test_warm_up_and_a_batch_without_a_step_change_nothing():
    torch.manual_seed(3)
    learner = make_learner(toy_config(agent="gnn_rnn", mac="gnn_graph_mac"))
    before, random_state = state_of(learner), torch.get_rng_state()
    learner.warm_up()
    assert torch.equal(random_state, torch.get_rng_state())
    stats = learner.update(pack_episodes([random_episode(0, 0)]), episodes=0)
    assert stats["loss_td"][1] == 0
    assert equal(before, state_of(learner)), "the optimizer's state included"


@pytest.mark.parametrize(("updates", "copies"), [
    ({"target_update_interval": 20}, [2, 4, 6]), ({"target_update_updates": 4}, [3]),
])  # fmt: skip
def test_targets_are_copied_when_due_also_after_a_restore(updates, copies):
    batches = [pack_episodes([random_episode(10 * i + k, 3 + k) for k in range(4)]) for i in range(7)]
    learner, resumed = (make_learner(toy_config(**updates), seed=seed) for seed in (0, 9))
    copied = []
    for i, batch in enumerate(batches):
        learner.update(batch, episodes=10 * i)
        for trained, target in ((learner.mac.agent, learner.target_agent), (learner.mixer, learner.target_mixer)):
            copied += [i] if equal(trained.state_dict(), target.state_dict()) else []
        if i > 4:
            resumed.update(batch, episodes=10 * i)
        elif i == 4:
            copy_learner(learner, resumed)
    assert copied == [i for i in copies for _ in ("agent", "mixer")]
    assert equal(state_of(learner), state_of(resumed))


def test_learners_of_all_stages_scale_their_learning_rates_when_asked(monkeypatch):
    assert [lr_scale(toy_config(lr_scaling=name), 4) for name in ("none", "sqrt", "linear")] == [1.0, 2.0, 4.0]
    monkeypatch.setattr(Dist, "wrap", lambda self, module, *_: module)  # which needs a process group
    dist = Dist(0, 4)
    stages = [graph_learner(stage, dist=dist, lr_scaling="linear", graph_lr=0.01) for stage in ("stage1", "stage2")]
    qmix = make_learner(toy_config(lr_scaling="linear", lr=0.02), dist=dist)
    ddpg = make_ddpg(dist, lr_scaling="linear", lr=0.03, critic_lr=0.05)
    kind = {"action_selector": "softmax", "mixer": "none", "lr_scaling": "linear", "lr": 0.06}
    on_policy = [make_learner(toy_config(**kind, learner=name), dist=dist) for name in ("ppo_learner", "rloo_learner")]
    optimizers = [*(learner.optimizer for learner in (*stages, qmix, ddpg, *on_policy)), ddpg.critic_optimizer]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.04, 0.04, 0.08, 0.12, 0.24, 0.24, 0.2])


def test_ranks_begin_with_equal_weights_and_different_random_numbers(monkeypatch):
    monkeypatch.setattr(Dist, "wrap", lambda self, module, *_: module)  # which needs a process group
    states, seeds = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        session = SimpleNamespace(config=toy_config(), info=INFO, dist=Dist(rank, 2))
        states.append(state_of(build_learner(session, PretrainedModules())[1]))
        seeds.append(torch.initial_seed())
    assert equal(*states)
    assert seeds[0] != seeds[1], "dropout"


FLAT = EnvInfo("flat", "flat", 3, 9, LAYOUT.obs_dim, 7, 12)


@pytest.mark.parametrize(("message", "info", "updates", "given"), [
    ("nq_graph_learner .* entity layout; env=skirmish", FLAT, {"learner": "nq_graph_learner"}, None),
    ("mac=gnn_graph_mac .* entity layout", FLAT, {"mac": "gnn_graph_mac"}, None),
    ("mac=n_mac", INFO, {}, HalvingReconstructor()),
    ("agent=gnn_rnn .* entity layout", FLAT, {"agent": "gnn_rnn"}, None),
])  # fmt: skip
def test_components_name_what_they_need(message, info, updates, given):
    config = toy_config(**updates)
    with pytest.raises(UserError, match=message):
        LEARNERS.get(config.learner)(MACS.get(config.mac)(config, info, CPU, given), config, info, Dist())


def tick_of(episodes, t):
    rows = [{name: value[min(t, len(value) - 1)].numpy() for name, value in e.items()} for e in episodes]
    obs, state, available = (np.stack([row[name] for row in rows]) for name in ("obs", "state", "avail_actions"))
    return Tick(Observation(obs, state, available.astype(bool), -obs), np.full(len(rows), t), np.ones(len(rows), bool))


def test_the_copy_that_acts_is_brought_up_to_date():
    mac = MACS.get("n_mac")(toy_config(), INFO, CPU)
    mac._actor, mac._copied = copy.deepcopy(mac.agent), True  # as with cpu_inference beside a GPU
    for parameter in mac.agent.parameters():
        parameter.data.add_(1.0)
    mac.begin(2)
    assert equal(mac._actor.state_dict(), mac.agent.state_dict())


@pytest.mark.parametrize("learned", [False, True])
def test_reset_forgets_one_slot_and_leaves_the_other(learned, monkeypatch):
    mac, episodes = MACS.get("n_mac")(toy_config(), INFO, CPU), [random_episode(0, 6), random_episode(0, 6)]
    if learned:
        one = torch.randn(1, INFO.n_agents, SMALL["rnn_hidden_dim"], requires_grad=True)
        monkeypatch.setattr(mac._actor, "init_hidden", lambda n_slots: one.expand(n_slots, -1, -1))
    mac.begin(2)
    start = mac._hidden.clone()
    for t in range(3):
        mac.act(tick_of(episodes, t), None)
    kept = mac._hidden.clone()
    mac.reset(np.array([True, False]))
    assert torch.equal(mac._hidden[0], start[0]) and torch.equal(mac._hidden[1], kept[1])
    assert mac._last_action[0].eq(-1).all() and mac._last_action[1].ge(0).all()


def test_a_tiny_environment_is_learned(tmp_path):
    words = "run=default batch_size_run=32 batch_size=32 buffer_size=32 lr=0.01 rnn_hidden_dim=32 seed=1 use_cuda=False"
    words += " mixing_embed_dim=4 hypernet_embed=6 target_update_updates=10 epsilon_finish=0.1 test_interval=100000"
    words += f" log_interval=100000 save_model=False enable_checkpointing=False local_results_path={tmp_path}"
    words += " t_max=14400 epsilon_anneal_time=7200"
    config = config_from(["--config=qmix", "--env-config=memory_game", "with", *words.split()])
    assert omagd.run(config)["stages"]["stage3"]["values"]["test_return_mean"] == pytest.approx(1.0)
