"""Continuous actions: densities, what environments play, what is learned, and runs that go on."""

import os
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS
from ddpg_toys import make_ddpg, random_steps
from gymnasium import spaces
from interruption import interrupted_run
from q_toys import BOXED, INFO, make_learner, random_episode, state_of, toy_config
from run_equality import differences
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution
from walk_env import pids_of

import omagd
from omagd.components.gaussian import Gaussian, TanhGaussian
from omagd.config.env_info import ActionBox, EnvInfo
from omagd.controllers.types import Exploration
from omagd.envs import adapters
from omagd.envs.factory import make_env
from omagd.envs.protocol import random_actions
from omagd.learners.synced_optimizer import SKIPPED
from omagd.run.checkpoint.resuming import identity_of
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import launch
from omagd.run.training.checks import complete_args
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

REACH = "--env-config=pettingzoo with env_args.key=foreign_worlds:Reach use_cuda=False".split()
FIGURES = "env_args.key=foreign_worlds:Figures agent=cnn_rnn"
SMALL = "test_nepisode=64 rnn_hidden_dim=32 save_model=False".split()
BOX = BOXED.box
RNG = np.random.default_rng(0)


def with_box(kind, box=BOX):
    selector = kind()
    selector.box = box
    return selector


def reference(kind, outputs):
    """Return torch's own distribution of actions in the environment's units."""
    mean, log_std = outputs.split(BOX.dim, -1)
    center, half = (torch.from_numpy(part).double() for part in BOX.scale)
    steps = [TanhTransform()] * kind.squashes + [AffineTransform(center, half)]
    return Independent(TransformedDistribution(Normal(mean, log_std.exp()), steps), 1)


@pytest.mark.parametrize("kind", [Gaussian, TanhGaussian])
def test_densities_and_entropies_are_torchs(kind):
    torch.manual_seed(0)
    outputs, some = torch.randn(50, 3, 4).double().mul(0.6).clamp(-1, 1).requires_grad_(), torch.ones(50, 3, 4).bool()
    selector, wanted = with_box(kind), reference(kind, outputs)
    actions = wanted.sample()
    got = selector.log_prob(outputs, actions, some)
    torch.testing.assert_close(got, wanted.log_prob(actions), atol=1e-4 * kind.squashes + 1e-10, rtol=1e-6)
    mine, theirs = (torch.autograd.grad(value.sum(), outputs)[0] for value in (got, wanted.log_prob(actions)))
    torch.testing.assert_close(mine, theirs, atol=1e-3 * kind.squashes + 1e-10, rtol=1e-4)
    drawn = reference(kind, outputs.detach()).sample((4000,))
    estimated = -reference(kind, outputs.detach()).log_prob(drawn).mean(0)
    torch.testing.assert_close(selector.entropy(outputs, some), estimated, atol=0.12, rtol=0)
    assert torch.autograd.gradcheck(lambda x: selector.entropy(x, some[:2]), outputs[:2].detach().requires_grad_())


@pytest.mark.parametrize("kind", [Gaussian, TanhGaussian])
def test_what_is_drawn_has_the_density_that_is_learned_from(kind):
    selector, available = with_box(kind), np.ones((400, 3, 4), bool)
    available[:, 1] = [True, False, True, False]  # an agent of one number
    q = RNG.normal(size=(400, 3, 4)).astype(np.float32)
    actions, log_prob = selector.choose(q, available, np.random.default_rng(1))
    assert actions.dtype == log_prob.dtype == np.float32 and (actions[:, 1, 1] == 0.5).all()
    again = selector.log_prob(*(torch.from_numpy(x) for x in (q, actions, available)))
    assert torch.equal(again, torch.from_numpy(log_prob))
    other, where = torch.from_numpy(q).clone(), torch.from_numpy(available)
    other[:, 1, [1, 3]] += 1  # of a number that it does not have
    assert torch.equal(selector.log_prob(other, torch.from_numpy(actions), where), again)
    assert torch.equal(selector.entropy(other, where), selector.entropy(torch.from_numpy(q), where))
    wide = selector.choose(np.full_like(q, 9), np.ones_like(available), np.random.default_rng(1))[0]
    assert kind.squashes or (wide / BOX.scale[1]).std(0).max() < 10, "no deviation is above exp(2)"
    inside = ((actions >= BOX.ends[0]) & (actions <= BOX.ends[1])).all()
    assert inside == kind.squashes
    best = selector.choose(q, available, None)[0][:, 0]
    mean = np.tanh(q[:, 0, :2]) if kind.squashes else q[:, 0, :2]
    np.testing.assert_allclose(best, [1, 0.5] + mean * [2, 0.5], rtol=1e-4, atol=1e-5)


