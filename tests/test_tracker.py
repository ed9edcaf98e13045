"""The predictor that tracks: what it remembers, its loss, ridge regression at the start, and acting with it."""

from __future__ import annotations

from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ddp_harness import run_ranks
from graph_toys import INFO, LAYOUT, graph_learner, toy_config, toy_episodes
from q_toys import equal, state_of

from omagd.config.loading import resolve
from omagd.learners import PREDICTORS, belief_cases, tracker_fitting
from omagd.learners.synced_optimizer import SKIPPED
from omagd.modules.graph_reconstructers import REGISTRY, compiled_tracking
from omagd.modules.graph_reconstructers.graphs import feature_mask, nodes_to_obs, obs_to_nodes
from omagd.modules.graph_reconstructers.pretrained import check, describe
from omagd.modules.graph_reconstructers.tracker import FLOOR
from omagd.modules.graph_reconstructers.tracking import TrackingReconstructor
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
N, D = LAYOUT.n_nodes, LAYOUT.node_dim


def learner(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Return the learner of a tracker, all of whose weights have moved."""
    made = graph_learner("stage2", dtype, kind="tracker", graph_frames_at_once=1000, **changes)
    made.begin(lambda: [pack_episodes(toy_episodes(12, seed=s, apart=True)) for s in (40, 41)])
    for seed in range(3):
        made.update(pack_episodes(toy_episodes(4, seed=seed, apart=True)))
    return made


def test_both_registries_have_the_same_kinds() -> None:
    assert {"masked", "tracker"} <= set(REGISTRY.names()) == set(PREDICTORS.names())
    with pytest.raises(UserError, match="argmax"):
        resolve("omagd_small", "skirmish", {"mask_predictor_config": {"kind": "tracker", "decode": "argmax"}})


def test_memory_is_what_was_seen_last_and_when() -> None:
    stage, episodes = learner(), toy_episodes(5, seed=1, apart=True)
    batch = pack_episodes(episodes)
    sample, targets = stage.sample(batch), iter(stage.sample(batch).target)
    memory = sample.memory
    for row in range(len(batch["obs"])):
        step = int(batch.packing.step[row])
        episode = episodes[batch.sample_index[batch.packing.episode[row]]]
        nodes, full = (obs_to_nodes(episode[name], LAYOUT) for name in ("obs", "full_obs"))
        living = episode["obs"].any(-1)
        assert int(memory.step[row]) == step
        for agent in range(INFO.n_agents):
            assert int(memory.action[row, agent]) == (int(episode["actions"][step - 1, agent]) if step else -1)
            change = nodes[step, agent, 0] - nodes[step - 1, agent, 0] if step else torch.zeros(D)
            assert torch.equal(memory.change[row, agent], change)
            for node in range(N):
                seen = [t for t in range(step + 1) if living[t, agent] and nodes[t, agent, node].any()]
                last = nodes[seen[-1], agent, node] if seen else torch.zeros(D)
                assert torch.equal(memory.last[row, agent, node], last)
                assert int(memory.age[row, agent, node]) == (step - seen[-1] if seen else -1)
                unseen = not nodes[step, agent, node].any() and bool(living[step, agent])
                counts = unseen and step < len(nodes) - 1
                assert bool(memory.missing[row, agent, node]) == counts
                if counts:
                    assert torch.equal(next(targets), full[step, agent, node])
    assert next(targets, None) is None
    assert torch.equal(sample.dead, ~sample.target.any(-1)) and 0 < int(sample.dead.sum()) < len(sample.dead)


def test_loss_is_the_weighted_likelihood_of_the_living_and_of_being_alive() -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(8, seed=3, apart=True))
    counts = torch.tensor([50.0, 9, 7, 5, 2, 1], dtype=torch.float64)
    sample = stage._weighted(stage.sample(batch), counts)
    loss, stats = stage._loss.eval()(sample)
    out = stage.predictor(sample.memory, sample.packing)
    real = feature_mask(LAYOUT)[torch.nonzero(sample.memory.missing)[:, 2]].numpy()
    base, regressed, learned, variance, dead = (value.detach().numpy() for value in out)
    mean = base + regressed + learned
    ages = sample.memory.age[sample.memory.missing].tolist()
    share = counts.numpy() / counts.sum().item()
    by_age = share**-0.5 / (share**0.5).sum()
    total = weights = 0.0
    for m, (truth, age) in enumerate(zip(sample.target.double().numpy(), ages, strict=True)):
        p = 1 / (1 + np.exp(-dead[m]))
        if not truth.any():
            total, weights = total - np.log(p), weights + 1
            continue
        weight = by_age[0 if age < 0 else 1 if age == 1 else 2 if age < 4 else 3 if age < 8 else 4 if age < 16 else 5]
        at, v = real[m], variance[m]
        nll = 2 * (truth - mean[m]) ** 2 / np.sqrt(v) + np.log(v) * np.sqrt(v)
        total, weights = total + weight * (nll[at].mean() - np.log(1 - p)), weights + weight
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    assert float(stats["graph_loss"][1]) == pytest.approx(weights, rel=1e-6)
    assert (variance >= FLOOR**2).all()


def test_the_mean_follows_the_weighted_likelihood_and_the_variance_the_likelihood_itself() -> None:
    """Gradients by hand; the equation at the top of tracker_learner.py says what has none."""
    stage, batch = learner(), pack_episodes(toy_episodes(8, seed=3, apart=True))
    sample = stage._weighted(stage.sample(batch), torch.tensor([50.0, 9, 7, 5, 2, 1], dtype=torch.float64))
    out, weights = stage.predictor(sample.memory, sample.packing), list(stage.predictor.parameters())
    mean = out.base + out.regressed + out.learned
    real = feature_mask(LAYOUT)[torch.nonzero(sample.memory.missing)[:, 2]].double()
    share = (sample.weight * ~sample.dead)[:, None] * real / real.sum(-1, keepdim=True)
    off, v = (mean - sample.target).detach(), out.variance.detach()
    of_mean, of_variance = share * 2 * off / v.sqrt(), share * v.sqrt() * (1 / v - (off / v).square())
    of_dead = sample.weight * (out.dead_logit.detach().sigmoid() - sample.dead.double())
    parts = (mean, out.variance, out.dead_logit), weights, (of_mean, of_variance, of_dead)
    wanted = torch.autograd.grad(*parts, retain_graph=True)
    for found, value in zip(torch.autograd.grad(stage._loss(sample)[0], weights), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    of_spread = torch.autograd.grad(out.variance.sum(), weights, materialize_grads=True)
    names = [name for name, _ in stage.predictor.named_parameters()]
    changed = {name for name, value in zip(names, of_spread, strict=True) if value.any()}
    assert changed == {"spread.weight", "spread.bias"}, "it reads the state of the network without changing it"


def test_updates_weigh_classes_of_age_by_their_shares_so_far() -> None:
    stage, so_far = graph_learner("stage2", kind="tracker", graph_frames_at_once=1000), torch.zeros(6).double()
    for seed in range(3):
        batch = pack_episodes(toy_episodes(6, seed=seed, apart=True))
        sample = stage.sample(batch)
        for age in sample.memory.age[sample.memory.missing][sample.target.any(-1)].tolist():
            so_far[0 if age < 0 else sum(age >= first for first in (1, 2, 4, 8, 16))] += 1
        weighted = stage._weighted(sample, so_far)
        loss = stage._loss(weighted)[0] / weighted.weight.double().sum()
        gradients = torch.autograd.grad(loss, list(stage.predictor.parameters()))
        wanted = torch.cat([each.flatten() for each in gradients]).norm()
        assert float(stage.update(batch)["grad_norm"][0]) == pytest.approx(float(wanted), rel=1e-6)
        assert torch.equal(stage.predictor.class_count, so_far) and stage.updates == seed + 1
    stage.predictor.node.weight.data.fill_(torch.nan)
    assert stage.update(batch)[SKIPPED][0] and torch.equal(stage.predictor.class_count, so_far)
    heaviest = stage._weighted(sample, torch.tensor([1e9, 1, 1, 1, 1, 1]).double()).weight.max()
    assert float(heaviest) == pytest.approx(0.002**-0.5, rel=1e-3), "as if their share was not below 0.002"


def test_the_learning_rate_falls_along_half_a_cosine_and_stays_at_a_fiftieth() -> None:
    stage = graph_learner("stage2", kind="tracker", graph_pretrain_epochs=4, graph_lr=0.01)
    batch, found = pack_episodes(toy_episodes(2, apart=True)), []
    for _ in range(8):  # more than the epochs, as a refresh goes on
        stage.update(batch)
        found.append(stage.optimizer.param_groups[0]["lr"])
    assert found == pytest.approx([0.01, 0.005 + 0.005 * 0.5**0.5, 0.005, 0.005 - 0.005 * 0.5**0.5, *[0.0002] * 4])


def test_a_fresh_tracker_believes_in_what_was_seen_last() -> None:
    stage, batch = graph_learner("stage2", kind="tracker"), pack_episodes(toy_episodes(8, seed=3, apart=True))
    memory = stage.sample(batch).memory
    out = stage.predictor(memory, batch.packing)
    torch.testing.assert_close(out.base, memory.last[memory.missing].double(), rtol=0, atol=0)
    assert out.base.any() and not out.regressed.any() and not out.learned.any()


def test_what_is_measured_are_errors_of_beliefs_and_who_is_taken_for_dead() -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(9, seed=21, apart=True))
    stage.predictor.threshold.copy_(stage.beliefs(batch)[1].p_dead.quantile(0.3))
    missing, belief = stage.beliefs(batch)
    truth, errors = obs_to_nodes(batch["full_obs"], LAYOUT)[missing].double(), []
    for guess, y, node in zip(belief.features.double(), truth, torch.nonzero(missing)[:, 2].tolist(), strict=True):
        errors.append(float((guess - y)[feature_mask(LAYOUT)[node]].square().mean()))
    dead, taken, each = (~truth.any(-1)).numpy(), belief.taken_for_dead.numpy(), np.array(errors)
    wanted = {
        "error_all": each.mean(), "error_alive": each[~dead].mean(), "absent_share": dead.mean(),
        "recall_absent": taken[dead].mean(), "recall_alive": (~taken[~dead]).mean(),
    }  # fmt: skip
    found = {name: float(total / count) for name, (total, count) in stage.evaluate(batch).items()}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5) and len(set(wanted.values())) == 5
    total, weight = stage._loss(stage._weighted(stage.sample(batch), stage.predictor.class_count))[1]["graph_loss"]
    assert found["graph_loss"] == pytest.approx(float(total / weight)), "weighted as in training"


def unlike(episodes: Any) -> Any:
    """Return episodes in which allies and enemies have other means and scales; one feature of enemies is constant."""
    types = torch.tensor(LAYOUT.node_types)
    out = []
    for episode in episodes:
        shown = {name: obs_to_nodes(episode[name], LAYOUT) for name in ("obs", "full_obs")}
        for name, nodes in shown.items():
            made = 10.0 * types[:, None] + (1.0 + types[:, None]) * torch.arange(1, 1 + D) * nodes
            made[:, :, 1 + LAYOUT.n_allies :, 0] = 0.25
            shown[name] = torch.where(nodes != 0, made, 0.0)
        out.append({**episode, **{name: nodes_to_obs(nodes, LAYOUT) for name, nodes in shown.items()}})
    return out


def test_features_are_standardised_by_the_living_units_of_a_type() -> None:
    stage = graph_learner("stage2", kind="tracker", graph_frames_at_once=1000)
    parts = [unlike(toy_episodes(12, seed=seed, apart=True)) for seed in (5, 6)]
    values: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for episode in (episode for part in parts for episode in part):
        full = obs_to_nodes(episode["full_obs"], LAYOUT).double()
        for step, agent in np.ndindex(len(full) - 1, INFO.n_agents):
            for node in range(N if episode["obs"][step, agent].any() else 0):
                if full[step, agent, node].any():
                    values[LAYOUT.node_types[node]].append(full[step, agent, node].numpy())
        episode["full_obs"][~episode["obs"].any(-1)] = 77.0  # what an environment may show to the dead
    stage.begin(lambda: [pack_episodes(part) for part in parts])
    for node, kind in enumerate(LAYOUT.node_types):
        found, spread = np.array(values[kind]), np.std(values[kind], axis=0)
        np.testing.assert_allclose(stage.predictor.mean[node], found.mean(0), atol=1e-6)
        np.testing.assert_allclose(stage.predictor.scale[node], np.where(spread < 1e-3, 1.0, spread), rtol=1e-6)
        np.testing.assert_allclose(stage.predictor.bounds[:, node], [found.min(0), found.max(0)], rtol=1e-6)


def test_the_network_and_the_regression_count_in_standard_deviations_of_the_unit() -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(4, seed=3, apart=True))
    tracker, sample, source = stage.predictor, stage.sample(batch), torch.Generator().manual_seed(0)
    tracker.scale.copy_(torch.rand(tracker.scale.shape, generator=source) + 0.5)
    tracker.linear_weight.zero_()
    tracker.linear_bias.copy_(torch.randn(tracker.linear_bias.shape, generator=source))
    torch.nn.init.zeros_(tracker.head.weight)
    torch.nn.init.normal_(tracker.head.bias, generator=source)
    out, bias = tracker(sample.memory, sample.packing), tracker.linear_bias.view(6, N - 1, D)
    for m, (node, age) in enumerate(zip(torch.nonzero(sample.memory.missing)[:, 2].tolist(), sample.ages, strict=True)):
        torch.testing.assert_close(out.learned[m], tracker.scale[node] * tracker.head.bias)
        torch.testing.assert_close(out.regressed[m], tracker.scale[node] * bias[age, node - 1])


def test_the_step_is_known_between_corners_that_double() -> None:
    tracker = learner().predictor
    for limit in (90, 400):
        tracker.limit, steps = limit, np.arange(410)
        at = np.log2(np.minimum(steps, limit) + 1)
        wanted = [np.interp(at, np.arange(9), row) for row in np.eye(9)[:8]]
        np.testing.assert_allclose(tracker.step_basis(torch.from_numpy(steps), torch.float64).T, wanted, atol=1e-12)


@pytest.mark.parametrize("at_once", [None, 2000])
def test_training_begins_with_regression_on_what_the_agent_knows(at_once: int | None, monkeypatch: Any) -> None:
    if at_once is not None:  # batches in many parts, as on maps with many units
        monkeypatch.setattr(belief_cases, "NUMBERS_AT_ONCE", at_once)
        assert len(list(belief_cases.bounded([pack_episodes(toy_episodes(30, seed=5, apart=True))]))) > 5
    stage = graph_learner("stage2", kind="tracker", graph_frames_at_once=1000)
    batches = [pack_episodes(toy_episodes(30, seed=seed, apart=True)) for seed in (5, 6)]
    stage.begin(lambda: batches)
    tracker, every = stage.predictor, [stage.sample(batch) for batch in batches]
    full = torch.cat([obs_to_nodes(b["full_obs"], LAYOUT)[b.valid_mask & b["obs"].any(-1).any(-1)] for b in batches])
    enemies = full[:, :, 1 + LAYOUT.n_allies :].flatten(0, 2)
    assert torch.allclose(tracker.mean[-1].float(), enemies[enemies.any(-1)].mean(0), atol=0.1)

    padded = [batch.packing.pad(batch["actions"].long()).sum(-1) for batch in batches]
    chosen_by = [(actions * torch.arange(1, 1 + actions.shape[1])).sum(1) % 5 == 4 for actions in padded]

    def cases(unit: int, judges: bool, *ages: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what agents know, with a 1, and what is left of the living unit's features, of some classes of age."""
        x, y = [torch.zeros(0, size)], [torch.zeros(0, D)]
        for number, sample in enumerate(every):
            memory, at = sample.memory, torch.nonzero(sample.memory.missing)
            _, base, known = tracker.encode(memory, torch.zeros((*memory.age.shape, 2), dtype=torch.float64))
            for m, (row, agent, node) in enumerate(at.tolist()):
                judge = bool(chosen_by[number][sample.packing.episode[row]])
                if node == unit and not sample.dead[m] and int(sample.ages[m]) in ages and judge == judges:
                    x.append(torch.cat([known[row, agent], known.new_ones(1)])[None])
                    y.append((sample.target[m] - base[row, agent, node - 1])[None] / tracker.scale[node])
        return torch.cat(x).double(), torch.cat(y).double()

    def solved(x: torch.Tensor, y: torch.Tensor, penalty: float) -> torch.Tensor:
        extra = penalty**0.5 * torch.eye(x.shape[1], dtype=torch.float64)
        return torch.linalg.lstsq(torch.cat([x, extra]), torch.cat([y, y.new_zeros(len(extra), D)])).solution

    def fitted(ages: tuple[int, ...], penalties: tuple[float, ...], tried: Any, around: Any) -> tuple[Any, Any, float]:
        """Return maps by unit: of all episodes but the judges, then of all; and the penalty that is best for judges."""
        errors, maps = {}, {}
        for penalty in penalties:
            maps[penalty] = {u: tried[u] + solved(x, y - x @ tried[u], penalty) for u, (x, y, *_) in data[ages].items()}
            errors[penalty] = sum(
                float((a @ maps[penalty][u] - b).square().sum()) for u, (*_, a, b) in data[ages].items()
            )
        best = min(penalties, key=errors.__getitem__)
        both = {u: (torch.cat([x, a]), torch.cat([y, b])) for u, (x, y, a, b) in data[ages].items()}
        final = {u: around[u] + solved(x, y - x @ around[u], best) for u, (x, y) in both.items()}
        return maps[best], final, best

    size, enemies_at = tracker.n_known + 1, range(1 + LAYOUT.n_allies, N)
    groups: list[tuple[int, ...]] = [(0,), (1, 2, 3, 4, 5), (1,), (2,), (3,), (4,), (5,)]
    data = {ages: {u: (*cases(u, False, *ages), *cases(u, True, *ages)) for u in enemies_at} for ages in groups}
    none = {unit: torch.zeros(size, D, dtype=torch.float64) for unit in enemies_at}
    never, seen = (fitted(ages, tracker_fitting.COMMON, none, none) for ages in groups[:2])
    wanted, chosen = [never[1]], {never[2], seen[2]}
    for ages in groups[2:]:
        of_age = fitted(ages, tracker_fitting.DEVIATION, *seen[:2])
        wanted.append(of_age[1])
        chosen.add(of_age[2])
    ours = tracker.linear_weight.view(6, N - 1, D, -1)
    for age, maps in enumerate(wanted):
        for unit, weights in maps.items():
            assert torch.allclose(ours[age, unit - 1], weights.T[:, :-1], atol=1e-6)
    assert len(chosen) > 2 and sum(len(x) for x, *_ in data[1,].values()) > 50


def test_thresholds_are_those_of_the_documentation() -> None:
    page = " ".join((Path(__file__).resolve().parents[1] / "docs" / "method.md").read_text(encoding="utf-8").split())
    never, before = tracker_fitting.TAKEN
    assert f"the highest at which at most {100 * tracker_fitting.MISSED:g} % of the dead are missed" in page
    assert f"so high that at most {100 * before:g} % of the living are taken for dead. Units never seen" in page
    assert f"at least 1/2, and so high that at most {100 * never:g} % of the living are taken for dead." in page


def test_thresholds_keep_to_the_shares_of_missed_dead_and_of_living_taken_for_dead(monkeypatch: Any) -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(40, seed=9, apart=True))
    stage.predictor.dead.weight.data *= 100  # which hardly differ after a few updates
    dead = ~obs_to_nodes(batch["full_obs"], LAYOUT)[stage.beliefs(batch)[0]].any(-1)
    before = stage.sample(batch).memory.age[stage.beliefs(batch)[0]] > 0
    types = stage.predictor.types[torch.nonzero(stage.beliefs(batch)[0])[:, 2]]
    for missed, taken in ((0.035, (0.001, 0.9)), (0.5, (0.3, 0.9)), (0.035, (0.3, 0.2))):
        monkeypatch.setattr(tracker_fitting, "MISSED", missed)
        monkeypatch.setattr(tracker_fitting, "TAKEN", taken)
        stage.calibrate([batch])
        belief, threshold = stage.beliefs(batch)[1], stage.predictor.threshold
        assert torch.equal(belief.taken_for_dead, belief.p_dead > threshold[types, before.long()])
        assert not belief.features[belief.taken_for_dead].any() and (belief.spread >= 0).all()
        for kind in (1, 2):
            of_dead = belief.p_dead[dead & before & (types == kind)].sort().values
            allowed = int(missed * len(of_dead))
            spared = belief.p_dead[~dead & before & (types == kind)].sort(descending=True).values
            least = spared[int(taken[1] * len(spared))]  # at which one more of the living is taken for dead
            if of_dead[allowed].logit() > least.logit() + 0.006:  # not in the same bin
                assert int((of_dead <= threshold[kind, 1]).sum()) <= allowed
            nearest = torch.maximum(of_dead[allowed], least).logit() - threshold[kind, 1].logit()
            assert abs(nearest) <= 0.011  # two bins
            assert (spared > threshold[kind, 1]).double().mean() <= taken[1]
            of_living = belief.p_dead[~dead & ~before & (types == kind)]
            assert threshold[kind, 0] >= 0.5 and (of_living > threshold[kind, 0]).double().mean() <= taken[0]
    assert threshold[1, 1] != threshold[2, 1]
    assert threshold[0, 1] > 0.999, "of this type nobody has died: nobody is taken for dead"


