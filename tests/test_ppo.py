"""PPO: an update equals an independent computation; minibatches, critics, selection of actions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interruption import stage_of
from q_toys import INFO, gradients_of, make_learner, random_episode, toy_config
from torch.nn import functional as F

from omagd.components.action_selectors import REGISTRY as SELECTORS
from omagd.components.action_selectors import draw, log_softmax
from omagd.config.loading import resolve
from omagd.learners.policy_learner import Epochs, PolicyArgs
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.critics import REGISTRY as CRITICS
from omagd.run.checkpoint.weights import with_own_settings
from omagd.run.cli.preflight import preflight, too_many_parts
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, pack_episodes

PPO = {"learner": "ppo_learner", "action_selector": "softmax", "mixer": "none", "grad_norm_clip": 1e9}
ARGS = {"epochs": 1, "normalise_values": False, "value_clip": None, "critic_hidden": 8}


def ppo(seed: int = 0, **args: Any) -> Any:
    more = {name: args.pop(name) for name in ("agent", "env_args", "share_parameters", "t_max") if name in args}
    config, info = toy_config(**PPO, **more, learner_args={**ARGS, **args}), INFO
    if "env_args" in more:
        info = replace(INFO, agent_rewards=True)
    return make_learner(config, dtype=torch.float64, seed=seed, info=info)


def episodes_of(*lengths: int) -> list[dict[str, torch.Tensor]]:
    made = [random_episode(i, length, truncated=i % 2 == 1) for i, length in enumerate(lengths)]
    for i, episode in enumerate(made):  # an agent that dies has one action
        episode["avail_actions"][1 + i % 2 :, i % 3] = F.one_hot(episode["actions"][1 + i % 2 :, i % 3].long(), 9)
        episode["log_prob"] -= 0.3 * torch.rand_like(episode["log_prob"])
    return made


def expected_loss(learner: Any, episodes: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean loss, episode by episode and step by step, as the papers write it, and the estimate of KL."""
    args, gamma, config = learner.args, learner.config.gamma, learner.config
    rows = []
    for episode in episodes:
        steps, ended = len(episode["reward"]) - 1, episode["terminated"].double()
        features, state, own = episode["obs"].double(), episode["state"].double(), "agent_reward" in episode
        reward = episode["agent_reward" if own else "reward"]
        last = torch.cat([torch.full((1, 3), -1), episode["actions"][:-1].long()])
        value = learner.critic(AgentInputs(features, last), state)
        value = value if value.dim() > 1 else value[:, None].expand(-1, 3)
        if args.death_masking and not own:  # one return for all, and who acts sees what it will be
            acts = episode["avail_actions"].sum(-1) > 1
            value = torch.stack([torch.where(a | ~a.any(), v, v[a].mean()) for v, a in zip(value, acts, strict=True)])
        hidden, total = learner.mac.agent.init_hidden(1), torch.zeros(3, dtype=torch.float64)
        advantage = torch.zeros(steps, 3, dtype=torch.float64)
        for t in reversed(range(steps)):  # Schulman et al. 2016, equation 16
            delta = reward[t] + gamma * (1 - ended[t]) * value[t + 1] - value[t]
            advantage[t] = total = (delta + gamma * args.gae_lambda * (1 - ended[t]) * total).detach()
        for t in range(steps):
            logits, hidden = learner.mac.agent.step(AgentInputs(features[t : t + 1], last[t : t + 1]), hidden)
            open_ = episode["avail_actions"][t].bool()
            policy = torch.distributions.Categorical(logits=logits[0].masked_fill(~open_, -1e30))
            ratio = (policy.log_prob(episode["actions"][t].long()) - episode["log_prob"][t]).exp()
            alive = (open_.sum(-1) > 1) if args.death_masking else torch.ones(3, dtype=torch.bool)
            rows += [(alive[i], advantage[t, i], ratio[i], policy.entropy()[i], value[t, i]) for i in range(3)]
    counted, all_rows = [row[1:] for row in rows if row[0]], rows
    raw = torch.stack([advantage for advantage, *_ in counted])
    normal = (raw - raw.mean()) / (raw.std(correction=0) + 1e-8) if args.normalise_advantages else raw
    loss, errors, kl = torch.zeros((), dtype=torch.float64), [], torch.zeros((), dtype=torch.float64)
    for a, (_, ratio, entropy, _) in zip(normal, counted, strict=True):
        policy_loss = -min(ratio * a, ratio.clamp(1 - args.clip, 1 + args.clip) * a)
        loss = loss + policy_loss - args.entropy * entropy
        kl = kl + ratio - 1 - ratio.log()
    for alive, advantage, *_, value in all_rows:
        if not (alive or own):  # what an agent that has left is worth
            continue
        errors.append(0.5 * (value - (advantage + value).detach()) ** 2)
    assert config.gamma < 1
    return loss / len(counted) + args.value_weight * torch.stack(errors).mean(), kl / len(counted)


