"""The predictor of means: its table, what it believes, acting with it, and runs without stage 1."""

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

import omagd
from omagd.config.loading import resolve
from omagd.learners.belief_baselines import fit_baselines
from omagd.learners.belief_cases import cases_of
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.modules.graph_reconstructers.map_constant import MapConstantReconstructor
from omagd.modules.graph_reconstructers.pretrained import check, describe
from omagd.run.cli.main import config_from
from omagd.run.cli.preflight import preflight
from omagd.run.training.evaluate import evaluation_config
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
N, LIMIT = LAYOUT.n_nodes, INFO.episode_limit
SEEDS = (40, 41, 42)


def batch_of(seed: int) -> Any:
    return pack_episodes(toy_episodes(30, seed=seed, apart=True))


def fitted(dist: Dist | None = None, seeds: tuple[int, ...] = SEEDS) -> Any:
    """Return the learner after its only update."""
    made = graph_learner("stage2", torch.float32, dist, kind="map_constant")
    made.begin(lambda: map(batch_of, seeds))
    before = made.predictor.table.clone()
    made.update(batch_of(1))
    assert torch.equal(made.predictor.table, before)
    return made


def acting(stage: Any) -> MapConstantReconstructor:
    return MapConstantReconstructor(None, stage.predictor, stage.config, INFO)


