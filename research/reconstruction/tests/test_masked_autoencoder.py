"""The masked autoencoder (`kind: ma2e`): what agents infer and from what, its training, and whole runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS
from ddp_harness import run_ranks
from graph_toys import INFO, LAYOUT, graph_learner, toy_episodes
from plugin_toys import RESEARCH, add_example

import omagd
from omagd.config.loading import resolve
from omagd.controllers.types import Exploration
from omagd.envs.factory import make_env
from omagd.lab.analysis.groups import load
from omagd.lab.analysis.run_report import reconstruction
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.graph_reconstructers.pretrained import check, describe
from omagd.run.cli.main import config_from
from omagd.run.cli.preflight import preflight
from omagd.run.training.build import build_mac, new_predictor
from omagd.run.training.evaluate import evaluation_config
from omagd.run.training.stages.base import PretrainedModules
from omagd.runners import REGISTRY as RUNNERS
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import Episode, PackedBatch, pack_episodes
from omagd.utils.seeding import EpisodeSeeds
from omagd_reconstruction.masked_autoencoder import InferringReconstructor

torch.set_num_threads(1)
add_example(RESEARCH)  # also in the processes of ranks
CPU, N, DIM, K = torch.device("cpu"), INFO.n_agents, INFO.obs_dim, 3


def learner(dist: Dist | None = None, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return graph_learner("stage2", dtype, dist, **{"kind": "ma2e", "stacked_steps": K, **changes})


def acting(stage: Any) -> InferringReconstructor:
    return InferringReconstructor(None, stage.predictor, stage.config, INFO)


def played(made: InferringReconstructor, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return what is stored in the steps of an episode [T, n, ...] that is played in slot 1 while slot 0 waits."""
    rows = []
    made.begin(2)
    made.reset(np.array([False, True]))
    for t, seen in enumerate(obs):
        last = actions[t - 1] if t else torch.full((N,), -1)
        result = made.step(torch.stack([torch.rand_like(seen), seen]), np.full(2, t), np.array([False, True]),
                           last.expand(2, -1))  # fmt: skip
        assert torch.equal(result.obs[1], seen) and not result.guessed.any() and not result.fields["inferred"][0].any()
        rows.append(result.fields["inferred"][1])
    return torch.stack(rows)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def window(stage: Any, obs: torch.Tensor, actions: torch.Tensor, t: int, shown: set[int]) -> torch.Tensor:
    """Return the reconstruction [k, n, obs_dim + 1] of the window that ends at t, token by token."""
    net = stage.predictor
    tokens = torch.zeros(1, K, N, net.token.out_features)
    for place, step in enumerate(range(t - K + 1, t + 1)):
        for agent in shown if step >= 0 else ():
            action = (int(actions[step - 1, agent]) + 1) / INFO.n_actions if step else 0.0
            tokens[0, place, agent] = net.token(torch.cat([obs[step, agent], torch.tensor([action])]))
    with torch.no_grad():
        made: torch.Tensor = net.eval()(tokens, K * N).view(K, N, DIM + 1)
    return made


def test_agents_infer_from_their_own_last_steps_and_from_nothing_else():
    stage, obs, actions = learner(), noise(7, N, DIM), torch.arange(7 * N).view(7, N) % INFO.n_actions
    before = played(acting(stage), obs, actions)
    assert before.shape == (7, N, (N - 1) * DIM) and before.dtype == torch.float16
    for step in (0, 3, 6):
        for agent in range(N):
            others, mine, acted = obs.clone(), obs.clone(), actions.clone()
            others[:, [a for a in range(N) if a != agent]] += 1
            mine[step, agent] += 1
            acted[step, agent] = (acted[step, agent] + 1) % INFO.n_actions
            assert torch.equal(played(acting(stage), others, actions)[:, agent], before[:, agent])
            for after, lag in ((played(acting(stage), mine, actions), 0), (played(acting(stage), obs, acted), 1)):
                changed = (after != before).any(-1)
                wanted = torch.zeros(7, N, dtype=torch.bool)
                wanted[step + lag : step + lag + K, agent] = True
                assert torch.equal(changed, wanted), "those steps whose window holds it, and this agent alone"


