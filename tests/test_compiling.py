"""Compiled mixers compute what plain ones do. No compiler is needed: the last stage of torch.compile is left out."""

from __future__ import annotations

import copy

import pytest
import torch
from ddp_harness import run_ranks
from q_toys import gradients_of, make_learner, random_episode, toy_config

from omagd.modules.kernels import compiling
from omagd.modules.mixers import REGISTRY as MIXERS

torch.set_num_threads(1)


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def episodes_of(rank, update=0):
    return [random_episode(100 * rank + 10 * update + k, 2 + 3 * k + rank + update) for k in range(3)]


def learner_of(compiled, mixer="qmix", dist=None):
    config = toy_config(mixer=mixer, compile=compiled, grad_norm_clip=1e9)
    return make_learner(config, dist=dist, dtype=torch.float64)


def is_compiled(module):
    return module._compiled_call_impl is not None


@pytest.mark.parametrize("mixer", MIXERS.names())
def test_compiled_mixers_learn_the_same_from_batches_of_any_size(without_compiler, mixer):
    plain, compiled = learner_of(False, mixer), learner_of(True, mixer)
    for learner, wanted in ((plain, False), (compiled, True)):
        assert [is_compiled(learner.mixer), is_compiled(learner.target_mixer)] == [wanted, wanted]
    assert plain.mixer.state_dict().keys() == compiled.mixer.state_dict().keys()
    assert not is_compiled(copy.deepcopy(compiled.mixer))
    for update in range(3):
        pairs = [gradients_of(learner, episodes_of(0, update)) for learner in (plain, compiled)]
        for a, b in zip(pairs[0][0], pairs[1][0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)
        for name, value in pairs[0][1].items():
            torch.testing.assert_close(pairs[1][1][name], value)


def compiled_gradients(rank, dist, payload):
    compiling.BACKEND = "aot_eager"
    return gradients_of(learner_of(True, dist=dist), episodes_of(rank))[0]


@pytest.mark.processes
def test_ranks_with_compiled_mixers_have_the_gradients_of_the_union():
    wanted, _ = gradients_of(learner_of(False), [*episodes_of(0), *episodes_of(1)])
    first, second = run_ranks(compiled_gradients)
    for a, b, c in zip(first, second, wanted, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-12, rtol=1e-9)
