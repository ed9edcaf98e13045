"""Numba kernels of learning: what they compute, when they do, and that learning goes on without them."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from q_toys import INFO, toy_config
from simulated_gpu import DEVICE, simulated_gpu
from torch import Tensor
from torch.nn import functional as F

from omagd.envs.battle.compiled import compiler as battles
from omagd.envs.battle.skirmish_env import SkirmishEnv
from omagd.envs.snakes.board import compiler as snakes
from omagd.envs.snakes.snakes_env import Snakes3v3, SnakesArgs
from omagd.modules import kernels, ops
from omagd.modules.agents.agent import AgentInputs
from omagd.modules.agents.gnn_rnn_agent import GNNRNNAgent
from omagd.modules.graph_reconstructers.graphs import GraphTables
from omagd.modules.kernels import compiled_kernels, graph_encoder
from omagd.modules.mixers.mixer import QMixer
from omagd.modules.ops import PackedGRU, lookup_relu
from omagd.utils.errors import UserError
from omagd.utils.packing import Packing

GRAPH_AGENTS = [{}, {"gnn_layer_num": 3}, {"obs_last_action": False}]
LENGTHS = [(6, 6, 4, 1, 1), (1,), (3, 3), (40, 38, 37, 20, 9, 2)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels for work of any size."""
    pytest.importorskip("numba")
    monkeypatch.setattr(kernels, "SMALL", 0)


def cell_by_cell(gru: PackedGRU, x: Tensor, packing: Packing, start: Tensor | None) -> Tensor:
    """Return what `torch.gru_cell` makes of each row in turn."""
    hidden = list(x.new_zeros(packing.n_episodes, x.shape[1], gru.hidden_dim) if start is None else start)
    out = []
    for row, episode in enumerate(packing.episode.tolist()):
        hidden[episode] = torch.gru_cell(x[row], hidden[episode], *gru.parameters())
        out.append(hidden[episode])
    return torch.stack(out)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return |got - wanted| / |wanted|."""
    return float((got.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("form", ["compiled", "of torch"])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_compiled_gru_equals_a_cell_in_values_and_gradients(monkeypatch, lengths, starts, form):
    torch.manual_seed(1)
    monkeypatch.setattr(kernels, "SMALL", 0 if form == "compiled" else math.inf)
    gru, packing = PackedGRU(5, 20), Packing(lengths)
    x = torch.randn(sum(lengths), 3, 5, requires_grad=True)
    start = torch.randn(len(lengths), 3, 20, requires_grad=True) if starts else None
    exact = PackedGRU(5, 20).double()
    exact.load_state_dict(gru.state_dict())
    doubles = [t if t is None else t.detach().double().requires_grad_() for t in (x, start)]
    given = [t for t in (x, start, *gru.parameters()) if t is not None]
    of_exact = [t for t in (*doubles, *exact.parameters()) if t is not None]
    plain = cell_by_cell(exact, doubles[0], packing, doubles[1])
    upstream = torch.randn(plain.shape)
    wanted = [plain, *torch.autograd.grad(plain, of_exact, upstream)]
    for rows in (1, 7, 20, 1000) if form == "compiled" else (1000,):
        monkeypatch.setattr("omagd.modules.kernels.gru.ROWS_AT_ONCE", rows)
        out = gru(x, packing, start)
        assert ("Unroll" in out.grad_fn.next_functions[0][0].name()) == (form == "compiled")
        got = [out, *torch.autograd.grad(out, given, upstream)]
        assert max(relative(a, b) for a, b in zip(got, wanted, strict=True)) < 1e-6
        with torch.no_grad():
            assert torch.equal(gru(x, packing, start), out)


@pytest.mark.parametrize("starts", [False, True])
def test_gradients_of_equal_episodes_on_a_gpu_are_those_of_the_cpu(starts):
    steps, rows, inputs, size = 7, 5, 6, 8

    def made(device):
        drawn, shapes = torch.Generator().manual_seed(1), [(steps * rows, inputs), (rows, size)]
        shapes += [(3 * size, inputs), (3 * size, size), (3 * size,), (3 * size,)]
        x, start, *weights = (torch.randn(s, generator=drawn, dtype=torch.float64).to(device) for s in shapes)
        given = [value.requires_grad_() for value in (x, start, *weights) if starts or value is not start]
        out = ops.gru(x, start if starts else None, [rows] * steps, *weights)
        (out * torch.arange(out.numel(), device=device).view(out.shape).sin()).sum().backward()
        return out.grad_fn.name(), [out.detach().cpu(), *(value.grad.cpu() for value in given)]

    with simulated_gpu():
        name, found = made(DEVICE)
        values = torch.ones(3, device=DEVICE, requires_grad=True)
        summed = ops.add_at(torch.zeros(1, device=DEVICE), torch.tensor([0, 0, 0], device=DEVICE), values)
        assert "IndexPut" in summed.grad_fn.name(), "sums have one order"
    assert "FixedUnroll" in name
    assert max(map(relative, found, made("cpu")[1])) < 1e-12


ON_A_SIMULATOR = """
import sys, torch
from numba import cuda  # Numba's simulator, in which Python threads meet at each barrier
from simulated_gpu import DEVICE, simulated_gpu
from omagd.modules import ops
from omagd.modules.kernels import gru, gru_cuda
from numba.cuda.simulator.kernelapi import FakeCUDAShared

