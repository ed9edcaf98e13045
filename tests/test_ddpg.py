"""DDPG: its update against the published formulas, and its exploration."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from ddpg_toys import INFO, ddpg_config, make_ddpg, random_steps
from torch.nn import functional as F

from omagd.controllers import REGISTRY as MACS
from omagd.controllers.ddpg_mac import draw, softmax
from omagd.controllers.types import Exploration, Tick
from omagd.envs.protocol import Observation
from omagd.learners.ddpg_learner import straight_through
from omagd.run import launchers
from omagd.run.training.stages.base import held_in_common
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes


def weights_of(learner):
    return {name: value.detach().clone() for name, value in held_in_common(learner).items()}


def mlp(weights, prefix, x):
    """Return the output of the three layers of these names."""
    for i in (1, 2, 3):
        x = x.relu() if i > 1 else x
        x = F.linear(x, weights[f"{prefix}.trunk.fc{i}.weight"], weights[f"{prefix}.trunk.fc{i}.bias"])
    return x


def adam(weights, prefix, loss, lr, clip):
    """Return the weights under `prefix` after Adam's first step on `loss`, its gradient's norm cut to `clip`."""
    names = [name for name in weights if name.startswith(prefix)]
    grads = torch.autograd.grad(loss, [weights[name] for name in names])
    norm = torch.sqrt(sum((g * g).sum() for g in grads))
    scale = min(1.0, clip / (norm.item() + 1e-6))
    stepped = {n: weights[n] - lr * (g * scale) / ((g * scale).abs() + 1e-8) for n, g in zip(names, grads, strict=True)}
    return {name: value.detach().requires_grad_() for name, value in stepped.items()}, norm


@pytest.mark.parametrize("case", ["one step each", "long episodes", "team reward", "clipped"])
def test_an_update_is_what_the_published_formulas_say(case):
    clip = 0.05 if case == "clipped" else 1e9
    learner = make_ddpg(grad_norm_clip=clip, gamma=0.9)
    length = 4 if case == "long episodes" else 1
    episodes = random_steps(1, 8, length, team=case == "team reward")
    for target in (learner.target_agent, learner.target_critic):  # targets that differ from what they follow
        for parameter in target.parameters():
            parameter.data += 0.05
    w = {name: value.requires_grad_() for name, value in weights_of(learner).items()}
    stats = learner.update(pack_episodes(episodes), episodes=0)

    def joined(name, shift):
        return torch.cat([e[name][shift : len(e[name]) - 1 + shift] for e in episodes]).double()

    def policy(name, shift):
        return mlp(w, name, joined("obs", shift)).masked_fill(joined("avail_actions", shift) == 0, -1e9).softmax(-1)

    before, after, taken = joined("obs", 0), joined("obs", 1), joined("action_probs", 0)
    reward = joined("reward", 0)[:, None].expand(-1, 3) if case == "team reward" else joined("agent_reward", 0)
    with torch.no_grad():
        later = torch.cat([after, policy("target_agent", 1)], -1)
        y = reward + 0.9 * (1 - joined("terminated", 0)[:, None]) * mlp(w, "target_critic", later)[..., 0]
    q = mlp(w, "critic", torch.cat([before, taken], -1))[..., 0]
    loss = F.mse_loss(q, y)
    critic, norm = adam(w, "critic.", loss, 0.02, clip)
    assert float(stats["grad_norm"][0]) == pytest.approx(norm.item())
    assert float(stats["loss_td"][0] / stats["loss_td"][1]) == pytest.approx(loss.item())
    mine = torch.cat([before, policy("agent", 0)], -1)
    value = mlp(critic, "critic", mine).mean()  # of the updated critic
    actor, norm = adam(w, "agent.", -value, 0.01, clip)
    assert float(stats["grad_norm_actor"][0]) == pytest.approx(norm.item())
    assert float(stats["loss_actor"][0] / stats["loss_actor"][1]) == pytest.approx(-value.item())
    assert all(p.grad is None for p in learner.critic.parameters()), "the actor's step computes none"
    targets = [*learner.target_agent.parameters(), *learner.target_critic.parameters()]
    assert not any(p.requires_grad for p in [*targets, *learner._frozen_critic.parameters()])
    got = weights_of(learner)
    expected = {**critic, **actor}
    expected |= {f"target_{n}": 0.9 * w[f"target_{n}"] + 0.1 * value for n, value in expected.items()}
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=0)


def acted(epsilon, calls=400, available=(1, 1, 1, 1), **updates):
    """Return actions and stored vectors of many calls on the same observation of five boards, and the policy."""
    torch.manual_seed(0)
    mac = MACS.get("ddpg_mac")(ddpg_config(**updates), INFO, torch.device("cpu"), None)
    mac.begin(5)
    obs = np.tile(np.linspace(0, 1, 3 * 26, dtype=np.float32).reshape(3, 26), (5, 1, 1))
    seen = Observation(obs, np.zeros((5, 66), np.float32), np.tile(np.array(available, bool), (5, 3, 1)))
    tick = Tick(seen, np.zeros(5, np.int64), np.ones(5, bool))
    explore = None if epsilon is None else Exploration(epsilon, np.random.default_rng(1))
    made = [mac.act(tick, explore) for _ in range(calls)]
    policy = mac.agent(mac._build_inputs(tick)[0]).softmax(-1)[0].detach().numpy()
    return np.stack([d.actions for d in made]), np.stack([d.extras["action_probs"] for d in made]), policy


def test_actions_are_drawn_from_the_softmax_and_that_is_stored():
    actions, vectors, policy = acted(0.0)
    np.testing.assert_allclose(vectors, np.broadcast_to(policy, vectors.shape), rtol=1e-5)
    shares = np.stack([(actions == a).mean((0, 1)) for a in range(4)], -1)
    np.testing.assert_allclose(shares, policy, atol=5 * 0.5 / np.sqrt(2000))
    greedy, _, policy = acted(None, calls=1)
    assert (greedy == policy.argmax(-1)).all(), "without exploration"
    draws = draw(np.array([[[0.0, 2.0, 0.0, 1.0]]]).repeat(1000, 0), np.linspace(0, 1, 1000, endpoint=False)[:, None])
    assert set(draws[:, 0]) == {1, 3} and (draws == 1).mean() == pytest.approx(2 / 3, abs=0.01)
    np.testing.assert_allclose(softmax(np.array([[1000.0, 1000.0]])), 0.5)


def test_exploring_makes_all_vectors_of_a_board_uniform_and_draws_in_proportion():
    actions, vectors, policy = acted(0.25)
    explored = (np.abs(vectors - policy) > 1e-5).any(-1)
    assert (explored.all(-1) | ~explored.any(-1)).all(), "all three snakes of a board, or none"
    assert explored[..., 0].mean() == pytest.approx(0.25, abs=0.05)
    drawn = vectors[explored]
    assert 0 <= drawn.min() < 0.01 < 0.99 < drawn.max() <= 1
    assert drawn.mean() == pytest.approx(0.5, abs=0.03)
    taken = np.take_along_axis(drawn, actions[explored][:, None], 1)[:, 0]
    assert taken.mean() == pytest.approx(((drawn**2).sum(1) / drawn.sum(1)).mean(), abs=0.03)


def test_gumbel_actions_are_one_hot_draws_of_the_same_policy():
    actions, vectors, policy = acted(0.0, gumbel_softmax=True)
    np.testing.assert_array_equal(vectors, np.eye(4)[actions])
    np.testing.assert_allclose(vectors.mean((0, 1)), policy, atol=5 * 0.5 / np.sqrt(2000))
    anything, _, _ = acted(1.0, gumbel_softmax=True)
    np.testing.assert_allclose([(anything == a).mean() for a in range(4)], 0.25, atol=0.03)


@pytest.mark.parametrize("gumbel_softmax", [False, True])
def test_unavailable_actions_are_never_taken(gumbel_softmax):
    for epsilon in (0.5, None):
        actions, vectors, _ = acted(epsilon, calls=40, available=(0, 1, 1, 0), gumbel_softmax=gumbel_softmax)
        assert set(np.unique(actions)) <= {1, 2} and not vectors[..., [0, 3]].any()
    mac = MACS.get("ddpg_mac")(ddpg_config(gumbel_softmax=gumbel_softmax), INFO, torch.device("cpu"), None)
    unlikely = np.tile(np.array([200.0, 0.0, 0.0, 0.0], np.float32), (9, 3, 1))  # a softmax of 0 for the others
    explore = Exploration(0.0, np.random.default_rng(1))
    assert mac.select_actions(unlikely, np.tile([False, True, True, False], (9, 3, 1)), explore)[0].min() == 1


@pytest.mark.parametrize("gumbel_softmax", [False, True])
def test_targets_and_actor_take_available_actions_only(gumbel_softmax):
    learner, episodes, given = make_ddpg(gumbel_softmax=gumbel_softmax), random_steps(1, 200), []
    for episode in episodes:
        episode["avail_actions"][:] = torch.tensor([False, True, True, False])
    for critic in (learner.target_critic, learner._frozen_critic):
        critic.register_forward_pre_hook(lambda _, args: given.append(args[1].detach().clone()))
    learner.update(pack_episodes(episodes), episodes=0)
    assert len(given) == 2 and not any(vectors[..., [0, 3]].any() for vectors in given)


def test_straight_through_is_one_hot_with_the_gradient_of_the_softmax():
    logits = torch.randn(5, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, 4, dtype=torch.float64)
    out = straight_through(logits)
    torch.testing.assert_close(out.detach(), F.one_hot(logits.argmax(-1), 4).double())
    one = torch.autograd.grad((out * weight).sum(), logits)[0]
    torch.testing.assert_close(one, torch.autograd.grad((logits.softmax(-1) * weight).sum(), logits)[0])


def test_gumbel_noise_has_its_distribution_and_changes_with_every_update():
    learner = make_ddpg(gumbel_softmax=True)
    batch, place = pack_episodes(random_steps(1, 400)), torch.arange(400)
    first = learner._steps(batch, place, learner._key(400)).noise
    assert float(first.mean()) == pytest.approx(0.5772, abs=0.06)
    assert float(first.std()) == pytest.approx(np.pi / np.sqrt(6), abs=0.06)
    learner.update(batch, episodes=0)
    assert not torch.equal(first, learner._steps(batch, place, learner._key(400)).noise)


def test_gpus_that_are_named_and_not_there_are_rejected(monkeypatch, tmp_path):
    cases = [("0,9", 1, True, True), ("9", 0, True, True), ("0,2", 2, True, False), ("", 0, True, False)]
    for named, cards, on_this_machine, rejected in [*cases, ("0,9", 0, False, False)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        monkeypatch.setattr(launchers, "has_gpus", lambda answer=on_this_machine: answer)
        with pytest.raises(UserError, match=f"={named}: only {cards} of these") if rejected else nullcontext():
            launchers._check_subset(cards)
    monkeypatch.undo()
    for name in ("null", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert not launchers.has_gpus(str(tmp_path))
    (tmp_path / "nvidia0").touch()
    assert launchers.has_gpus(str(tmp_path))
