"""Targets, selection, memory of the controllers, and the update of the Q-learners."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import ddpg_toys
import graph_toys
import numpy as np
import pytest
import torch
from q_toys import (
    GRAPH,
    INFO,
    LAYOUT,
    SMALL,
    HalvingReconstructor,
    copy_learner,
    equal,
    gradients_of,
    make_learner,
    padded,
    random_episode,
    state_of,
    toy_config,
)
from torch.func import functional_call
from torch.nn import functional as F

import omagd
from omagd.components.action_selectors import EpsilonGreedy, Greedy
from omagd.components.schedules import LinearSchedule
from omagd.components.td_lambda import td_lambda_targets
from omagd.config.env_info import EnvInfo
from omagd.config.loading import resolve
from omagd.controllers import REGISTRY as MACS
from omagd.controllers.basic_mac import last_actions
from omagd.controllers.types import Tick
from omagd.envs.protocol import Observation
from omagd.learners import REGISTRY as LEARNERS
from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.synced_optimizer import lr_scale
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.run.cli.main import config_from
from omagd.run.reporting import plots
from omagd.run.training.build import build_learner
from omagd.run.training.stages.base import PretrainedModules
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import Packing, pack_episodes

torch.set_num_threads(1)
CPU = torch.device("cpu")


def scalar_returns(reward, terminated, values, gamma, td_lambda):
    """The lambda-return of each step of one episode, as a weighted sum of its n-step returns."""
    steps = len(reward)
    result = []
    for t in range(steps):
        n_step = []
        for end in range(t + 1, steps + 1):
            total = sum(gamma ** (k - t) * reward[k] for k in range(t, end))
            ended = any(terminated[t:end])
            n_step.append(total + (0.0 if ended else gamma ** (end - t) * values[end]))
        last = n_step.pop()
        mixed = sum((1 - td_lambda) * td_lambda**i * g for i, g in enumerate(n_step))
        result.append(mixed + td_lambda ** len(n_step) * last)
    return result


@pytest.mark.parametrize("td_lambda", [0.0, 0.6, 1.0])
def test_targets_equal_weighted_n_step_returns(td_lambda):
    rng = np.random.default_rng(0)
    steps, truncated = [7, 7, 4, 1, 0], [False, True, True, False, True]
    packing = Packing(tuple(k + 1 for k in steps))
    reward, values = rng.normal(size=(2, 5, 8))
    terminated = np.zeros((5, 8))
    for i, k in enumerate(steps):
        if k and not truncated[i]:
            terminated[i, k - 1] = 1
    got = packing.pad(
        td_lambda_targets(
            *(packing.pack(torch.from_numpy(x)) for x in (reward, terminated, values)), packing, 0.9, td_lambda
        )
    )
    for i, k in enumerate(steps):
        wanted = scalar_returns(reward[i, :k], terminated[i, :k], values[i], 0.9, td_lambda)
        np.testing.assert_allclose(got[i, :k], wanted, atol=1e-12)
        assert (got[i, k:] == 0).all()


def test_last_actions_stay_within_their_episode():
    episodes = [random_episode(i, length) for i, length in enumerate([2, 5, 1, 5])]
    batch = pack_episodes(episodes)
    got = batch.packing.pad(last_actions(batch["actions"], batch.packing), fill=-7)
    for place, which in enumerate(batch.sample_index):
        actions = episodes[which]["actions"].long()
        assert got[place, 0].eq(-1).all()
        assert torch.equal(got[place, 1 : len(actions)], actions[:-1])


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


def test_schedule_falls_in_a_straight_line_and_stays():
    schedule = LinearSchedule(1.0, 0.05, 1000)
    assert [schedule.value(t) for t in (0, 500, 1000, 9999)] == pytest.approx([1.0, 0.525, 0.05, 0.05])


def reference_values(agent, data):
    """The agent of PyMARL on padded episodes with one-hots, step by step: [B, T, n, A]."""
    batch, steps, n, _ = data["obs"].shape
    cell = torch.nn.GRUCell(SMALL["rnn_hidden_dim"], SMALL["rnn_hidden_dim"]).double()
    hidden = torch.zeros(batch * n, SMALL["rnn_hidden_dim"], dtype=torch.float64)
    last = torch.zeros(batch, n, INFO.n_actions, dtype=torch.float64)
    ids = torch.eye(n, dtype=torch.float64).expand(batch, n, n)
    values = []
    for t in range(steps):
        x = torch.cat([data["obs"][:, t].double(), last, ids], dim=-1).flatten(0, 1)
        x = F.relu(F.linear(x, agent.fc1.weight, agent.fc1.bias))
        hidden = functional_call(cell, dict(agent.rnn.named_parameters()), (x, hidden))
        values.append(agent.fc2(hidden).view(batch, n, -1))
        last = F.one_hot(data["actions"][:, t].long(), INFO.n_actions).double()
    return torch.stack(values, dim=1)


def reference_mix(mixer, qs, state):
    """QMIX one row after another: [B, T] from qs [B, T, n]."""
    hyper, embed = SMALL["hypernet_embed"], SMALL["mixing_embed_dim"]
    weights, biases = (p.split([hyper, hyper, embed, embed]) for p in (mixer.first.weight, mixer.first.bias))
    out = torch.zeros(qs.shape[:2], dtype=qs.dtype)
    for b in range(len(qs)):
        for t in range(qs.shape[1]):
            s = state[b, t]
            w1 = mixer.weight1(F.relu(weights[0] @ s + biases[0])).abs().view(-1, embed)
            w2 = mixer.weight2(F.relu(weights[1] @ s + biases[1])).abs()
            b2 = mixer.bias2(F.relu(weights[3] @ s + biases[3]))
            out[b, t] = F.elu(qs[b, t] @ w1 + weights[2] @ s + biases[2]) @ w2 + b2[0]
    return out


def reference_loss(learner, episodes):
    """PyMARL's loss: half the mean squared error of the (joint) values over the valid steps, on padded episodes."""
    data, alone = padded(episodes), learner.config.mixer == "none"
    state, available = data["state"].double(), data["avail_actions"].bool()
    q = reference_values(learner.mac.agent, data)
    joint = q.gather(-1, data["actions"].long().unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        target_q = reference_values(learner.target_agent, data)
        best = (q if learner.config.double_q else target_q).clone()
        best[~available] = -1e9
        values = target_q.gather(-1, best.argmax(-1, keepdim=True)).squeeze(-1)
        if not alone:
            values = reference_mix(learner.target_mixer, values, state).unsqueeze(-1)
    joint = joint if alone else reference_mix(learner.mixer, joint, state).unsqueeze(-1)
    errors = []
    for i, rows in enumerate(data["rows"].tolist()):
        team = data["reward"][i].unsqueeze(-1).expand(-1, joint.shape[-1])
        reward = episodes[i].get("agent_reward", team).double()
        for agent in range(joint.shape[-1]):
            of_agent = reward[: rows - 1, agent].tolist(), data["terminated"][i].tolist()[: rows - 1]
            wanted = scalar_returns(*of_agent, values[i, :, agent].tolist(), 0.99, 0.6)
            errors += [joint[i, t, agent] - g for t, g in enumerate(wanted)]
    return 0.5 * torch.stack(errors).square().mean()


@pytest.mark.parametrize(
    ("updates", "own_rewards"),
    [
        ({}, False),
        ({"double_q": False}, False),
        ({"grad_norm_clip": 0.5}, False),
        ({"mixer": "none"}, False),
        ({"mixer": "none"}, True),
    ],
)
def test_update_equals_a_padded_reference(updates, own_rewards):
    episodes = [random_episode(i, length, truncated=i % 2 == 1) for i, length in enumerate([3, 6, 1, 6, 4])]
    if own_rewards:
        episodes = [{**e, "agent_reward": torch.randn(len(e["reward"]), INFO.n_agents)} for e in episodes]
    config = toy_config(**{"grad_norm_clip": 1e9, **updates})
    learner, other = (make_learner(config, dtype=torch.float64, seed=seed) for seed in (0, 5))
    learner.target_agent.load_state_dict(other.mac.agent.state_dict())
    learner.target_mixer.load_state_dict(other.mixer.state_dict())
    loss = reference_loss(learner, episodes)
    wanted = torch.autograd.grad(loss, [*learner.mac.agent.parameters(), *learner.mixer.parameters()])
    norm = torch.cat([gradient.flatten() for gradient in wanted]).norm().item()
    assert norm > 0.5 or config.grad_norm_clip > 1  # or nothing would be clipped
    grads, stats = gradients_of(learner, episodes)
    for name in ("loss_td", "td_error_abs"):
        assert stats[name][1] == 20
        assert float(stats[name][0] / stats[name][1]) == pytest.approx(loss.item(), rel=1e-6)
    assert float(stats["grad_norm"][0]) == pytest.approx(norm, rel=1e-6)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want * min(1.0, config.grad_norm_clip / norm), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("parts", [2, 5, 99])
def test_parts_of_a_batch_add_up_to_the_whole(parts):
    episodes = [random_episode(i, length) for i, length in enumerate([5, 9, 0, 3, 3, 1, 12])]
    wanted, stats = gradients_of(make_learner(toy_config(grad_norm_clip=1e9), dtype=torch.float64), episodes)
    config = toy_config(grad_norm_clip=1e9, accumulate=parts, batch_size=128)
    got, of_parts = gradients_of(make_learner(config, dtype=torch.float64), episodes)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)
    for name, pair in stats.items():
        torch.testing.assert_close(of_parts[name], pair)


