"""Stages 1 and 2: codes and their losses, the predictor's inputs, targets and metrics, and what both stages share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, graph_learner, toy_config, toy_episodes, toy_modules
from q_toys import equal, state_of

from omagd.config.env_info import ALLY, ENEMY, EntityLayout
from omagd.learners.graph_metrics import perplexity_stats, summarise
from omagd.learners.predictor_learner import PredictorLearner, match_types
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.modules.ops import attend
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

K, MASK, PAD, ABSENT = 12, 12, 13, 12


def test_ids_are_the_nearest_codes() -> None:
    tokenizer, _ = toy_modules(toy_config(), torch.float64)
    tokenizer.place(torch.arange(K), torch.randn(K, 4, dtype=torch.float64), 1.0)
    encoded = tokenizer.encode(torch.randn(150, LAYOUT.node_dim))
    assert torch.equal(tokenizer.quantize(encoded), torch.cdist(encoded, tokenizer.codebook).argmin(-1))


def test_dropout_is_in_every_part() -> None:
    tokenizer, predictor = toy_modules(toy_config(tokenizer_config__dropout=0.5, dropout=0.5))
    nodes, x = torch.randn(9, LAYOUT.node_dim), torch.randn(3, 5, predictor.config.d_model)
    block, query, kv = predictor.blocks.pop(0), torch.randn(2, 3, 4), torch.randn(2, 3, 8)
    frame, everything = predictor.blank_frame(), torch.ones(1, predictor.n_nodes, dtype=torch.bool)
    predictor.blocks.eval()  # what is left is the dropout of its input
    parts = (lambda: tokenizer.encode(nodes), lambda: block(x, None, 5), lambda: attend(query, kv, 1, 0.5))
    assert [torch.equal(part(), part()) for part in (*parts, lambda: predictor(frame, everything))] == [False] * 4


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
        encoded, ids = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, K, (40,))
        tokenizer.move(tokenizer.sums(encoded, ids))
        for code in range(K):
            size[code] = 0.9 * size[code] + 0.1 * (ids == code).sum()
            average[code] = 0.9 * average[code] + 0.1 * encoded[ids == code].sum(0)
    smoothed = (size + 1e-5) / (size.sum() + 12e-5) * size.sum()
    assert torch.allclose(tokenizer.codebook, average / smoothed[:, None], atol=1e-12)


def test_loss_is_the_mean_over_graphs_of_the_means_over_what_is_present() -> None:
    stage, batch = graph_learner("stage1"), pack_episodes(toy_episodes(5, seed=3))
    tokenizer, real, weight = stage.tokenizer, feature_mask(LAYOUT), stage.config.tokenizer_config.commitment
    graphs, losses = obs_to_nodes(batch["full_obs"], LAYOUT), []
    encoded = tokenizer.encode(graphs)
    codes = tokenizer.quantize(encoded)
    squares = (tokenizer.decode(codes) - graphs).square()
    commitment = (encoded - tokenizer.codebook[codes]).square().mean(-1)
    for row, agent in torch.nonzero(batch["full_obs"].any(-1) & ~batch.packing.closing[:, None]).tolist():
        slots = graphs[row, agent].any(-1)
        error = squares[row, agent][real & slots[:, None]].mean()
        losses.append(float((error + weight * commitment[row, agent, slots].mean()).detach()))
    assert weight == 0.5
    total, count = stage._loss.eval()(stage.sample(batch))[1]["graph_loss"]
    assert int(count) == len(losses) and total.item() == pytest.approx(sum(losses), rel=1e-10)


def test_all_zero_nodes_and_closing_rows_never_reach_the_codebook() -> None:
    stage, batch = graph_learner("stage1"), pack_episodes(toy_episodes(6, seed=4))
    features = stage.sample(batch).features
    living = batch["full_obs"].any(-1) & ~batch.packing.closing[:, None]
    present = obs_to_nodes(batch["full_obs"], LAYOUT).any(-1) & living[..., None]
    assert features.any(-1).all() and len(features) == int(present.sum())
    drawn = stage._draw(stage.sample(batch), len(features), "codebook")
    assert torch.allclose(drawn.sort(0)[0], stage.tokenizer.encode(features).sort(0)[0]), "each node once"
    stage.update(batch)
    before = float(stage.tokenizer.cluster_size.sum())
    stage.update(batch)
    assert float(stage.tokenizer.cluster_size.sum()) == pytest.approx(0.9 * before + 0.1 * len(features))


def test_dead_codes_come_back_from_the_batch_but_not_at_the_end() -> None:
    for total, revives in ((100, True), (10, False)):
        stage, batch = graph_learner("stage1", graph_pretrain_epochs=total), pack_episodes(toy_episodes(6, seed=5))
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
        assert (tokenizer.encode(stage.sample(batch).features) - code).norm(dim=-1).min() < 1e-9
        assert torch.allclose(tokenizer.embed_avg[7], code * tokenizer.cluster_size[7])
        assert tokenizer.cluster_size[7] == pytest.approx(tokenizer.cluster_size.mean().item(), rel=0.2)
    tokenizer.cluster_size.fill_(100.0)  # dead: below a twentieth of the mean count
    tokenizer.cluster_size[3], tokenizer.cluster_size[4] = 4.0, 6.0
    assert tokenizer.dead().tolist() == [3]


@pytest.mark.parametrize(("counts", "wanted"), [([5, 5, 0, 5], 3), ([1, 3], 4 / 3**0.75)])
def test_perplexity_is_the_exponential_of_the_entropy(counts: list[int], wanted: float) -> None:
    stats = perplexity_stats(torch.tensor(counts))
    assert stats["perplexity"][0].item() == pytest.approx(wanted)
    assert stats["codes_in_use"][0].item() == np.count_nonzero(counts)


def learner(**changes: Any) -> Any:
    return graph_learner("stage2", **changes)


def sample_of(stage, batch):
    return stage.sample(batch, stage.graphs(batch))


def by_frame(sample, batch):
    """Yield (number of frame, number of episode, step, agent, {slot: target})."""
    targets = iter(sample.target.tolist())
    for i, (row, agent, masked) in enumerate(zip(sample.rows, sample.agents.tolist(), sample.masked, strict=True)):
        episode = batch.sample_index[batch.packing.episode[row]]
        slots = torch.nonzero(masked).flatten().tolist()
        yield i, episode, int(batch.packing.step[row]), agent, {slot: next(targets) for slot in slots}


def test_frames_hold_what_was_seen_and_nothing_else() -> None:
    stage, n_frames = learner(stacked_steps=3, stacked_strip=2), 0
    episodes = toy_episodes(4, seed=1, longest=8)
    batch = pack_episodes(episodes)
    sample = sample_of(stage, batch)
    seen, full = ([obs_to_nodes(episode[name], LAYOUT) for episode in episodes] for name in ("obs", "full_obs"))
    living = [episode["obs"].any(-1, keepdim=True) for episode in episodes]
    ids = [torch.where(x.any(-1) & on, stage.tokenizer.ids(x), MASK) for x, on in zip(seen, living, strict=True)]
    true_ids = [torch.where(x.any(-1), stage.tokenizer.ids(x), ABSENT) for x in full]
    for i, episode, step, agent, targets in by_frame(sample, batch):
        tokens = ids[episode][:, agent]
        times = (step - 4, step - 2, step)
        stacked = [tokens[t].tolist() if t >= 0 else [PAD] * LAYOUT.n_nodes for t in times]
        assert sample.frames.ids[i].tolist() == stacked and int(sample.frames.step[i]) == step
        truth = true_ids[episode][step, agent].tolist()
        assert targets == {slot: truth[slot] for slot, token in enumerate(stacked[-1]) if token == MASK}
        for slot in range(LAYOUT.n_nodes):
            times = torch.nonzero(tokens[:step, slot] < K).flatten().tolist()
            last = (int(tokens[times[-1], slot]), step - times[-1]) if times else (PAD, 0)
            assert (int(sample.frames.last_ids[i, slot]), int(sample.frames.age[i, slot])) == last
        n_frames += 1
    with_mask = [(x[:-1] == MASK).any(-1) & on[:-1, :, 0] for x, on in zip(ids, living, strict=True)]
    assert n_frames == len(sample.frames) == sum(int(one.sum()) for one in with_mask)
    frames, masked, predict = sample.frames, sample.masked, stage.predictor.eval()
    others = replace(frames, last_ids=frames.last_ids.where(masked, 3), age=frames.age.where(masked, 1))
    assert torch.equal(predict(others, masked), predict(frames, masked)), "what is seen needs no memory of itself"
    assert predict(frames, masked).shape == (len(sample.target), K + 1)


def test_what_is_beyond_sight_changes_targets_only() -> None:
    stage, episodes = learner(), toy_episodes(8, seed=3)
    blind = sample_of(stage, pack_episodes([{**e, "full_obs": e["obs"]} for e in episodes]))
    sample = sample_of(stage, pack_episodes(episodes))
    for name in ("ids", "step", "last_ids", "age"):
        assert torch.equal(getattr(blind.frames, name), getattr(sample.frames, name)), name
    assert torch.equal(blind.masked, sample.masked) and not torch.equal(blind.target, sample.target)
    assert torch.equal(sample.masked, sample.frames.ids[:, -1] == MASK)


def test_loss_is_the_cross_entropy_of_the_masked_tokens() -> None:
    batch = pack_episodes(toy_episodes(6, seed=6))
    slots, matched = (learner(matching=matching) for matching in ("none", "type"))
    assert matched._loss.eval()(sample_of(matched, batch))[0] < slots._loss.eval()(sample_of(slots, batch))[0]
    sample = sample_of(slots, batch)
    loss, stats = slots._loss.eval()(sample)
    logits = slots.predictor(sample.frames, sample.masked)
    wanted = torch.nn.functional.cross_entropy(logits, sample.target, reduction="sum")
    assert [loss.item(), stats["graph_loss"][1].item()] == pytest.approx([wanted.item(), len(sample.target)])
    of_mean = torch.autograd.grad(wanted / len(sample.target), [*slots.predictor.parameters()])
    assert slots.update(batch)["grad_norm"][0].item() == pytest.approx(torch.nn.utils.get_total_norm(of_mean).item())


def test_matching_is_the_cheapest_assignment_within_frame_and_type() -> None:
    torch.manual_seed(0)
    layout = EntityLayout(move_dim=2, n_enemies=5, enemy_dim=5, n_allies=3, ally_dim=4, own_dim=1)
    masked = torch.rand(20, layout.n_nodes) < 0.8
    masked[:, 0] = masked[0] = False
    frame, slot = torch.nonzero(masked, as_tuple=True)
    n, kind = len(frame), torch.tensor(layout.node_types)[slot]
    log_p, targets = torch.randn(n, K + 1, dtype=torch.float64).log_softmax(-1), torch.randint(0, K + 1, (n,))
    matched = match_types(log_p, targets, masked, layout)
    cost = -log_p[:, targets].numpy()
    for f, t in itertools.product(range(20), (ALLY, ENEMY)):
        group = torch.nonzero((frame == f) & (kind == t)).flatten().tolist()
        assert sorted(matched[group].tolist()) == group
        least = min(cost[group, list(order)].sum() for order in itertools.permutations(group))
        assert cost[group, matched[group]].sum() == pytest.approx(least)


@pytest.mark.parametrize("decode", ["mean", "argmax"])
def test_a_guess_is_absent_or_features_of_codes(decode: str) -> None:
    stage = learner(decode=decode)
    logits = torch.randn(40, K + 1, dtype=torch.float64)
    logits[::2, -1] += 3
    guess = stage.predictor.guess(logits)
    p = logits.softmax(-1)
    assert 0 < int(guess.absent.sum()) < 40
    assert torch.equal(guess.absent, p[:, -1] > p[:, :-1].sum(-1))
    assert (guess.features[guess.absent] == 0).all() and (guess.ids[guess.absent] == ABSENT).all()
    table, alive = stage.tokenizer.table(), ~guess.absent
    best = p[:, :-1].argmax(-1)[alive]
    assert torch.equal(guess.ids[alive], best)
    wanted = table[best] if decode == "argmax" else sum(p[alive, code, None] * table[code] for code in range(K))
    assert torch.allclose(guess.features[alive], wanted, atol=1e-12)


def test_metrics_against_loops_over_tokens() -> None:
    stage, episodes = learner(), toy_episodes(6, seed=9)
    for seed in range(3):
        stage.update(pack_episodes(toy_episodes(4, seed=seed)))
    batch = pack_episodes(episodes)
    values = summarise({name: float(total) / float(count) for name, (total, count) in stage.evaluate(batch).items()})
    sample, real, tokens = sample_of(stage, batch), feature_mask(LAYOUT), []
    logits = stage.predictor.eval()(sample.frames, sample.masked)
    guess, table = stage.predictor.guess(logits), stage.tokenizer.table()
    for _, episode, step, agent, targets in by_frame(sample, batch):
        full = obs_to_nodes(episodes[episode]["full_obs"][step, agent], LAYOUT).double()
        for slot in targets:
            guesses = {"error_all": guess.features[len(tokens)]}
            code = targets[slot]
            guesses["error_all_code"] = torch.zeros_like(full[slot]) if code == ABSENT else table[code].double()
            errors = {name: float((x - full[slot])[real[slot]].detach().square().mean()) for name, x in guesses.items()}
            tokens.append({**errors, "dead": not full[slot].any()})
    wanted = {name: np.mean([token[name] for token in tokens]) for name in errors}
    dead, absent = np.array([token["dead"] for token in tokens]), guess.absent.numpy()
    rank = 1 + (logits.argsort(descending=True) == sample.target[:, None]).int().argmax(1).numpy()
    assert 0 < dead.sum() < len(dead)
    wanted["balanced_accuracy"] = (absent[dead].mean() + (~absent)[~dead].mean()) / 2
    wanted.update(top3=(rank <= 3).mean(), mrr=(1 / rank).mean(), absent_share=dead.mean())
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


def test_a_new_predictor_takes_in_the_tokenizers_codes() -> None:
    config = toy_config()
    tokenizer, predictor = toy_modules(config)
    predictor.table.zero_()
    PredictorLearner(predictor, tokenizer, config, INFO, Dist())
    assert torch.equal(predictor.table, tokenizer.table())
    predictor.table += 1e-5  # as computed on another device
    trained = predictor.table.clone()
    PredictorLearner(predictor, tokenizer, config, INFO, Dist())
    assert torch.equal(predictor.table, trained), "a trained predictor is judged with the table that agents act with"


def test_features_of_codes_are_standardised_and_clipped() -> None:
    predictor = toy_modules(toy_config(tokenizer_config__n_codes=40))[1]
    table = torch.randn_like(predictor.table)
    table[:, 0], table[0, 1] = 1.0, 1e3  # the same in all codes; far from the others
    predictor.bind(table)
    features = predictor.code_features[:40]
    assert not features[:, 0].any() and features[0, 1] == 5
    torch.testing.assert_close(features[:, 2], (table[:, 2] - table[:, 2].mean()) / table[:, 2].std(correction=0))


def gradients(stage: Any) -> list[torch.Tensor]:
    """Return the gradients of one update."""
    kept: list[torch.Tensor] = []
    module = next(iter(stage.modules().values()))
    stage.optimizer.step = lambda: kept.extend(p.grad.clone() for p in module.parameters())
    torch.manual_seed(3)
    stage.update(pack_episodes(toy_episodes(7, seed=5)))
    return kept


CASES: dict[str, dict[str, Any]] = {
    "stage1": {},
    "stage2": {},
    "stage2 matched": {"matching": "type", "stacked_steps": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_batch_add_up_to_the_whole(case: str) -> None:
    stages = [graph_learner(case.split()[0], graph_frames_at_once=size, **CASES[case]) for size in (10**6, 11)]
    whole, parts = (gradients(stage) for stage in stages)
    assert len(whole) > 10
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    states = [{k: v for k, v in state_of(stage).items() if "optimizer" not in k} for stage in stages]
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=1e-12)
    of_whole, of_parts = (stage.evaluate(pack_episodes(toy_episodes(9, seed=8))) for stage in stages)
    torch.testing.assert_close(of_parts, of_whole, rtol=1e-6, atol=1e-12)


def test_recomputing_activations_changes_nothing() -> None:
    pair = [gradients(learner(enable_gradient_checkpointing=on, dropout=0.3)) for on in (False, True)]
    torch.testing.assert_close(*pair, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("stage", "width"), [("stage1", "tokenizer_config__hidden_dim"), ("stage2", "d_model")])
def test_bf16_products_are_close_to_float32(stage: str, width: str) -> None:
    pair = [gradients(graph_learner(stage, torch.float32, precision=p, **{width: 16})) for p in ("float32", "bf16")]
    one, other = (torch.cat([g.flatten() for g in gradient]) for gradient in pair)
    assert 0 < (one - other).norm() < 0.1 * one.norm()


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_evaluation_warm_up_and_empty_batches_change_nothing(stage: str) -> None:
    made = graph_learner(stage, dropout=0.3)
    before, batch = state_of(made), pack_episodes(toy_episodes(3))
    made.warm_up()
    made.evaluate(batch)
    blank = [{name: torch.zeros_like(value) for name, value in episode.items()} for episode in toy_episodes(2)]
    made.update(pack_episodes(blank))
    assert equal(before, state_of(made))
    assert next(iter(made.modules().values())).training


def test_a_file_of_an_earlier_version_loads() -> None:
    """Those hold two sums of unseen units, which nothing reads."""
    predictor = toy_modules(toy_config())[1]
    assert {"slot_sum", "slot_count"} <= predictor.state_dict().keys()
