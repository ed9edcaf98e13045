"""Stage 2: inputs and targets of the predictor, matching, loss, metrics; and what both pre-training stages share."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, graph_learner, toy_config, toy_episodes, toy_modules

from omagd.config.env_info import ALLY, ENEMY
from omagd.learners.graph_metrics import summarise
from omagd.learners.predictor_learner import PredictorLearner, cheapest, match_types
from omagd.modules.graph_reconstructers.graphs import feature_mask, nodes_to_obs, obs_to_nodes
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
K, MASK, PAD, HIDDEN, ABSENT = 12, 12, 13, 14, 12


def learner(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    return graph_learner("stage2", dtype, **{f"mask_predictor_config__{k}": v for k, v in changes.items()})


def sample_of(stage, batch, hide=False):
    return stage.sample(batch, stage.graphs(batch), hide)


def by_frame(sample):
    """Yield (number of frame, row, agent, {slot: target})."""
    targets = iter(sample.target.tolist())
    for i in range(len(sample.frames)):
        slots = torch.nonzero(sample.masked[i]).flatten().tolist()
        yield i, int(sample.rows[i]), int(sample.agents[i]), {slot: next(targets) for slot in slots}


def test_frames_hold_what_was_seen_and_nothing_else() -> None:
    stage, strip = learner(stacked_steps=3, stacked_strip=2), 2
    episodes = toy_episodes(4, seed=1, longest=8)
    batch = pack_episodes(episodes)
    sample, packing = sample_of(stage, batch), batch.packing
    seen_ids, full_ids = (
        [stage.tokenizer.ids(obs_to_nodes(episodes[i][name], LAYOUT)).tolist() for i in batch.sample_index]
        for name in ("obs", "full_obs")
    )

    def tokens(episode, step, agent):
        if step < 0:
            return [PAD] * LAYOUT.n_nodes
        nodes = obs_to_nodes(episodes[batch.sample_index[episode]]["obs"][step, agent], LAYOUT).numpy()
        if not nodes[0, 1:].any():  # a dead observer
            return [MASK] * LAYOUT.n_nodes
        ids = seen_ids[episode][step][agent]
        return [ids[slot] if nodes[slot].any() else MASK for slot in range(LAYOUT.n_nodes)]

    expected = 0
    for i, row, agent, targets in by_frame(sample):
        episode, step = int(packing.episode[row]), int(packing.step[row])
        wanted = [tokens(episode, step - back * strip, agent) for back in (2, 1, 0)]
        assert sample.frames.ids[i].tolist() == wanted
        assert int(sample.frames.step[i]) == step
        assert {slot for slot, token in enumerate(wanted[-1]) if token == MASK} == set(targets)
        full = obs_to_nodes(episodes[batch.sample_index[episode]]["full_obs"][step, agent], LAYOUT)
        for slot, target in targets.items():
            assert target == (full_ids[episode][step][agent][slot] if full[slot].any() else ABSENT)
        for slot in range(LAYOUT.n_nodes):
            times = [t for t in range(step) if tokens(episode, t, agent)[slot] < K]
            last = (tokens(episode, times[-1], agent)[slot], step - times[-1]) if times else (PAD, 0)
            assert (int(sample.frames.last_ids[i, slot]), int(sample.frames.age[i, slot])) == last
        expected += 1
    living = [e["obs"][:-1].any(-1) & (~obs_to_nodes(e["obs"][:-1], LAYOUT).any(-1)).any(-1) for e in episodes]
    assert expected == len(sample.frames) == sum(int(one.sum()) for one in living)
    assert stage.predictor(sample.frames, sample.masked).shape == (len(sample.target), K + 1)


def test_truth_beyond_sight_changes_targets_only() -> None:
    stage = learner(mask_ratio=0.5)
    episodes = toy_episodes(4, seed=2)
    blind = [{**e, "full_obs": e["obs"].clone()} for e in episodes]
    one, other = (sample_of(stage, pack_episodes(e), hide=True) for e in (episodes, blind))
    assert torch.equal(one.frames.ids, other.frames.ids) and torch.equal(one.frames.last_ids, other.frames.last_ids)
    assert torch.equal(one.masked, other.masked) and not torch.equal(one.target, other.target)


def test_random_masks_hide_seen_nodes_and_are_drawn_by_update_and_episode() -> None:
    stage = learner(mask_ratio=0.4)
    episodes = toy_episodes(8, seed=3)
    batch = pack_episodes(episodes)
    sample, plain = sample_of(stage, batch, hide=True), sample_of(stage, batch)
    last = sample.frames.ids[:, -1]
    assert torch.equal(sample.masked, (last == MASK) | (last == HIDDEN))
    hidden = (last == HIDDEN)[sample.masked]
    assert (sample.target[hidden] < K).all() and not (last[:, 0] == HIDDEN).any()
    assert not (plain.frames.ids == HIDDEN).any() and not (sample.frames.ids[:, :-1] == HIDDEN).any()
    seen = int(stage.graphs(batch).seen[..., 1:].sum())
    assert 0.3 < int(hidden.sum()) / seen < 0.5
    assert torch.equal(sample_of(stage, batch, hide=True).frames.ids, sample.frames.ids)
    # Another order of the same sample: each episode keeps its draws only with its place in the sample.
    stage.updates = 1
    again = sample_of(stage, batch, hide=True)
    assert len(again.frames) != len(sample.frames) or not torch.equal(again.frames.ids, sample.frames.ids)


def test_loss_is_the_weighted_cross_entropy_of_the_masked_tokens() -> None:
    batch = pack_episodes(toy_episodes(6, seed=6))
    slots, matched = (learner(matching=matching) for matching in ("none", "type"))
    assert matched._loss.eval()(sample_of(matched, batch))[0] < slots._loss.eval()(sample_of(slots, batch))[0]
    stage = learner(early_steps=3, early_step_weight=0.25)
    sample = sample_of(stage, pack_episodes(toy_episodes(5, seed=4)))
    loss, stats = stage._loss.eval()(sample)
    log_p = stage.predictor(sample.frames, sample.masked).log_softmax(-1)
    early = (sample.frames.step < 3)[:, None].expand_as(sample.masked)[sample.masked]
    weight = torch.where(early, 0.25, 1.0)
    wanted = -(weight * log_p.gather(1, sample.target[:, None])[:, 0]).sum()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    assert 0 < early.sum() < len(early)
    assert float(stats["graph_loss"][1]) == pytest.approx(float(weight.sum())) == float(stage._count(sample))


@pytest.mark.parametrize("m", [1, 3, 4, 5])
def test_cheapest_assignment_is_the_cheapest_of_all(m: int) -> None:
    cost = torch.from_numpy(np.random.default_rng(m).normal(size=(4, m, m)))
    chosen = cheapest(cost)
    for one, order in zip(cost, chosen, strict=True):
        best = min(sum(float(one[i, j]) for i, j in enumerate(p)) for p in itertools.permutations(range(m)))
        assert sorted(order.tolist()) == list(range(m))
        assert sum(float(one[i, j]) for i, j in enumerate(order)) == pytest.approx(best)


def test_matching_stays_within_frame_and_type() -> None:
    torch.manual_seed(0)
    masked = torch.rand(30, LAYOUT.n_nodes) < 0.7
    masked[:, 0] = False
    masked[0] = False
    n = int(masked.sum())
    log_p, targets = torch.randn(n, K + 1, dtype=torch.float64).log_softmax(-1), torch.randint(0, K + 1, (n,))
    matched = match_types(log_p, targets, masked, LAYOUT)
    frame, slot = torch.nonzero(masked, as_tuple=True)
    kind = torch.tensor(LAYOUT.node_types)[slot]
    assert sorted(matched.tolist()) == list(range(n))
    assert torch.equal(frame[matched], frame) and torch.equal(kind[matched], kind)
    for f, t in itertools.product(range(30), (ALLY, ENEMY)):
        ours = torch.nonzero((frame == f) & (kind == t)).flatten().tolist()
        cost = sum(-float(log_p[i, targets[matched[i]]]) for i in ours)
        orders = itertools.permutations(ours)
        costs = [sum(-float(log_p[i, targets[j]]) for i, j in zip(ours, order, strict=True)) for order in orders]
        assert cost == pytest.approx(min(costs))


@pytest.mark.parametrize("use_gru", [False, True])
def test_everything_that_is_shown_matters_to_its_own_frame_alone(use_gru: bool) -> None:
    stage = learner(use_gru=use_gru)
    stage._loss.eval()
    sample = sample_of(stage, pack_episodes(toy_episodes(5, seed=8)))
    frames, masked = sample.frames[:4], sample.masked[:4]
    base = stage.predictor(frames, masked)
    frame = torch.nonzero(masked)[:, 0]
    for name in ("ids", "step", "last_ids", "age"):
        changed = getattr(frames, name).clone()
        if name in ("ids", "last_ids"):
            changed[1] = (changed[1] + 1) % K
        else:
            changed[1] = changed[1] + 1
        out = stage.predictor(replace(frames, **{name: changed}), masked)
        assert torch.allclose(out[frame != 1], base[frame != 1], atol=1e-12), name
        assert not torch.allclose(out[frame == 1], base[frame == 1], atol=1e-6), name


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
    stage = learner()
    for seed in range(3):
        stage.update(pack_episodes(toy_episodes(4, seed=seed)))
    episodes = toy_episodes(6, seed=9)
    batch = pack_episodes(episodes)
    stats = stage.evaluate(batch)
    values = summarise({name: float(total) / float(count) for name, (total, count) in stats.items()})
    sample = sample_of(stage, batch)
    logits = stage.predictor.eval()(sample.frames, sample.masked)
    guess, real = stage.predictor.guess(logits), feature_mask(LAYOUT)
    mean = stage.predictor.slot_sum / stage.predictor.slot_count.clamp(min=1)[:, None]
    top3, mrr, errors, baselines, absent, token = [], [], [], {"slot_mean": [], "last_seen": [], "zeros": []}, [], 0
    for _, row, agent, targets in by_frame(sample):
        episode = episodes[batch.sample_index[int(batch.packing.episode[row])]]
        step = int(batch.packing.step[row])
        for slot, target in targets.items():
            order = logits[token].argsort(descending=True).tolist()
            top3.append(target in order[:3])
            mrr.append(1 / (1 + order.index(target)))
            truth = obs_to_nodes(episode["full_obs"][step, agent], LAYOUT)[slot].double()[real[slot]]
            past = obs_to_nodes(episode["obs"][:step, agent], LAYOUT)[:, slot].double()[:, real[slot]]
            past = past[past.any(-1)]
            errors.append(float((guess.features.detach()[token][real[slot]] - truth).square().mean()))
            baselines["slot_mean"].append(float((mean[slot][real[slot]] - truth).square().mean()))
            baselines["last_seen"].append(float(((past[-1] if len(past) else 0 * truth) - truth).square().mean()))
            baselines["zeros"].append(float(truth.square().mean()))
            absent.append((bool(guess.absent[token]), not truth.any()))
            token += 1
    assert values["top3"] == pytest.approx(np.mean(top3)) and values["mrr"] == pytest.approx(np.mean(mrr))
    assert values["error"] == pytest.approx(np.mean(errors), rel=1e-5)
    of_living = [error for error, (_, dead) in zip(errors, absent, strict=True) if not dead]
    assert 0 < len(of_living) < len(errors)
    assert values["error_alive"] == pytest.approx(np.mean(of_living), rel=1e-5)
    for name, wanted in baselines.items():
        assert values[f"error_{name}"] == pytest.approx(np.mean(wanted), rel=1e-5), name
    said, true = np.array(absent).T
    assert values["balanced_accuracy"] == pytest.approx((said[true].mean() + (~said)[~true].mean()) / 2)
    assert values["error_rival"] <= min(values["error_slot_mean"], values["error_last_seen"])
    assert values["error_ratio"] == pytest.approx(values["error"] / values["error_rival"])


def test_a_new_predictor_takes_in_the_tokenizers_codes() -> None:
    config = toy_config()
    tokenizer, predictor = toy_modules(config)
    predictor.table.zero_()
    PredictorLearner(predictor, tokenizer, config, INFO, Dist())
    assert torch.equal(predictor.table, tokenizer.table())


def test_slot_means_are_those_of_unseen_nodes_in_training() -> None:
    stage = learner()
    batches = [pack_episodes(toy_episodes(4, seed=seed)) for seed in (1, 2)]
    for batch in batches:
        stage.update(batch)
    collected: list[list[torch.Tensor]] = [[] for _ in range(LAYOUT.n_nodes)]
    for batch in batches:
        full, obs = (obs_to_nodes(batch[name], LAYOUT) for name in ("full_obs", "obs"))
        counts = batch["obs"].any(-1) & ~batch.packing.closing[:, None]
        for slot in range(1, LAYOUT.n_nodes):
            collected[slot].append(full[:, :, slot][counts & ~obs[:, :, slot].any(-1)])
    for slot in range(1, LAYOUT.n_nodes):
        wanted = torch.cat(collected[slot]).double()
        assert stage.predictor.slot_count[slot] == len(wanted)
        assert torch.allclose(stage.predictor.slot_sum[slot], wanted.sum(0), atol=1e-9)


def test_memory_of_earlier_steps_is_used() -> None:
    """A unit that does not move is seen every other step: only memory gives its position."""
    episodes = []
    rng = np.random.default_rng(0)
    for _ in range(12):
        nodes = np.zeros((9, 3, LAYOUT.n_nodes, LAYOUT.node_dim), np.float32)
        nodes[:, :, 0, 4:] = 1
        nodes[:, :, 3] = np.sign(rng.normal())
        seen = nodes.copy()
        seen[1::2, :, 3] = 0
        pair = {"obs": seen, "full_obs": nodes}
        episodes.append({name: torch.from_numpy(nodes_to_obs(value, LAYOUT)) for name, value in pair.items()})
    ratios = []
    for memory in (True, False):
        names = {"last_seen": memory, "stacked_steps": 1}
        changes = {f"mask_predictor_config__{name}": value for name, value in names.items()}
        stage = graph_learner("stage2", torch.float32, graph_lr=0.01, **changes)
        for _ in range(40):
            stage.update(pack_episodes(episodes))
        stats = stage.evaluate(pack_episodes(episodes))
        ratios.append(float(stats["top1"][0] / stats["top1"][1]))
    assert ratios[0] > 0.95 and ratios[1] < 0.95


def gradients(stage: Any) -> list[torch.Tensor]:
    """Return the gradients of one update."""
    kept: list[torch.Tensor] = []
    module = next(iter(stage.modules().values()))
    stage.optimizer.step = lambda: kept.extend(p.grad.clone() for p in module.parameters())
    torch.manual_seed(3)
    stage.update(pack_episodes(toy_episodes(7, seed=5)))
    return kept


def state_of(stage: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in next(iter(stage.modules().values())).state_dict().items()}


CASES: dict[str, dict[str, Any]] = {
    "stage1": {},
    "stage2": {"mask_predictor_config__mask_ratio": 0.3, "mask_predictor_config__early_step_weight": 0.3},
    "stage2 matched": {"mask_predictor_config__matching": "type", "mask_predictor_config__stacked_steps": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_parts_of_a_batch_add_up_to_the_whole(case: str) -> None:
    stages = [graph_learner(case.split()[0], graph_frames_at_once=size, **CASES[case]) for size in (10**6, 11)]
    whole, parts = (gradients(stage) for stage in stages)
    assert len(whole) > 10
    for one, other in zip(whole, parts, strict=True):
        assert (one - other).norm() <= 1e-12 * max(1.0, float(one.norm()))
    states = [state_of(stage) for stage in stages]
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], rtol=0, atol=1e-12), name
    batch = pack_episodes(toy_episodes(9, seed=8))
    of_whole, of_parts = (stage.evaluate(batch) for stage in stages)
    assert of_whole.keys() == of_parts.keys()
    for name, pair in of_whole.items():
        assert [float(v) for v in pair] == pytest.approx([float(v) for v in of_parts[name]], rel=1e-6), name


def test_recomputing_activations_changes_nothing() -> None:
    dropout = {"mask_predictor_config__dropout": 0.3}
    pair = (gradients(graph_learner("stage2", enable_gradient_checkpointing=on, **dropout)) for on in (False, True))
    for one, other in zip(*pair, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_bf16_products_are_close_to_float32(stage: str) -> None:
    changes = {"tokenizer_config__hidden_dim": 16} if stage == "stage1" else {"mask_predictor_config__d_model": 16}
    pair = (gradients(graph_learner(stage, torch.float32, precision=p, **changes)) for p in ("float32", "bf16"))
    one, other = (torch.cat([g.flatten() for g in gradient]) for gradient in pair)
    assert 0 < (one - other).norm() < 0.1 * one.norm()


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_evaluation_warm_up_and_empty_batches_change_nothing(stage: str) -> None:
    made = graph_learner(stage, mask_predictor_config__dropout=0.3)
    before, batch = state_of(made), pack_episodes(toy_episodes(3))
    made.warm_up()
    made.warm_up(batch)
    made.evaluate(batch)
    blank = [{name: torch.zeros_like(value) for name, value in episode.items()} for episode in toy_episodes(2)]
    made.update(pack_episodes(blank))
    for name, value in state_of(made).items():
        assert torch.equal(value, before[name]), name
    assert next(iter(made.modules().values())).training
