"""The fast layers of stages 1 and 2 against the plain ones, and an update in parts against the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_toys import INFO, toy_config, toy_episodes, toy_modules

from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules.graph_reconstructers.tokenizer import first_largest
from omagd.modules.kernels.transformer import attend, cross_entropy, dropout, gelu_dropout
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes
from omagd.utils.seeding import uniform

torch.set_num_threads(1)


def learner(stage: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    config = toy_config(**changes)
    tokenizer, predictor = toy_modules(config, dtype)
    if stage == "stage1":
        return TokenizerLearner(tokenizer, config, INFO, Dist())
    return PredictorLearner(predictor, tokenizer, config, INFO, Dist())


def gradients(stage: Any) -> list[torch.Tensor]:
    """Return the gradients of one update."""
    kept: list[torch.Tensor] = []
    module = next(iter(stage.modules().values()))
    stage.optimizer.step = lambda: kept.extend(p.grad.clone() for p in module.parameters())
    torch.manual_seed(3)
    stage.update(pack_episodes(toy_episodes(7, seed=5)))
    return kept


def test_dropout_drops_the_share_it_says_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 400, requires_grad=True)
    out = dropout(x, 0.1)
    kept = out != 0
    assert abs(1 - kept.float().mean().item() - 0.1) < 0.003
    assert torch.allclose(out[kept], x[kept] / 0.9, rtol=1e-4)
    out.sum().backward()
    assert torch.equal(x.grad != 0, kept) and x.grad.mean().item() == pytest.approx(1, abs=0.003)
    assert abs(torch.corrcoef(kept.float()[:2])[0, 1]) < 0.2
    assert dropout(x, 0.0) is x


def test_gelu_under_dropout_has_the_gradient_of_both() -> None:
    x = torch.randn(300, 301, dtype=torch.float64, requires_grad=True)
    out = gelu_dropout(x, 0.25)
    kept, coming = out != 0, torch.randn_like(out)
    plain = F.gelu(x) * kept / 0.75
    assert 0.2 < 1 - kept.double().mean() < 0.3 and torch.allclose(out, plain, rtol=1e-9)
    got, wanted = (torch.autograd.grad(one, x, coming)[0] for one in (out, plain))
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n_out", [5, 9])
def test_attention_equals_torchs(n_out: int) -> None:
    query = torch.randn(7, n_out, 16, dtype=torch.float64, requires_grad=True)
    key_value = torch.randn(7, 9, 32, dtype=torch.float64, requires_grad=True)
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (query, *key_value.chunk(2, -1)))
    wanted = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    got, coming = attend(query, key_value, 4, 0.0), torch.randn_like(wanted)
    assert torch.allclose(got, wanted, atol=1e-12)
    pairs = (torch.autograd.grad(one, (query, key_value), coming) for one in (got, wanted))
    for one, other in zip(*pairs, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_attention_with_dropout_has_the_gradient_of_what_it_computed() -> None:
    query = torch.randn(3, 4, 8, dtype=torch.float64, requires_grad=True)
    key_value = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)

    def same_draws(*args: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return attend(*args, 2, 0.3)

    assert torch.autograd.gradcheck(same_draws, (query, key_value))
    assert not torch.allclose(same_draws(query, key_value), attend(query, key_value, 2, 0.0))


def test_cross_entropy_equals_the_plain_one() -> None:
    logits = torch.randn(40, 13, dtype=torch.float64, requires_grad=True)
    target, weight = torch.randint(0, 13, (40,)), torch.rand(40, dtype=torch.float64)
    got = 2 * cross_entropy(logits, logits.detach().log_softmax(-1), target, weight)
    wanted = 2 * (F.cross_entropy(logits, target, reduction="none") * weight).sum()
    assert got.item() == pytest.approx(wanted.item(), rel=1e-12)
    one, other = (torch.autograd.grad(loss, logits)[0] for loss in (got, wanted))
    assert torch.allclose(one, other, atol=1e-13)


def test_the_first_largest_is_argmax_ties_included() -> None:
    values = torch.randint(0, 40, (200, 256)).float()
    assert torch.equal(first_largest(values), values.argmax(1))


def test_draws_by_place_are_even_and_differ_by_key() -> None:
    numbers = torch.arange(40000)
    one, other = uniform(numbers, 17), uniform(numbers, 18)
    assert torch.equal(uniform(numbers[5:9], 17), one[5:9])
    assert 0 <= one.min() and one.max() < 1
    assert torch.histc(one, 20, 0, 1).sub(2000).abs().max() < 250
    for pair in (torch.stack([one, other]), torch.stack([one[1:], one[:-1]])):
        assert abs(torch.corrcoef(pair)[0, 1]) < 0.02


CHANGES: dict[str, dict[str, Any]] = {
    "stage1": {},
    "stage2": {"mask_predictor_config__mask_ratio": 0.3, "mask_predictor_config__early_step_weight": 0.3},
    "stage2 matched": {"mask_predictor_config__matching": "type", "mask_predictor_config__stacked_steps": 1},
}


@pytest.mark.parametrize("case", CHANGES)
def test_parts_add_up_to_the_whole(case: str) -> None:
    stages = [learner(case.split()[0], graph_frames_at_once=size, **CHANGES[case]) for size in (10**6, 6)]
    whole, parts = (gradients(stage) for stage in stages)
    assert len(whole) > 10
    for one, other in zip(whole, parts, strict=True):
        assert (one - other).norm() <= 1e-12 * max(1.0, float(one.norm()))
    states = [next(iter(stage.modules().values())).state_dict() for stage in stages]
    for name, value in states[0].items():
        assert torch.allclose(value, states[1][name], rtol=0, atol=1e-12), name


def test_computing_activations_again_changes_nothing() -> None:
    changes = {"mask_predictor_config__dropout": 0.3}
    plain, again = (gradients(learner("stage2", enable_gradient_checkpointing=on, **changes)) for on in (False, True))
    for one, other in zip(plain, again, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_bf16_products_are_close_to_whole_ones(stage: str) -> None:
    changes = {"tokenizer_config__hidden_dim": 16} if stage == "stage1" else {"mask_predictor_config__d_model": 16}
    whole, low = (gradients(learner(stage, torch.float32, precision=p, **changes)) for p in ("float32", "bf16"))
    one, other = (torch.cat([g.flatten() for g in gradient]) for gradient in (whole, low))
    assert 0 < (one - other).norm() < 0.1 * one.norm()