def test_what_is_stored_is_the_last_step_of_the_window_without_the_agent_itself():
    stage = learner()
    (episode,) = toy_episodes(1, seed=5, longest=12)
    obs, actions = episode["obs"], episode["actions"]
    stored, dead = played(acting(stage), obs, actions), 0
    for t, agent in np.ndindex(len(obs), N):
        made = window(stage, obs, actions, t, {agent})[-1, :, :-1]
        wanted = made[[a for a in range(N) if a != agent]].flatten() * bool(obs[t, agent].any())
        dead += not wanted.any()
        torch.testing.assert_close(stored[t, agent].float(), wanted, atol=2e-3, rtol=2e-3)
    assert 0 < dead < len(obs) * N
    made = acting(stage)
    features, guessed = made.restore({"obs": obs})
    assert torch.equal(features, obs) and guessed.shape == (len(obs), N, LAYOUT.n_nodes) and not guessed.any()


def test_windows_continue_from_a_snapshot_and_new_weights_count_from_the_next_beginning_on():
    stage, obs = learner(), noise(6, 4, N, DIM)
    whole, cut = acting(stage), acting(stage)
    for made in (whole, cut):
        made.begin(4)
    for t in range(3):
        whole.step(obs[t], np.full(4, t))
    kept = whole.snapshot()
    cut.load_snapshot(kept)
    before = kept["tokens"].clone()
    for made in (whole, cut):
        made.reset(np.array([False, True, False, False]))
    for t in range(3, 6):
        results = [made.step(obs[t], np.full(4, t)).fields["inferred"] for made in (whole, cut)]
        assert torch.equal(*results)
    assert torch.equal(kept["tokens"], before), "which may be written to a file later"


def test_slots_that_wait_keep_their_windows():
    """All wait for one step; slot 2 begins an episode before it."""
    stage, obs = learner(), noise(6, N, DIM)
    made = acting(stage)
    made.begin(3)
    for t in (0, 1):
        made.step(obs[t].expand(3, -1, -1), np.full(3, t))
    made.reset(np.array([False, False, True]))
    made.step(noise(3, N, DIM), np.full(3, 2), np.array([False, False, False]))
    end = made.step(obs[2].expand(3, -1, -1), np.full(3, 2)).fields["inferred"]
    assert torch.equal(end[0], end[1]) and not torch.equal(end[0], end[2])
    torch.testing.assert_close(end[0], played(acting(stage), obs, torch.full((6, N), -1))[2], atol=2e-3, rtol=0)
    alone = acting(stage)
    alone.begin(3)
    assert torch.equal(alone.step(obs[2].expand(3, -1, -1), np.zeros(3)).fields["inferred"][2], end[2])


def batch_of(*seeds: int) -> PackedBatch:
    return pack_episodes([each for seed in seeds for each in toy_episodes(4, seed=seed, apart=True)])


def test_half_of_the_windows_show_one_agent_and_the_others_some_but_never_all():
    stage, batch = learner(), batch_of(*range(12))
    evaluated = stage.evaluate(batch)["graph_loss"][0]
    stage.updates = 1
    assert torch.equal(stage.evaluate(batch)["graph_loss"][0], evaluated), "evaluations show the same windows"
    stage._loss.train()
    stage.updates = 0
    sample = stage.sample(batch)
    n_rows = int(batch.valid_mask.sum())
    shown = sample.shown.sum(1)
    assert len(sample.rows) == 2 * n_rows and (shown[:n_rows] == 1).all()
    assert set(shown[n_rows:].tolist()) == {1, N - 1}
    pairs = []
    for _ in range(N * (N - 1)):
        pairs.append(sample.shown.view(2, n_rows, N))
        stage.updates += 1
        sample = stage.sample(batch)
    counts = torch.stack(pairs).double().mean((0, 2))
    assert counts[0].tolist() == pytest.approx([1 / N] * N), "at each step, all agents in turn"
    assert counts[1].tolist() == pytest.approx([1 / 2] * N), "one agent or two of three"
    starts = torch.tensor(batch.packing.batch_sizes).cumsum(0) - torch.tensor(batch.packing.batch_sizes)
    valid = [r for r in range(len(batch["obs"])) if batch.valid_mask[r]]
    for row, found in zip(valid, sample.rows.tolist(), strict=False):
        step, number = int(batch.packing.step[row]), int(batch.packing.episode[row])
        assert found == [int(starts[t]) + number if t >= 0 else -1 for t in range(step - K + 1, step + 1)]


