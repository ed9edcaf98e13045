"""Numba kernels of learning: what they compute, when they do, and that learning goes on without them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from q_toys import INFO, make_learner, random_episode, toy_config
from torch import Tensor
from torch.nn import functional as F

from omagd.modules.agents.agent import AgentInputs
from omagd.modules.agents.gnn_rnn_agent import GNNRNNAgent
from omagd.modules.agents.rnn_agent import RNNAgent
from omagd.modules.graph_reconstructers.graphs import nodes_to_obs
from omagd.modules.kernels import compiling, graph_encoder, recurrent
from omagd.modules.kernels.compiling import compiled_kernels, kernels_for, tile_kernels
from omagd.modules.kernels.linear import lookup_relu
from omagd.modules.kernels.recurrent import PackedGRU
from omagd.modules.kernels.transformer import dropout
from omagd.modules.mixers.qmix import QMixer
from omagd.utils.packing import Packing, pack_episodes

torch.set_num_threads(1)
GRAPH_AGENTS = [
    {}, {"gnn_readout": "entity"}, {"mark_guesses": True, "gnn_layer_num": 3}, {"obs_last_action": False},
    {"mark_guesses": True, "gnn_readout": "entity"},
]  # fmt: skip
LENGTHS = [(6, 6, 4, 1, 1), (1,), (3, 3), (40, 38, 37, 20, 9, 2)]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels for work of any size."""
    pytest.importorskip("numba")
    monkeypatch.setattr(compiling, "SMALL", 0)


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
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_compiled_gru_equals_a_cell_in_values_and_gradients(monkeypatch, lengths, starts, bf16):
    torch.manual_seed(1)
    gru, packing = PackedGRU(5, 20, bf16), Packing(lengths)
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
    for rows in (1, 7, 20, 1000):
        monkeypatch.setattr(recurrent, "ROWS_AT_ONCE", rows)
        out = gru(x, packing, start)
        assert "CompiledUnroll" in out.grad_fn.next_functions[0][0].name()
        got = [out, *torch.autograd.grad(out, given, upstream)]
        assert max(relative(a, b) for a, b in zip(got, wanted, strict=True)) < (0.02 if bf16 else 1e-6)
        with torch.no_grad():
            assert torch.equal(gru(x, packing, start), out)