def test_the_spread_is_a_standard_deviation_of_at_least_the_floor() -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(8, seed=3, apart=True))
    torch.nn.init.normal_(stage.predictor.spread.weight, generator=torch.Generator().manual_seed(0))
    sample = stage.sample(batch)
    real = feature_mask(LAYOUT)[torch.nonzero(sample.memory.missing)[:, 2]]
    variance = stage.predictor(sample.memory, sample.packing).variance.detach()
    spread = stage.beliefs(batch)[1].spread
    torch.testing.assert_close(spread.square(), torch.where(real, variance, 0.0))
    assert float(spread[real].std()) > 0.1
    torch.nn.init.constant_(stage.predictor.spread.bias, -1000.0)
    torch.testing.assert_close(stage.beliefs(batch)[1].spread, torch.where(real, spread.new_tensor(FLOOR), 0.0))


@pytest.mark.parametrize(("parts", "seed"), [(1, 9), (3, 9), (1, 11)])
def test_gains_are_those_with_the_smallest_error_of_the_living(parts: int, seed: int) -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(20, seed=seed, apart=True))
    stage.calibrate(batch.split(parts))
    sample, gain = stage.sample(batch), stage.predictor.gain.double()
    out = stage.predictor(sample.memory, sample.packing)
    node = torch.nonzero(sample.memory.missing)[:, 2]
    types, (low, high) = stage.predictor.types[node], stage.predictor.bounds[:, node]
    base, regressed, learned = (value.detach() for value in out[:3])
    chosen = set()
    for kind, age, feature in product((1, 2), range(4), range(D)):
        where = (types == kind) & (sample.ages == age) & ~sample.dead

        def errors(f: float, g: float, where: torch.Tensor = where, feature: int = feature) -> torch.Tensor:
            mean = torch.minimum(torch.maximum(base + f * regressed + g * learned, low), high)
            return (mean - sample.target)[where, feature].square()

        def loss(f: float, g: float) -> float:
            """Return by how much the error is surely smaller than that of the regression alone."""
            more = errors(f, g) - errors(1, 0)
            return float(more.mean() + more.std(correction=0) / len(more) ** 0.5)

        steps = [i / 4 for i in range(5)]
        found = tuple(gain[:, kind, age, feature].tolist())
        assert loss(*found) == pytest.approx(min(loss(f, g) for f in steps for g in steps), rel=1e-6, abs=1e-9)
        chosen.add(found)
    assert len(chosen) > 5