def test_gradients_of_the_loss_are_those_of_its_formula():
    """PPO's clipped loss and its bonus, by autograd over torch's distribution."""
    given = {"learner": "ppo_learner", "action_selector": "softmax", "mixer": "none", "obs_last_action": True}
    config = toy_config(**given, learner_args={"epochs": 1, "entropy": 0.1, "critic": "observation"})
    learner = make_learner(config, dtype=torch.float64, info=BOXED)
    batch = pack_episodes([random_episode(i, 5, info=BOXED) for i in range(4)])
    rows = learner.all_rows(batch)
    loss, _ = learner.step.loss_module(rows)
    names = [p for p in learner.mac.agent.parameters()]
    got = torch.autograd.grad(loss, names)
    outputs = learner.mac.agent(rows.inputs, rows.packing)
    pi = reference(Gaussian, outputs)
    ratio = ((pi.log_prob(rows.actions) - rows.log_prob) * rows.weight).exp()
    policy = -torch.min(ratio * rows.advantage, ratio.clamp(0.8, 1.2) * rows.advantage)
    half = torch.from_numpy(BOX.scale[1]).double().log().sum(-1)
    entropy = Independent(Normal(*(part for part in (outputs[..., :2], outputs[..., 2:].exp()))), 1).entropy() + half
    wanted = torch.autograd.grad(((policy - 0.1 * entropy) * rows.weight).sum(), names)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-7)
    last = rows.inputs.last_action  # in half widths
    assert not last[:4].any() and torch.allclose(
        last[4:8] * torch.tensor([2, 0.5]) + torch.tensor([1, 0.5]), batch["actions"][:4]
    )


def test_matd3_is_what_its_formulas_say():
    """Targets of the smaller critic, the critics' loss, an actor that moves at the second update by its own action."""
    args = {"joint": True, "twin": True, "policy_delay": 2}
    learner = make_ddpg(info=BOXED, learner_args=args, gamma=0.9)
    batch = pack_episodes(random_steps(1, 6, 3, team=True, info=BOXED))
    steps = learner._steps(batch, torch.arange(6), torch.zeros(3, dtype=torch.int64))
    n, agent = 3, learner.mac.agent

    def critics(module, inputs, actions, others):
        values = []
        for i in range(n):
            joint = torch.stack([(actions if j == i else others)[:, j] for j in range(n)], 1).flatten(1)
            own = inputs.features[:, i], actions[:, i], inputs.features.flatten(1), joint
            parts = torch.cat(own, -1).unsqueeze(1)
            values.append(torch.cat([each.trunk(parts, inputs.last_action[:, :1]) for each in module.each], -1)[:, 0])
        return torch.stack(values, 1)

    center, half = (torch.from_numpy(part).double() for part in BOX.scale)
    taken = (batch["actions"][batch.packing.acting].double() - center) / half
    after = learner.target_agent(steps.after).tanh()
    y = steps.reward + 0.9 * (1 - steps.ended)[:, None] * critics(
        learner.target_critic, steps.after, after, after
    ).amin(-1)
    torch.testing.assert_close(learner._targets(steps), y)
    error = (critics(learner.critic, steps.before, taken, taken) - y.unsqueeze(-1)).square()
    loss, _ = learner._critic_step.loss_module(steps.before, steps.taken, y, steps.valid)
    torch.testing.assert_close(loss, error.sum())
    assert not torch.equal(*learner.critic(steps.before, steps.taken, steps.taken)), "two critics"

    value = critics(learner._frozen_critic, steps.before, agent(steps.before).tanh(), taken)[..., 0]
    wanted = torch.autograd.grad(-value.sum(), list(agent.parameters()))
    actor = learner._actor_step.loss_module(
        steps.before, learner._frozen_critic, None, steps.valid, steps.available[0], learner._others(steps.taken)
    )
    torch.testing.assert_close(torch.autograd.grad(actor[0], list(agent.parameters())), wanted)

    states, passes = [state_of(learner)], []
    agent.register_forward_hook(lambda *_: passes.append(learner.updates))
    for _ in range(2):
        stats = learner.update(batch, episodes=0)
        states.append(state_of(learner))
        assert stats[SKIPPED] == (0, 1)
    assert passes == [1]  # the first update needs no gradient of the actor
    moved = [{name.split(".")[0] for name in a if not torch.equal(a[name], b[name])} for a, b in pairwise(states)]
    kinds = [{name for name in each if " " not in name} for each in moved]
    assert kinds == [{"critic"}, {"critic", "agent", "target_agent", "target_critic"}]