class Compiler:
    def launch(self, kernel, device, blocks, threads, *tensors):
        cuda.jit(kernel)[blocks, threads](*(tensor.detach().value.numpy() for tensor in tensors))

gru_cuda.compiler, gru.find_spec, array = Compiler(), lambda name: True, FakeCUDAShared.array
FakeCUDAShared.array = lambda self, shape, dtype, alignment: array(self, shape, dtype)
shapes = (28, 6), (7, 8), (24, 6), (24, 8), (24,), (24,)  # 4 steps of 7 rows: the last block is not full
drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + i)) for i, shape in enumerate(shapes)]

def found(device):
    given = [value.to(device).requires_grad_() for value in drawn]
    x, start, *weights = given if device == DEVICE else [value.double() for value in given]
    out = ops.gru(x, start, [7] * 4, *weights)
    (out * torch.arange(out.numel(), device=device).view(out.shape).sin()).sum().backward()
    return out.detach(), *(value.grad for value in given)

def fails(*args):
    raise RuntimeError("no driver")

gru_cuda.LARGEST, forth, back = 40, gru_cuda.unroll, gru_cuda.unroll_back  # the first use has so many units
with simulated_gpu():
    torch.cuda.is_initialized = lambda: True
    assert gru._tried(DEVICE) is gru_cuda
    of_kernels = [value.cpu() for value in found(DEVICE)]
    for faulty in (fails, back), (lambda *args: forth(*args) * 1.001, back), (
        forth, lambda *args: [value * 1.001 for value in back(*args)]
    ):
        gru_cuda.unroll, gru_cuda.unroll_back = faulty
        gru._tried.cache_clear()
        assert gru._tried(DEVICE) is None
for value, wanted in zip(of_kernels, found("cpu"), strict=True):
    torch.testing.assert_close(value.double(), wanted.double(), atol=2e-6, rtol=2e-6)
"""


def test_the_recurrence_in_one_kernel_has_the_values_and_gradients_of_the_cpu():
    env = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", ON_A_SIMULATOR], env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    problem = "kernels of GRUs cannot be used (they compute wrongly): they learn step by step, which is slower"
    assert ended.stderr.splitlines() == [problem.replace("they compute wrongly", "no driver"), problem, problem]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("agents", "embed", "rows"), [(3, 8, 300), (1, 5, 257), (4, 32, 600)])
def test_compiled_mixer_equals_the_formula_in_values_and_gradients(agents, embed, rows):
    torch.manual_seed(2)
    info = replace(INFO, n_agents=agents, state_dim=7)
    config = toy_config(mixing_embed_dim=embed, hypernet_embed=12)
    mixer, exact = QMixer(config, info), QMixer(config, info).double()
    exact.load_state_dict(mixer.state_dict())
    inputs = [torch.randn(rows, width, requires_grad=True) for width in (agents, 7)]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    got, wanted = mixer(*inputs), exact(*doubles)
    assert got.grad_fn.name() == "MixBackward"
    upstream = torch.randn(rows)
    got = [got, *torch.autograd.grad(got, [*inputs, *mixer.parameters()], upstream)]
    wanted = [wanted, *torch.autograd.grad(wanted, [*doubles, *exact.parameters()], upstream.double())]
    assert max(relative(a, b) for a, b in zip(got, wanted, strict=True)) < 3e-6


@pytest.mark.usefixtures("always")
def test_weights_that_are_not_finite_show_in_values():
    """ReLU passes NaN on, as torch's does: otherwise an update would learn from a part of the network only."""
    config = toy_config(mixing_embed_dim=4, hypernet_embed=6)
    mixer, q, state = QMixer(config, INFO), torch.randn(5, INFO.n_agents), torch.rand(5, INFO.state_dim) + 1
    for name, parameter in mixer.named_parameters():
        kept = parameter.detach().clone()
        parameter.data.view(-1)[0] = math.nan
        assert mixer(q, state).isnan().all(), name
        parameter.data.copy_(kept)
    x = torch.randn(4, 3)
    x[2, 1] = math.nan
    out = lookup_relu(x, torch.randn(5, 3), torch.randn(2, 5), torch.tensor([0, 1, 0, 1]))
    assert out.isnan().all(dim=1).tolist() == out.isnan().any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("rows", [70, 2048 + 300])
