"""Updates on a GPU: every configuration, graphs beside plain updates, gradients beside the CPU's."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path

import fixed_toys
import graph_toys
import numpy as np
import pytest
import test_fixed_pretraining
import torch
from ddpg_toys import make_ddpg
from preset_toys import CPU, Made, cases, config_of
from q_toys import equal, make_learner, state_of, toy_config

from omagd.config.loading import resolve
from omagd.controllers.basic_mac import BasicMAC
from omagd.learners.nq_learner import NQLearner
from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.modules import ops
from omagd.modules.kernels import gru
from omagd.resident.replay import ResidentBuffer, StagedBuffer
from omagd.resident.updates import WARM_UP, FixedUpdates
from omagd.run.checkpoint.weights import checksum, load_learner, save_learner
from omagd.run.reporting.metrics import Counters, Metrics
from omagd.run.training.build import new_predictor, new_tokenizer
from omagd.run.training.stages.base import Health
from omagd.utils.dist_utils import Dist
from omagd.utils.packing import pack_episodes

if not torch.cuda.is_available():
    pytest.skip("there is no NVIDIA GPU here", allow_module_level=True)

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import qmix_update  # noqa: E402

torch.backends.cudnn.allow_tf32 = False  # as runs do
GPU = torch.device("cuda", 0)


def learn_without_waiting(learner, batch):
    """Return the stats of an update; fail where the host waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            stats = learner.update(batch, episodes=10**6)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)]
    assert waits == []
    return stats


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("preset", "learner"), cases())
def test_a_preset_plays_learns_and_is_loaded_on_either_device(preset, learner, precision, tmp_path):
    config = config_of(preset, learner=learner, precision=precision)
    on_cpu = Made(config_of(preset, learner=learner), CPU)
    episodes = on_cpu.play()
    made = Made(config, GPU)
    assert all(p.device == GPU for module in made.learner.modules().values() for p in module.parameters())
    assert made.play()[0]["actions"].device == CPU
    batch, metrics = made.batch(episodes), Metrics()
    made.learner.update(batch, episodes=0)
    metrics.add(Health(config, "lr").note(learn_without_waiting(made.learner, batch)))
    assert all(math.isfinite(value) for value in metrics.reduce(Dist(device=GPU)).values())
    save_learner(made.learner, Counters(), tmp_path / "of_gpu")
    for device in (GPU, CPU):
        other = Made(config if device == GPU else config_of(preset, learner=learner), device)
        load_learner(other.learner, tmp_path / "of_gpu")
        assert checksum(other.weights()) == checksum(made.weights())
    save_learner(on_cpu.learner, Counters(), tmp_path / "of_cpu")
    load_learner(made.learner, tmp_path / "of_cpu")
    assert checksum(made.weights()) == checksum(on_cpu.weights())


@pytest.mark.parametrize(("preset", "learner"), cases())
def test_the_weights_of_two_updates_are_those_of_the_cpu(preset, learner):
    config = config_of(preset, learner=learner)
    on_cpu, made = Made(config, CPU), Made(config, GPU)
    episodes = on_cpu.play()
    for each in (on_cpu, made):
        for _ in range(2):
            each.learner.update(each.batch(episodes), episodes=0)
    found = made.weights()
    for name, value in on_cpu.weights().items():
        torch.testing.assert_close(found[name].cpu(), value, atol=2e-4, rtol=1e-3, msg=name)


