"""Products through the faster library equal torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from omagd.modules.kernels import linear
from omagd.modules.kernels.linear import FastLinear, fast_linear

torch.set_num_threads(1)
SHAPES = [((7, 5), 3), ((300, 55), 64), ((2, 150, 64), 12), ((5, 0, 4), 3), ((0, 4), 6), ((257, 1), 1)]


def gradients(function, x, weight, bias, upstream):
    given = [x, weight] + ([] if bias is None else [bias])
    return torch.autograd.grad((function(x, weight, bias) * upstream).sum(), given)


def factors(shape, out, dtype, bias):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(out, shape[-1], dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(out, dtype=dtype, requires_grad=True) if bias else None


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_equal_to_torch_in_values_and_gradients(monkeypatch, shape, out, dtype, bias, library):
    if library and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(linear, "prefers_onednn", lambda: library)
    monkeypatch.setattr(linear, "SMALL", 0)
    x, weight, b = factors(shape, out, dtype, bias)
    got = fast_linear(x, weight, b)
    assert got.dtype == dtype
    torch.testing.assert_close(got, F.linear(x, weight, b), rtol=1e-5, atol=1e-5)
    upstream = torch.randn(got.shape, dtype=dtype)
    wanted = gradients(F.linear, x, weight, b, upstream)
    for a, e in zip(gradients(fast_linear, x, weight, b, upstream), wanted, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(fast_linear(x, weight, b), got)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_bf16_rounds_factors_and_products_and_nothing_else(shape, out, bias):
    x, weight, b = factors(shape, out, torch.float32, bias)
    got = fast_linear(x, weight, b, bf16=True)
    assert got.dtype == torch.float32
    upstream = torch.randn(got.shape)
    if shape[0] * (shape[1] if len(shape) == 3 else 1) < linear.PADDING:
        assert torch.equal(got, F.linear(x, weight, b))
        return

    def low(value):
        return value.detach().bfloat16().double()

    flat, grad = low(x).flatten(0, -2), low(upstream).flatten(0, -2)
    products = [low(x) @ low(weight).t(), (grad @ low(weight)).view(shape), grad.t() @ flat]
    wanted = [products[0] if b is None else products[0] + b.double(), *products[1:]]
    results = [got, *gradients(lambda *a: fast_linear(*a, bf16=True), x, weight, b, upstream)]
    for a, e, product in zip(results, wanted, products, strict=False):
        assert ((a.double() - e).abs() <= product.abs() * 2.0**-8 + 1e-4).all()
    if bias:
        torch.testing.assert_close(results[3], upstream.flatten(0, -2).sum(0))


def test_bf16_leaves_float64_alone_and_only_wanted_gradients_are_computed(monkeypatch):
    x, weight, b = factors((300, 4), 3, torch.float64, True)
    assert torch.equal(fast_linear(x, weight, b, bf16=True), F.linear(x, weight, b))
    assert torch.autograd.gradcheck(fast_linear, factors((4, 3), 2, torch.float64, True))
    monkeypatch.setattr(linear, "SMALL", 0)
    for bf16 in (False, True):
        x, weight, b = factors((300, 4), 3, torch.float32, True)
        fast_linear(x.detach(), weight, b.detach(), bf16).sum().backward()
        assert x.grad is None and b.grad is None and weight.grad.abs().sum() > 0


def test_layer_has_the_parameters_of_torchs():
    torch.manual_seed(0)
    plain = torch.nn.Linear(5, 3)
    torch.manual_seed(0)
    layer = FastLinear(5, 3)
    assert all(torch.equal(a, layer.state_dict()[name]) for name, a in plain.state_dict().items())
    torch.testing.assert_close(layer(plain.weight), plain(plain.weight))