def test_warm_up_and_a_batch_without_a_step_change_nothing():
    torch.manual_seed(3)
    learner = make_learner(toy_config(agent="gnn_rnn", mac="gnn_graph_mac"))
    before, random_state = state_of(learner), torch.get_rng_state()
    learner.warm_up()
    assert torch.equal(random_state, torch.get_rng_state())
    stats = learner.update(pack_episodes([random_episode(0, 0)]), episodes=0)
    assert stats["loss_td"][1] == 0
    assert equal(before, state_of(learner)), "the optimizer's state included"


@pytest.mark.parametrize("updates", [{"target_update_interval": 20}, {"target_update_updates": 4}])
def test_a_restored_learner_continues_as_if_never_stopped(updates):
    config = toy_config(**updates)
    batches = [pack_episodes([random_episode(10 * i + k, 3 + k) for k in range(4)]) for i in range(7)]
    learner, resumed = make_learner(config), make_learner(config, seed=9)
    for i, batch in enumerate(batches):
        learner.update(batch, episodes=8 * i)
        if i == 4:  # targets were copied at 24 episodes, or at update 4: the next copy depends on when
            copy_learner(learner, resumed)
        if i > 4:
            resumed.update(batch, episodes=8 * i)
    assert equal(state_of(learner), state_of(resumed))