METHODS = {
    **fixed_toys.METHODS,
    **fixed_toys.ON_POLICY,
    "bf16": {"precision": "bf16"},
    "in parts, bf16": {"accumulate": 2, "precision": "bf16", "mixer": "none"},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("method", METHODS)
def test_captured_updates_are_plain_ones_bit_for_bit(method, caplog):
    config, drawn = toy_config(**{"target_update_updates": 4, **METHODS[method]}), fixed_toys.draws(WARM_UP + 8)
    replay = fixed_toys.replay(GPU, longest=6)
    read = replay.whole if method in fixed_toys.ON_POLICY else replay.fixed
    graph, plain, packed = (make_learner(config, Dist(device=GPU), device=GPU) for _ in range(3))
    of_graph, of_plain = FixedUpdates(graph), FixedUpdates(plain)
    of_plain._capture = lambda shape, draw, inputs: of_plain._aside(draw, inputs)
    for indices in drawn:
        for updates in (of_graph, of_plain):
            updates.update(read(indices), episodes=0)
        packed.update(replay.batch(indices), episodes=0)
    assert all(shape.graph is not None for shape in of_graph._shapes.values())
    assert caplog.records == []
    found, of_packed = state_of(graph), state_of(packed)
    assert equal(found, state_of(plain))
    if config.precision == "float32":
        for name, value in of_packed.items():
            torch.testing.assert_close(found[name], value, atol=3e-4, rtol=1e-2, msg=name)


@pytest.mark.parametrize("method", fixed_toys.DDPG)
def test_captured_updates_of_ddpg_are_plain_ones_bit_for_bit(method, caplog):
    given = Dist(device=GPU), torch.float32, 0, GPU
    graph, plain = (FixedUpdates(make_ddpg(*given, **fixed_toys.DDPG[method])) for _ in range(2))
    plain._capture = lambda shape, draw, inputs: plain._aside(draw, inputs)
    replay = fixed_toys.steps_replay(GPU, 6, **fixed_toys.DDPG[method])
    for indices in fixed_toys.draws(WARM_UP + 8):
        for updates in (graph, plain):
            updates.update(replay.fixed(indices), episodes=0)
    assert all(shape.graph is not None for shape in graph._shapes.values())
    assert caplog.records == []
    assert equal(state_of(graph._learner), state_of(plain._learner))


def test_graphs_learn_from_replay_in_main_memory():
    learners = [make_learner(toy_config(), Dist(device=GPU), device=GPU) for _ in range(2)]
    there = [fixed_toys.replay(GPU, longest=6, kind=kind) for kind in (ResidentBuffer, StagedBuffer)]
    made = [*map(FixedUpdates, learners)]
    for indices in fixed_toys.draws(WARM_UP + 8):
        for updates, buffer in zip(made, there, strict=True):
            updates.update(buffer.fixed(indices), episodes=0)
    assert equal(*map(state_of, learners))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", test_fixed_pretraining.CASES)
def test_captured_updates_of_pretraining_are_plain_ones_bit_for_bit(case, dropout, caplog):
    config = graph_toys.toy_config(
        **test_fixed_pretraining.CASES[case], tokenizer_config__dropout=dropout, dropout=dropout
    )
    found = []
    for captures in (True, False):
        torch.manual_seed(0)
        tokenizer, dist = new_tokenizer(config, graph_toys.INFO, GPU), Dist(device=GPU)
        learner = TokenizerLearner(tokenizer, config, graph_toys.INFO, dist)
        if "stage2" in case:
            predictor = new_predictor(config, graph_toys.INFO, GPU)
            learner = PredictorLearner(predictor, tokenizer, config, graph_toys.INFO, dist)
        updates, buffer = FixedUpdates(learner), test_fixed_pretraining.stored(GPU)
        updates._captures = captures
        for indices in 8 * test_fixed_pretraining.draws(3)[1:]:
            updates.update(buffer.fixed(indices), episodes=0)
        assert not captures or any(shape.graph is not None for shape in updates._shapes.values())
        found.append(state_of(learner))
    assert caplog.records == []
    assert equal(*found)


def gradients(device, episodes, **updates):
    """Return the gradients of the first update of QMIX on 5m_vs_6m, at its published sizes, on the CPU."""
    info = qmix_update.MAPS["5m_vs_6m"]
    config = resolve("qmix", "skirmish", {"env_args.map_name": "5m_vs_6m", "grad_norm_clip": 1e12, **updates})
    torch.manual_seed(0)
    learner = NQLearner(BasicMAC(config, info, device), config, info, Dist(device=device))
    seen = []
    learner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.extend(p.grad.detach().cpu().double() for p in learner.step.parameters)
    )
    learner.warm_up()
    learner.update(pack_episodes(episodes).to(device), episodes=0)
    return seen


@pytest.mark.parametrize(("updates", "bound"), [({}, 2e-5), ({"precision": "bf16"}, 0.1)])
def test_gradients_are_those_of_the_cpu(updates, bound):
    info = qmix_update.MAPS["5m_vs_6m"]
    episodes = qmix_update.make_episodes(128, np.random.default_rng(0), info)
    wanted, found, again = gradients(CPU, episodes), *(gradients(GPU, episodes, **updates) for _ in range(2))
    assert all(map(torch.equal, found, again))
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (found, wanted))
    relative = float((one - other).norm() / other.norm())
    assert relative < bound


@pytest.mark.parametrize(("steps", "rows", "size"), [(1, 1, 8), (7, 5, 33), (70, 640, 64), (20, 135, 128)])
def test_grus_in_one_kernel_have_the_values_and_gradients_of_the_cpu(steps, rows, size):
    shapes = (steps * rows, 6), (rows, size), (3 * size, 6), (3 * size, size), (3 * size,), (3 * size,)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]

    def found(device, dtype):
        x, start, *weights = given = [value.to(device, dtype, copy=True).requires_grad_() for value in drawn]
        out = ops.gru(x, start, [rows] * steps, *weights)
        (out * torch.arange(out.numel(), device=device).view(out.shape).sin()).sum().backward()
        return [value.detach().cpu().double() for value in (out, *(value.grad for value in given))]

    assert gru.cuda_kernels(drawn[0].to(GPU), size) is not None
    of_kernels, again = (found(GPU, torch.float32) for _ in range(2))
    assert all(map(torch.equal, of_kernels, again))
    for value, wanted in zip(of_kernels, found(CPU, torch.float64), strict=True):
        assert float((value - wanted).norm() / wanted.norm()) < 1e-5
