"""What stages 1 and 2 have in common, without their networks."""

import math
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from graph_toys import INFO, graph_learner, toy_config, toy_episodes

from omagd.config.loading import read_saved, validate
from omagd.envs.factory import make_env
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.run_folder import RunFolder
from omagd.run.training.build import PRETRAINED, load_pretrained, pretrain_policy, restore_pretrained
from omagd.run.training.stages.base import PretrainedModules, Session
from omagd.run.training.stages.pretraining import PretrainStage
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import pack_episodes

SLOTS = 8


class Measured(PretrainStage):
    """A stage that measures `error`."""

    name, module_name, weights_name, error = "stage1", "toy", "toy.th", math.nan

    def make_learner(self):
        self.module = torch.nn.Linear(1, 1, bias=False)
        return SimpleNamespace(
            best_metric="error",
            evaluate=lambda batch: {"error": (self.error, 1.0)},
            modules=lambda: {"toy": self.module},
            state_dict=dict,
            load_state_dict=lambda state: None,
        )


def stage_of(tmp_path, dist=None, episodes=8, **changes):
    counts = {"graph_pretrain_episodes": episodes, "graph_pretrain_eval_episodes": episodes}
    config = toy_config(
        graph_lr=0.1, grad_norm_clip=1.0, enable_checkpointing=False, save_model=False, **counts, **changes
    )
    dist, folder, env = dist or Dist(), RunFolder(tmp_path), SimpleNamespace(n_slots=SLOTS, get_stats=dict)
    checkpointer = Checkpointer(config, dist, folder)
    return Measured(Session(config, dist, env, None, folder, MagicMock(), {}, checkpointer, None), PretrainedModules())


def measure(stage, errors):
    """Measure `errors`, each with its number as the weight."""
    stage.pretrained.episodes["held_out"] = MagicMock(__len__=lambda buffer: 1)
    for number, stage.error in enumerate(errors, start=1):
        stage.module.weight.data.fill_(number)
        stage.clock.epoch = number
        stage.evaluate()


@pytest.mark.parametrize(("errors", "best"), [([3.0, 1.0, 2.0], 2), ([2.0, 3.0], 1)])
def test_the_model_with_the_smallest_error_is_passed_on(errors, best, tmp_path):
    stage = stage_of(tmp_path)
    measure(stage, errors)
    assert stage.finish().values["best_epoch"] == best == stage.module.weight.item()


def test_a_measure_that_would_choose_the_model_and_is_missing_is_named(tmp_path):
    stage = stage_of(tmp_path)
    stage.learner.best_metric = "loss"
    with pytest.raises(UserError, match="best_metric=loss is not among what its evaluate returns: error"):
        measure(stage, [3.0])


@pytest.mark.parametrize("name", PRETRAINED)
def test_measures_files_and_frozen_modules_are_without_dropout_and_of_the_best_model(name, tmp_path):
    module_name, key, file, _ = PRETRAINED[name]
    learner = graph_learner(name, torch.float32, tokenizer_config__dropout=0.5, mask_predictor_config__dropout=0.5)
    batch = pack_episodes(toy_episodes(6))
    asks = {"stage1": [learner.evaluate, lambda b: learner._draw(learner.sample(b), 12, "revive")],
            "stage2": [learner.evaluate, getattr(learner, "beliefs", None)]}  # fmt: skip
    for ask in asks[name]:
        learner._loss.train()  # as an update leaves it
        torch.testing.assert_close(ask(batch), ask(batch), rtol=0, atol=0)
    stage = stage_of(tmp_path)
    stage.session.config, stage.session.info = stage.session.config.model_copy(update={"save_model": True}), INFO
    stage.name, stage.module_name, stage.weights_name, stage.learner = name, module_name, file, learner
    for number, error in enumerate((3.0, 1.0, 2.0)):
        for weight in learner.modules()[module_name].parameters():
            weight.data.fill_(number)
        stage.measure = lambda buffer, error=error: {learner.best_metric: error}
        stage.pretrained.episodes["held_out"] = []
        stage.evaluate()
    config = toy_config(**{key: stage.finish().files[name]})
    loaded, resumed = load_pretrained(config, INFO, torch.device("cpu")), PretrainedModules()
    plan = SimpleNamespace(trained={name: stage.best[2]}.get)
    restore_pretrained(
        SimpleNamespace(config=config, info=INFO, dist=Dist(), folder=stage.session.folder), resumed, plan
    )
    for modules in (stage.pretrained, loaded, resumed):
        module = getattr(modules, module_name)
        assert {float(weight.mean()) for weight in module.parameters()} == {1.0}, "not the best model"
        assert not any(part.training for part in module.modules()), "acts and encodes with dropout"


def test_what_is_not_finite_ends_the_stage_and_is_not_saved(tmp_path):
    with pytest.raises(UserError, match=r"^stage1, epoch 2: eval/error=nan is not finite; graph_lr=0\.1, "):
        measure(stage_of(tmp_path), [2.0, math.nan])
    stage = stage_of(tmp_path)
    measure(stage, [2.0])
    stage.module.weight.data.fill_(math.inf)
    with pytest.raises(UserError, match=r"toy\.weight holds values that are not finite, so nothing is saved"):
        stage.finish()


def test_all_ranks_and_purposes_have_different_random_numbers(tmp_path):
    dropout, drawn = set(), set()
    for rank in range(3):
        stage = stage_of(tmp_path, Dist(rank, 3))
        dropout.add(torch.initial_seed())
        drawn.update(*(stage.rng(purpose).random(4).tolist() for purpose in ("explore", "replay")))
    assert len(dropout) == 3 and len(drawn) == 3 * 2 * 4


def test_an_agent_that_plays_takes_nothing_from_the_generator_of_dropout(qmix_run):
    config = validate({**read_saved(qmix_run / "config.json", ""), "graph_pretrain_policy": str(qmix_run)})
    info = make_env("skirmish", {"map_name": "3m"}, 1, processes=False).info
    torch.manual_seed(7)
    before = torch.get_rng_state()
    pretrain_policy(SimpleNamespace(config=config, info=info, dist=Dist()), None)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("episodes", [1, 3, 17, 48, 1000])
def test_every_rank_plays_the_same_number_of_whole_rounds(world_size, episodes, tmp_path):
    stages = [stage_of(tmp_path, Dist(rank, world_size), episodes) for rank in range(world_size)]
    (share,) = {stage.pretrained.episodes["pretrain"].capacity for stage in stages}
    assert share % SLOTS == 0
    assert episodes <= share * world_size < episodes + SLOTS * world_size