@pytest.mark.parametrize(
    ("updates", "copies"),
    [({"target_update_interval": 20}, [2, 4]), ({"target_update_updates": 2}, [1, 3, 5])],
)
def test_targets_are_copied_when_due(updates, copies):
    learner = make_learner(toy_config(**updates))
    batch = pack_episodes([random_episode(k, 3) for k in range(2)])
    copied = []
    for i in range(6):
        learner.update(batch, episodes=10 * i)
        for trained, target in ((learner.mac.agent, learner.target_agent), (learner.mixer, learner.target_mixer)):
            copied += [i] if equal(trained.state_dict(), target.state_dict()) else []
    assert copied == [i for i in copies for _ in ("agent", "mixer")]


@pytest.mark.parametrize("name", ["qmix", "vdn", "iql", "gnn_qmix", "gnn_vdn", "omagd", "omagd_small", "snakes_vdn"])
def test_presets_of_other_than_the_published_sizes_clip_as_they_were_tuned(name):
    """They were tuned with a loss without the factor 1/2, whose gradient 10 clips as 5 clips that of the halved one."""
    config = resolve(name, "snakes" if name.startswith("snakes") else "skirmish", {})
    published = (config.batch_size_run, config.batch_size, config.updates_per_iteration) == (8, 128, 1)
    assert config.grad_norm_clip == (10.0 if published else 5.0)