def test_noise_on_target_actions_is_normal_and_clipped():
    learner = make_ddpg(info=BOXED, learner_args={"target_noise": 0.2, "target_noise_clip": 0.3})
    batch = pack_episodes(random_steps(1, 200, 9, info=BOXED))
    noise = learner._noise(batch.packing, torch.arange(200), learner._key(200))
    assert noise.mean().abs() < 0.03 and (noise.std() - 1).abs() < 0.03 and noise.unique().numel() == noise.numel()
    moved, little = learner._smoothed(torch.full_like(noise, 0.9), noise), noise.abs() < 1
    torch.testing.assert_close(learner._smoothed(0 * noise, noise)[little], 0.2 * noise[little])
    q, explore = np.zeros((999, 3, 2), np.float32), Exploration(0.1, np.random.default_rng(0))
    explored, _ = learner.mac.select_actions(q, np.ones((999, 3, 4), bool), explore)
    assert ((explored - BOX.scale[0]) / BOX.scale[1]).std() == pytest.approx(0.1, rel=0.1)
    assert (moved.min().item(), moved.max().item()) == (pytest.approx(0.6), 1.0)
    steps = learner._steps(batch, torch.arange(200), learner._key(200))
    assert not torch.equal(learner._targets(steps), learner._targets(replace(steps, noise=None)))


def test_critics_read_no_numbers_that_an_action_does_not_have():
    learner, batch, given = make_ddpg(info=BOXED), pack_episodes(random_steps(1, 20, info=BOXED)), []
    batch["avail_actions"][:, 1, 1::2] = False
    for critic in (learner.target_critic, learner._frozen_critic):
        critic.register_forward_pre_hook(lambda _, args: given.append(args[1].detach().clone()))
    learner.update(batch, episodes=0)
    assert len(given) == 2 and not any(vectors[:, 1, 1].any() for vectors in given)


def test_worlds_say_their_bounds_and_play_within_them():
    env = make_env("pettingzoo", {"key": "foreign_worlds:Reach", "steps": 3}, 2, False)
    info = EnvInfo.from_dict(env.info.to_dict())
    assert (info, info.n_actions, info.box.dim) == (env.info, 4, 2) and "continuous actions of 2 numbers" in info.sizes
    np.testing.assert_array_equal(info.box.ends, [[[-4, 0], [0, -1]], [[4, 2], [1, 1]]])
    env.reset(np.ones(2, bool), np.array([1, 2]))
    assert env.observe().avail_actions[0].tolist() == [[True] * 4, [True, False, True, False]]
    actions = random_actions(env.observe().avail_actions, np.random.default_rng(0), info.box)
    assert actions.shape == (2, 2, 2) and env.step(actions, np.ones(2, bool)).reward.shape == (2,)
    gym = make_env("gymma", {"key": "foreign_worlds:Reach-v0", "time_limit": 1}, 1, False)
    gym.reset(np.ones(1, bool), np.array([1]))
    assert gym.info.box == info.box and gym.step(actions[:1], np.ones(1, bool)).terminated.all()
    space = spaces.Box(-0.1, 0.1, (1,), np.float64)  # 0.1 in float32 is larger
    assert space.contains(adapters._inside(space, np.full(1, 0.1, np.float32)))
    own = ActionBox.of([[-np.inf, 0.0]], [[np.inf, np.inf]])
    assert own.low == ((None, 0.0),) and not own.bounded and own.clip(np.array([[9.0, -9.0]])).tolist() == [[9.0, 0.0]]


@pytest.mark.processes
def test_snapshots_and_workers_replay_numbers():
    """A run that goes on, and a worker that dies, play the same numbers again."""
    args, every = {"key": "foreign_worlds:Reach", "steps": 4}, np.ones(2, bool)
    one, other, apart = (make_env("pettingzoo", args, 2, processes) for processes in (False, False, True))
    rng = np.random.default_rng(5)
    for env in (one, apart):
        env.reset(every, np.array([3, 4]))
    for step in range(3):
        actions = one.info.box.uniform((2,), rng)
        reward, again = (env.step(actions, every).reward for env in (one, apart))
        np.testing.assert_array_equal(reward, again)
        if step == 1:
            other.restore(one.snapshot())
            os.kill(pids_of(apart)[0], signal.SIGKILL)
    np.testing.assert_array_equal(other.step(actions, every).reward, reward)
    assert apart.get_stats()["worker_restarts"] == 1
    apart.close()


