"""Stage 3's reconstructions: what passes, what is guessed, and that learning reads what acting saw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from graph_toys import INFO, LAYOUT, toy_config, toy_episodes, toy_modules

from omagd.config.env_info import EntityLayout, EnvInfo
from omagd.learners.predictor_learner import PredictorLearner
from omagd.modules.graph_reconstructers.graphs import feature_mask, obs_to_nodes
from omagd.modules.graph_reconstructers.reconstructor import Reconstructor, check, describe
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)
DECODES = ["mean", "argmax"]


def trained(**changes):
    """Return (config, tokenizer, predictor) after a few updates, so that no weight is at its start."""
    config = toy_config(**changes)
    tokenizer, predictor = toy_modules(config)
    stage = PredictorLearner(predictor, tokenizer, config, INFO, Dist())
    for seed in range(3):
        stage.update(pack_episodes(toy_episodes(4, seed=seed)))
    return config, tokenizer, predictor


def play(reconstructor: Reconstructor, episodes):
    """Act through episodes in two slots, each slot's next one starting at once; return what came out of each."""
    queues = [list(range(0, len(episodes), 2)), list(range(1, len(episodes), 2))]
    out = [{"obs": [], "guessed": [], "field": []} for _ in episodes]
    reconstructor.begin(2)
    step = np.zeros(2, np.int64)
    reconstructor.reset(np.array([True, True]))
    while any(queues):
        obs = np.zeros((2, INFO.n_agents, INFO.obs_dim), np.float32)
        for slot, queue in enumerate(queues):
            if queue:
                obs[slot] = episodes[queue[0]]["obs"][step[slot]].numpy()
        made = reconstructor.step(obs, step.copy())
        over = np.zeros(2, bool)
        for slot, queue in enumerate(queues):
            if not queue:
                continue
            kept = out[queue[0]]
            kept["obs"].append(made.obs[slot])
            kept["guessed"].append(made.guessed[slot])
            kept["field"].append(made.fields[reconstructor.field][slot])
            step[slot] += 1
            if step[slot] == len(episodes[queue[0]]["obs"]):
                queue.pop(0)
                step[slot], over[slot] = 0, True
        reconstructor.reset(over)
    return [{name: torch.stack(values) for name, values in one.items()} for one in out]


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("use_gru", [False, True])
def test_learning_reads_the_bits_that_acting_saw(decode: str, use_gru: bool) -> None:
    parts = trained(mask_predictor_config__decode=decode, mask_predictor_config__use_gru=use_gru)
    reconstructor = Reconstructor(parts[1], parts[2], parts[0], INFO)
    episodes = toy_episodes(6, seed=20)
    played = play(reconstructor, episodes)
    extras = [{reconstructor.field: p["field"], "acted": p["obs"], "marks": p["guessed"]} for p in played]
    batch = pack_episodes([{**one, **extra} for one, extra in zip(episodes, extras, strict=True)])
    assert batch[reconstructor.field].dtype == (torch.float16 if decode == "mean" else torch.int16)
    obs, guessed = reconstructor.restore(batch.data)
    assert torch.equal(obs.view(torch.int32), batch["acted"].view(torch.int32))
    assert torch.equal(guessed, batch["marks"]) and guessed.any()


@pytest.mark.parametrize("decode", DECODES)
def test_acting_predicts_what_training_predicts(decode: str) -> None:
    config, tokenizer, predictor = trained(mask_predictor_config__decode=decode)
    reconstructor = Reconstructor(tokenizer, predictor, config, INFO)
    episodes = toy_episodes(6, seed=21)
    played = play(reconstructor, episodes)
    batch = pack_episodes([{**e, "acted": p["obs"]} for e, p in zip(episodes, played, strict=True)])
    stage = PredictorLearner(predictor, tokenizer, config, INFO, Dist())
    sample = stage.sample(batch, stage.graphs(batch))
    guess = predictor.eval().guess(predictor(sample.frames, sample.masked))
    acted = obs_to_nodes(batch["acted"], LAYOUT)[sample.rows, sample.agents][sample.masked]
    real = feature_mask(LAYOUT)[torch.nonzero(sample.masked)[:, 1]]
    assert torch.allclose(acted, guess.features * real, atol=2e-3)
    assert (acted[guess.absent] == 0).all() and (acted[~guess.absent] != 0).any(-1).all()