def test_learners_of_all_stages_scale_their_learning_rates_when_asked(monkeypatch):
    assert [lr_scale(toy_config(lr_scaling=name), 4) for name in ("none", "sqrt", "linear")] == [1.0, 2.0, 4.0]
    monkeypatch.setattr(Dist, "wrap", lambda self, module, *_: module)  # which needs a process group
    dist = Dist(0, 4)
    config = graph_toys.toy_config(lr_scaling="linear", graph_lr=0.01)
    tokenizer, predictor = graph_toys.toy_modules(config)
    stage1 = TokenizerLearner(tokenizer, config, graph_toys.INFO, dist)
    stage2 = PredictorLearner(predictor, tokenizer, config, graph_toys.INFO, dist)
    qmix = make_learner(toy_config(lr_scaling="linear", lr=0.02), dist=dist)
    ddpg = ddpg_toys.make_ddpg(dist, lr_scaling="linear", lr=0.03, critic_lr=0.05)
    optimizers = [stage1.optimizer, stage2.optimizer, qmix.optimizer, ddpg.optimizer, ddpg.critic_optimizer]
    rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.04, 0.04, 0.08, 0.12, 0.2])


def test_ranks_begin_with_equal_weights_and_random_numbers_of_their_own(monkeypatch):
    monkeypatch.setattr(Dist, "wrap", lambda self, module, *_: module)  # which needs a process group
    states, seeds = [], []
    for rank in range(2):
        torch.manual_seed(rank)
        session = SimpleNamespace(config=toy_config(), info=INFO, dist=Dist(rank, 2))
        states.append(state_of(build_learner(session, PretrainedModules())[1]))
        seeds.append(torch.initial_seed())
    assert equal(*states)
    assert seeds[0] != seeds[1], "dropout"


def test_components_say_what_they_need():
    flat, config = EnvInfo("flat", "flat", 3, 9, LAYOUT.obs_dim, 7, 12), toy_config()
    for learner in ("nq_graph_learner", "nq_graph_learner_ddp"):
        with pytest.raises(UserError, match=f"{config.learner} .* entity layout; env=skirmish"):
            LEARNERS.get(learner)(MACS.get("n_mac")(config, flat, CPU), config, flat, Dist())
    for mac in ("n_graph_mac", "gnn_graph_mac"):
        with pytest.raises(UserError, match=f"mac={mac} .* entity layout"):
            MACS.get(mac)(toy_config(mac=mac), flat, CPU)
    with pytest.raises(UserError, match="mac=n_mac"):
        MACS.get("n_mac")(config, INFO, CPU, HalvingReconstructor())
    odd = EnvInfo("odd", "odd", 3, 11, INFO.obs_dim, 7, 12, n_normal_actions=6, layout=INFO.layout)
    for info, updates, message in ((flat, {}, "entity layout"), (odd, {"gnn_readout": "entity"}, "gnn_readout=pool")):
        with pytest.raises(UserError, match=message):
            AGENTS.get("gnn_rnn")(toy_config(agent="gnn_rnn", **updates), info)