@pytest.mark.parametrize("args", [
    {}, {"critic": "observation", "death_masking": False},
    {"critic": "set", "normalise_advantages": False, "agent": "hpn_rnn"},
    {"critic": "observation", "share_parameters": False, "gae_lambda": 0.5},
    {"critic": "agent_state", "own": True},
    {"critic": "state", "own": True, "env_args": {"common_reward": False}},
    {"critic": "agent_state", "share_parameters": False},
])  # fmt: skip
def test_a_step_follows_the_gradient_of_an_independent_computation(args):
    args, episodes = dict(args), episodes_of(5, 2, 4, 1)
    if args.pop("own", False):
        episodes = [{**e, "agent_reward": torch.randn(len(e["reward"]), 3)} for e in episodes]
    learner = ppo(**args)
    loss, kl = expected_loss(learner, episodes)
    loss.backward()
    weights = [p for group in learner.optimizer.param_groups for p in group["params"]]
    wanted = [p.grad.clone() for p in weights]
    learner.optimizer.zero_grad()
    found, stats = gradients_of(learner, episodes)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    choices = sum(int((e["avail_actions"][:-1].sum(-1) > 1).sum()) for e in episodes)
    rows, name = learner.all_rows(pack_episodes(episodes)), learner.args.critic
    read, last = rows.inputs, (rows.inputs.last_action + 1) % 9
    given = [read, replace(read, features=read.features + 1), replace(read, last_action=last)]
    value, *others = (learner.critic(*pair) for pair in [*((x, rows.state) for x in given), (read, rows.state + 1)])
    of_agents = name in ("observation", "agent_state")
    assert [not torch.equal(value, x) for x in others] == [of_agents, of_agents, name != "observation"]
    samples = choices if learner.args.death_masking else 3 * (5 + 2 + 4 + 1)
    assert float(stats["loss_ppo"][1]) == samples
    assert float(stats["kl"][0] / samples) == pytest.approx(kl.item(), rel=1e-4) and kl > 1e-3


@pytest.mark.parametrize(("critic", "name"), [("state", "reward"), ("observation", "agent_reward")])
def test_advantages_are_gae_of_values_in_units_of_returns(critic, name):
    """Of rewards of agents, where there are any; values stay as the critic predicts them."""
    episodes = [{**e, "reward": 100 + 10 * e["reward"]} for e in episodes_of(5, 2, 4, 1)]
    if name == "agent_reward":
        episodes = [{**e, name: torch.rand(len(e["reward"]), 3) - 50} for e in episodes]
    learner = ppo(critic=critic, normalise_values=True, normalise_advantages=False, death_masking=False)
    batch, gamma, weight = pack_episodes(episodes), learner.config.gamma, learner.args.gae_lambda
    first = learner.all_rows(batch)
    mean, deviation = learner.value_norm.scale
    returns = (first.target * deviation + mean)[batch.valid_mask]
    torch.testing.assert_close(returns.mean(), mean)  # closing rows have none
    rows = learner.all_rows(batch)
    raw = learner.critic(rows.inputs, rows.state).detach().view(len(rows.state), -1).expand(-1, 3)
    torch.testing.assert_close(rows.value, raw)
    for place in range(len(episodes)):
        own = (batch.packing.episode == place).nonzero().flatten()
        value, reward = raw[own] * deviation + mean, batch[name][own].double().view(len(own), -1)
        total = torch.zeros(3, dtype=torch.float64)
        for t in reversed(range(len(own) - 1)):  # Schulman et al. 2016, equation 16
            more = gamma * (1 - batch["terminated"][own[t]].double())
            total = reward[t] + more * value[t + 1] - value[t] + weight * more * total
            torch.testing.assert_close(rows.advantage[own[t]], total)