def test_guesses_of_the_arm_ridge_are_those_of_regression_alone() -> None:
    """Whatever weights its network begins with; and it takes nobody for dead."""
    preset = resolve("fog_ridge")
    stage = learner(graph_lr=preset.graph_lr, graph_pretrain_epochs=preset.graph_pretrain_epochs)
    batch = pack_episodes(toy_episodes(20, seed=9, apart=True))
    stage.calibrate([batch])
    sample, gain = stage.sample(batch), stage.predictor.gain.double()
    missing, belief = stage.beliefs(batch)
    base, regressed, learned = stage.predictor(sample.memory, sample.packing)[:3]
    assert 0 < learned.abs().max() < 1e-7 < regressed.abs().max()  # updates come through, and change nothing
    node = torch.nonzero(missing)[:, 2]
    factor = gain[0, stage.predictor.types[node], sample.ages]
    bounded = (base + factor * regressed).clamp(*stage.predictor.bounds[:, node])
    torch.testing.assert_close(belief.features.double(), bounded * stage.predictor.real[node - 1], rtol=0, atol=1e-6)
    assert sample.dead.any() and not belief.taken_for_dead.any()


def test_each_type_and_class_of_age_has_its_own_gains() -> None:
    stage, batch = learner(), pack_episodes(toy_episodes(20, seed=9, apart=True))
    tracker, sample = stage.predictor, stage.sample(batch)
    tracker.gain.copy_(torch.rand(tracker.gain.shape, generator=torch.Generator().manual_seed(0)))
    tracker.threshold.fill_(2.0)
    tracker.bounds[0], tracker.bounds[1] = -1e6, 1e6
    base, regressed, learned = (part.detach() for part in tracker(sample.memory, sample.packing)[:3])
    missing, belief = stage.beliefs(batch)
    real, classes = feature_mask(LAYOUT), set()
    ages = sample.memory.age[missing].tolist()
    for m, (node, age) in enumerate(zip(torch.nonzero(missing)[:, 2].tolist(), ages, strict=True)):
        kind, of = LAYOUT.node_types[node], 0 if age < 0 else sum(age >= first for first in (1, 2, 4, 8, 16))
        f, g = tracker.gain[:, kind, of]
        wanted = torch.where(real[node], base[m] + f * regressed[m] + g * learned[m], 0.0)
        torch.testing.assert_close(belief.features[m], wanted.float())
        classes.add((kind, of))
    assert len(classes) > 6


