"""Graphs of observations, and stage 3's reconstructions: what passes, what is guessed, and what acting computes."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, toy_config, toy_episodes, toy_modules
from hypothesis import given, settings
from hypothesis import strategies as st

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.envs.frames import Frame, Scene
from omagd.lab.beliefs.picture import filled_by, picture
from omagd.learners.predictor_learner import PredictorLearner
from omagd.modules.graph_reconstructers import token_reconstructor
from omagd.modules.graph_reconstructers.graphs import GraphTables, alive, feature_mask, obs_to_nodes
from omagd.modules.graph_reconstructers.pretrained import check, describe
from omagd.modules.graph_reconstructers.token_reconstructor import TokenReconstructor
from omagd.run.recording import WRITERS
from omagd.run.recording.recording import Recording
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

DECODES = ["mean", "argmax"]
layouts = st.builds(
    EntityLayout,
    **{name: st.integers(0, 6) for name in ("move_dim", "n_allies")},
    **{name: st.integers(1, 9) for name in ("n_enemies", "enemy_dim", "ally_dim", "own_dim")},
)


@settings(max_examples=30, deadline=None)
@given(layout=layouts, seed=st.integers(0, 2**32 - 1), lead=st.lists(st.integers(0, 3), max_size=3))
def test_there_and_back_is_the_same_bit_for_bit(layout: EntityLayout, seed: int, lead: list[int]) -> None:
    # Any bit pattern at all: also -0.0, infinities, NaN and subnormals.
    bits = np.random.default_rng(seed).integers(0, 2**32, (*lead, layout.obs_dim), dtype=np.uint32)
    tables, obs = GraphTables(layout, torch.device("cpu")), torch.from_numpy(bits.view(np.float32))
    for nodes in (obs_to_nodes(obs, layout), tables.nodes(obs)):
        assert np.array_equal(tables.obs(nodes).contiguous().numpy().view(np.uint32), bits)


def test_each_node_has_its_features_in_the_environments_order() -> None:
    layout = EntityLayout(move_dim=4, n_enemies=2, enemy_dim=5, n_allies=1, ally_dim=6, own_dim=1)
    nodes = obs_to_nodes(torch.arange(1.0, layout.obs_dim + 1), layout)
    assert nodes.tolist() == [
        [1, 0, 0, 0, 1, 2, 3, 4, 21],
        [15, 16, 17, 18, 19, 20, 0, 0, 0],
        [5, 6, 7, 8, 9, 0, 0, 0, 0],
        [10, 11, 12, 13, 14, 0, 0, 0, 0],
    ]
    assert nodes[feature_mask(layout)].all() and feature_mask(layout).sum() == layout.obs_dim
    layout = EntityLayout(move_dim=1, n_enemies=2, enemy_dim=5, n_allies=2, ally_dim=5, own_dim=1)
    assert obs_to_nodes(torch.arange(layout.obs_dim), layout)[1:, 0].tolist() == [11, 16, 1, 6]
    with pytest.raises(ValueError, match="features"):
        obs_to_nodes(torch.zeros(5), layout)


def test_unseen_nodes_are_all_zero_and_only_an_observer_that_sees_nothing_is_dead() -> None:
    layout = EntityLayout(move_dim=0, n_enemies=1, enemy_dim=13, n_allies=1, ally_dim=13, own_dim=10)
    obs = torch.zeros(3, layout.obs_dim)
    obs[:2, -10:] = 7
    obs[1, 4] = 0.5
    nodes = obs_to_nodes(obs, layout)
    assert nodes[0, 0].tolist() == [1, 0, 0, 0, *[7] * 10], "the fixed head stays without move features"
    seen, missing = GraphTables(layout, obs.device).sight(obs)
    assert seen.tolist() == [[True, False, False], [True, False, True], [False] * 3]
    assert missing.tolist() == [[False, True, True], [False, True, False], [False] * 3]
    assert alive(obs).tolist() == [True, True, False]


def test_tables_convert_as_the_functions_do() -> None:
    obs = torch.cat([episode["obs"] for episode in toy_episodes(5, seed=3)])
    obs[0, 0, 0] = -0.0
    tables, nodes = GraphTables(LAYOUT, torch.device("cpu")), obs_to_nodes(obs, LAYOUT)
    assert torch.equal(tables.nodes(obs), nodes) and torch.equal(tables.obs(nodes), obs)
    (seen, missing), living = tables.sight(obs), alive(obs)[..., None]
    assert torch.equal(missing, ~nodes.any(-1) & living) and torch.equal(seen, nodes.any(-1) & living)
    assert torch.equal(tables.of_nodes(missing), tables.obs(missing[..., None].expand_as(nodes)))


def trained(**changes):
    """Return (tokenizer, predictor, config, info) after a few updates, which change every weight."""
    config = toy_config(**changes)
    tokenizer, predictor = toy_modules(config)
    stage = PredictorLearner(predictor, tokenizer, config, INFO, Dist())
    for seed in range(3):
        stage.update(pack_episodes(toy_episodes(4, seed=seed)))
    return tokenizer, predictor, config, INFO


def play(reconstructor: TokenReconstructor, episodes):
    """Act through episodes in two slots, one after another; return (obs, guessed, field) of each."""
    slots = [[(i, t) for i in range(s, len(episodes), 2) for t in range(len(episodes[i]["obs"]))] for s in (0, 1)]
    out: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in episodes]
    reconstructor.begin(2)
    for places in zip_longest(*slots, fillvalue=(0, 0)):
        step = np.array([t for _, t in places])
        reconstructor.reset(step == 0)
        made = reconstructor.step(torch.stack([episodes[i]["obs"][t] for i, t in places]), step)
        for slot, (i, _) in enumerate(places):
            out[i].append((made.obs[slot], made.guessed[slot], made.fields[reconstructor.field][slot]))
    lengths = (len(episode["obs"]) for episode in episodes)
    return [[torch.stack(x[:length]) for x in zip(*one, strict=True)] for one, length in zip(out, lengths, strict=True)]


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("use_gru", [False, True])
def test_learning_reads_the_bits_that_acting_saw(decode: str, use_gru: bool) -> None:
    reconstructor, episodes = TokenReconstructor(*trained(decode=decode, use_gru=use_gru)), toy_episodes(6, seed=20)
    names = ("acted", "marks", reconstructor.field)
    played = [dict(zip(names, one, strict=True)) for one in play(reconstructor, episodes)]
    batch = pack_episodes([{**one, **extra} for one, extra in zip(episodes, played, strict=True)])
    assert batch[reconstructor.field].dtype == (torch.float16 if decode == "mean" else torch.int16)
    obs, guessed = reconstructor.restore(batch.data)
    assert torch.equal(obs.view(torch.int32), batch["acted"].view(torch.int32))
    assert torch.equal(guessed, batch["marks"]) and guessed.any()


@pytest.mark.parametrize("at_once", [1 << 21, 1])
@pytest.mark.parametrize("decode", DECODES)
def test_acting_predicts_what_training_predicts(monkeypatch, decode: str, at_once: int) -> None:
    """Also where frames pass in several groups."""
    monkeypatch.setattr(token_reconstructor, "FLOATS_AT_ONCE", (at_once, at_once))
    parts = tokenizer, predictor, config, _ = trained(decode=decode)
    episodes = toy_episodes(6, seed=21)
    played = play(TokenReconstructor(*parts), episodes)
    batch = pack_episodes([{**e, "acted": obs} for e, (obs, *_) in zip(episodes, played, strict=True)])
    stage = PredictorLearner(predictor, tokenizer, config, INFO, Dist())
    sample = stage.sample(batch, stage.graphs(batch))
    guess = predictor.eval().guess(predictor(sample.frames, sample.masked))
    acted = obs_to_nodes(batch["acted"], LAYOUT)[sample.rows, sample.agents][sample.masked]
    real = feature_mask(LAYOUT)[torch.nonzero(sample.masked)[:, 1]]
    assert torch.allclose(acted, guess.features * real, atol=2e-3)
    assert (acted[guess.absent] == 0).all() and (acted[~guess.absent] != 0).any(-1).all()


def test_what_is_seen_and_dead_observers_pass_unchanged_and_no_other_episode_matters() -> None:
    reconstructor, episodes = TokenReconstructor(*trained()), toy_episodes(6, seed=22)
    for episode, (obs, guessed, _) in zip(episodes, play(reconstructor, episodes), strict=True):
        living = episode["obs"].any(-1)
        assert torch.equal(obs[~living], episode["obs"][~living])
        before, after = (obs_to_nodes(o, LAYOUT).view(torch.int32) for o in (episode["obs"], obs))
        assert torch.equal(after[~guessed], before[~guessed])
        assert torch.equal(guessed, ~before.any(-1) & living[..., None])
        assert torch.allclose(play(reconstructor, [episode, episode])[0][0], obs, atol=2e-3)


def test_modules_of_another_tokenizer_environment_or_size_are_rejected() -> None:
    config = toy_config()
    with pytest.raises(UserError, match="another tokenizer"):
        TokenReconstructor(toy_modules(config, seed=5)[0], toy_modules(config)[1], config, INFO)
    tokenizer, predictor = "pretrained_tokenizer_path", "pretrained_mask_predictor_path"
    meta, of_predictor = (describe(config, INFO, predictor=kind) for kind in (False, True))
    check(meta, toy_config(tokenizer_config__dropout=0.3), INFO, predictor=False, source="a")
    check(of_predictor, config, INFO, predictor=True, source="a")
    elsewhere = EnvInfo(**{**INFO.__dict__, "map_name": "huge"})
    resized = EnvInfo(**{**INFO.__dict__, "layout": EntityLayout(2, 3, 5, 2, 4, 2)})
    cosine = {**meta, "tokenizer_config": {**meta["tokenizer_config"], "distance": "cosine"}}
    cases = [
        (cosine, config, INFO, tokenizer, r"distance=cosine, which was removed. Play it with omagd 0\.2\.0: .* L2"),
        (meta, config, elsewhere, tokenizer, "trained on toy tiny"),
        (meta, config, resized, tokenizer, "other sizes"),
        (meta, toy_config(tokenizer_config__n_codes=13), INFO, tokenizer, "tokenizer_config.n_codes=12"),
        (meta, config, INFO, predictor, "not the file of a trained mask_predictor"),
        (None, config, INFO, tokenizer, "not the file"),
        ({**of_predictor, "mask_predictor_config": None}, config, INFO, predictor, "not the file"),
        *(({k: v for k, v in meta.items() if k != gone}, config, INFO, tokenizer, "not the file") for gone in meta),
        (of_predictor, toy_config(stacked_steps=3), INFO, predictor, "mask_predictor_config.stacked_steps=2"),
    ]
    for found, with_config, info, key, words in cases:
        with pytest.raises(UserError, match=f"^{key}=some/file.th .*{words}"):
            check(found, with_config, info, predictor=key == predictor, source=f"{key}=some/file.th")


def test_the_picture_of_beliefs_shows_what_is_seen_believed_and_true(tmp_path, monkeypatch) -> None:
    """Of a set of maps it names all units, whatever map a slot is on. Places are relative to the agent."""
    parts, episodes = trained(), toy_episodes(5, seed=31)
    info = replace(INFO, tasks=("1m", "tiny"), n_training=2)
    drawn: list[Any] = []
    monkeypatch.setitem(WRITERS._objects, "png", lambda made, path, agent: drawn.append((made, agent)) or path)
    frame = Frame(Scene(("a0", "e0"), (0, 1), ("marine",) * 2, ("agents", "enemies")), [0.0] * 2, [0.0] * 2, [True] * 2)
    session: Any = SimpleNamespace(
        config=parts[2], info=info, env=SimpleNamespace(frame=lambda slot: frame),
        folder=SimpleNamespace(plots=tmp_path), logger=SimpleNamespace(picture=lambda name, path: None),
    )  # fmt: skip
    made = picture(session, lambda *a: filled_by(TokenReconstructor(*parts), *a), pack_episodes(episodes), "moment")
    ((recording, agent),) = drawn
    assert made == tmp_path / "moment.png" and Recording.model_validate(recording.model_dump())
    shown, column = recording.episodes[0], LAYOUT.position[0]
    assert shown.scene.ids == (*(f"a{i}" for i in range(INFO.n_agents)), "e0", "e1", "e2")
    others = [i for i in range(INFO.n_agents) if i != agent] + list(range(INFO.n_agents, len(shown.scene.ids)))
    right = [obs_to_nodes(each["full_obs"][0, agent], LAYOUT)[1:, column] * LAYOUT.sight for each in episodes]
    first = torch.tensor(shown.moments[0].x)[others].float()
    (number,) = (i for i, each in enumerate(right) if torch.allclose(each, first, atol=1e-4))
    acted, marks, _ = play(TokenReconstructor(*parts), [episodes[number]] * 2)[0]
    believed = 0
    for step, moment in enumerate(shown.moments):
        views = (episodes[number]["obs"], episodes[number]["full_obs"], acted)
        seen, full, made = (obs_to_nodes(each[step, agent], LAYOUT).numpy() for each in views)
        bits = int(moment.seen[agent] or "0", 16)
        for place, unit in enumerate([agent, *others]):
            assert moment.alive[unit] == full[place].any() and bits >> unit & 1 == seen[place].any()
            found = [(x, y) for each, x, y, _ in moment.beliefs[agent] if each == unit]
            assert bool(found) == bool(marks[step, agent, place] and made[place].any() and full.any())
            for way in found:
                assert way == pytest.approx(made[place][list(LAYOUT.position)] * LAYOUT.sight, abs=0.11)
                believed += 1
    assert believed > 5
