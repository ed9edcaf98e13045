"""The optimizer of all learners: torch's Adam, bit for bit, without torch's compiler in the process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from omagd.learners.synced_optimizer import Adam, RMSprop


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).requires_grad_() for shape in ((7, 3), (3,), (5, 1, 2))]


def test_rmsprop_takes_pymarls_steps():
    ours, torchs = parameters(), parameters()
    steps(RMSprop(ours, lr=0.01), ours, 0, 20)
    steps(torch.optim.RMSprop(torchs, lr=0.01, alpha=0.99, eps=1e-5), torchs, 0, 20)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def steps(optimizer: torch.optim.Optimizer, weights: list[Tensor], first: int, n: int) -> None:
    for number in range(first, first + n):
        generator = torch.Generator().manual_seed(number)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("eps", [1e-8, 1e-5])
def test_adam_takes_the_steps_of_torch_and_reads_its_states(eps):
    ours, torchs, moved = parameters(), parameters(), parameters()
    one, other = Adam(ours, lr=0.01, eps=eps), torch.optim.Adam(torchs, lr=0.01, eps=eps, fused=True)
    steps(one, ours, 0, 3)
    steps(other, torchs, 0, 3)
    third = Adam(moved, lr=0.5)
    third.load_state_dict(copy.deepcopy(other.state_dict()))
    with torch.no_grad():
        for weight, value in zip(moved, torchs, strict=True):
            weight.copy_(value)
    for optimizer, weights in ((one, ours), (other, torchs), (third, moved)):
        steps(optimizer, weights, 3, 2)
        assert all(weight.grad is None for weight in weights)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, torchs, moved, strict=True))
    assert one.state_dict()["state"].keys() == other.state_dict()["state"].keys()
    assert one.state_dict()["param_groups"] == other.state_dict()["param_groups"] == third.state_dict()["param_groups"]