def test_features_stay_within_those_of_living_units_in_training() -> None:
    stage = learner()
    tracker, batch = stage.predictor, pack_episodes(toy_episodes(20, seed=9, apart=True))
    trained = [pack_episodes(toy_episodes(12, seed=s, apart=True)) for s in (40, 41)]
    full = [obs_to_nodes(b["full_obs"], LAYOUT)[b["obs"].any(-1) & b.valid_mask[:, None]] for b in trained]
    enemies = torch.cat([nodes[:, 1 + LAYOUT.n_allies :].flatten(0, 1) for nodes in full])
    living = enemies[enemies.any(-1)]
    assert torch.allclose(tracker.bounds[:, -1].float(), torch.stack([living.min(0).values, living.max(0).values]))
    with torch.no_grad():
        tracker.head.bias += 100.0
    missing, belief = stage.beliefs(batch)
    alive = (torch.nonzero(missing)[:, 2] > LAYOUT.n_allies) & ~belief.taken_for_dead
    assert torch.equal(belief.features[alive].max(0).values, tracker.bounds[1, -1].float())


def of_ranks(rank: int, dist: Dist, seeds: list[tuple[int, ...]]) -> Any:
    """Return the tracker's state after all that ranks fit and choose together."""
    stage = graph_learner("stage2", torch.float64, dist, kind="tracker", graph_frames_at_once=1000)
    batches = [pack_episodes(toy_episodes(12, seed=seed, apart=True)) for seed in seeds[rank]]
    stage.begin(lambda: batches)
    for part, scale in ((stage.predictor.dead, 3.0), (stage.predictor.head, 0.3)):  # which begin with zeros
        torch.nn.init.normal_(part.weight, std=scale, generator=torch.Generator().manual_seed(0))
    stage.update(pack_episodes([e for seed in seeds[rank] for e in toy_episodes(12, seed=seed, apart=True)]))
    stage.calibrate(batches)
    return stage.predictor.state_dict()