def test_the_loss_is_the_mean_error_of_all_tokens_of_a_window():
    stage, batch = learner(), batch_of(3)
    sample, expected = stage.sample(batch), []
    for rows, shown in zip(sample.rows.tolist(), sample.shown, strict=True):
        episode, t = int(batch.packing.episode[rows[-1]]), int(batch.packing.step[rows[-1]])
        obs, actions = (batch.packing.pad(batch[name])[episode] for name in ("obs", "actions"))
        made, errors = window(stage, obs, actions, t, set(shown.nonzero().flatten().tolist())), []
        for place, step in enumerate(range(t - K + 1, t + 1)):
            for agent in range(N) if step >= 0 else ():
                action = (int(actions[step - 1, agent]) + 1) / INFO.n_actions if step else 0.0
                errors.append(float((made[place, agent, :-1] - obs[step, agent]).square().mean()))
                errors[-1] += float((made[place, agent, -1] - action) ** 2)
        expected.append(np.mean(errors))
    loss, stats = stage._loss.eval()(sample)
    assert float(loss.detach()) == pytest.approx(np.sum(expected), rel=1e-5)
    assert float(stats["graph_loss"][1]) == len(expected)


def as_torch(layer: Any, kind: Any) -> Any:
    """Return torch's own transformer layer of the class `kind` with the weights of `layer`."""
    d, wide = layer.norms[0].normalized_shape[0], layer.widen.out_features
    made = kind(d, layer.n_heads, wide, dropout=0.0, batch_first=True)
    parts = [made.self_attn, made.multihead_attn] if kind is torch.nn.TransformerDecoderLayer else [made.self_attn]
    with torch.no_grad():
        for part, query, key_value, out in zip(parts, layer.queries, layer.keys_values, layer.merges, strict=True):
            part.in_proj_weight.copy_(torch.cat([query.weight, key_value.weight]))
            part.in_proj_bias.copy_(torch.cat([query.bias, key_value.bias]))
            part.out_proj.load_state_dict(out.state_dict())
        made.linear1.load_state_dict(layer.widen.state_dict())
        made.linear2.load_state_dict(layer.narrow.state_dict())
        for number, norm in enumerate(layer.norms, start=1):
            getattr(made, f"norm{number}").load_state_dict(norm.state_dict())
    return made


