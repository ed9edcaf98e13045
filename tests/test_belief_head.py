"""The belief head: its loss, whom it trains, what it costs those who act, and where its beliefs are shown."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS
from command_harness import records
from fixed_toys import CODES
from plugin_toys import own_names
from preset_toys import Made, config_of
from q_toys import INFO, LAYOUT, equal, foggy, gradients_of, make_learner, random_episode, toy_config
from torch import Tensor

from omagd.config.loading import resolve
from omagd.controllers.types import Exploration, Tick
from omagd.envs.factory import make_env
from omagd.envs.protocol import Observation
from omagd.lab.beliefs import judge as judging
from omagd.lab.beliefs.judge import HeadBeliefs
from omagd.learners.belief_loss import BeliefLoss
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.agents import agent as agents
from omagd.modules.agents.agent import AgentInputs, NRNNAgent
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.run.api import LoadedPolicy, load_policy
from omagd.run.cli.main import main
from omagd.run.recording.recording import Recording
from omagd.run.training.build import PretrainedModules, build_mac, load_pretrained
from omagd.runners import REGISTRY as RUNNERS
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes
from omagd.utils.seeding import EpisodeSeeds

CPU = torch.device("cpu")
BELIEF = {"belief_loss": "features", "grad_norm_clip": 1e9}
TOKENS = {**BELIEF, "belief_loss": "tokens", "pretrained_tokenizer_path": "given", **CODES}
PPO = {"learner": "ppo_learner", "action_selector": "softmax", "mixer": "none", "learner_args": {"epochs": 1}}
PLAYED = {"evaluate": True, "checkpoint_path": "a run"}
N, REAL = INFO.n_agents, feature_mask(LAYOUT).numpy()


def batches(count: int) -> list[list[dict[str, Tensor]]]:
    return [[foggy(random_episode(10 * i + j, k)) for j, k in enumerate((9, 4, 1, 7))] for i in range(count)]


def cases_of(
    episodes: list[dict[str, Tensor]], config: Any, every: int
) -> list[tuple[int, int, int, int, bool, np.ndarray]]:
    """Return episode, step, agent, other unit, whether it lives and its features of each case, as the docs say."""
    found = []
    for number, episode in enumerate(episodes):
        obs, full = (obs_to_nodes(episode[name], LAYOUT).numpy() for name in ("obs", "full_obs"))
        for step in range(0, len(obs) - 1, every):  # the last row has no step
            for agent in range(N):
                if not episode["obs"][step, agent].any():
                    continue
                for unit in range(1, LAYOUT.n_nodes):
                    if config.belief_units == "all" or not obs[step, agent, unit].any():
                        true = full[step, agent, unit].astype(np.float64)
                        found.append((number, step, agent, unit - 1, bool(true.any()), true))
    return found


def expected(learner: Any, seen: list[list[dict[str, Tensor]]]) -> tuple[float, float, int, np.ndarray, np.ndarray]:
    """Return loss, its part of living and count of cases, summed over the last batch; mean and deviation after all."""
    head, config, episodes = learner.mac.head, learner.config, seen[-1]
    moments = np.zeros((3, head.n_units, head.dim))
    followed = config.belief_every if config.learner == "nq_learner" else 1  # PPO reads other rows each time
    for earlier in seen:
        for unit in range(head.n_units):
            x = np.array([c[5][: head.dim] for c in cases_of(earlier, config, followed) if c[3] == unit and c[4]])
            if len(x):
                now = np.stack([np.ones(head.dim), x.mean(0), (x**2).mean(0)])
                moments[:, unit] = 0.99 * moments[:, unit] + 0.01 * now
    mean = moments[1] / moments[0]
    deviation = np.sqrt(np.maximum(moments[2] / moments[0] - mean**2, 0))
    deviation[(deviation <= 1e-3) | ~REAL[1:, : head.dim].astype(bool)] = 0
    batch = pack_episodes(episodes)
    with torch.no_grad():
        _, hidden = learner.mac.agent.unroll(learner.mac.inputs(batch), batch.packing)
        outputs = [batch.packing.pad(part).numpy() for part in head(hidden)]
    places = {episode: place for place, episode in enumerate(batch.sample_index)}
    total, alive, cases = 0.0, 0.0, cases_of(episodes, config, config.belief_every)
    for number, step, agent, unit, lives, x in cases:
        out, *z = (part[places[number], step, agent, unit] for part in outputs)
        if config.belief_loss == "tokens":
            code = int(head._tokenizer[0].ids(torch.tensor(x, dtype=torch.float32))) if lives else len(out) - 1
            total += np.log(np.exp(out).sum()) - out[code]
            continue
        alive += np.log1p(np.exp(-out if lives else out))
        varies = deviation[unit] > 0
        if lives and varies.any():
            true = (x[: head.dim] - mean[unit])[varies] / deviation[unit][varies]
            total += ((z[0][varies] - true) ** 2).mean()
    return total + alive, alive, len(cases), mean, deviation


@pytest.mark.parametrize(("learner", "kind", "units", "every"), [
    ({}, BELIEF, "unseen", 3), ({}, BELIEF, "all", 1), (PPO, BELIEF, "all", 3),
    ({}, TOKENS, "unseen", 3), (PPO, TOKENS, "all", 1),
], ids=["QMIX", "QMIX all", "PPO", "tokens", "tokens PPO"])  # fmt: skip
def test_the_loss_and_its_statistics_are_those_of_a_loop_over_units(learner, kind, units, every):
    config = toy_config(**{**kind, **learner, "belief_every": every, "belief_units": units})
    trained, given = make_learner(config, dtype=torch.float64), batches(3)
    for episode in (episode for episodes in given for episode in episodes):  # one feature does not vary
        for field in (episode["obs"], episode["full_obs"]):
            field[..., LAYOUT.move_dim] = (field[..., LAYOUT.move_dim] != 0).to(field.dtype)
    for episode in given[1]:  # the last enemy lives in no case of an update
        last = LAYOUT.move_dim + (LAYOUT.n_enemies - 1) * LAYOUT.enemy_dim
        episode["full_obs"][..., last : last + LAYOUT.enemy_dim] = 0
    for update, episodes in enumerate(given, start=1):
        total, alive, count, mean, deviation = expected(trained, given[:update])
        stats = trained.update(pack_episodes(episodes), episodes=0)
        assert int(stats["loss_belief"][1]) == count > 50
        assert float(stats["loss_belief"][0]) == pytest.approx(total, rel=1e-9)
        assert kind is TOKENS or float(stats["belief_alive"][0]) == pytest.approx(alive, rel=1e-9)
    if kind is BELIEF:
        np.testing.assert_allclose(trained.mac.head.mean.numpy(), mean, atol=1e-12)
        np.testing.assert_allclose(trained.mac.head.deviation.numpy(), deviation, atol=1e-9)
        assert (deviation > 0).any() and (deviation == 0).any()
    assert_beliefs_are_what_the_head_says(trained.mac, pack_episodes(given[-1]), mean, deviation)


def assert_beliefs_are_what_the_head_says(mac: Any, batch: Any, mean: np.ndarray, deviation: np.ndarray) -> None:
    head, (missing, belief) = mac.head, HeadBeliefs(mac, mac.head).beliefs(batch)
    assert not mac.agent.training, "measured as it acts, without dropout"
    with torch.no_grad():
        outputs = [part.numpy() for part in head(mac.agent.unroll(mac.inputs(batch), batch.packing)[1])]
    for case, (row, agent, node) in enumerate(missing.nonzero().tolist()):
        out, *z = (part[row, agent, node - 1] for part in outputs)
        if head.tokens:
            *lives, p_dead = np.exp(out) / np.exp(out).sum()
            codes, share = head._tokenizer[0].table().numpy(), np.array(lives) / (1 - p_dead)
            features = share @ codes
            wanted = np.sqrt(share @ (codes - features) ** 2)
            np.testing.assert_allclose(belief.spread[case], wanted, atol=1e-5)
        else:
            p_dead, features = 1 / (1 + np.exp(out)), mean[node - 1] + deviation[node - 1] * z[0]
        assert float(belief.p_dead[case]) == pytest.approx(p_dead)
        found = belief.features[case, : len(features)]
        np.testing.assert_allclose(found, features * (p_dead <= 0.5), atol=1e-5)


@pytest.mark.parametrize("words", [{}, {"learner": "wqmix_learner", "learner_args": {"weighting": "central"}}])
def test_the_weighted_mean_over_cases_is_added_to_the_other_loss(words):
    """Gradients of the agent are those of both losses; those of the mixer are as without it."""
    (episodes,) = batches(1)
    alone = make_learner(toy_config(grad_norm_clip=1e9, **words), dtype=torch.float64)
    both = make_learner(toy_config(**{**BELIEF, **words, "belief_weight": 0.3}), dtype=torch.float64)
    batch = pack_episodes(episodes)
    one = toy_config(**{**BELIEF, "belief_weight": 1.0})
    loss, cases = BeliefLoss(both.mac.head, one), both.belief.cases(batch)
    loss.observe([cases], Dist())
    _, hidden = both.mac.agent.unroll(both.mac.inputs(batch), batch.packing)
    weighted = 0.3 * loss(hidden, cases)[0] / cases.counted.sum()
    parts = list(both.mac.agent.parameters())
    wanted = torch.autograd.grad(weighted, parts, allow_unused=True)
    reached = [
        name for (name, _), grad in zip(both.mac.agent.named_parameters(), wanted, strict=True) if grad is not None
    ]
    assert {name.partition(".")[0] for name in reached} == {"fc1", "rnn"}
    before, _ = gradients_of(alone, episodes)
    after, _ = gradients_of(both, episodes)
    for number, (one, other) in enumerate(zip(before, after[: len(before)], strict=True)):
        more = wanted[number] if number < len(parts) and wanted[number] is not None else 0.0
        torch.testing.assert_close(other, one + more, atol=1e-12, rtol=1e-9)
    assert all(grad.abs().max() > 0 for grad in after[len(before) :])


REMEMBER = [name for name in own_names(AGENTS) if AGENTS.get(name)(toy_config(agent=name), INFO).init_hidden(1).numel()]


@pytest.mark.parametrize(("name", "share"), [*((name, True) for name in REMEMBER), ("n_rnn", False)])
def test_every_agent_with_memory_shows_its_hidden_states(name, share, monkeypatch):
    """`unroll` is `forward` and `step`, also in blocks; the gradient of the loss reaches the agent's weights."""
    monkeypatch.setattr(agents, "STEPS_AT_ONCE", 3)
    (episodes,) = batches(1)
    batch, gradients = pack_episodes(episodes), []
    for blocks in (False, True):
        words = {"agent": name, "share_parameters": share, "enable_gradient_checkpointing": blocks}
        learner = make_learner(toy_config(**BELIEF, **words), dtype=torch.float64)
        agent, inputs = learner.mac.agent, learner.mac.inputs(batch)
        values, hidden = agent.unroll(inputs, batch.packing)
        assert torch.equal(values, agent(inputs, batch.packing))
        state, rows = agent.init_hidden(len(episodes)), iter(torch.arange(len(hidden)))
        for size in batch.packing.batch_sizes:
            now = torch.stack([next(rows) for _ in range(size)])
            q, state = agent.step(inputs.rows(now), state[:size])
            torch.testing.assert_close((q, state), (values[now], hidden[now]), atol=1e-12, rtol=1e-9)
        cases = learner.belief.cases(batch)
        learner.belief.observe([cases], Dist())
        found = torch.autograd.grad(learner.belief(hidden, cases)[0], list(agent.parameters()), allow_unused=True)
        gradients.append([grad for grad in found if grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)
    assert sum(float(grad.abs().max()) > 0 for grad in gradients[0]) > 4


def acts(mac: Any, episode: dict[str, Tensor]) -> np.ndarray:
    """Return the actions of a team that evaluates on what an episode shows."""
    mac.begin(1)
    chosen = []
    for step in range(len(episode["obs"])):
        row = {name: episode[name][step : step + 1].numpy() for name in ("obs", "state", "avail_actions", "full_obs")}
        seen = Observation(row["obs"], row["state"], row["avail_actions"].astype(bool), row["full_obs"])
        chosen.append(mac.act(Tick(seen, np.array([step]), np.ones(1, bool)), None).actions)
    return np.concatenate(chosen)


def blinded(episodes: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{**episode, "full_obs": torch.full_like(episode["full_obs"], np.nan)} for episode in episodes]


@pytest.mark.parametrize("learner", [{}, PPO], ids=["QMIX", "PPO"])
def test_only_the_loss_reads_what_agents_do_not_see(learner):
    given = batches(3)
    team = make_learner(toy_config(**BELIEF, **learner))
    plain, blind = (make_learner(toy_config(**learner)) for _ in range(2))
    for episodes in given:
        team.update(pack_episodes(episodes), episodes=0)
        plain.update(pack_episodes(episodes), episodes=0)
        blind.update(pack_episodes(blinded(episodes)), episodes=0)
    assert equal(weights(plain), weights(blind))
    assert not equal(weights(team), weights(plain))
    for episode, unseen in zip(given[0], blinded(given[0]), strict=True):
        assert np.array_equal(acts(team.mac, episode), acts(team.mac, unseen))


def weights(learner: Any) -> dict[str, Tensor]:
    parts = {name: module for name, module in learner.modules().items() if name != "belief_head"}
    return {f"{part}.{name}": value for part, module in parts.items() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("preset", ["qmix", "mappo"])
def test_agent_and_mixer_begin_as_they_do_without_it(preset):
    with_head, without = (Made(config_of(preset, belief_loss=kind), CPU).learner for kind in ("features", "none"))
    assert equal(weights(with_head), weights(without))
    assert set(with_head.modules()) - set(without.modules()) == {"belief_head"}
    again = Made(config_of(preset, belief_loss="features"), CPU).learner
    assert equal(with_head.modules()["belief_head"].state_dict(), again.modules()["belief_head"].state_dict())


def test_truth_that_is_not_finite_does_not_stay_in_the_statistics():
    learner, (first, second) = make_learner(toy_config(**BELIEF)), batches(2)
    learner.update(pack_episodes(first), episodes=0)
    kept = {name: value.clone() for name, value in learner.mac.head.state_dict().items()}
    learner.update(pack_episodes(blinded(second)), episodes=0)
    assert equal(kept, dict(learner.mac.head.state_dict()))
    learner.update(pack_episodes(second), episodes=0)
    assert all(value.isfinite().all() for value in learner.mac.head.state_dict().values())
    assert not equal(kept, dict(learner.mac.head.state_dict()))


@pytest.mark.parametrize(("env", "words", "message"), [
    ("skirmish", {"agent": "ff"}, "agent=ff has no memory"),
    ("matrix_game", {}, "an entity layout; env=matrix_game has none"),
    ("skirmish", {"belief_loss": "tokens"}, "pretrained_tokenizer_path is empty"),
    ("skirmish", {"use_graph_reconstruction": True, "mac": "n_graph_mac", "learner": "nq_graph_learner"},
     "use_graph_reconstruction=True"),
    ("skirmish", {"use_full_obs": True}, "use_full_obs=True"),
    ("skirmish", {"use_team_obs": True}, "use_team_obs=True"),
    ("skirmish", {"learner": "ddpg_learner", "mac": "ddpg_mac", "agent": "ddpg", "obs_last_action": False},
     "learner=ddpg_learner has no such loss"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_named_before_a_folder_exists(env, words, message, tmp_path, capsys):
    given = {"belief_loss": "features", "local_results_path": tmp_path / "results", "t_max": 20, **words}
    base = "qmix", f"--env-config={env}"
    assert main([f"--config={base[0]}", base[1], "with", *(f"{key}={value}" for key, value in given.items())]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert any(f"belief_loss={given['belief_loss']}" in line and message in line for line in lines), lines
    assert not list(tmp_path.iterdir())


class Doubling(NRNNAgent):
    """A plug-in with another forward, and with a step that fits."""

    def forward(self, inputs, packing):
        return 2 * super().forward(inputs, packing)

    def step(self, inputs, hidden):
        values, hidden = super().step(inputs, hidden)
        return 2 * values, hidden


def test_an_agent_that_would_train_with_another_forward_is_rejected(monkeypatch):
    monkeypatch.setitem(AGENTS._objects, "doubling", Doubling)
    with pytest.raises(
        UserError, match=r"^belief_loss=features: agent=doubling: Doubling has a forward of its own"
    ) as e:
        make_learner(toy_config(agent="doubling", share_parameters=False, **BELIEF))
    assert "\n" not in e.value.render()
    make_learner(toy_config(agent="doubling"))


def team_of(map_name: str, slots: int, **words: Any) -> tuple[Any, Any, Any]:
    """Return an environment, a configuration and a team whose untrained head says something of every unit."""
    words = {"belief_loss": "features", "rnn_hidden_dim": 8, "env_args.map_name": map_name, **words}
    config = resolve("qmix", "skirmish", {**words, "batch_size_run": slots})
    env = make_env("skirmish", {"map_name": map_name}, slots, processes=False)
    mac: Any = build_mac(config, env.info, CPU, PretrainedModules())
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in (*mac.agent.parameters(), *mac.head.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=draws) * 0.5)
        mac.head.mean.copy_(torch.rand(mac.head.mean.shape, generator=draws))
        mac.head.deviation.copy_(torch.rand(mac.head.mean.shape, generator=draws))
        mac.head.lives.bias += 1.0
    return env, config, mac


def test_what_pictures_fill_in_is_what_metrics_judge():
    """Episodes of random actions, filled in as a whole."""
    env, config, mac = team_of("3m_mixed_sight6", 3)
    plays = RUNNERS.get("parallel")(env, config, env.info, EpisodeSeeds(1, "train"))
    episodes = plays.run(mac, explore=Exploration(0.7, np.random.default_rng(0)), full_obs=True).episodes
    env.close()
    batch, layout = pack_episodes(episodes), env.info.layout
    believer, compared = HeadBeliefs(mac, mac.head), 0
    missing, belief = believer.beliefs(batch)
    shown = torch.zeros((*missing.shape, layout.node_dim))
    shown[missing] = belief.features * feature_mask(layout)[missing.nonzero()[:, 2]]
    for place, number in enumerate(batch.sample_index):
        made, guessed = believer.filled(batch, place)
        for step in range(batch.packing.lengths[place] - 1):
            row = int(((batch.packing.episode == place) & (batch.packing.step == step)).nonzero())
            assert torch.equal(guessed[step], missing[row])
            nodes, seen = obs_to_nodes(made[step], layout), obs_to_nodes(episodes[number]["obs"][step], layout)
            torch.testing.assert_close(nodes, torch.where(missing[row][..., None], shown[row], seen))
            compared += int((nodes[missing[row]] != 0).any(-1).sum())
    assert compared > 50


def test_a_loaded_team_says_what_it_remembers_and_computes_nothing_more_to_act(monkeypatch):
    env, config, mac = team_of("3m_mixed_sight6", 1)
    gone = resolve("qmix", "skirmish", {"belief_loss": "tokens", "pretrained_tokenizer_path": "gone", **PLAYED})
    assert load_pretrained(gone, env.info, CPU).tokenizer is None  # a trained head needs it no more
    policy, agent = LoadedPolicy(config, env.info, mac), copy.deepcopy(mac.agent)
    hidden = agent.init_hidden(1)
    env.reset(np.ones(1, bool), np.array([3]))
    last, n_guessed, calls = torch.full((1, env.info.n_agents), -1), 0, []
    for module, name in ((mac.head, "belief"), (mac.actor, "step"), (mac.agent, "step")):
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, plain=plain, name=name: calls.append(name) or plain(*given))
    for _ in range(8):
        seen = env.observe()
        actions = policy.act(seen.obs[0], seen.avail_actions[0])
        assert calls == ["step"]  # once, and without the head
        nodes, guessed = policy.beliefs()
        obs = torch.from_numpy(np.array(seen.obs))
        hidden = agent.step(AgentInputs(obs, last), hidden)[1]
        made, missing = mac.head.filled(obs, hidden)
        calls.clear()
        assert np.array_equal(guessed, missing[0])
        np.testing.assert_allclose(nodes, obs_to_nodes(made[0].detach(), env.info.layout), atol=1e-6)
        last, n_guessed = torch.from_numpy(actions[None]), n_guessed + guessed.sum()
        env.step(actions[None], np.ones(1, bool))
    assert n_guessed > 10
    env.close()


def evaluated(run: Path, place: Path, *words: str) -> Path:
    """Evaluate a run; return the folder of the evaluation."""
    small = "eval_report_episodes=2", "batch_size_run=2", "save_replay=True", f"local_results_path={place}"
    assert main(["evaluate", str(run), *small, *words]) == 0
    (made,) = place.glob("*_evaluation_*/")
    return made


def beliefs_in(evaluation: Path) -> int:
    """Return how many beliefs of single units an evaluation has recorded."""
    recording = Recording.read(evaluation / "replays" / "episodes.json.gz")
    return sum(len(each) for e in recording.episodes for moment in e.moments for each in moment.beliefs)


@pytest.mark.processes
def test_a_trained_team_is_evaluated_and_watched(qmix_run, tmp_path, capsys, monkeypatch):
    """Of a run with a head beliefs are shown, and judged at its end; a run without one has none, though asked."""
    used, fit, judge = [], judging.fit_baselines, judging.judge
    monkeypatch.setattr(judging, "fit_baselines", lambda *a: used.extend((*a[0](), *a[1]())) or fit(*a))
    monkeypatch.setattr(judging, "judge", lambda *a: used.extend(a[1]) or judge(*a))
    words = "with", "env_args.map_name=3m_mixed_sight6", "belief_loss=features", f"local_results_path={tmp_path}"
    assert main(["--config=qmix", "--env-config=skirmish", *words, *BUDGETS, "unique_token=head", "t_max=400"]) == 0
    run = tmp_path / "head"
    assert list(run.glob("models/*/belief_head.th"))
    assert len({batch["obs"].numpy().tobytes() for batch in used}) == 3, "episodes that judge are fitted to by nothing"
    assert main(["beliefs", f"--reconstruction={run}", "--episodes=8"]) == 0
    assert any(line.get("policy/error", 0) > 0 for line in records(run))
    assert "graph_pretrain_eval_episodes" not in capsys.readouterr().err, "it is read"
    assert beliefs_in(evaluated(run, tmp_path / "1")) > 0
    assert main(["watch", str(run), "--episodes=1", "-o", str(tmp_path / "w.html")]) == 0
    assert beliefs_in(evaluated(Path(qmix_run), tmp_path / "2", "belief_loss=features")) == 0
    assert "error" not in capsys.readouterr().err
    for file in run.glob("models/*/belief_head.th"):
        file.unlink()
    assert main(["beliefs", f"--reconstruction={run}", "--episodes=8"]) == 2
    assert "has no belief_head.th" in capsys.readouterr().err


def test_units_that_a_map_of_a_set_lacks_are_no_cases():
    (episodes,) = batches(1)
    for episode in episodes[::2]:  # played on a map without the last agent and the last enemy
        for field in (episode["obs"], episode["full_obs"]):
            field[:, -1] = 0
            last = LAYOUT.move_dim + (LAYOUT.n_enemies - 1) * LAYOUT.enemy_dim
            field[..., last : last + LAYOUT.enemy_dim] = 0
    learner = make_learner(toy_config(**BELIEF, belief_every=2), info=replace(INFO, padded=True))
    batch = pack_episodes(episodes)
    cases = learner.belief.cases(batch)
    lacks = torch.tensor([number % 2 == 0 for number in batch.sample_index])[batch.packing.episode[cases.rows]]
    assert not cases.counted[lacks, :, -1].any() and cases.counted[~lacks, :, -1].any()
    assert cases.counted[lacks, :, :-1].any() and (~cases.living & cases.counted)[:, :, :-1].any()  # the dead are cases


@pytest.mark.processes
def test_teams_play_maps_of_other_units_without_their_head_and_a_head_needs_its_weights(tmp_path, capsys):
    words = ["--env-config=skirmish", "with", "agent=hpn_rnn", "obs_agent_id=False", "run=default", *BUDGETS]
    words += ["env_args.map_name=3m", "t_max=100", f"local_results_path={tmp_path}"]
    assert main(["--config=omagd_belief", *words, "unique_token=with"]) == 0
    assert main(["evaluate", str(tmp_path / "with"), "env_args.map_name=5m_vs_6m", "test_nepisode=2"]) == 0
    with closing(make_env("skirmish", {"map_name": "5m_vs_6m"}, 1, processes=False)) as env:
        policy, seen = load_policy(tmp_path / "with").on(env.info), env.observe()
        policy.act(seen.obs[0], seen.avail_actions[0])
    assert policy.beliefs() is None
    assert main(["--config=fog_baseline", *words, "unique_token=without"]) == 0
    capsys.readouterr()
    start = f"checkpoint_path={tmp_path / 'without' / 'models'}"
    assert main(["--config=omagd_belief", *words, "t_max=300", start]) == 2
    assert "its team has no belief head. Continue it with belief_loss=none" in capsys.readouterr().err