@pytest.mark.processes
def test_ranks_fit_and_choose_as_one_process_with_the_episodes_of_all() -> None:
    ranks, alone = run_ranks(of_ranks, [(5,), (6, 7)]), of_ranks(0, Dist(), [(5, 6, 7)])
    for state in ranks:
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7, msg=name)
    assert len(alone["threshold"].unique()) > 3 and len(alone["gain"].unique()) > 2


def play(reconstructor: Any, episodes: Any) -> list[list[torch.Tensor]]:
    """Act through episodes in two slots, one of which rests now and then; return (obs, guessed, field) of each."""
    slots = [[(i, t) for i in range(s, len(episodes), 2) for t in range(len(episodes[i]["obs"]))] for s in (0, 1)]
    out: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in episodes]
    reconstructor.begin(2)
    rng = np.random.default_rng(0)
    while any(slots):
        active = np.array([bool(slot) and (not slots[1 - s] or rng.random() < 0.7) for s, slot in enumerate(slots)])
        places = [slot[0] if slot else (0, 0) for slot in slots]
        step = np.array([t for _, t in places])
        reconstructor.reset((step == 0) & active)
        actions = torch.stack([e["actions"][t - 1] if t else torch.full((INFO.n_agents,), -1) for e, t in
                               ((episodes[i], t) for i, t in places)])  # fmt: skip
        obs = torch.stack([episodes[i]["obs"][t] for i, t in places])
        made = reconstructor.step(obs, step, active, actions)
        assert torch.equal(made.obs[torch.from_numpy(~active)], obs[torch.from_numpy(~active)])
        for slot in np.flatnonzero(active):
            i, _ = slots[slot].pop(0)
            out[i].append((made.obs[slot], made.guessed[slot], made.fields["recon"][slot]))
    return [[torch.stack(x) for x in zip(*one, strict=True)] for one in out]


