"""Kernels with their own backward pass equal the plain expressions of their docstrings, in values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from q_toys import upstream_of, with_gradients
from torch import Tensor

from omagd.modules.graph_reconstructers.tokenizer import first_largest
from omagd.modules.kernels import linear
from omagd.modules.kernels.linear import ROWS_AT_ONCE, FastLinear, fast_linear, lookup_relu, three_layers
from omagd.modules.kernels.transformer import attend, cross_entropy, dropout, gelu_dropout

torch.set_num_threads(1)
SHAPES = [((7, 5), 3), ((300, 55), 64), ((2, 150, 64), 12), ((5, 0, 4), 3), ((0, 4), 6), ((257, 1), 1)]


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def masked_gelu() -> tuple[Tensor, Tensor, list[Tensor]]:
    x = leaf(300, 301)
    out = gelu_dropout(x, 0.25)
    assert 0.2 < (out == 0).double().mean() < 0.3
    return out, F.gelu(x) * (out != 0) / 0.75, [x]


def attention(n_queries: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    query, key_value = leaf(7, n_queries, 16), leaf(7, 9, 32)
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (query, *key_value.chunk(2, -1)))
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return attend(query, key_value, 4, 0.0), plain, [query, key_value]


def weighted_cross_entropy() -> tuple[Tensor, Tensor, list[Tensor]]:
    logits, target, weight = leaf(40, 13), torch.randint(0, 13, (40,)), torch.rand(40, dtype=torch.float64)
    got = cross_entropy(logits, logits.detach().log_softmax(-1), target, weight)
    return got, (F.cross_entropy(logits, target, reduction="none") * weight).sum(), [logits]


def lookup() -> tuple[Tensor, Tensor, list[Tensor]]:
    rows = ROWS_AT_ONCE + 50
    x, weight, table, index = leaf(rows, 4), leaf(3, 4), leaf(6, 3), torch.randint(0, 6, (rows,))
    return lookup_relu(x, weight, table, index), F.relu(F.linear(x, weight) + table[index]), [x, weight, table]


def layers(frozen: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    x, parameters = leaf(9, 5), [leaf(7, 5), leaf(7), leaf(8, 7), leaf(8), leaf(2, 8), leaf(2)]
    for parameter in parameters:
        parameter.requires_grad_(not frozen)
    w1, b1, w2, b2, w3, b3 = parameters
    plain = F.linear(F.relu(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)), w3, b3)
    return three_layers(x, *parameters), plain, [x] if frozen else [x, *parameters]


KERNELS = {
    "gelu and dropout": masked_gelu,
    "attention": lambda: attention(9),
    "attention of some tokens": lambda: attention(5),
    "cross-entropy": weighted_cross_entropy,
    "look-up and ReLU": lookup,
    "three layers": lambda: layers(False),
    "three frozen layers": lambda: layers(True),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_equals_the_plain_expression(kernel: str) -> None:
    torch.manual_seed(0)
    got, plain, inputs = KERNELS[kernel]()
    torch.testing.assert_close(with_gradients(got, inputs), with_gradients(plain, inputs), rtol=1e-9, atol=1e-11)


def test_dropout_drops_the_given_share_and_keeps_the_mean() -> None:
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


def test_attention_with_dropout_has_the_gradient_of_its_own_draws() -> None:
    query, key_value = leaf(2, 3, 4), leaf(2, 3, 8)

    def same_draws(*args: Tensor) -> Tensor:
        torch.manual_seed(1)
        return attend(*args, 2, 0.3)

    assert torch.autograd.gradcheck(same_draws, (query, key_value))
    assert not torch.allclose(same_draws(query, key_value), attend(query, key_value, 2, 0.0))


def test_first_largest_is_argmax_including_ties() -> None:
    values = torch.randint(0, 40, (200, 256)).float()
    assert torch.equal(first_largest(values), values.argmax(1))


def factors(shape: tuple[int, ...], out: int, dtype: torch.dtype, bias: bool) -> list[Tensor]:
    """Return an input of `shape`, a weight and, with `bias`, a bias."""
    torch.manual_seed(0)
    return [leaf(*size, dtype=dtype) for size in (shape, (out, shape[-1]), (out,))[: 2 + bias]]


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_fast_linear_equals_torchs(monkeypatch, shape, out, dtype, bias, library) -> None:
    if library and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(linear, "prefers_onednn", lambda: library)
    monkeypatch.setattr(linear, "SMALL", 0)
    given = factors(shape, out, dtype, bias)
    got, wanted = (with_gradients(function(*given), given) for function in (fast_linear, F.linear))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(fast_linear(*given), got[0])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_bf16_rounds_factors_and_products_and_nothing_else(shape: tuple[int, ...], out: int, bias: bool) -> None:
    given = factors(shape, out, torch.float32, bias)
    got = with_gradients(fast_linear(*given, bf16=True), given)
    if got[0].numel() < linear.PADDING * out:
        torch.testing.assert_close(got, with_gradients(F.linear(*given), given), rtol=0, atol=0)
        return
    upstream = upstream_of(got[0]).flatten(0, -2)
    x, weight, grad = (value.detach().bfloat16().double() for value in (given[0].flatten(0, -2), given[1], upstream))
    for value, product in zip(got, (x @ weight.t(), grad @ weight, grad.t() @ x), strict=False):
        added = given[2].double() if bias and value is got[0] else 0.0
        error = (value.double() - (product.view(value.shape) + added)).abs()
        assert (error <= product.view(value.shape).abs() * 2.0**-8 + 1e-4).all()
    if bias:
        torch.testing.assert_close(got[3], upstream.sum(0))


def test_bf16_leaves_float64_alone_and_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = factors((300, 4), 3, torch.float64, True)
    assert torch.equal(fast_linear(*given, bf16=True), F.linear(*given))
    monkeypatch.setattr(linear, "SMALL", 0)
    for bf16 in (False, True):
        x, weight, bias = factors((300, 4), 3, torch.float32, True)
        fast_linear(x.detach(), weight, bias.detach(), bf16).sum().backward()
        assert x.grad is None and bias.grad is None and weight.grad.abs().sum() > 0


def test_layer_has_the_parameters_of_torchs() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(5, 3)
    torch.manual_seed(0)
    layer = FastLinear(5, 3)
    torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(layer(plain.weight), plain(plain.weight))
