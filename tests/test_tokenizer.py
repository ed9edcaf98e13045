"""Stage 1: codes, their exponential means, revival, the loss, and what it reports."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, toy_config, toy_episodes, toy_modules

from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)


def learner(total_updates: int = 100, **changes):
    config = toy_config(**changes)
    tokenizer, _ = toy_modules(config, torch.float64)
    return TokenizerLearner(tokenizer, config, INFO, Dist(), total_updates)


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_ids_are_the_nearest_codes(distance: str) -> None:
    tokenizer, _ = toy_modules(toy_config(tokenizer_config__distance=distance), torch.float64)
    tokenizer.place(torch.arange(12), torch.randn(12, 4, dtype=torch.float64), 1.0)
    encoded = tokenizer.encode(torch.randn(50, 3, LAYOUT.node_dim))
    gaps = (encoded[..., None, :] - tokenizer.codebook).norm(dim=-1)
    if distance == "cosine":
        assert torch.allclose(encoded.norm(dim=-1), torch.ones(50, 3, dtype=torch.float64))
        gaps = -torch.nn.functional.cosine_similarity(encoded[..., None, :], tokenizer.codebook, dim=-1)
    assert torch.equal(tokenizer.quantize(encoded), gaps.argmin(-1))


def test_gradient_goes_straight_through_the_codes() -> None:
    tokenizer, _ = toy_modules(toy_config(), torch.float64)
    nodes = torch.randn(7, LAYOUT.node_dim, dtype=torch.float64)
    out = tokenizer(nodes)
    assert torch.equal(out.code, tokenizer.codebook[out.ids])
    assert torch.allclose(out.decoded, tokenizer.decode(out.ids), atol=1e-12)
    (got,) = torch.autograd.grad(out.decoded.square().sum(), out.encoded)
    code = out.code.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(tokenizer.decoder(code).square().sum(), code)
    assert torch.allclose(got, wanted, atol=1e-12)
    assert not any("codebook" in name for name, _ in tokenizer.named_parameters())


def test_codebook_moves_by_exponential_means() -> None:
    tokenizer, _ = toy_modules(toy_config(), torch.float64)
    torch.manual_seed(1)
    size, average = tokenizer.cluster_size.clone(), tokenizer.embed_avg.clone()
    for _ in range(3):
        encoded, ids = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 12, (40,))
        tokenizer.move(tokenizer.sums(encoded, ids))
        for code in range(12):
            size[code] = 0.9 * size[code] + 0.1 * (ids == code).sum()
            average[code] = 0.9 * average[code] + 0.1 * encoded[ids == code].sum(0)
    smoothed = (size + 1e-5) / (size.sum() + 12e-5) * size.sum()
    assert torch.allclose(tokenizer.codebook, average / smoothed[:, None], atol=1e-12)


def test_loss_is_per_graph_mean_over_what_is_present() -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(5, seed=3))
    tokenizer, config = stage.tokenizer, stage.config.tokenizer_config
    stats = stage._loss.eval()(stage.nodes(batch))[1]
    wanted, graphs, real = 0.0, 0, feature_mask(LAYOUT)
    everything = obs_to_nodes(batch["full_obs"], LAYOUT)
    all_encoded = tokenizer.encode(everything)
    all_codes = tokenizer.quantize(all_encoded)
    all_decoded = tokenizer.decode(all_codes).detach()
    for row in range(len(batch["full_obs"])):
        if batch.packing.closing[row]:
            continue
        for agent in range(INFO.n_agents):
            nodes = everything[row, agent]
            if not batch["full_obs"][row, agent].any():
                continue
            graphs += 1
            squares, features, stay = 0.0, 0, []
            for slot in range(LAYOUT.n_nodes):
                if not nodes[slot].any():
                    continue
                encoded, code = all_encoded[row, agent, slot], all_codes[row, agent, slot]
                squares += ((all_decoded[row, agent, slot] - nodes[slot])[real[slot]] ** 2).sum().item()
                features += int(real[slot].sum())
                stay.append((encoded - tokenizer.codebook[code]).square().mean().item())
            wanted += squares / features + config.commitment * float(np.mean(stay))
    total, count = stats["graph_loss"]
    assert int(count) == graphs
    assert total.item() == pytest.approx(wanted, rel=1e-10)


def test_all_zero_nodes_and_closing_rows_never_reach_the_codebook() -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(6, seed=4))
    nodes = stage.nodes(batch)
    assert (nodes.features != 0).any(-1).all()
    full = obs_to_nodes(batch["full_obs"], LAYOUT)
    living = batch["full_obs"].any(-1) & ~batch.packing.closing[:, None]
    assert len(nodes.features) == int((full.any(-1) & living[..., None]).sum())
    stage.update(batch)
    before = stage.tokenizer.cluster_size.sum()
    stage.update(batch)
    wanted = 0.9 * before + 0.1 * len(nodes.features)
    assert stage.tokenizer.cluster_size.sum() == pytest.approx(wanted.item())


def test_dead_codes_come_back_from_the_batch_but_not_at_the_end() -> None:
    for total, revives in ((100, True), (10, False)):
        stage, batch = learner(total), pack_episodes(toy_episodes(6, seed=5))
        for _ in range(9):
            stage.update(batch)
        far = torch.full((4,), 1e3, dtype=torch.float64)
        stage.tokenizer.place(torch.tensor([7]), far[None], 1e-3)
        assert stage.tokenizer.dead().tolist().count(7) == 1
        stage.update(batch)  # the tenth: due at an interval of two
        code = stage.tokenizer.codebook[7]
        if not revives:
            assert code.norm() > 100
            continue
        encoded = stage.tokenizer.encode(stage.nodes(batch).features)
        assert (encoded - code).norm(dim=-1).min() < 1e-9
        mean = stage.tokenizer.cluster_size.mean()
        assert torch.allclose(stage.tokenizer.embed_avg[7], code * stage.tokenizer.cluster_size[7])
        assert stage.tokenizer.cluster_size[7] == pytest.approx(mean.item(), rel=0.2)


def test_threshold_is_a_share_of_the_mean_count() -> None:
    tokenizer, _ = toy_modules(toy_config(), torch.float64)
    tokenizer.cluster_size.fill_(100.0)
    tokenizer.cluster_size[3], tokenizer.cluster_size[4] = 4.0, 6.0
    assert tokenizer.dead().tolist() == [3]


def test_training_lowers_the_error_and_reports_it_whole() -> None:
    stage, held_out = learner(graph_lr=0.01), pack_episodes(toy_episodes(8, seed=7))
    before = stage.evaluate(held_out)["mse"]
    for seed in range(40):
        stage.update(pack_episodes(toy_episodes(8, seed=seed + 10)))
    stats = stage.evaluate(held_out)
    assert stats["mse"][0] / stats["mse"][1] < 0.8 * before[0] / before[1]
    parts = [stats[f"mse_{name}"] for name in ("self", "ally", "enemy")]
    assert sum(float(total) for total, _ in parts) == pytest.approx(float(stats["mse"][0]), rel=1e-6)
    by_feature = [stats[f"mse_enemy_f{i}"] for i in range(LAYOUT.enemy_dim)]
    assert sum(float(t) for t, _ in by_feature) / LAYOUT.enemy_dim == pytest.approx(float(parts[2][0]), rel=1e-6)
    assert 1 <= float(stats["perplexity"][0]) <= float(stats["codes_in_use"][0]) <= 12


def test_perplexity_of_even_use_is_the_number_of_codes() -> None:
    from omagd.learners.graph_metrics import perplexity_stats

    even = perplexity_stats(torch.tensor([5, 5, 0, 5]))
    assert even["perplexity"][0].item() == pytest.approx(3)
    assert even["codes_in_use"][0].item() == 3
    skew = perplexity_stats(torch.tensor([1, 3]))
    assert skew["perplexity"][0].item() == pytest.approx(math.exp(0.25 * math.log(4) + 0.75 * math.log(4 / 3)))


def test_evaluation_in_parts_equals_the_whole() -> None:
    batch = pack_episodes(toy_episodes(9, seed=8))
    whole, parts = (learner(graph_frames_at_once=size).evaluate(batch) for size in (10**6, 17))
    assert whole.keys() == parts.keys()
    for name in whole:
        assert float(whole[name][0]) == pytest.approx(float(parts[name][0]), rel=1e-9), name


def test_warm_up_and_an_empty_batch_leave_everything_as_it_was() -> None:
    stage = learner()
    before = {name: value.clone() for name, value in stage.tokenizer.state_dict().items()}
    stage.warm_up()
    stage.warm_up(pack_episodes(toy_episodes(3)))
    blank = [{name: torch.zeros_like(value) for name, value in episode.items()} for episode in toy_episodes(2)]
    stage.update(pack_episodes(blank))
    for name, value in stage.tokenizer.state_dict().items():
        assert torch.equal(value, before[name]), name