def acting(**changes: Any) -> tuple[Any, TrackingReconstructor]:
    stage = learner(torch.float32, **changes)
    p_dead = stage.beliefs(pack_episodes(toy_episodes(7, seed=21, apart=True)))[1].p_dead
    stage.predictor.threshold.copy_(p_dead.median())
    return stage, TrackingReconstructor(None, stage.predictor, stage.config, INFO)


def test_acting_believes_what_training_predicts_and_learning_reads_its_bits() -> None:
    stage, reconstructor = acting()
    episodes = toy_episodes(7, seed=21, apart=True)
    played = play(reconstructor, episodes)
    extra = [{"acted": obs, "marks": marks, "recon": kept} for obs, marks, kept in played]
    batch = pack_episodes([{**one, **more} for one, more in zip(episodes, extra, strict=True)])
    missing, belief = stage.beliefs(batch)
    acted = obs_to_nodes(batch["acted"], LAYOUT)[missing]
    assert 0 < int(belief.taken_for_dead.sum()) < len(acted)
    assert torch.allclose(acted, belief.features, atol=2e-3, rtol=2e-3)
    obs, guessed = reconstructor.restore(batch.data)
    assert torch.equal(obs.view(torch.int32), batch["acted"].view(torch.int32)) and torch.equal(guessed, batch["marks"])
    shown, after = (obs_to_nodes(batch[name], LAYOUT).view(torch.int32) for name in ("obs", "acted"))
    assert torch.equal(after[~guessed], shown[~guessed])