@pytest.mark.parametrize("n_layers", [1, 3])
def test_the_network_is_a_transformer_whose_decoder_reads_the_encoder(n_layers: int):
    net = learner(n_layers=n_layers).predictor
    with torch.no_grad():
        for weight in net.parameters():  # also of norms and biases, which begin alike
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight)))
        tokens = noise(5, K, N, net.token.out_features)
        memory = out = (tokens + net.places).flatten(1, 2)
        for layer in net.encoder:
            memory = as_torch(layer, torch.nn.TransformerEncoderLayer)(memory)
        for layer in net.decoder:
            out = as_torch(layer, torch.nn.TransformerDecoderLayer)(out, memory)
        wanted = net.head(out)
        assert len(net.encoder) == n_layers and len(net.decoder) == max(1, n_layers - 1)
        torch.testing.assert_close(net(tokens, K * N), wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(net(tokens, 2), wanted[:, -2:], atol=1e-4, rtol=1e-4)


def test_only_updates_drop_anything_out():
    batch, found = batch_of(3), []
    for p in (0.0, 0.5):
        stage = learner(dropout=p)
        stage.warm_up()  # leaves it in training mode
        found.append({name: total / count for name, (total, count) in stage.evaluate(batch).items()})
        assert found[-1] == found[0]
        torch.manual_seed(1)
        total, count = stage.update(batch)["graph_loss"]
        assert (total / count == found[0]["graph_loss"]) == (p == 0)
        (episode,) = toy_episodes(1, seed=5, longest=12)
        played_twice = [played(acting(stage), episode["obs"], episode["actions"]) for _ in range(2)]
        assert torch.equal(*played_twice) and not stage.predictor.training


@pytest.mark.parametrize("at_once", [1, 1000])
def test_an_update_follows_the_gradient_of_the_mean_over_windows(at_once: int):
    stage, batch = learner(dtype=torch.float64, graph_frames_at_once=at_once), batch_of(3)
    assert (len(stage.parts(batch)) > 1) == (at_once == 1)
    sample = stage.sample(batch)
    loss = stage._loss(sample)[0] / len(sample.rows)
    gradients = torch.autograd.grad(loss, list(stage.predictor.parameters()))
    wanted = torch.cat([each.flatten() for each in gradients]).norm()
    assert float(stage.update(batch)["grad_norm"][0]) == pytest.approx(float(wanted), rel=1e-9)
    assert stage.updates == 1, "by which other agents have their turn"


def echoes(n: int, seed: int) -> list[Episode]:
    """Return episodes in which agent i observes what agent 0 has observed i steps earlier."""
    rng, out = np.random.default_rng(seed), []
    for _ in range(n):
        first = rng.normal(0, 1, (12 + N, 1, 2)).astype(np.float32)
        seen = np.concatenate([first[N - i : N - i + 12] for i in range(N)], axis=1)
        obs = np.tile(seen, DIM // 2)
        actions = torch.from_numpy(rng.integers(0, 2, (12, N)))
        out.append({"obs": torch.from_numpy(obs), "full_obs": torch.from_numpy(obs), "actions": actions})
    return out


def test_it_learns_what_allies_observe_from_an_agents_own_history():
    """Agent 0 has seen in the last three steps what all others see now; the last one knows nothing of agent 0's."""
    torch.manual_seed(0)
    stage = learner(d_model=16, n_layers=1, feedforward_dim=32, graph_lr=0.02)
    stage.begin(lambda: [pack_episodes(echoes(30, 100))])
    for seed in range(160):
        stage.update(pack_episodes(echoes(8, seed)))
    test = echoes(20, 1000)
    errors = torch.zeros(2, N)
    for episode in test:
        obs = episode["obs"]
        inferred = played(acting(stage), obs, episode["actions"]).float().view(len(obs), N, N - 1, DIM)[K:-1, ..., :2]
        first, last = (obs[K:-1, [a for a in range(N) if a != i], :2] for i in (0, N - 1))
        errors[0, 1:] += (inferred[:, 0] - first).square().mean((0, 2)) / len(test)
        errors[1, :-1] += (inferred[:, -1] - last).square().mean((0, 2)) / len(test)
    assert errors[0, 1] < 0.8 and errors[0, 2] < 0.6, "of numbers with variance 1"
    assert errors[1, 0] > 0.8, "what nobody can know"


def test_the_error_is_that_of_living_allies_as_living_agents_infer_them():
    stage, training = learner(), batch_of(20, 21)
    stage.begin(lambda: [training])
    stage.predictor.head.weight.data *= 5  # so that what is before an episode would count
    episodes, errors = toy_episodes(5, seed=9, apart=True), {"error_allies": [], "error_allies_mean": []}
    for agent in range(N):
        obs = training["obs"][training.valid_mask][:, agent]
        torch.testing.assert_close(stage.predictor.mean[agent], obs[obs.any(-1)].mean(0))
    for episode in episodes:
        obs, inferred = episode["obs"], played(acting(stage), episode["obs"], episode["actions"]).float()
        for t, agent in np.ndindex(len(obs) - 1, N):
            for place, other in enumerate([a for a in range(N) if a != agent]):
                if obs[t, agent].any() and obs[t, other].any():
                    guess = inferred[t, agent].view(N - 1, DIM)[place]
                    errors["error_allies"].append(float((guess - obs[t, other]).square().mean()))
                    errors["error_allies_mean"].append(
                        float((stage.predictor.mean[other] - obs[t, other]).square().mean())
                    )
    found = stage.evaluate(pack_episodes(episodes))
    for name, values in errors.items():
        total, count = found[name]
        assert int(count) == len(values) > 30 and float(total / count) == pytest.approx(np.mean(values), rel=1e-3)


def of_ranks(rank: int, dist: Dist, seeds: list[tuple[int, ...]]) -> Any:
    stage = learner(dist, torch.float64)
    stage.begin(lambda: [batch_of(*seeds[rank])])
    for _ in range(3):
        stage.update(batch_of(*seeds[rank]))
    return stage.predictor.state_dict(), {name: dist.sum(torch.stack(pair).double())
                                          for name, pair in stage.evaluate(batch_of(*seeds[rank])).items()}  # fmt: skip


@pytest.mark.processes
def test_ranks_train_as_one_process_with_the_episodes_of_all():
    ranks, alone = run_ranks(of_ranks, [(30,), (31,)]), of_ranks(0, Dist(), [(30, 31)])
    for weights, stats in ranks:
        for name, value in alone[0].items():
            torch.testing.assert_close(weights[name], value, atol=1e-7, rtol=1e-5, msg=name)
        for name, value in alone[1].items():
            torch.testing.assert_close(stats[name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("runner", "agent"), [("parallel", "n_rnn"), ("stream", "ff")])
def test_learners_read_what_agents_have_acted_on(runner: str, agent: str):
    config = resolve("ma2e", "skirmish", {
        "env_args.map_name": "3m_mixed_sight6", "batch_size_run": 3, "rnn_hidden_dim": 8, "runner": runner,
        "agent": agent,
    })  # fmt: skip
    env = make_env("skirmish", {"map_name": "3m_mixed_sight6"}, 3, processes=False)
    mac = build_mac(config, env.info, CPU, PretrainedModules(None, new_predictor(config, env.info, CPU)))
    inferred: set[bytes] = set()
    build = mac._build_inputs

    def noted(tick: Any) -> Any:
        inputs, extras = build(tick)
        inferred.update(row.numpy().tobytes() for row in inputs.inferred)
        return inputs, extras

    mac._build_inputs = noted  # type: ignore[method-assign]
    plays, episodes = RUNNERS.get(runner)(env, config, env.info, EpisodeSeeds(1, "train")), []
    while len(episodes) < 3:
        episodes += plays.collect(mac, explore=Exploration(1.0, np.random.default_rng(0)), full_obs=False).episodes
    env.close()
    size = (env.info.n_agents - 1) * env.info.obs_dim
    assert mac.extra_fields(config, env.info) == {"inferred": (torch.float16, (env.info.n_agents, size))}
    batch = pack_episodes(episodes)
    inputs = mac.inputs(batch)
    assert {row.numpy().tobytes() for row in inputs.inferred} <= inferred
    assert torch.equal(inputs.inferred.half(), batch["inferred"]) and torch.equal(inputs.features, batch["obs"])
    values = mac.agent(inputs, batch.packing)
    nothing = AgentInputs(inputs.features, inputs.last_action, inputs.guessed)
    assert not torch.equal(mac.agent(nothing, batch.packing), values), "agents read it"
    blank = AgentInputs(inputs.features, inputs.last_action, inputs.guessed, None, torch.zeros_like(inputs.inferred))
    assert torch.equal(mac.agent(nothing, batch.packing), mac.agent(blank, batch.packing))


def test_files_of_other_sizes_do_not_fit():
    config, fits = learner().config, partial(check, predictor=True, source="x")
    fits(describe(config, INFO, predictor=True), config, INFO)
    with pytest.raises(UserError, match=r"trained with mask_predictor_config.stacked_steps=3, not 4; set"):
        fits(describe(config, INFO, predictor=True), learner(stacked_steps=4).config, INFO)


def test_the_smallest_width_has_places_for_agents_alone():
    made = learner(d_model=1, n_heads=1).predictor
    assert made.places.shape[-1] == 1 and made.places.isfinite().all()


def small(path: Path, *more: str) -> Any:
    words = ("t_max=60", "test_nepisode=2", "save_replay=False", f"local_results_path={path}", *more)
    return config_from(["--config=ma2e", "with", "env_args.map_name=3m", *BUDGETS, *words])


@pytest.mark.processes
def test_one_command_trains_stages_two_and_three_and_reports_its_own_error(tmp_path):
    config = small(tmp_path, "t_max=200")
    assert preflight(config).stages == ("stage2", "stage3")
    summary = omagd.run(config)
    assert list(summary["stages"]) == ["stage2", "stage3"]
    stage2, stage3 = summary["stages"]["stage2"], summary["stages"]["stage3"]
    assert stage2["values"].keys() >= {"best_error_allies", "test_error_allies", "test_error_allies_mean"}
    assert "test_error" not in stage2["values"] and "beliefs" not in stage2 and "beliefs" not in stage3
    assert "policy_error_allies" in stage3["values"]
    log = (Path(summary["folder"]) / "metrics.jsonl").read_text()
    assert "ratio_simple" not in log
    assert reconstruction(load([Path(summary["folder"])])[0]) == []
    policy, env = omagd.load_policy(summary["folder"]), omagd.make("skirmish", map_name="3m")
    assert omagd.play(policy, env, episodes=2)["totals"]["episodes"] == 2
    env.close()
    assert omagd.run(evaluation_config(summary["folder"], {}))["exit_state"] == "completed"
    given = f"pretrained_mask_predictor_path={summary['folder']}/models/pretrain_stage2_best"
    assert preflight(small(tmp_path, given)).stages == ("stage3",)


@pytest.mark.parametrize(("words", "message"), [
    ({"agent": "hpn_rnn"}, "kind=ma2e: agent=hpn_rnn does not read what it infers. Use agent=n_rnn, rnn or ff"),
    ({"mac": "gnn_graph_mac", "agent": "gnn_rnn"}, "agent=gnn_rnn does not read what it infers"),
    ({"env_args.map_name": "3m,4m"}, "learns one map, not a set .*3m.4m.*Give one map"),
    ({"mask_predictor_config.decode": "argmax"}, "kind=ma2e predicts features, not codes. Use decode=mean"),
    ({"runner": "resident"}, "runner=resident: reconstructs with .*kind=masked, not kind=ma2e. Use runner=parallel"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_rejected(words, message):
    with pytest.raises(UserError, match=message):
        preflight(resolve("ma2e", "skirmish", words))