LEARNS = {
    "mappo": "t_max=4000 batch_size=64 batch_size_run=64 lr=0.003 obs_last_action=False",
    "maddpg": "t_max=2500 batch_size=64 batch_size_run=16 lr=0.002 updates_per_iteration=4 epsilon_anneal_time=2000",
}


@pytest.mark.parametrize("name", LEARNS)
def test_a_place_that_is_shown_is_reached(name, tmp_path):
    """Doing nothing earns -0.49; agents of other bounds and sizes share a network."""
    words = [f"--config={name}", *REACH, *SMALL, *LEARNS[name].split(), f"local_results_path={tmp_path}"]
    assert omagd.run(config_from(words))["return"] > -0.05


@pytest.mark.parametrize("words", [
    ("--config=ippo", "action_selector=tanh_gaussian", "runner=stream", "env_args.common_reward=False"),
    ("--config=mappo", "share_parameters=False", "env_processes=True"),
    ("--config=matd3",), ("--config=qmix", *FIGURES.split()),
])  # fmt: skip
def test_a_run_that_was_interrupted_ends_with_the_same_bits(words, tmp_path):
    def config(place):
        config, *keys = words
        given = (f"local_results_path={tmp_path / place}", "auto_resume=True", "keep_checkpoints=True")
        return config_from([config, *REACH, *BUDGETS, *keys, *given, "env_args.steps=5", "checkpoint_interval=0"])

    whole = launch(config("whole"), "run")["folder"]
    folder, _ = interrupted_run(config("cut"), 2)
    assert launch(config("cut"), "another")["folder"] == str(folder.path)
    assert differences(Path(whole), folder.path) == []


@pytest.mark.parametrize(("words", "said"), [
    ("qmix", "learner=nq_learner: learns values of discrete actions"),
    ("mappo action_selector=greedy", "env=pettingzoo has continuous actions. Use action_selector=gaussian"),
    ("mappo runner=resident", "runner=resident: env=pettingzoo cannot be played on a device"),
    ("maddpg gumbel_softmax=True", "gumbel_softmax=True: is for discrete actions"),
    ("mappo agent=ddpg", "agent=ddpg: its outputs are not those of learner=ppo_learner"),
    ("maddpg agent=ff", "agent=ff: its outputs are not those of learner=ddpg_learner"),
    ("mappo agent=cnn_rnn", "agent=cnn_rnn reads images, and env=pettingzoo shows none. Use agent=n_rnn"),
    (f"vdn {FIGURES} env_args.size=4", "agent_args.layers: a kernel of 3 finds 2x2 pixels of an image of 4x4. Give"),
    ("mappo env_args.mixed=True", "some agents have Box actions and others Discrete"),
])  # fmt: skip
def test_what_cannot_learn_or_play_numbers_is_one_line(words, said, capsys):
    name, *keys = words.split()
    assert main([f"--config={name}", *REACH, *keys, "--dry-run"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert said in line


def test_a_selector_of_the_other_kind_is_rejected():
    for selector, info in (("tanh_gaussian", INFO), ("greedy", BOXED)):
        with pytest.raises(UserError, match=rf"action_selector={selector}: env=.* actions. Use action_selector="):
            make_learner(toy_config(learner="ppo_learner", mixer="none", action_selector=selector), info=info)


def test_a_loaded_policy_acts_within_the_bounds(tmp_path):
    words = ["--config=mappo", *REACH, *BUDGETS, f"local_results_path={tmp_path}"]
    policy = omagd.load_policy(launch(config_from(words), "run")["folder"])
    policy.agent.fc2.bias.data.fill_(50.0)
    actions = policy.act(np.zeros((2, 2), np.float32), np.ones((2, 4), bool))
    np.testing.assert_array_equal(actions, [[4, 2], [1, 1]])
    env = omagd.make("pettingzoo", key="foreign_worlds:Reach")
    env.reset(seed=1)
    assert env.action_space("agent_0").high.tolist() == [4, 2]
    env.step({name: env.action_space(name).sample() for name in env.agents})


def test_runs_of_ddpg_from_before_these_keys_keep_their_identity():
    config = config_from(["--config=snakes_ddpg", "--env-config=snakes", "with", "use_cuda=False"])
    assert config.learner_args == {} != complete_args(config).learner_args
    assert identity_of(complete_args(config)) == identity_of(config)
    assert identity_of(complete_args(config.model_copy(update={"learner_args": {"twin": True}}))) != identity_of(config)