def test_defaults_and_presets_are_those_of_the_papers():
    args = ppo().args_model()
    assert ppo().optimizer.param_groups[0]["eps"] == 1e-5
    assert (args.gae_lambda, args.clip, args.value_clip, args.normalise_advantages) == (0.95, 0.2, 0.2, True)
    keys = {
        "mappo": ("ppo_learner", "n_rnn", "none", {"critic": "state"}),
        "ippo": ("ppo_learner", "n_rnn", "none", {"critic": "observation"}),
        "hpn_mappo": ("ppo_learner", "hpn_rnn", "none", {"critic": "set"}),
        "rloo": ("rloo_learner", "n_rnn", "none", {"score": "outcome"}),
        "hpn_rloo": ("rloo_learner", "hpn_rnn", "none", {"score": "outcome"}),
        "hpn_qmix": ("nq_learner", "hpn_rnn", "set_qmix", {}),
    }
    for name, (*wanted, given) in keys.items():
        config = resolve(name, "skirmish", {})
        assert [config.learner, config.agent, config.mixer] == wanted
        assert given.items() <= config.learner_args.items(), name


def test_values_are_clipped_and_normalised():
    """Normalised targets have mean 0 and deviation 1; a clipped value has no gradient beyond its bound."""
    episodes = [{**e, "reward": 100 + 10 * e["reward"]} for e in episodes_of(5, 2, 4, 1)]
    learner = ppo(normalise_values=True, death_masking=False)
    constant = type(learner.value_norm)(torch.device("cpu"))
    constant.add(torch.tensor([4.0, 8.0, 16.0], dtype=torch.float64))
    assert constant.scale[1] == pytest.approx(1e-2), "the least variance is 1e-4"
    rows = learner.all_rows(pack_episodes(episodes))
    target = rows.target[rows.weight > 0]
    assert abs(target.mean()) < 1e-6 and target.std(correction=0).item() == pytest.approx(1)
    again = learner.all_rows(pack_episodes(episodes))
    assert learner.value_norm.scale[0] > 100 and again.target[again.weight > 0].std() < 10
    resumed = ppo(normalise_values=True)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.value_norm.scale == learner.value_norm.scale and set(learner.modules()) == {"agent", "critic"}
    value, old, target = (torch.tensor([[x]], requires_grad=True) for x in (2.0, 1.0, 5.0))
    for clip, error, slope in ((None, 4.5, -3.0), (0.2, 0.5 * 3.8**2, 0.0), (9.0, 4.5, -3.0)):
        loss = ppo(value_clip=clip).step.loss_module
        found = loss._value_error(value, SimpleNamespace(value=old.detach(), target=target.detach()))
        assert found.item() == pytest.approx(error)
        assert torch.autograd.grad(found.sum(), value)[0].item() == pytest.approx(slope)


def minibatches(batch: PackedBatch, dist: Dist, count: int, seed: int = 0) -> list[list[int]]:
    epochs = Epochs(PolicyArgs(epochs=1, minibatches=count), toy_config(**PPO, seed=seed), ppo().optimizer, dist)
    drawn = epochs.draw(batch.packing.lengths, batch.sample_index, 0)
    assert epochs.finish(0) == len(drawn) and epochs.learned_from == 18
    return drawn


def test_minibatches_hold_every_episode_of_all_ranks_once(monkeypatch):
    """Each rank draws its own part of those that one process would draw. 18 steps: those of all ranks."""
    lengths = 5, 2, 1, 7, 3, 0
    episodes = [{"t": torch.zeros(steps + 1)} for steps in lengths]
    ranks = [(pack_episodes(episodes[rank::n]), Dist(rank, n)) for rank, n in ((0, 1), (0, 2), (1, 2))]
    steps = [dict(enumerate(lengths[rank::2])) for rank in range(2)]
    monkeypatch.setattr(Dist, "gather", lambda self, value: steps if self.world_size > 1 else [value])
    for count, wanted in ((1, 1), (3, 3), (64, 5)):
        alone, *parts = (minibatches(*of_rank, count) for of_rank in ranks)
        assert len(alone) == wanted and all(alone), "no minibatch is empty on all ranks"
        by_length = sorted(lengths[:5], reverse=True)  # one process has them in this order
        for own, of_ranks in zip(alone, zip(*parts, strict=True), strict=True):
            found = [b.packing.lengths[i] - 1 for (b, _), some in zip(ranks[1:], of_ranks, strict=True) for i in some]
            assert sorted(found) == sorted(by_length[place] for place in own) and own == sorted(own)
        assert sorted(place for own in alone for place in own) == list(range(5))
    assert minibatches(*ranks[0], 2) != minibatches(*ranks[0], 2, seed=1)


