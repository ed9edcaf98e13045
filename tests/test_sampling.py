"""Units drawn from beliefs (`decode: sample`): distributions, that draws persist, and that runs are reproducible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, believing, graph_learner, toy_config, toy_episodes

from omagd.config.loading import resolve
from omagd.controllers.graph_mac import NGraphMAC
from omagd.controllers.types import Exploration, Tick
from omagd.envs.protocol import Observation
from omagd.modules.graph_reconstructers import REGISTRY, check_beliefs, sampling
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.run.cli.preflight import preflight
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
KINDS = [{"kind": "tracker"}, {}, {"use_gru": True}]
SLOTS = 3000


def view() -> torch.Tensor:
    """Return an observation [n, obs_dim] in which every agent lives and misses a unit."""
    for episode in toy_episodes(50, seed=8, apart=True):
        obs = episode["obs"][0]
        if (~obs_to_nodes(obs, LAYOUT).any(-1)).any(-1).all():
            return obs
    raise AssertionError


def drawn_in(reconstructor: Any, slots: int = SLOTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nodes [slots, n, N, D] that agents with one view read, and which are missing [n, N]."""
    reconstructor.begin(slots)
    reconstructor.reset(np.ones(slots, bool))
    made = reconstructor.step(view().expand(slots, -1, -1), np.zeros(slots, np.int64))
    return obs_to_nodes(made.obs, LAYOUT), made.guessed[0]


def test_a_tracker_draws_death_and_features_from_its_belief() -> None:
    stage, reconstructor = believing(kind="tracker", decode="sample")
    torch.nn.init.normal_(stage.predictor.dead.weight, generator=torch.Generator().manual_seed(1))
    stage.predictor.threshold.fill_(0.01)  # which does not matter
    nodes, missing = drawn_in(reconstructor)
    episode = {"obs": torch.stack([view()] * 2), "full_obs": torch.rand(2, *view().shape)}
    batch = pack_episodes([{**episode, "actions": torch.zeros(2, INFO.n_agents, dtype=torch.int64)}])
    stage.predictor.threshold.fill_(2.0)  # the mean of a unit that may be dead, too
    at, belief = stage.beliefs(batch)
    assert torch.equal(at[0], missing)
    drawn, real = nodes[:, missing], feature_mask(LAYOUT)[torch.nonzero(missing)[:, 1]]
    for m in range(len(belief.p_dead)):
        dead = ~drawn[:, m].any(-1)
        p = float(belief.p_dead[m])
        assert float(dead.double().mean()) == pytest.approx(p, abs=4 * (p * (1 - p) / SLOTS) ** 0.5 + 1e-3)
        living, error = drawn[~dead, m].double(), 4 / (SLOTS * (1 - p)) ** 0.5
        z = ((living - belief.features[m]) / belief.spread[m])[:, real[m]]
        assert living[:, ~real[m]].any().item() is False
        assert (z.mean(0).abs() < error).all() and ((z.std(0) - 1).abs() < error).all()
        assert (torch.corrcoef(z.T) - torch.eye(z.shape[1])).abs().max() < error
    living = drawn.any(-1)  # agents and units draw independently, and some agents miss the same unit
    assert len(torch.nonzero(missing)[:, 1].unique()) < len(belief.p_dead)
    assert (torch.corrcoef(living.T.double()) - torch.eye(living.shape[1])).abs().max() < 0.1
    together = torch.where(living, drawn[..., 2], belief.features[:, 2]).double()
    assert (torch.corrcoef(together.T) - torch.eye(living.shape[1])).abs().max() < 0.1
    assert 0.02 < float(belief.p_dead.min()) and float(belief.p_dead.max()) < 0.98
    stage.predictor.bounds[0, :, 2], stage.predictor.bounds[1, :, 2] = -0.1, 0.05
    within = drawn_in(reconstructor)[0][:, missing][..., 2]
    assert float(within.min()) == pytest.approx(-0.1, abs=1e-3) and float(within.max()) == pytest.approx(0.05, abs=1e-3)