@pytest.fixture
def unset_is_nan() -> Iterator[None]:
    """Let memory that nothing has written hold NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("always", "unset_is_nan")
@pytest.mark.parametrize("size", [20, 33, 50, 100])
def test_compiled_gru_in_bf16_reads_no_unset_memory(size):
    """Also where a row is no whole number of the blocks of a product, which then reads on into the next row."""
    torch.manual_seed(4)
    gru, packing = PackedGRU(5, size, bf16=True), Packing((7, 5, 1))
    assert torch.empty(3).isnan().all()
    x, start = torch.randn(13, 3, 5, requires_grad=True), torch.randn(3, 3, size, requires_grad=True)
    given, upstream = (x, start, *gru.parameters()), torch.randn(13, 3, size)
    plain = cell_by_cell(gru, x, packing, start)
    wanted = [plain, *torch.autograd.grad(plain, given, upstream)]
    out = gru(x, packing, start)
    got = [out, *torch.autograd.grad(out, given, upstream)]
    assert max(relative(a, b) if a.isfinite().all() else math.inf for a, b in zip(got, wanted, strict=True)) < 0.02


@pytest.fixture
def tiles(always: None) -> ModuleType:
    """Return the kernels that multiply by tiles, where the processor has them."""
    found = tile_kernels()
    return found if found is not None else pytest.skip("this processor has no AMX")


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize(("width", "size"), [(32, 64), (64, 32)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gru_by_tiles_equals_a_cell_in_values_and_gradients(lengths, width, size, starts):
    torch.manual_seed(1)
    gru, packing = PackedGRU(width, size, bf16=True), Packing(lengths)
    x = torch.randn(sum(lengths), 9, width).bfloat16().requires_grad_()
    start = torch.randn(len(lengths), 9, size, requires_grad=True) if starts else None
    exact = PackedGRU(width, size).double()
    exact.load_state_dict(gru.state_dict())
    doubles = [t if t is None else t.detach().double().requires_grad_() for t in (x, start)]
    given = [t for t in (x, start, *gru.parameters()) if t is not None]
    of_exact = [t for t in (*doubles, *exact.parameters()) if t is not None]
    plain = cell_by_cell(exact, doubles[0], packing, doubles[1])
    upstream = torch.randn(plain.shape)
    wanted = [plain, *torch.autograd.grad(plain, of_exact, upstream)]
    out = gru(x, packing, start)
    assert "TiledUnroll" in out.grad_fn.next_functions[0][0].name()
    got = [out, *torch.autograd.grad(out, given, upstream)]
    assert [t.dtype for t in got] == [torch.float32, *(t.dtype for t in given)]
    assert max(relative(a, b) for a, b in zip(got, wanted, strict=True)) < 0.01
    with torch.no_grad():
        assert torch.equal(gru(x, packing, start), out)


@pytest.mark.usefixtures("tiles")
def test_gru_by_tiles_takes_any_layout():
    gru, packing = PackedGRU(32, 32, bf16=True), Packing((3, 2))
    x, start = torch.randn(32, 10).t().view(5, 2, 32), torch.randn(32, 2, 2).permute(2, 1, 0)
    for kind in (torch.float32, torch.bfloat16):
        low = x.to(kind)
        assert not low.is_contiguous()
        assert torch.equal(gru(low, packing, start), gru(low.contiguous(), packing, start.contiguous()))


def test_gru_by_tiles_lets_nan_through_to_its_own_row_alone(tiles):
    gru, packing = PackedGRU(32, 32, bf16=True), Packing((3, 3, 2))
    x = torch.randn(8, 1, 32)
    x[4] = math.nan  # second step of the second episode
    rows = gru(x, packing).isnan().all(-1).flatten().tolist()
    assert rows == [False, False, False, False, True, False, False, True]


def test_sixteen_numbers_at_once_have_the_sigmoid_of_one(tiles):
    numba = pytest.importorskip("numba")
    from omagd.modules.kernels.vectors import load, sigmoid, store

    @numba.njit(error_model="numpy", _nrt=False)
    def of_all(x, out):
        for j in range(0, len(x), 16):
            store(out, j, sigmoid(load(x, j)))

    x = torch.linspace(-80, 80, 1600)
    out = torch.empty_like(x)
    of_all(x.numpy(), out.numpy())
    torch.testing.assert_close(out, x.double().sigmoid().float(), rtol=3e-7, atol=0)
    ends = torch.tensor([math.inf, -math.inf, math.nan, 1e4, -1e4, 0.0, 1e15, -1e15, 3e38, -3e38] + 6 * [0.0])
    of_all(ends.numpy(), out.numpy())
    wanted = torch.tensor([1.0, 0.0, math.nan, 1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(out[:10], wanted, equal_nan=True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("agents", "embed", "rows"), [(3, 8, 300), (1, 5, 257), (4, 32, 600)])
def test_compiled_mixer_equals_the_formula_in_values_and_gradients(monkeypatch, agents, embed, rows, bf16):
    torch.manual_seed(2)
    info = replace(INFO, n_agents=agents, state_dim=7)
    config = toy_config(mixing_embed_dim=embed, hypernet_embed=12, precision="bf16" if bf16 else "float32")
    mixer, exact = QMixer(config, info), QMixer(config, info).double()
    exact.load_state_dict(mixer.state_dict())
    inputs = [torch.randn(rows, width, requires_grad=True) for width in (agents, 7)]
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    got, wanted = mixer(*inputs), exact(*doubles)
    assert got.grad_fn.name() == "CompiledMixBackward"
    upstream = torch.randn(rows)
    got = [got, *torch.autograd.grad(got, [*inputs, *mixer.parameters()], upstream)]
    wanted = [wanted, *torch.autograd.grad(wanted, [*doubles, *exact.parameters()], upstream.double())]
    # Rounding turns the sign of weights near zero, so gradients differ more than values.
    assert relative(got[0], wanted[0]) < (0.01 if bf16 else 1e-6)
    assert max(relative(a, b) for a, b in zip(got, wanted, strict=True)) < (0.15 if bf16 else 3e-6)
    if bf16:  # as far from the exact gradients as torch's products in bf16 are
        monkeypatch.setattr(compiling, "SMALL", math.inf)
        plain = mixer(*inputs)
        plain = [plain, *torch.autograd.grad(plain, [*inputs, *mixer.parameters()], upstream)]
        far, other = (sum(relative(a, b) for a, b in zip(x, wanted, strict=True)) for x in (got, plain))
        assert far < 1.2 * other


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
    out = lookup_relu(x, torch.randn(5, 3), torch.randn(2, 5), torch.tensor([0, 1, 0, 1]), False)
    assert out.isnan().all(dim=1).tolist() == out.isnan().any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.usefixtures("always")
def test_a_mixer_can_be_gone_through_backward_twice_with_any_gradients():
    """One number for all rows, as of a sum, lies in memory once."""
    mixer, q = QMixer(toy_config(), INFO), torch.randn(300, INFO.n_agents, requires_grad=True)
    out, leaves = mixer(q, torch.randn(300, INFO.state_dim)), [q, *mixer.parameters()]
    first = torch.autograd.grad(out, leaves, torch.ones(300), retain_graph=True)
    second = torch.autograd.grad(out.sum(), leaves)
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("always")
def test_kernels_round_to_the_nearest_bf16_of_two_to_the_even_one():
    numba = pytest.importorskip("numba")
    from omagd.modules.kernels.compiled import held, value

    @numba.njit(error_model="numpy", _nrt=False)
    def there_and_back(x, low, back):
        for i in range(len(x)):
            low[i] = held(low, x[i])
            back[i] = value(low[i])

    bits = torch.arange(-(2**31), 2**31, 2**31 // 997)[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001])
    x = bits.flatten().clamp(-(2**31), 2**31 - 1).int().view(torch.float32)
    x = torch.cat([x[x.isfinite()], torch.tensor([math.inf, -math.inf, 1 + 2**-8, 1 + 3 * 2**-8])])
    low, back = torch.empty(len(x), dtype=torch.int16), torch.empty_like(x)
    there_and_back(x.numpy(), low.numpy(), back.numpy())
    assert torch.equal(low, x.bfloat16().view(torch.int16))
    assert torch.equal(back, x.bfloat16().float())


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("rows", [70, 2048 + 300])
def test_compiled_input_layer_equals_the_expression(rows, bf16):
    torch.manual_seed(3)
    x, weight, table = (torch.randn(*shape, requires_grad=True) for shape in ((rows, 9), (20, 9), (6, 20)))
    index, upstream = torch.randint(6, (rows,)), torch.randn(rows, 20)
    doubles = [t.detach().double().requires_grad_() for t in (x, weight, table)]
    wanted = F.relu(F.linear(doubles[0], doubles[1]) + doubles[2][index])
    wanted = [wanted, *torch.autograd.grad(wanted, doubles, upstream.double())]
    got = lookup_relu(x, weight, table, index, bf16)
    got = [got, *torch.autograd.grad(got, [x, weight, table], upstream)]
    assert max(relative(a, b) for a, b in zip(got, wanted, strict=True)) < (0.1 if bf16 else 1e-6)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("at_once", [1, 24, 10_000])
@pytest.mark.parametrize("updates", GRAPH_AGENTS, ids=str)
def test_compiled_graphs_equal_the_layers_in_values_and_gradients(monkeypatch, updates, at_once):
    torch.manual_seed(4)
    monkeypatch.setattr(graph_encoder, "NODES_AT_ONCE", at_once)
    agent = GNNRNNAgent(toy_config(agent="gnn_rnn", gnn_hidden_dim=12, **updates), INFO)
    exact = copy.deepcopy(agent).double()
    nodes = torch.randn(40, 3, 6, 9) * (torch.rand(40, 3, 6, 1) < 0.5)  # half of the units show nothing
    obs = nodes_to_obs(nodes * (torch.rand(40, 3, 1, 1) < 0.7), INFO.layout)  # nearly a third of the observers do
    guessed, last = torch.rand(40, 3, 6) < 0.2, torch.randint(-1, 2, (40, 3))
    guessed &= torch.rand(40, 3, 1) < 0.5
    given = AgentInputs(obs, last, guessed)
    like = replace(given, features=obs.double())
    got, wanted = (a.encode(x) for a, x in ((agent, given), (exact, like)))
    assert got[0].grad_fn.name() == "ViewBackward0" and wanted[0].dtype == torch.float64
    upstream = [torch.randn(part.shape) for part in got]
    sums = [sum((a * b).sum() for a, b in zip(made, upstream, strict=True)) for made in (got, wanted)]
    # Layers behind the encoder have no part in it.
    grads = [
        torch.autograd.grad(x, list(a.parameters()), allow_unused=True)
        for a, x in zip((agent, exact), sums, strict=True)
    ]
    pairs = [*zip(got, wanted, strict=True), *zip(*grads, strict=True)]
    pairs = [(a, b) for a, b in pairs if b is not None and b.numel()]
    assert len(pairs) > 10
    assert max(relative(a, b) for a, b in pairs) < 2e-6
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(agent.encode(given), got, strict=True))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("agent", ["n_rnn", "rnn", "gnn_rnn"])
def test_updates_with_kernels_equal_updates_of_torch(monkeypatch, agent, precision):
    batches = [[random_episode(10 * i + k, 3 + k) for k in range(6)] for i in range(20)]
    keys = {"agent": agent, "precision": precision, "obs_last_action": agent != "rnn"}
    learners = [make_learner(toy_config(**keys)) for _ in range(2)]
    norms: list[list[float]] = [[], []]
    for episodes in batches:
        for learner, small, kept in zip(learners, (0, math.inf), norms, strict=True):
            monkeypatch.setattr(compiling, "SMALL", small)
            kept.append(float(learner.update(pack_episodes(episodes), episodes=0)["grad_norm"][0]))
    tolerance = 0.15 if precision == "bf16" else 1e-3
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)
    for name, weight in learners[0].mac.agent.state_dict().items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(
            weight, learners[1].mac.agent.state_dict()[name], atol=tolerance / 10, rtol=tolerance
        )


@pytest.mark.usefixtures("always")
def test_a_tick_in_bf16_acts_like_the_unroll():
    torch.manual_seed(0)
    agent = RNNAgent(toy_config(agent="rnn", precision="bf16"), INFO)
    inputs = AgentInputs.blank(300, INFO, agent.fc2.weight)
    with torch.inference_mode():
        values, hidden = agent.step(inputs, agent.init_hidden(300))
        whole = agent(inputs, Packing((1,) * 300))
    assert values.dtype == hidden.dtype == torch.float32
    torch.testing.assert_close(values, whole, atol=0.01, rtol=0.01)


@pytest.mark.usefixtures("always")
def test_gates_saturate_and_what_is_not_finite_stays_in_its_row():
    gru, packing = PackedGRU(1, 4), Packing((2, 2, 2, 2))
    x = torch.tensor([1e4, -1e4, math.nan, math.inf, 0.0, 0.0, 0.0, 0.0]).view(8, 1, 1)
    with torch.no_grad():
        out, wanted = gru(x, packing), cell_by_cell(gru, x, packing, None)
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=0, equal_nan=True)
    assert out[[0, 1, 4, 5]].isfinite().all()
    assert out[[2, 6]].isnan().all()


def test_the_size_of_the_work_decides_and_only_for_float32_on_cpus(monkeypatch):
    monkeypatch.setattr(compiling, "compiled_kernels", lambda: "kernels")
    x = torch.zeros(1)
    assert kernels_for(x, compiling.SMALL) == "kernels"
    assert kernels_for(x, compiling.SMALL - 1) is None
    assert kernels_for(x.double(), compiling.SMALL) is None
    assert kernels_for(x.to("meta"), compiling.SMALL) is None


def test_without_numba_torch_computes_after_one_warning(monkeypatch, capsys, request):
    monkeypatch.setattr("omagd.utils.compiling.find_spec", lambda name: None)
    monkeypatch.setattr("omagd.utils.compiling._warnings", [])
    compiled_kernels.cache_clear()
    request.addfinalizer(compiled_kernels.cache_clear)
    monkeypatch.setattr(compiling, "SMALL", 0)
    gru, x = PackedGRU(3, 4), torch.randn(5, 2, 3)
    for _ in range(2):
        out = gru(x, Packing((3, 2)))
        torch.testing.assert_close(out, cell_by_cell(gru, x, Packing((3, 2)), None))
    assert capsys.readouterr().err.count("pip install 'numba") == 1


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_compiled_dropout_has_the_bits_of_torchs_operations(monkeypatch, p):
    x = torch.randn(37, 65, requires_grad=True)
    x.data[0, 0] = math.inf
    upstream, results = torch.randn(37, 65), []
    for small in (0, math.inf):
        monkeypatch.setattr(compiling, "SMALL", small)
        torch.manual_seed(5)
        out = dropout(x, p)
        results.append([out, *torch.autograd.grad(out, x, upstream), torch.rand(1)])
    assert results[0][0].grad_fn.name() != results[1][0].grad_fn.name()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