@pytest.mark.parametrize("kind", [PPO, {"learner": "pqn_learner", "mixer": "vdn"}], ids=["PPO", "PQN"])
def test_the_learning_rate_falls_to_0_at_t_max_also_after_a_restore(kind):
    def new(**args: Any) -> Any:
        return make_learner(toy_config(**kind, t_max=30, learner_args={"epochs": 1, "minibatches": 1, **args}))

    episodes, learner, rates = episodes_of(5, 2, 4, 1), new(anneal_lr=True), []
    for _ in range(4):
        learner.update(pack_episodes(episodes), episodes=0)
        rates.append(learner.optimizer.param_groups[0]["lr"] / learner.config.lr)
        assert learner.updates == len(rates)
        state, learner = learner.state_dict(), new(anneal_lr=True)
        learner.load_state_dict(state)
    assert rates == pytest.approx([1, 18 / 30, 6 / 30, 0])
    fixed = new()
    fixed.load_state_dict(state)
    fixed.update(pack_episodes(episodes), episodes=0)
    assert fixed.optimizer.param_groups[0]["lr"] == fixed.config.lr


@pytest.mark.parametrize("kind", [PPO, {"learner": "pqn_learner", "mixer": "vdn"}], ids=["PPO", "PQN"])
def test_the_learning_rate_falls_to_0_at_max_episodes(kind):
    args = {"epochs": 1, "minibatches": 1, "anneal_lr": True}
    learner, rates = make_learner(toy_config(**kind, t_max=10**12, max_episodes=8, learner_args=args)), []
    for episodes in (0, 4, 8):
        learner.update(pack_episodes(episodes_of(5, 2, 4, 1)), episodes=episodes)
        rates.append(learner.optimizer.param_groups[0]["lr"] / learner.config.lr)
        state, learner = learner.state_dict(), make_learner(learner.config)
        learner.load_state_dict(with_own_settings(state, learner.state_dict()))  # as from `models/`
    assert rates == pytest.approx([1, 1 / 2, 0])


def test_every_epoch_draws_other_minibatches(monkeypatch):
    learner, seen = ppo(epochs=3, minibatches=2), []
    step = type(learner.step).__call__
    noting = lambda *given: seen.append(given[2][0].advantage.tolist()) or step(*given)  # noqa: E731
    monkeypatch.setattr(type(learner.step), "__call__", noting)
    batch = pack_episodes(episodes_of(5, 2, 4, 1, 3, 6))
    stats = learner.update(batch, episodes=0)
    assert len(seen) == 6 and len({str(part) for part in seen}) > 2
    assert learner.updates == learner.steps_per_batch(learner.config) == 6
    assert stats["entropy"][1] == 3 * learner.all_rows(batch).weight.sum(), "each sample once in each epoch"


def test_minibatches_without_an_episode_take_no_step():
    batch = pack_episodes(episodes_of(5, 2, 4))
    many, few = (ppo(epochs=2, minibatches=count) for count in (64, 3))
    (total, steps), *_ = (learner.update(batch, episodes=0)["grad_norm"] for learner in (many, few))
    assert steps == many.updates == few.updates == 6 and total > 0
    assert all(map(torch.equal, many.step.parameters, few.step.parameters))


def test_a_step_without_a_sample_is_no_update():
    """Nobody has a choice, as where all agents are dead."""
    episodes = episodes_of(3)
    episodes[0]["avail_actions"] = torch.zeros_like(episodes[0]["avail_actions"])
    episodes[0]["avail_actions"][..., 0] = 1
    episodes[0]["actions"] = torch.zeros_like(episodes[0]["actions"])
    learner = ppo(epochs=2)
    before = [weight.clone() for weight in learner.step.parameters]
    stats = learner.update(pack_episodes(episodes), episodes=0)
    assert learner.updates == 0 and stats["grad_norm"] == (0, 0)
    assert all(map(torch.equal, before, learner.step.parameters))


