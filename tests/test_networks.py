"""Agents, mixers, and the kernels that they are made of: each kernel equals the plain expression of its docstring."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from plugin_toys import own_names
from q_toys import INFO, SMALL, make_learner, random_episode, toy_config, with_gradients
from torch import Tensor
from torch.nn import functional as F

from omagd.controllers.types import Tick
from omagd.envs.protocol import Observation
from omagd.modules import ops
from omagd.modules.agents import REGISTRY as AGENTS
from omagd.modules.agents.agent import AgentInputs, InputLinear
from omagd.modules.graph_ops import FullGraphConv
from omagd.modules.graph_reconstructers.tokenizer import first_largest
from omagd.modules.mixers import REGISTRY as MIXERS
from omagd.modules.mixers.mixer import MixerInputs
from omagd.modules.ops import attend, fast_linear
from omagd.utils.packing import Packing, last_actions, pack_episodes

SHAPES = [((7, 5), 3), ((300, 55), 64), ((2, 150, 64), 12), ((5, 0, 4), 3), ((0, 4), 6), ((257, 1), 1)]
VARIANTS = [
    *({"agent": name} for name in AGENTS.names()),
    {"agent": "n_rnn", "use_layer_norm": True, "use_orthogonal": True},
    {"agent": "rnn", "obs_last_action": False},
    {"agent": "gnn_rnn", "obs_agent_id": False, "obs_last_action": False},
]


def make_agent(seed=0, **updates):
    torch.manual_seed(seed)
    config = toy_config(**updates)
    return AGENTS.get(config.agent)(config, INFO).double()


def toy_inputs(lengths=(5, 3, 3, 1)):
    batch = pack_episodes([random_episode(i, k) for i, k in enumerate(lengths)])
    return AgentInputs(batch["obs"].double(), last_actions(batch["actions"], batch.packing)), batch.packing


@pytest.mark.parametrize("updates", VARIANTS, ids=str)
def test_unroll_equals_acting_and_agents_read_what_the_configuration_says(updates):
    agent, config, (inputs, packing) = make_agent(**updates), toy_config(**updates), toy_inputs()
    q = agent(inputs, packing)
    assert q.shape == (len(packing.step), INFO.n_agents, INFO.n_actions)
    hidden = [agent.init_hidden(1)] * packing.n_episodes
    for row, episode in enumerate(packing.episode.tolist()):
        values, hidden[episode] = agent.step(inputs.rows(slice(row, row + 1)), hidden[episode])
        torch.testing.assert_close(values[0], q[row], atol=1e-10, rtol=1e-9)
    q.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in agent.parameters())
    same = AgentInputs(inputs.features[:, :1].expand_as(inputs.features), inputs.last_action[:, :1].expand(-1, 3))
    of_same = agent(same, packing)
    assert torch.equal(of_same[:, 0], of_same[:, 1]) != config.obs_agent_id
    other_actions = replace(inputs, last_action=(inputs.last_action + 1) % INFO.n_actions)
    assert torch.equal(agent(other_actions, packing), q) != config.obs_last_action


def test_graph_convolution_follows_its_formula():
    conv = FullGraphConv(4).double()
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    got = conv(x)
    for i in range(5):
        others = sum(conv.others(x[:, j]) for j in range(5) if j != i)
        torch.testing.assert_close(got[:, i], (F.relu(conv.own(x[:, i])) + F.relu(others)) / 5)


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("actions", [False, True])
def test_input_layer_equals_a_linear_over_one_hots(ids, actions):
    layer = InputLinear(4, 5, toy_config(obs_agent_id=ids, obs_last_action=actions), INFO).double()
    features, last = torch.randn(7, 3, 4, dtype=torch.float64), torch.randint(-1, INFO.n_actions, (7, 3))
    one_hots = [F.one_hot(last + 1, INFO.n_actions + 1)[..., 1:]] * actions + [torch.eye(3).expand(7, 3, 3)] * ids
    plain = F.linear(torch.cat([features, *one_hots], dim=-1), layer.weight, layer.bias)
    for got, wanted in ((layer(features, last), plain), (layer.relu(features, last), plain.relu())):
        given = list(layer.parameters())
        torch.testing.assert_close(with_gradients(got, given), with_gradients(wanted, given))


def adam_step(layer):
    layer(torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    torch.optim.Adam(layer.parameters(), lr=0.1, foreach=False).step()


WRITES = {
    "optimizer": adam_step,
    "loading": lambda layer: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}),
    "bias": lambda layer: torch.nn.init.constant_(layer.bias, 3.0),
    "type": lambda layer: layer.double(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_input_layer_acts_on_the_weights_that_were_written_last(write):
    layer, last = InputLinear(4, 5, toy_config(), INFO), torch.randint(-1, INFO.n_actions, (7, 3))
    act = torch.inference_mode()(lambda features: (layer(features, last), layer.relu(features, last)))
    features = torch.randn(7, 3, 4)
    before = act(features)[0]
    write(layer)
    features = features.to(layer.weight.dtype)
    plain = layer(features, last).detach()
    for got, wanted in zip(act(features), (plain, plain.relu()), strict=True):
        torch.testing.assert_close(got, wanted)
    assert layer.weight.dtype == torch.float64 or (before - plain).abs().max() > 0.01


@pytest.mark.parametrize("agent", ["n_rnn", "gnn_rnn"])
def test_acting_follows_every_update(agent):
    mac = {"mac": "gnn_graph_mac"} if agent == "gnn_rnn" else {}
    learner = make_learner(toy_config(agent=agent, lr=0.1, **mac))
    mac, batch = learner.mac, pack_episodes([random_episode(i, 4) for i in range(3)])
    for _ in range(3):
        mac.begin(3)
        seen = Observation(batch["obs"][:3].numpy(), batch["state"][:3].numpy(), np.ones((3, 3, 9), bool))
        inputs, _ = mac._build_inputs(Tick(seen, np.zeros(3), np.ones(3, bool)))
        with torch.inference_mode():
            acted = torch.from_numpy(mac._values(inputs, None))
        learned, _ = mac.agent.step(inputs, mac.agent.init_hidden(3))
        torch.testing.assert_close(acted, learned.detach())
        learner.update(batch, episodes=0)


@pytest.mark.parametrize("name", [name for name in own_names(MIXERS) if name != "qplex"])  # it need not be monotonic
def test_joint_value_never_falls_when_an_agents_value_rises(name):
    torch.manual_seed(0)
    mixer = MIXERS.get(name)(toy_config(mixer=name), INFO).double()
    qs = torch.randn(50, INFO.n_agents, dtype=torch.float64, requires_grad=True)
    joint = mixer(qs, torch.randn(50, INFO.state_dim, dtype=torch.float64))
    assert joint.shape == ((50, INFO.n_agents) if name == "none" else (50,))
    slopes = torch.autograd.grad(joint.sum(), qs, retain_graph=True)[0]
    assert (slopes >= 0).all() and (slopes > 0).any()
    if name == "qatten":  # Yang et al. 2020, eq. 11 and 13: heads that attend to the agents' own parts of the state
        state = torch.randn(50, INFO.state_dim, dtype=torch.float64)
        query, key = mixer.query(state).view(50, 1, 4, -1), mixer.key(state[:, :3, None]).view(50, 3, 4, -1)
        share = ((query * key).sum(-1) / mixer.width**0.5).softmax(1)
        heads = torch.einsum("snh,sn,sh->s", share, qs, mixer.weight(state).abs())
        torch.testing.assert_close(mixer(qs, state), heads + mixer.bias(state)[:, 0])
    if list(mixer.parameters()):
        grads = torch.autograd.grad(joint.square().sum(), list(mixer.parameters()))
        assert all(g.abs().sum() > 0 for g in grads)


def test_talking_agents_hear_what_the_paper_says():
    """TarMAC, eq. 1 and 2, written out for each episode; gradients reach every parameter."""
    agent, (inputs, packing) = make_agent(agent="tarmac", agent_args={"key_dim": 3, "value_dim": 5}), toy_inputs((4, 2))
    got, cell = agent(inputs, packing), agent.rnn
    wanted = torch.empty_like(got)
    for episode, length in enumerate(packing.lengths):
        h = torch.zeros(INFO.n_agents, cell.hidden_dim, dtype=torch.float64)
        for step in range(length):
            row = packing.row(torch.tensor([step]), torch.tensor([episode]))
            q, k, v = (h @ cell.say.weight.t() + cell.say.bias).split([3, 3, 5], dim=-1)
            heard = torch.stack([(q[i] @ k.t() / 3**0.5).softmax(-1) @ v for i in range(INFO.n_agents)])
            x = torch.cat([agent.encode(inputs.rows(row))[0][0], heard], dim=-1)
            h = torch.gru_cell(x, h, cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
            wanted[row] = agent.values(h)
    torch.testing.assert_close(got, wanted)
    grads = torch.autograd.grad(got.square().sum(), list(agent.parameters()))
    assert all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize(("agent", "learns"), [("tarmac", True), ("rnn", False)])
def test_what_one_agent_sees_another_one_acts_on_only_if_they_talk(agent, learns):
    """Agent 0 sees a sign at the first step; agent 1 is asked for it at the second."""
    talker, packing = make_agent(agent=agent, rnn_hidden_dim=16), Packing((2,) * 32)
    optimizer, asked = torch.optim.Adam(talker.parameters(), lr=0.01), packing.row(torch.tensor(1), torch.arange(32))
    for _ in range(150):
        sign = torch.randint(0, 2, (32,))
        features = torch.zeros(64, INFO.n_agents, INFO.obs_dim, dtype=torch.float64)
        features[:32, 0, 0] = 2.0 * sign - 1
        inputs = AgentInputs(features, torch.full((64, INFO.n_agents), -1))
        loss = F.cross_entropy(talker(inputs, packing)[asked, 1, :2], sign)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert bool(loss < 0.1) is learns


def test_orthogonal_start():
    agent = make_agent(agent="n_rnn", use_orthogonal=True)
    rows = agent.fc1.weight @ agent.fc1.weight.t()
    torch.testing.assert_close(rows, torch.eye(SMALL["rnn_hidden_dim"], dtype=torch.float64), atol=1e-5, rtol=0)
    assert agent.fc2.weight.abs().max() <= 0.01


def unroll(batch, **updates):
    """Return the values and all gradients of a new agent, and the bytes that it kept for backward."""
    agent, kept = make_agent(**updates).to(batch[0].features.dtype), []
    keep = lambda x: kept.append(x.untyped_storage().nbytes()) or x  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        q = agent(*batch)
    return [q, *torch.autograd.grad(q.square().sum(), list(agent.parameters()))], sum(kept)


@pytest.mark.parametrize("updates", [{"agent": "n_rnn"}, {"agent": "gnn_rnn"}], ids=str)
def test_checkpointing_keeps_less_for_backward_and_changes_neither_values_nor_gradients(updates):
    batch = toy_inputs((41, 40, 40))
    (plain, kept), (checkpointed, less) = (
        unroll(batch, **updates, enable_gradient_checkpointing=on) for on in (False, True)
    )
    assert less < 0.5 * kept
    torch.testing.assert_close(checkpointed, plain, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("agent", ["n_rnn", "gnn_rnn"])
def test_bf16_is_close_to_float32(agent, checkpointed):
    inputs, packing = toy_inputs((41, 40, 40, 30, 9) * 3)
    batch = AgentInputs(inputs.features.float(), inputs.last_action), packing
    made = []
    for bf16 in (False, True):
        with ops.autocast_bf16(torch.device("cpu"), bf16):
            made.append(unroll(batch, agent=agent, enable_gradient_checkpointing=checkpointed)[0])
    plain, rounded = made
    assert all((a - b).norm() <= 0.03 * a.norm() for a, b in zip(plain, rounded, strict=True))
    assert not all(map(torch.equal, plain, rounded))


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("n_queries", [9, 5], ids=["all tokens", "some tokens"])
def test_attention_equals_the_plain_expression(n_queries: int) -> None:
    torch.manual_seed(0)
    inputs = [query, key_value] = [leaf(7, n_queries, 16), leaf(7, 9, 32)]
    q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (query, *key_value.chunk(2, -1)))
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    got = attend(query, key_value, 4, 0.0)
    torch.testing.assert_close(with_gradients(got, inputs), with_gradients(plain, inputs), rtol=1e-9, atol=1e-11)


def test_the_greedy_value_is_of_an_available_action() -> None:
    q, available = torch.tensor([[[1.0, 5.0]]]), torch.tensor([[[1, 0]]])
    assert MixerInputs(q, torch.zeros(1, 1).long(), available, torch.zeros(1, 1)).greedy.item() == 1.0


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
    monkeypatch.setattr(ops, "prefers_onednn", lambda: library)
    monkeypatch.setattr(ops, "SMALL", 0)
    given = factors(shape, out, dtype, bias)
    got, wanted = (with_gradients(function(*given), given) for function in (fast_linear, F.linear))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(fast_linear(*given), got[0])