class ByTorch(TrackingReconstructor):
    """The reference, without kernels."""

    has_kernels = False


def test_kernels_compute_what_torch_computes(monkeypatch: Any) -> None:
    monkeypatch.setattr(compiled_tracking, "ROWS_AT_ONCE", 3 * (N - 1))  # observers pass in several groups
    stage, _ = acting()
    for value in stage.predictor.parameters():  # a few updates leave most of them at their start
        value.data += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(value)))
    p_dead = stage.beliefs(pack_episodes(toy_episodes(7, seed=21, apart=True)))[1].p_dead
    stage.predictor.threshold.copy_(p_dead.median())
    both = [kind(None, stage.predictor, stage.config, INFO) for kind in (TrackingReconstructor, ByTorch)]
    assert both[0].has_kernels
    episodes = [e for e in toy_episodes(120, seed=3, apart=True) if len(e["obs"]) > 3]
    episodes.sort(key=lambda e: -len(e["obs"]) * bool(e["obs"][-1].any()))  # the first ones live to the step limit
    slots, rng = 9, np.random.default_rng(0)
    current, step, begun, dead = np.arange(slots), np.zeros(slots, np.int64), slots, 0
    living = torch.zeros(INFO.episode_limit + 1)  # guesses of living units by step
    for one in both:
        one.begin(slots)
    for tick in range(60):
        if tick == 30:  # as when the predictor is trained further
            torch.nn.init.normal_(stage.predictor.node.weight, std=0.3)
        active = rng.random(slots) < 0.8
        places = [(episodes[i % len(episodes)], t) for i, t in zip(current, step, strict=True)]
        obs = torch.stack([e["obs"][t] for e, t in places])
        action = torch.stack([e["actions"][t - 1] if t else torch.full((INFO.n_agents,), -1) for e, t in places])
        ours, wanted = (one.step(obs.numpy().copy(), step, active, action) for one in both)
        assert torch.equal(ours.guessed, wanted.guessed) and ours.fields.keys() == wanted.fields.keys()
        shown = obs_to_nodes(wanted.obs, LAYOUT)[wanted.guessed]
        taken, dead = ~shown.any(-1), dead + int((~shown.any(-1)).sum())
        assert torch.equal(~obs_to_nodes(ours.obs, LAYOUT)[ours.guessed].any(-1), taken)
        of_step = torch.from_numpy(step)[torch.nonzero(wanted.guessed)[:, 0]]
        living += torch.bincount(of_step[~taken], minlength=len(living))
        seen = torch.where(both[0].columns.of_nodes(ours.guessed), 0.0, ours.obs)
        assert torch.equal(seen, torch.where(both[0].columns.of_nodes(ours.guessed), 0.0, obs))
        for name, value in wanted.fields.items():
            assert ours.fields[name].dtype == value.dtype
            torch.testing.assert_close(ours.fields[name].float(), value.float(), rtol=2e-3, atol=2e-4)
        assert torch.equal(torch.where(ours.fields["recon"] != 0, ours.fields["recon"].float(), ours.obs), ours.obs)
        step += active
        over = active & (step >= [len(episodes[i % len(episodes)]["obs"]) for i in current])
        for slot in np.flatnonzero(over):
            current[slot], step[slot], begun = begun, 0, begun + 1
        for one in both:
            one.reset(over)
    assert both[0].frames == both[1].frames > 300
    assert begun > 20 and dead > 50 and living.min() > 10