def test_it_believes_what_the_baseline_of_this_name_says():
    stage, batch = fitted(), batch_of(7)
    baselines = fit_baselines(lambda: map(batch_of, SEEDS), lambda: [batch_of(43)], INFO, Dist())
    missing, belief = stage.beliefs(batch)
    cases = cases_of(batch, LAYOUT)
    assert torch.equal(belief.features, baselines.predictions(cases)["map_constant"]) and len(cases) > 300
    assert torch.equal(missing, cases.missing)
    assert not belief.taken_for_dead.any() and not belief.p_dead.any()
    stats = {name: float(total / count) for name, (total, count) in stage.evaluate(batch).items()}
    real, truth = feature_mask(LAYOUT)[cases.node].numpy(), cases.truth.numpy()
    errors = [float(((f - t)[r] ** 2).mean()) for f, t, r in zip(belief.features.numpy(), truth, real, strict=True)]
    assert stats["error_all"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert stats["error_alive"] == pytest.approx(np.array(errors)[cases.living.numpy()].mean(), rel=1e-5)
    total, count = stage.update(batch)["graph_loss"]  # of the living too: the dead have no features to be missed
    assert float(total / count) == pytest.approx(stats["error_alive"], rel=1e-6)
    assert (stats["recall_absent"], stats["recall_alive"]) == (0, 1)
    assert stats["absent_share"] == pytest.approx((~truth.any(-1)).mean())


def of_ranks(rank: int, dist: Dist, seeds: list[tuple[int, ...]]) -> torch.Tensor:
    table: torch.Tensor = fitted(dist, seeds[rank]).predictor.table
    return table


@pytest.mark.processes
def test_ranks_fit_one_table_to_the_episodes_of_all():
    tables = run_ranks(of_ranks, [SEEDS[:1], SEEDS[1:]])
    assert torch.equal(*tables)
    torch.testing.assert_close(tables[0], fitted().predictor.table, rtol=1e-6, atol=1e-6)


def test_agents_act_on_the_table_and_learning_reads_its_bits():
    stage, batch = fitted(), batch_of(7)
    reconstructor, table = acting(stage), stage.predictor.table
    obs, step = batch["obs"], batch.packing.step
    made = reconstructor.step(obs.numpy(), step.numpy())
    shown, acted = obs_to_nodes(obs, LAYOUT), obs_to_nodes(made.obs, LAYOUT)
    living = obs.any(-1)
    for row, agent, node in np.ndindex(len(obs), INFO.n_agents, N):
        unseen = bool(living[row, agent]) and not shown[row, agent, node].any()
        assert bool(made.guessed[row, agent, node]) == unseen, "also the dead: the table does not know who they are"
        wanted = table[agent, node, step[row]].half().float() if unseen else shown[row, agent, node]
        assert torch.equal(acted[row, agent, node], wanted)
    features, guessed = reconstructor.restore({"obs": obs, **made.fields})
    assert torch.equal(features, made.obs) and torch.equal(guessed, made.guessed)
    assert made.fields["recon"].dtype == torch.float16 and reconstructor.frames == int(made.guessed.any(-1).sum())


def test_slots_that_wait_pass_unchanged_and_steps_beyond_the_limit_are_the_last_one():
    reconstructor, obs = acting(fitted()), batch_of(7)["obs"][:2]
    active = np.array([True, False])
    made = reconstructor.step(obs, np.full(2, LIMIT), active)
    assert torch.equal(made.obs[1], obs[1]) and not made.guessed[1].any() and not made.fields["recon"][1].any()
    assert torch.equal(reconstructor.step(obs, np.full(2, LIMIT + 5), active).obs, made.obs) and made.guessed[0].any()


def test_a_new_table_is_used_from_the_next_beginning_on():
    reconstructor, obs = acting(fitted()), batch_of(7)["obs"][:2]
    before = reconstructor.step(obs, np.zeros(2)).obs
    reconstructor.predictor.table.add_(1)
    assert torch.equal(reconstructor.step(obs, np.zeros(2)).obs, before)
    reconstructor.begin(2)
    assert not torch.equal(reconstructor.step(obs, np.zeros(2)).obs, before)


def test_files_of_other_codes_fit_and_those_of_other_kinds_do_not():
    stage = fitted()
    other = stage.config.model_copy(
        update={"tokenizer_config": stage.config.tokenizer_config.model_copy(update={"n_codes": 5})}
    )
    fits = partial(check, predictor=True, source="x")
    fits(describe(other, INFO, predictor=True), stage.config, INFO)
    masked = graph_learner("stage2", kind="masked").config
    with pytest.raises(UserError, match="trained with mask_predictor_config.kind=map_constant, not masked"):
        fits(describe(stage.config, INFO, predictor=True), masked, INFO)
    with pytest.raises(UserError, match="trained with mask_predictor_config.kind=masked, not map_constant"):
        fits(describe(masked, INFO, predictor=True), stage.config, INFO)


def small(path: Path, *more: str) -> Any:
    words = ("t_max=60", "test_nepisode=2", "save_replay=False", f"local_results_path={path}", *more)
    return config_from(["--config=fog_map_constant", "with", "env_args.map_name=3m", *BUDGETS, *words])


@pytest.mark.processes
def test_one_command_trains_stages_two_and_three_and_its_files_serve_again(tmp_path):
    config = small(tmp_path, "cpu_inference=True")
    assert preflight(config).stages == ("stage2", "stage3")
    assert preflight(small(tmp_path, "pretrain_only=True")).stages == ("stage2",)
    summary = omagd.run(config)
    assert list(summary["stages"]) == ["stage2", "stage3"] and summary["stages"]["stage2"]["clock"]["epoch"] == 1
    values = summary["stages"]["stage2"]["values"]
    assert values["test_error"] == pytest.approx(values["test_error_map_constant"], rel=1e-6)
    policy, env = omagd.load_policy(summary["folder"]), omagd.make("skirmish", map_name="3m")
    assert omagd.play(policy, env, episodes=2)["totals"]["episodes"] == 2
    env.close()
    assert omagd.run(evaluation_config(summary["folder"], {}))["exit_state"] == "completed"
    given = f"pretrained_mask_predictor_path={summary['folder']}/models/pretrain_stage2_best"
    assert preflight(small(tmp_path, given)).stages == ("stage3",)
    assert preflight(small(tmp_path, given, "reconstructer_stage=stage3")).stages == ("stage3",)
    measured = omagd.run(small(tmp_path, given, "evaluation_only=True"))
    assert list(measured["stages"]) == ["stage2"]


@pytest.mark.parametrize(("words", "message"), [
    ({"mask_predictor_config.decode": "argmax"}, "kind=map_constant predicts features, not codes. Use decode=mean"),
    ({"runner": "resident"}, "runner=resident: reconstructs with .*kind=masked, not kind=map_constant. Use runner=par"),
    ({"reconstructer_stage": "stage3"}, "reconstructer_stage=stage3: needs pretrained_mask_predictor_path"),
    ({"reconstructer_stage": "stage1"}, "stage1: mask_predictor_config.kind=map_constant reads no tokens.* Use stage2"),
    ({"evaluation_only": True}, "evaluation_only=True: evaluates pre-trained graph modules"),
    ({"mask_predictor_config.kind": "masked", "pretrained_mask_predictor_path": "x"}, "x: needs the tokenizer that it"),
    ({"mask_predictor_config.kind": "masked", "reconstructer_stage": "stage2"}, "=stage2: needs pretrained_tokenizer"),
])  # fmt: skip
def test_what_does_not_go_with_it_is_rejected(words, message):
    with pytest.raises(UserError, match=message):
        preflight(resolve("fog_map_constant", "skirmish", words))