def test_the_stored_log_probabilities_are_those_of_the_policy_that_played(tmp_path):
    """So the ratio of the first step is 1: no divergence, nothing clipped."""
    config = resolve("mappo", "skirmish", {"env_args.map_name": "3m", "use_cuda": False, "rnn_hidden_dim": 8})
    stage = stage_of(config.model_copy(update={"learner_args": {"epochs": 1}}), tmp_path / "run")
    rollout = stage.session.runners["train"].collect(stage.mac, explore=stage._exploration())
    stage.session.close()
    stats = stage.learner.update(pack_episodes(rollout.episodes), episodes=0)
    mean = {name: float(total / count) for name, (total, count) in stats.items()}
    assert abs(mean["kl"]) < 1e-6 and mean["clipped_share"] == 0 and mean["entropy"] > 1


def test_actions_are_drawn_from_the_softmax_of_available_logits():
    rng = np.random.default_rng(0)
    logits, available = np.array([[[0.0, 1.0, 3.0, 2.0]]]), np.array([[[True, True, False, True]]])
    chances = np.exp(log_softmax(logits, available))[0, 0]
    assert chances == pytest.approx([np.exp(k) / (1 + np.e + np.e**2) if k < 3 else 0 for k in (0, 1, 3, 2)])
    many = np.repeat(logits, 100_000, 0), np.repeat(available, 100_000, 0)
    selector = SELECTORS.get("softmax")()
    counts = np.bincount(selector.select(*many, 0.0, rng).ravel(), minlength=4) / 100_000
    assert counts == pytest.approx(chances, abs=0.006) and counts[2] == 0
    assert selector.select(logits, available, 0.0, None).item() == 3
    pairs = selector.select(np.zeros((1000, 2, 4)), np.ones((1000, 2, 4), bool), 0.0, rng)
    assert 0.7 < (pairs[:, 0] != pairs[:, 1]).mean() < 0.8, "agents draw apart"
    assert np.isfinite(log_softmax(logits, np.zeros_like(available))).all(), "a row after the end"
    assert draw(np.array([[0.0, 0.0]]), np.array([0.3])).item() == 0


@pytest.mark.parametrize("name", ["observation", "agent_state"])
def test_agents_that_share_nothing_have_critics_of_their_own(name):
    critic = CRITICS.get(name)(toy_config(**PPO, share_parameters=False), INFO, 8)
    assert len(critic.each) == INFO.n_agents
    batch = pack_episodes([random_episode(0, 4)])
    inputs = AgentInputs(batch["obs"], torch.zeros_like(batch["actions"], dtype=torch.int64))
    critic(inputs, batch["state"])[:, 1].sum().backward()
    for i, own in enumerate(critic.each):
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in own.parameters()) == (i == 1)


@pytest.mark.parametrize(("updates", "words"), [
    ({"action_selector": "epsilon_greedy"}, ["action_selector=epsilon_greedy", "action_selector=softmax"]),
    ({"learner_args": {"epochs": True}}, ["learner_args.epochs=True", "a whole number"]),
    ({"runner": "ticks"}, ["runner=ticks"]),
    ({"learner_args": {"chunk_length": 10}}, ["learner_args.chunk_length=10"]),
    ({"td_lambda": 0.5}, ["td_lambda=0.5: has no meaning for learner=ppo_learner", "Leave it out"]),
    ({"learner": "nq_learner", "learner_args": {}}, ["action_selector=softmax", "epsilon_greedy"]),
    ({"learner_args": {"critic": "staet"}}, ["learner_args.critic=staet is not known. Did you mean 'state'?"]),
])  # fmt: skip
def test_what_does_not_fit_is_rejected_at_the_start(updates, words):
    config = resolve("mappo", "skirmish", {})
    with pytest.raises(UserError) as caught:
        preflight(config.model_copy(update=updates))
    assert [word for word in words if word not in caught.value.render()] == []


def test_more_minibatches_than_episodes_are_a_warning():
    given = {"run": "default", "batch_size": 4, "batch_size_run": 2}
    for parts, warned in ((4, ()), (5, ("learner_args.minibatches=5: a batch has about 4 episodes",))):
        checked = preflight(resolve("mappo", "skirmish", {**given, "learner_args.minibatches": parts}))
        assert tuple(line.partition(",")[0] for line in checked.warnings) == warned
    for learner, value in (("ppo_learner", None), ("ppo_learner", "all"), ("nq_learner", 10**6)):  # as plug-ins may
        of_others = checked.config.model_copy(update={"learner": learner, "learner_args": {"minibatches": value}})
        assert [*too_many_parts(of_others, checked.plan)] == []