def tick_of(episodes, t):
    rows = [{name: value[min(t, len(value) - 1)].numpy() for name, value in e.items()} for e in episodes]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    seen = Observation(stacked["obs"], stacked["state"], stacked["avail_actions"].astype(bool), -stacked["obs"])
    return Tick(seen, np.full(len(episodes), t), np.ones(len(episodes), bool)), stacked


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize(("mac_name", "agent"), [("n_graph_mac", "n_rnn"), ("gnn_graph_mac", "gnn_rnn")])
def test_learner_reads_what_the_controller_acted_on(mac_name, agent, marks):
    config = toy_config(**GRAPH, mac=mac_name, agent=agent, mark_guesses=marks)
    reconstructor = HalvingReconstructor()
    mac = MACS.get(mac_name)(config, INFO, CPU, reconstructor)
    episodes = [random_episode(i, 4) for i in range(3)]
    mac.begin(3)
    mac.reset(np.ones(3, bool))
    assert reconstructor.resets == [[True, True, True]]
    for t in range(5):
        tick, stacked = tick_of(episodes, t)
        decision = mac.act(tick, None)
        for i, episode in enumerate(episodes):
            episode["actions"][t] = torch.from_numpy(decision.actions[i])
            assert torch.equal(episode["recon"][t], torch.from_numpy(decision.extras["recon"][i]))
    batch = pack_episodes(episodes)
    q = mac.agent(mac.inputs(batch), batch.packing).detach()
    best = q.masked_fill(batch["avail_actions"] == 0, -torch.inf).argmax(-1)
    assert torch.equal(best, batch["actions"].long())


def test_full_obs_is_read_by_the_upper_bound_alone():
    batch = pack_episodes([{**random_episode(0, 3), "full_obs": torch.full((4, 3, LAYOUT.obs_dim), 9.0)}])
    for full in (False, True):
        mac = MACS.get("gnn_graph_mac")(toy_config(mac="gnn_graph_mac", use_full_obs=full), INFO, CPU)
        assert mac.wants_full_obs == full
        assert bool((mac.inputs(batch).features == 9.0).all()) == full


def test_the_copy_that_acts_is_brought_up_to_date():
    mac = MACS.get("n_mac")(toy_config(), INFO, CPU)
    mac._actor, mac._copied = copy.deepcopy(mac.agent), True  # as with cpu_inference beside a GPU
    for parameter in mac.agent.parameters():
        parameter.data.add_(1.0)
    mac.begin(2)
    assert equal(mac._actor.state_dict(), mac.agent.state_dict())


def test_reset_forgets_one_slot_and_leaves_the_other():
    mac, episodes = MACS.get("n_mac")(toy_config(), INFO, CPU), [random_episode(0, 6), random_episode(0, 6)]
    mac.begin(2)
    start = mac._hidden.clone()
    for t in range(3):
        mac.act(tick_of(episodes, t)[0], None)
    kept = mac._hidden.clone()
    mac.reset(np.array([True, False]))
    assert torch.equal(mac._hidden[0], start[0]) and torch.equal(mac._hidden[1], kept[1])
    assert mac._last_action[0].eq(-1).all() and mac._last_action[1].ge(0).all()


@pytest.mark.parametrize(
    ("preset", "env", "wanted", "updates"),
    [
        ("vdn", "matrix_game", 8.0, "env_args.payoff=monotonic t_max=2560 epsilon_anneal_time=1280"),
        ("iql", "matrix_game", 8.0, "env_args.payoff=monotonic t_max=2560 epsilon_anneal_time=1280"),
        ("qmix", "memory_game", 1.0, "t_max=14400 epsilon_anneal_time=7200"),
    ],
)
def test_tiny_environments_are_learned(preset, env, wanted, updates, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "curves", lambda *_: None)
    words = "run=default batch_size_run=32 batch_size=32 buffer_size=32 lr=0.01 rnn_hidden_dim=32 seed=1 use_cuda=False"
    words += " mixing_embed_dim=4 hypernet_embed=6 target_update_updates=10 epsilon_finish=0.1 test_interval=100000"
    words += f" log_interval=100000 save_model=False enable_checkpointing=False local_results_path={tmp_path} {updates}"
    config = config_from([f"--config={preset}", f"--env-config={env}", "with", *words.split()])
    assert omagd.run(config)["stages"]["stage3"]["values"]["test_return_mean"] == pytest.approx(wanted)