def test_compiled_input_layer_equals_the_expression(rows):
    torch.manual_seed(3)
    x, weight, table = (torch.randn(*shape, requires_grad=True) for shape in ((rows, 9), (20, 9), (6, 20)))
    index, upstream = torch.randint(6, (rows,)), torch.randn(rows, 20)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, table)]
    wanted = F.relu(F.linear(doubles[0], doubles[1]) + doubles[2][index])
    wanted = [wanted, *torch.autograd.grad(wanted, doubles, upstream.double())]
    got = lookup_relu(x, weight, table, index)
    got = [got, *torch.autograd.grad(got, [x, weight, table], upstream)]
    assert max(relative(a, b) for a, b in zip(got, wanted, strict=True)) < 1e-6


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("at_once", [1, 24, 10_000])
@pytest.mark.parametrize("updates", GRAPH_AGENTS, ids=str)
def test_compiled_graphs_equal_the_layers_in_values_and_gradients(monkeypatch, updates, at_once):
    torch.manual_seed(4)
    monkeypatch.setattr(graph_encoder, "NODES_AT_ONCE", at_once)
    agent = GNNRNNAgent(toy_config(agent="gnn_rnn", gnn_hidden_dim=16, **updates), INFO)
    exact = copy.deepcopy(agent).double()
    nodes = torch.randn(40, 3, 6, 9) * (torch.rand(40, 3, 6, 1) < 0.5)  # half of the units show nothing
    tables = GraphTables(INFO.layout, torch.device("cpu"))
    obs = tables.obs(nodes * (torch.rand(40, 3, 1, 1) < 0.7))  # nearly a third of the observers do
    given = AgentInputs(obs, torch.randint(-1, 2, (40, 3)))
    like = replace(given, features=obs.double())
    (got,), (wanted,) = (a.encode(x) for a, x in ((agent, given), (exact, like)))
    assert got.grad_fn.name() == "ViewBackward0" and wanted.dtype == torch.float64
    upstream, both = torch.randn(got.shape), ((agent, got), (exact, wanted))
    # Layers behind the encoder have no part in it.
    grads = [torch.autograd.grad(x, list(a.parameters()), upstream.to(x), allow_unused=True) for a, x in both]
    pairs = [(a, b) for a, b in [(got, wanted), *zip(*grads, strict=True)] if b is not None and b.numel()]
    assert len(pairs) > 10
    assert max(relative(a, b) for a, b in pairs) < 2e-6
    with torch.no_grad():
        assert torch.equal(agent.encode(given)[0], got)


@pytest.mark.usefixtures("always")
def test_gates_saturate_and_what_is_not_finite_stays_in_its_row():
    gru, packing = PackedGRU(1, 4), Packing((2, 2, 2, 2))
    x = torch.tensor([1e4, -1e4, math.nan, math.inf, 0.0, 0.0, 0.0, 0.0]).view(8, 1, 1)
    with torch.no_grad():
        out, wanted = gru(x, packing), cell_by_cell(gru, x, packing, None)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=0, equal_nan=True)
    assert out[[0, 1, 4, 5]].isfinite().all()
    assert out[[2, 6]].isnan().all()


def test_a_second_start_compiles_nothing():
    """Each kernel of learning, battles and snakes has one form at most, which is kept for the next start."""
    SkirmishEnv.engine(), Snakes3v3(SnakesArgs(), 1)
    learning, graphs = compiled_kernels("compiled"), compiled_kernels("compiled_graphs")
    for compiler in (learning._compiler, graphs._compiler, battles, snakes):
        kept = [
            [k._cache._cache_file.load(k._cache._index_key(form, k.targetctx.codegen())) for form in k.signatures]
            for k in compiler._kernels
        ]
        assert any(kept) and all(len(forms) <= 1 and None not in forms for forms in kept), compiler.folder


def test_without_numba_learning_on_a_cpu_ends_in_one_line(monkeypatch, request):
    compiled_kernels.cache_clear()
    request.addfinalizer(compiled_kernels.cache_clear)
    monkeypatch.setattr(kernels, "SMALL", 0)
    for change, said in (
        (("numba.config.DISABLE_JIT", True), "switched off by NUMBA_DISABLE_JIT. Unset that variable"),
        (("omagd.utils.compiling.find_spec", lambda name: None), "not installed. pip install 'numba~="),
    ):
        monkeypatch.setattr(*change)
        with pytest.raises(UserError, match=f"learning on a CPU needs Numba, which is {said}"):
            PackedGRU(3, 4)(torch.randn(5, 2, 3), Packing((3, 2)))
