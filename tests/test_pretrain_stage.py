"""What stages 1 and 2 have in common, without their networks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from omagd.learners.synced_optimizer import SKIPPED
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.reporting.log_sinks import EpisodeLog
from omagd.run.training.session import Session
from omagd.run.training.stages.base import PretrainedModules
from omagd.run.training.stages.health import MOST_SKIPPED
from omagd.run.training.stages.pretraining import PretrainStage
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder

SLOTS = 8


class Measured(PretrainStage):
    """A stage whose held-out errors are given, and whose weight is the number of the measurement."""

    name = "stage1"
    product, weights_name = "toy", "toy.th"

    def make_learner(self):
        self.module = torch.nn.Linear(1, 1, bias=False)
        return SimpleNamespace(
            best_metric="error",
            evaluate=lambda batch: {"error": (batch.error, 1.0)},
            modules=lambda: {"toy": self.module},
            state_dict=dict,
            load_state_dict=lambda state: None,
        )


def stage_of(tmp_path, dist=None, episodes=8):
    config = SimpleNamespace(
        graph_lr=0.1, grad_norm_clip=1.0, precision="float32", seed=1,
        graph_pretrain_eval_interval=1, evaluation_only=False, save_model=False,
        enable_checkpointing=False, evaluate=False, max_checkpoints_to_keep=2, dist_timeout_minutes=1,
        graph_pretrain_episodes=episodes, graph_pretrain_eval_episodes=episodes,
    )  # fmt: skip
    logger = SimpleNamespace(log=lambda values, **when: None)
    env = SimpleNamespace(n_slots=SLOTS, get_stats=dict)
    log = EpisodeLog(tmp_path / "episodes.jsonl")
    dist, folder = dist or Dist(), RunFolder(tmp_path)
    checkpointer = Checkpointer(config, dist, folder)
    session = Session(config, dist, env, None, folder, logger, {}, checkpointer, log)
    return Measured(session, PretrainedModules())


class HeldOut:
    """A batch with an error, and the buffer that it comes from."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 1

    def batch(self, places):
        return self

    def to(self, device):
        return self


def measure(stage, errors):
    for number, error in enumerate(errors, start=1):
        stage.module.weight.data.fill_(number)
        stage.clock.epoch = number
        stage.products.held_out = HeldOut(error)
        stage.evaluate()


@pytest.mark.parametrize(("errors", "best"), [([3.0, 1.0, 2.0], 2), ([2.0, 3.0], 1)])
def test_the_model_with_the_smallest_error_is_passed_on(errors, best, tmp_path):
    stage = stage_of(tmp_path)
    measure(stage, errors)
    result = stage.finish()
    assert stage.module.weight.item() == best
    assert result.values["best_epoch"] == best


def test_what_is_not_finite_ends_the_stage_and_is_not_saved(tmp_path):
    with pytest.raises(UserError, match=r"^stage1, epoch 2: eval/error=nan is not finite; graph_lr=0\.1, "):
        measure(stage_of(tmp_path), [2.0, math.nan])
    stage = stage_of(tmp_path)
    measure(stage, [2.0])
    stage.module.weight.data.fill_(math.inf)
    with pytest.raises(UserError, match=r"toy\.weight holds values that are not finite, so nothing is saved"):
        stage.finish()


def test_skipped_updates_are_counted_on_after_a_restart(tmp_path):
    skipped = {SKIPPED: (torch.tensor(1.0), torch.tensor(1.0))}
    stage, resumed = stage_of(tmp_path), stage_of(tmp_path)
    for _ in range(MOST_SKIPPED - 1):
        stage.health.note(skipped)
    resumed.health.load_state_dict(stage.health.state_dict())
    resumed.require_sound()
    resumed.health.note(skipped)
    with pytest.raises(UserError, match="in 10 updates in a row"):
        resumed.require_sound()


def test_every_rank_and_purpose_has_its_own_random_numbers(tmp_path):
    stages, dropout = [], set()
    for rank in range(3):
        stages.append(stage_of(tmp_path, Dist(rank, 3)))
        dropout.add(torch.initial_seed())
    assert len(dropout) == 3
    drawn = [stage.rng(purpose).random(4).tolist() for stage in stages for purpose in ("explore", "replay")]
    assert len({value for values in drawn for value in values}) == 3 * 2 * 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("episodes", [1, 3, 17, 48, 1000])
def test_every_rank_plays_the_same_number_of_whole_rounds(world_size, episodes, tmp_path):
    stages = [stage_of(tmp_path, Dist(rank, world_size), episodes) for rank in range(world_size)]
    shares = {stage.products.train_episodes.capacity for stage in stages}
    assert len(shares) == 1
    share = shares.pop()
    assert share % SLOTS == 0
    assert episodes <= share * world_size < episodes + SLOTS * world_size