def test_what_is_seen_and_who_is_dead_pass_unchanged() -> None:
    config, tokenizer, predictor = trained()
    reconstructor = Reconstructor(tokenizer, predictor, config, INFO)
    for episode, played in zip(toy_episodes(6, seed=22), play(reconstructor, toy_episodes(6, seed=22)), strict=True):
        dead = ~episode["obs"].any(-1)
        assert torch.equal(played["obs"][dead], episode["obs"][dead]) and not played["guessed"][dead].any()
        before, after = (obs_to_nodes(o, LAYOUT).view(torch.int32) for o in (episode["obs"], played["obs"]))
        kept = ~played["guessed"]
        assert torch.equal(after[kept], before[kept])
        living = ~dead[..., None]
        assert torch.equal(played["guessed"][..., 1:], (before[..., 1:, :] == 0).all(-1) & living)


def test_other_slots_and_earlier_episodes_do_not_leak() -> None:
    config, tokenizer, predictor = trained()
    reconstructor = Reconstructor(tokenizer, predictor, config, INFO)
    episodes = toy_episodes(4, seed=23)
    alone = [play(reconstructor, [one, one])[0] for one in episodes]
    together = play(reconstructor, episodes)
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one["obs"], other["obs"], atol=2e-3)


def test_a_snapshot_continues_in_the_middle_of_an_episode_without_dropout_or_gradients() -> None:
    config, tokenizer, predictor = trained(mask_predictor_config__dropout=0.5, tokenizer_config__dropout=0.5)
    obs = toy_episodes(1, seed=24, longest=12)[0]["obs"][:, None].numpy()
    obs = np.concatenate([obs, obs, obs])
    whole = Reconstructor(tokenizer, predictor, config, INFO)
    whole.begin(1)
    for step in range(len(obs)):
        if step == 3:
            other = Reconstructor(tokenizer, predictor, config, INFO)
            other.begin(1)
            other.load_snapshot(whole.snapshot())
        wanted = whole.step(obs[step], np.array([step]))
        if step >= 3:
            assert torch.equal(other.step(obs[step], np.array([step])).obs, wanted.obs)
    assert not wanted.obs.requires_grad
    assert not any(p.requires_grad for module in (tokenizer, predictor) for p in module.parameters())


def test_modules_of_another_tokenizer_environment_or_size_are_rejected() -> None:
    config = toy_config()
    predictor_of_seed_0, tokenizer_of_seed_5 = toy_modules(config)[1], toy_modules(config, seed=5)[0]
    with pytest.raises(UserError, match="another tokenizer"):
        Reconstructor(tokenizer_of_seed_5, predictor_of_seed_0, config, INFO)
    tokenizer, predictor = "pretrained_tokenizer_path", "pretrained_mask_predictor_path"
    meta = describe(config, INFO, predictor=False)
    check(meta, config, INFO, tokenizer, "a/tokenizer.th")
    of_predictor, stacked = describe(config, INFO, predictor=True), toy_config(mask_predictor_config__stacked_steps=3)
    check(of_predictor, config, INFO, predictor, "a/stage2_model.th")
    check(meta, toy_config(tokenizer_config__dropout=0.3), INFO, tokenizer, "a")
    elsewhere = EnvInfo(**{**INFO.__dict__, "map_name": "huge"})
    resized = EnvInfo(**{**INFO.__dict__, "layout": EntityLayout(2, 3, 5, 2, 4, 2)})
    cases = [
        (meta, config, elsewhere, tokenizer, "trained on toy tiny"),
        (meta, config, resized, tokenizer, "other sizes"),
        (meta, toy_config(tokenizer_config__n_codes=13), INFO, tokenizer, "tokenizer_config.n_codes=12"),
        (meta, config, INFO, predictor, "not the file of a trained mask_predictor"),
        (None, config, INFO, tokenizer, "not the file"),
        (of_predictor, stacked, INFO, predictor, "mask_predictor_config.stacked_steps=2"),
    ]
    for found, with_config, info, key, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            check(found, with_config, info, key, "some/file.th")
        assert str(caught.value).startswith(f"{key}=some/file.th")