def test_the_masked_predictor_draws_a_code_or_death() -> None:
    stage, reconstructor = believing(decode="sample")
    torch.nn.init.normal_(stage.predictor.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    nodes, missing = drawn_in(reconstructor)
    frames = reconstructor._history.frames(torch.arange(INFO.n_agents), torch.zeros(SLOTS, dtype=torch.int64))
    shares = stage.predictor.eval()(frames, missing).softmax(-1)
    table = torch.cat([stage.predictor.table, torch.zeros(1, LAYOUT.node_dim)])
    at = torch.nonzero(missing)
    real, drawn = feature_mask(LAYOUT)[at[:, 1]], nodes[:, missing]
    assert len(shares) == len(at)
    for m, share in enumerate(shares.tolist()):
        distance = (drawn[:, m, None] - table * real[m]).abs().amax(-1)
        counts = torch.bincount(distance.argmin(-1), minlength=len(share)).double() / SLOTS
        assert float(distance.amin(-1).max()) < 1e-6
        for count, p in zip(counts.tolist(), share, strict=True):
            assert count == pytest.approx(p, abs=4 * (p * (1 - p) / SLOTS) ** 0.5 + 1e-3)


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_a_draw_persists_through_an_episode_and_a_snapshot_and_changes_with_the_episode(
    changes: dict[str, Any],
) -> None:
    stage, whole = believing(decode="sample", **changes)
    kind = REGISTRY.get(stage.config.mask_predictor_config.kind)
    other = kind(getattr(stage, "tokenizer", None), stage.predictor, stage.config, INFO)
    episodes = toy_episodes(9, seed=24, apart=True)
    obs = torch.cat([episode["obs"] for episode in episodes])[:30]
    for one in (whole, other):
        one.begin(2)
    rng, keys = np.random.default_rng(0), []
    for t in range(30):
        starts, active = np.array([t % 10 == 0, t % 7 == 0]), np.array([True, t % 3 > 0 or t % 7 == 0])
        given = torch.stack([obs[t], obs[29 - t]]), np.array([t % 10, t % 7]), active
        for one in (whole, other) if t > 12 else (whole,):
            one.reset(starts)
        if t < 12:
            whole.renew(starts, rng)
        wanted = whole.step(*given)
        if t == 12:
            other.load_snapshot(whole.snapshot())
        if t > 12:
            made = other.step(*given)
            assert all(torch.equal(made.fields[name], value) for name, value in wanted.fields.items())
            assert torch.equal(made.obs, wanted.obs)
        keys.append(whole.snapshot()["noise_key"].tolist())
    for slot, length in ((0, 10), (1, 7)):
        of_episodes = [{key[slot] for key in keys[i : i + length]} for i in range(0, 30, length)]
        assert [len(one) for one in of_episodes] == [1] * len(of_episodes)
        assert len(set.union(*of_episodes)) == len(of_episodes)


def test_an_unchanged_belief_gives_the_same_unit_again_and_another_in_the_next_episode() -> None:
    _, reconstructor = believing(decode="sample", stacked_steps=1, last_seen=False)
    first, _ = drawn_in(reconstructor, 20)
    again = reconstructor.step(view().expand(20, -1, -1), np.zeros(20, np.int64)).obs
    assert torch.equal(obs_to_nodes(again, LAYOUT), first)
    reconstructor.reset(np.arange(20) < 10)
    later = obs_to_nodes(reconstructor.step(view().expand(20, -1, -1), np.zeros(20, np.int64)).obs, LAYOUT)
    assert torch.equal(later[10:], first[10:])
    assert not torch.equal(later[:10], first[:10])


def test_training_draws_by_the_generator_of_exploration_and_tests_draw_alike() -> None:
    stage = graph_learner("stage2", torch.float32, kind="tracker", decode="sample")
    config = toy_config(kind="tracker", decode="sample", rnn_hidden_dim=8)
    kind = REGISTRY.get("tracker")
    n, actions = 4, np.ones((4, INFO.n_agents, INFO.n_actions), bool)

    def acted(rng: np.random.Generator | None) -> list[np.ndarray]:
        mac = NGraphMAC(config, INFO, torch.device("cpu"), kind(None, stage.predictor, config, INFO))
        mac.begin(n)
        mac.reset(np.ones(n, bool))
        seen = Observation(view().expand(n, -1, -1).numpy().copy(), np.zeros((n, INFO.state_dim)), actions, None)
        explore = None if rng is None else Exploration(0.0, rng)
        ticks = [Tick(seen, np.full(n, t), np.ones(n, bool)) for t in range(2)]
        return [mac.act(tick, explore).extras["recon"] for tick in ticks]

    test, again = acted(None), acted(None)
    assert all(np.array_equal(a, b) for a, b in zip(test, again, strict=True))
    one, same, other = (acted(np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert not np.array_equal(one[0], test[0])
    assert not np.array_equal(one[0][0], one[0][1])  # the same view in two slots


def test_slots_of_all_ranks_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reconstructor = believing(kind="tracker", decode="sample")
    drawn = {}
    for rank in (0, 1):
        monkeypatch.setattr(sampling, "get_rank", lambda rank=rank: rank)
        drawn[rank] = drawn_in(reconstructor, 4)[0]
    monkeypatch.setattr(sampling, "get_rank", lambda: 0)
    assert torch.equal(torch.cat([drawn[0], drawn[1]]), drawn_in(reconstructor, 8)[0])
    assert not torch.equal(drawn[0], drawn[1])


def test_what_has_nothing_to_draw_from_is_rejected() -> None:
    sample = {"mask_predictor_config.decode": "sample"}
    with pytest.raises(
        UserError, match="decode=sample: kind=map_constant has no distribution to draw from. Use decode"
    ):
        preflight(resolve("fog_map_constant", "skirmish", sample))
    with pytest.raises(UserError, match="runner=resident: draws no units, .*decode=sample. Use runner=parallel"):
        preflight(resolve("omagd_small", "skirmish", {**sample, "runner": "resident"}))
    for kind in ("masked", "tracker"):
        check_beliefs(resolve("omagd_small", "skirmish", {**sample, "mask_predictor_config.kind": kind}))
