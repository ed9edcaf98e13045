"""Stage 1: codes, their exponential moving averages, revival, the loss, and the metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, graph_learner, toy_config, toy_episodes, toy_modules

from omagd.learners.graph_metrics import perplexity_stats
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)


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
    out = tokenizer(torch.randn(7, LAYOUT.node_dim, dtype=torch.float64))
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
    stage, batch = graph_learner("stage1"), pack_episodes(toy_episodes(5, seed=3))
    tokenizer, real = stage.tokenizer, feature_mask(LAYOUT)
    graphs = obs_to_nodes(batch["full_obs"], LAYOUT)
    encoded = tokenizer.encode(graphs)
    codes = tokenizer.quantize(encoded)
    squares = (tokenizer.decode(codes).detach() - graphs).square()
    commitment = (encoded - tokenizer.codebook[codes]).square().mean(-1).detach()
    losses = []
    for row, agent in np.ndindex(len(graphs), INFO.n_agents):
        if batch.packing.closing[row] or not batch["full_obs"][row, agent].any():
            continue
        slots = [slot for slot in range(LAYOUT.n_nodes) if graphs[row, agent, slot].any()]
        errors = torch.cat([squares[row, agent, slot][real[slot]] for slot in slots])
        losses.append(
            float(errors.mean() + stage.config.tokenizer_config.commitment * commitment[row, agent, slots].mean())
        )
    assert stage.config.tokenizer_config.commitment == 0.5
    total, count = stage._loss.eval()(stage.nodes(batch))[1]["graph_loss"]
    assert int(count) == len(losses)
    assert total.item() == pytest.approx(sum(losses), rel=1e-10)


def test_all_zero_nodes_and_closing_rows_never_reach_the_codebook() -> None:
    stage, batch = graph_learner("stage1"), pack_episodes(toy_episodes(6, seed=4))
    nodes = stage.nodes(batch)
    assert (nodes.features != 0).any(-1).all()
    living = batch["full_obs"].any(-1) & ~batch.packing.closing[:, None]
    assert len(nodes.features) == int((obs_to_nodes(batch["full_obs"], LAYOUT).any(-1) & living[..., None]).sum())
    stage.update(batch)
    before = stage.tokenizer.cluster_size.sum()
    stage.update(batch)
    wanted = 0.9 * before + 0.1 * len(nodes.features)
    assert stage.tokenizer.cluster_size.sum() == pytest.approx(wanted.item())


def test_dead_codes_come_back_from_the_batch_but_not_at_the_end() -> None:
    for total, revives in ((100, True), (10, False)):
        stage, batch = graph_learner("stage1", total_updates=total), pack_episodes(toy_episodes(6, seed=5))
        for _ in range(9):
            stage.update(batch)
        tokenizer = stage.tokenizer
        tokenizer.place(torch.tensor([7]), torch.full((1, 4), 1e3, dtype=torch.float64), 1e-3)
        assert tokenizer.dead().tolist().count(7) == 1
        stage.update(batch)  # the tenth: due at an interval of two
        code = tokenizer.codebook[7]
        if not revives:
            assert code.norm() > 100
            continue
        assert (tokenizer.encode(stage.nodes(batch).features) - code).norm(dim=-1).min() < 1e-9
        assert torch.allclose(tokenizer.embed_avg[7], code * tokenizer.cluster_size[7])
        assert tokenizer.cluster_size[7] == pytest.approx(tokenizer.cluster_size.mean().item(), rel=0.2)
    tokenizer.cluster_size.fill_(100.0)  # dead: below a twentieth of the mean count
    tokenizer.cluster_size[3], tokenizer.cluster_size[4] = 4.0, 6.0
    assert tokenizer.dead().tolist() == [3]


def test_training_lowers_the_error_and_its_parts_add_up() -> None:
    stage, held_out = graph_learner("stage1", graph_lr=0.01), pack_episodes(toy_episodes(8, seed=7))
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


@pytest.mark.parametrize(("counts", "wanted"), [([5, 5, 0, 5], 3), ([1, 3], 4 / 3**0.75)])
def test_perplexity_is_the_exponential_of_the_entropy(counts: list[int], wanted: float) -> None:
    stats = perplexity_stats(torch.tensor(counts))
    assert stats["perplexity"][0].item() == pytest.approx(wanted)
    assert stats["codes_in_use"][0].item() == np.count_nonzero(counts)
