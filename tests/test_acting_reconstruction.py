"""Reconstruction as acting computes it: equal to the trained module, in parts of the slots, in bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, toy_config, toy_episodes, toy_modules

from omagd.controllers.graph_mac import NGraphMAC
from omagd.controllers.types import Tick
from omagd.envs.protocol import Observation
from omagd.modules.graph_reconstructers import frozen
from omagd.modules.graph_reconstructers.frozen import FrozenLinear, FrozenPredictor, FrozenTokenizer
from omagd.modules.graph_reconstructers.graphs import GraphTables, alive, nodes_to_obs, obs_to_nodes, unseen
from omagd.modules.graph_reconstructers.history import Frames
from omagd.modules.graph_reconstructers.predictor import MaskPredictor
from omagd.modules.graph_reconstructers.reconstructor import Reconstructor

torch.set_num_threads(1)


def moved(seed: int = 0, **changes) -> MaskPredictor:
    """Return a predictor none of whose weights is at its start."""
    config = toy_config(**{f"mask_predictor_config__{name}": value for name, value in changes.items()})
    predictor = toy_modules(config)[1].eval().requires_grad_(False)
    torch.manual_seed(seed)
    for weight in predictor.parameters():
        weight.add_(0.3 * torch.randn_like(weight))
    return predictor


def random_frames(predictor: MaskPredictor, n: int = 37) -> tuple[Frames, torch.Tensor]:
    """Return frames and which of their nodes are masked; steps and ages go beyond the tables."""
    generator = torch.Generator().manual_seed(1)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    codes, nodes = predictor.specials.n_codes, predictor.n_nodes
    ids = draw(codes + 3, n, predictor.config.stacked_steps, nodes)
    masked = torch.rand(n, nodes, generator=generator) < 0.4
    masked[:, 1] = True
    return Frames(ids, draw(30, n), draw(codes + 2, n, nodes), draw(30, n, nodes)), masked


@pytest.mark.parametrize("use_gru", [False, True])
@pytest.mark.parametrize("last_seen", [False, True])
@pytest.mark.parametrize("decode", ["mean", "argmax"])
def test_the_frozen_predictor_is_the_trained_one(
    use_gru: bool, last_seen: bool, decode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = moved(use_gru=use_gru, last_seen=last_seen, decode=decode, code_features=last_seen)
    frames, masked = random_frames(predictor)
    where = masked.flatten().nonzero().flatten()
    wanted = predictor(frames, masked)
    whole = FrozenPredictor(predictor)
    assert torch.allclose(whole.logits(frames, where), wanted, atol=2e-5, rtol=1e-5)
    guess, plain = whole(frames, where), predictor.guess(wanted)
    assert torch.equal(guess.absent, plain.absent) and torch.allclose(guess.features, plain.features, atol=1e-5)
    assert decode == "mean" or torch.equal(guess.ids, plain.ids)
    monkeypatch.setattr(frozen, "FLOATS_AT_ONCE", 0)
    grouped = FrozenPredictor(predictor)(frames, where)
    assert torch.equal(grouped.absent, guess.absent) and torch.allclose(grouped.features, guess.features, atol=1e-5)


def test_large_attention_scores_do_not_overflow() -> None:
    predictor = moved()
    for block in predictor.blocks:
        block.query.weight.mul_(60.0)
        block.key_value.weight.mul_(60.0)
    frames, masked = random_frames(predictor)
    got = FrozenPredictor(predictor).logits(frames, masked.flatten().nonzero().flatten())
    assert got.isfinite().all() and torch.allclose(got, predictor(frames, masked), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("safe", [False, True])
def test_attention_by_numpy_is_attention(safe: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 7, 2, 5, 4).unbind()
    joined = torch.cat([query, key, value, torch.ones(7, 2, 5, 1)], dim=-1)
    wanted = ((query @ key.transpose(2, 3)).softmax(-1) @ value).transpose(1, 2).reshape(35, 8)
    laid_out = joined.transpose(1, 2).contiguous().transpose(1, 2)
    for mix in (frozen._mix, frozen._mix_by_numpy):
        assert torch.allclose(mix(laid_out, safe), wanted, atol=1e-5)


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_the_frozen_tokenizer_is_the_trained_one(distance: str) -> None:
    tokenizer = toy_modules(toy_config(tokenizer_config__distance=distance, tokenizer_config__dropout=0.5))[0].eval()
    with torch.no_grad():
        for weight in tokenizer.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
        tokenizer.place(torch.arange(12), tokenizer.encode(torch.randn(12, LAYOUT.node_dim)), 1.0)
    nodes = torch.randn(500, LAYOUT.node_dim)
    ids = FrozenTokenizer(tokenizer)(nodes)
    assert torch.equal(ids, tokenizer.ids(nodes)) and len(ids.unique()) > 6


def test_bf16_guesses_are_near() -> None:
    predictor = moved(d_model=32, n_heads=4, feedforward_dim=64)
    frames, masked = random_frames(predictor)
    where = masked.flatten().nonzero().flatten()
    exact, rounded = (FrozenPredictor(predictor, bf16=bf16).logits(frames, where) for bf16 in (False, True))
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.05 * exact.std()


@pytest.mark.parametrize("gelu", [False, True])
def test_a_packed_product_is_the_plain_one(gelu: bool) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(130, 128), torch.randn(130), torch.randn(9, 128)
    wanted = torch.nn.functional.linear(x, weight, bias)
    wanted = torch.nn.functional.gelu(wanted) if gelu else wanted
    assert torch.allclose(FrozenLinear(weight, bias)(x, gelu), wanted, atol=1e-4)
    assert torch.allclose(FrozenLinear(weight, bias, bf16=True)(x, gelu).float(), wanted, atol=0.4, rtol=0.02)


def test_columns_do_what_graphs_do() -> None:
    obs = torch.cat([episode["obs"] for episode in toy_episodes(5, seed=3)])
    obs[0, 0, 0] = -0.0
    columns = GraphTables(LAYOUT, torch.device("cpu"))
    nodes = obs_to_nodes(obs, LAYOUT)
    assert torch.equal(columns.nodes(obs), nodes) and torch.equal(columns.obs(nodes), nodes_to_obs(nodes, LAYOUT))
    seen, missing = columns.sight(obs)
    living = alive(obs)[..., None]
    assert torch.equal(missing, unseen(nodes) & living) and torch.equal(seen, ~unseen(nodes) & living)
    marks = nodes_to_obs(missing[..., None].expand_as(nodes), LAYOUT)
    assert torch.equal(columns.of_nodes(missing), marks)


def test_changed_weights_are_read_when_rollouts_begin() -> None:
    config = toy_config()
    tokenizer, predictor = toy_modules(config)
    reconstructor = Reconstructor(tokenizer, predictor, config, INFO)
    obs = next(e["obs"][:1] for e in toy_episodes(20, seed=4) if (e["obs"][0, 0, 3:] == 0).any())
    before = reconstructor_step(reconstructor, obs)
    with torch.no_grad():
        predictor.head.bias.copy_(torch.linspace(-3, 3, len(predictor.head.bias)).flip(0))
    after = reconstructor_step(reconstructor, obs)
    assert not torch.equal(before, after)
    assert torch.equal(after, reconstructor_step(Reconstructor(tokenizer, predictor, config, INFO), obs))


def reconstructor_step(reconstructor: Reconstructor, obs: torch.Tensor) -> torch.Tensor:
    """Return what the first tick of one slot looks like."""
    reconstructor.begin(1)
    return reconstructor.step(obs, np.zeros(1, np.int64)).obs


@pytest.mark.parametrize(("decode", "field"), [("mean", "recon"), ("argmax", "tokens")])
def test_a_controller_acts_for_some_slots_as_for_all(decode: str, field: str) -> None:
    """The observations of inactive slots are never read."""
    config = toy_config(mask_predictor_config__decode=decode)
    macs = []
    for _ in range(2):
        torch.manual_seed(1)
        reconstructor = Reconstructor(*toy_modules(config), config, INFO)
        macs.append(NGraphMAC(config, INFO, torch.device("cpu"), reconstructor))
        macs[-1].begin(4)
    together, turns = macs
    shown = torch.stack([toy_episodes(1, seed=50 + i, longest=1)[0]["obs"] for i in range(16)], 1).numpy()
    first = np.array([True, False, False, True])
    for step, obs in enumerate(shown.reshape(-1, 4, *shown.shape[2:])):
        whole = together.act(_tick(obs, step, np.ones(4, bool)), None)
        for which in (first, ~first):
            broken = np.where(which[:, None, None], obs, np.float32("nan"))
            part = turns.act(_tick(broken, step, which), None)
            assert (part.actions[which] == whole.actions[which]).all()
            np.testing.assert_allclose(part.extras[field][which], whole.extras[field][which], atol=2e-3)
        assert torch.allclose(turns.snapshot()["hidden"], together.snapshot()["hidden"], atol=1e-6)
        assert turns.snapshot()["history"]["past"].equal(together.snapshot()["history"]["past"])
    assert turns.reconstructor.frames == together.reconstructor.frames > 0


def _tick(obs: np.ndarray, step: int, active: np.ndarray) -> Tick:
    avail = np.ones((len(obs), INFO.n_agents, INFO.n_actions), bool) & active[:, None, None]
    seen = Observation(obs=obs, state=np.zeros((len(obs), INFO.state_dim), np.float32), avail_actions=avail)
    return Tick(seen, np.full(len(obs), step), active)