def test_the_regression_of_kernels_is_a_product() -> None:
    rng, units, dim = np.random.default_rng(0), 4, 3
    known, where, ages = rng.normal(size=(5, 11)), rng.permutation(5 * units)[:13], rng.integers(6, size=13)
    weight, bias, real = (
        rng.normal(size=(6, units * dim, 11)),
        rng.normal(size=(6, units * dim)),
        rng.random((4, 3)) < 0.6,
    )
    out = np.full((13, dim), 7, np.float32)
    compiled_tracking.ready()
    given = (x.astype(np.float32) for x in (weight, bias))
    compiled_tracking.regress(known.astype(np.float32), where, ages, *given, real, out)
    maps = np.einsum("mk,mdk->md", known[where // units], weight.reshape(6, units, dim, 11)[ages, where % units])
    wanted = maps + bias.reshape(6, units, dim)[ages, where % units]
    np.testing.assert_allclose(out, np.where(real[where % units], wanted, 7), rtol=1e-5, atol=1e-5)


def test_every_input_matters_and_no_other_episode() -> None:
    _, reconstructor = acting()
    episodes = toy_episodes(4, seed=22, longest=10, apart=True)
    alone = play(reconstructor, episodes[:1])[0][0]
    assert torch.allclose(play(reconstructor, episodes)[0][0], alone, atol=2e-3)
    changed = {**episodes[0], "actions": (episodes[0]["actions"] + 1) % INFO.n_actions}
    assert not torch.allclose(play(reconstructor, [changed])[0][0], alone, atol=1e-3)
    obs = episodes[0]["obs"].clone()
    obs[1] += obs[1].sign() * 0.5  # what was seen earlier
    later = play(reconstructor, [{**episodes[0], "obs": obs}])[0][0]
    assert not torch.allclose(later[3:], alone[3:], atol=1e-3)


def test_a_snapshot_continues_in_the_middle_of_an_episode_bit_for_bit() -> None:
    stage, whole = acting()
    other = TrackingReconstructor(None, stage.predictor, stage.config, INFO)
    (episode,) = toy_episodes(1, seed=24, apart=True)
    whole.begin(1)
    other.begin(1)
    for step, (obs, action) in enumerate(zip_longest(episode["obs"].repeat(3, 1, 1), episode["actions"].repeat(3, 1))):
        if step == 3:
            kept = whole.snapshot()
            other.load_snapshot(kept)
            before = {name: value.clone() for name, value in kept.items()}
        wanted = whole.step(obs[None], np.array([step]), None, action[None])
        assert step < 3 or torch.equal(other.step(obs[None], np.array([step]), None, action[None]).obs, wanted.obs)
    assert not wanted.obs.requires_grad and not any(p.requires_grad for p in stage.predictor.parameters())
    whole.reset(np.array([True]))
    assert equal(kept, before), "which may be written to a file later"


def test_parts_of_a_batch_add_up_and_nothing_missing_changes_nothing() -> None:
    whole, parts = learner(), learner()
    object.__setattr__(parts.config, "graph_frames_at_once", 1)
    batch = pack_episodes(toy_episodes(9, seed=5, apart=True))
    assert len(parts.parts(batch)) > 2 and len(whole.parts(batch)) == 1
    for stage in (whole, parts):
        stage.update(batch)
    for a, b in zip(state_of(whole).values(), state_of(parts).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    before = state_of(whole)
    whole.warm_up(batch)
    whole.evaluate(batch)
    whole.update(
        pack_episodes([{name: torch.zeros_like(v) for name, v in e.items()} for e in toy_episodes(2, apart=True)])
    )
    changed = [name for name, value in state_of(whole).items() if not equal({name: value}, {name: before[name]})]
    assert changed in ([], ["updates"])


def regular(episodes: Any) -> Any:
    """Return episodes in which a unit's features follow from its place among the units, its agent's and the step."""
    pattern = torch.randn(N, D, generator=torch.Generator().manual_seed(0))
    out = []
    for episode in episodes:
        steps = torch.arange(len(episode["obs"]))[:, None, None, None] / INFO.episode_limit
        shown = {name: obs_to_nodes(episode[name], LAYOUT) for name in ("obs", "full_obs")}
        nodes = {name: torch.where(value != 0, pattern + steps, 0.0) for name, value in shown.items()}
        out.append({**episode, **{name: nodes_to_obs(value, LAYOUT) for name, value in nodes.items()}})
    return out


def test_training_lowers_the_error_of_the_living() -> None:
    changes = {"kind": "tracker", "d_model": 32, "feedforward_dim": 32, "graph_lr": 0.01, "graph_pretrain_epochs": 60}
    stage: Any = graph_learner("stage2", torch.float32, graph_frames_at_once=1000, **changes)
    held_out = pack_episodes(regular(toy_episodes(12, seed=70, apart=True)))

    def error() -> float:
        sample = stage.sample(held_out)
        out = stage.predictor(sample.memory, sample.packing)
        real = stage.predictor.real[torch.nonzero(sample.memory.missing)[:, 2] - 1]
        left = (out.base + out.regressed + out.learned - sample.target).detach() * real
        return float(left[~sample.dead & (sample.ages == 0)].square().mean())

    before, loss = error(), stage.evaluate(held_out)["graph_loss"]
    for seed in range(60):
        stage.update(pack_episodes(regular(toy_episodes(8, seed=100 + seed, apart=True))))
    assert error() < 0.1 * before
    after = stage.evaluate(held_out)["graph_loss"]
    assert after[0] / after[1] < loss[0] / loss[1] - 0.3
    assert stage.optimizer.param_groups[0]["lr"] < 0.01 * 0.05


def test_files_of_another_kind_or_size_are_rejected() -> None:
    fits, config = partial(check, predictor=True, source="a"), toy_config(kind="tracker")
    meta = describe(config, INFO, predictor=True)
    fits(meta, config, INFO)
    fits(meta, toy_config(kind="tracker", n_layers=3), INFO)  # which a tracker does not have
    for change in ({"kind": "masked"}, {"kind": "tracker", "d_model": 16}):
        with pytest.raises(UserError, match=f"not {list(change.values())[-1]}"):
            fits(meta, toy_config(**change), INFO)
    old = describe(toy_config(), INFO, predictor=True)
    del old["mask_predictor_config"]["kind"]
    fits(old, toy_config(), INFO)
    with pytest.raises(UserError, match="trained with mask_predictor_config.kind=masked"):
        fits(old, config, INFO)
