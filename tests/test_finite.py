"""Numbers that are not finite change no weight, are counted, end the run in one line, and reach no file."""

from __future__ import annotations

import copy
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import ddpg_toys
import graph_toys
import pytest
import q_toys
import torch
from command_budgets import BUDGETS
from q_toys import equal, state_of

import omagd
from omagd import learners
from omagd.learners.nq_learner import NQLearner
from omagd.learners.predictor_learner import PredictorLearner
from omagd.learners.protocol import METHODS, learner_class
from omagd.learners.synced_optimizer import SKIPPED
from omagd.learners.tokenizer_learner import TokenizerLearner
from omagd.run.checkpoint.serialization import first_not_finite
from omagd.run.cli.main import config_from, main
from omagd.run.training.stages.health import MOST_SKIPPED, Health
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, pack_episodes

torch.set_num_threads(1)


class Case:
    """A learner with batches by number, of which one may hold a `value` that is not finite."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        config = graph_toys.toy_config(tokenizer_config__revive_interval=1)
        tokenizer, predictor = graph_toys.toy_modules(config)
        stage = config, graph_toys.INFO, Dist()
        qmix = partial(q_toys.toy_config, target_update_updates=1)
        make: dict[str, Any] = {
            "qmix": lambda: q_toys.make_learner(qmix()),
            "iql": lambda: q_toys.make_learner(qmix(mixer="none")),
            "ddpg": lambda: ddpg_toys.make_ddpg(dtype=torch.float32),
            "tokenizer": lambda: TokenizerLearner(tokenizer, *stage),
            "predictor": lambda: PredictorLearner(predictor, tokenizer, *stage),
        }
        self.learner = make[name]()

    def update(self, number: int, value: float | None = None) -> dict[str, Any]:
        """Take an update on a batch."""
        graphs = hasattr(self.learner, "best_metric")
        if self.name == "ddpg":
            episodes, field = ddpg_toys.random_steps(number, 6), "agent_reward"
        elif graphs:
            episodes, field = graph_toys.toy_episodes(4, seed=number), "full_obs"
        else:
            episodes, field = [q_toys.random_episode(10 * number + i, 5) for i in range(4)], "reward"
        if value is not None:
            episodes[0][field].view(-1)[0] = value
        return self.learner.update(pack_episodes(episodes), **({} if graphs else {"episodes": 0}))


def spoilt(case: Case, value: float) -> dict[str, Any]:
    """Take an update whose gradient is not finite; the predictor reads tokens alone, so its own weight is spoilt."""
    if case.name != "predictor":
        return case.update(3, value)
    weight = next(case.learner.predictor.parameters())
    kept = weight.detach().clone()
    weight.data.fill_(value)
    stats = case.update(3)
    weight.data.copy_(kept)
    return stats


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["qmix", "iql", "ddpg", "tokenizer", "predictor"])
def test_an_update_that_is_not_finite_changes_nothing_and_the_next_one_learns(name: str, value: float) -> None:
    case = Case(name)
    assert float(case.update(1)[SKIPPED][0]) == 0
    if name == "tokenizer":
        case.learner.tokenizer.cluster_size[2:5] = 1e-3  # codes that the next update would put elsewhere
    before = state_of(case.learner)
    stats = spoilt(case, value)
    assert float(stats.pop(SKIPPED)[0]) == 1
    assert all(float(total) == float(count) == 0 for total, count in stats.values()), stats
    after = state_of(case.learner)
    assert equal(before, after)
    assert first_not_finite(after) is None
    learned = case.update(4)
    assert float(learned[SKIPPED][0]) == 0 and all(math.isfinite(float(total)) for total, _ in learned.values())
    assert not equal(after, state_of(case.learner))


def test_an_update_whose_finite_gradients_have_an_infinite_norm_changes_nothing() -> None:
    """Clipping would divide by infinity, and Adam's momentum move the weights."""
    case = Case("qmix")
    case.update(1)
    before = state_of(case.learner)
    assert float(case.update(3, 1e25)[SKIPPED][0]) == 1
    assert equal(before, state_of(case.learner))
    kept = copy.deepcopy(case.learner.target_agent.state_dict())
    next(case.learner.mac.agent.parameters()).data[0] = math.inf
    case.update(2)  # targets are copied after each update, but weights that have overflowed do not reach them
    assert equal(kept, case.learner.target_agent.state_dict())


def test_few_skipped_updates_are_counted_and_many_in_a_row_end_the_run() -> None:
    config = graph_toys.toy_config()
    bad, good = ({SKIPPED: (torch.tensor(value), torch.tensor(1.0))} for value in (1.0, 0.0))
    health = Health(config, "lr")
    for _ in range(3):
        for stats in [bad] * (MOST_SKIPPED - 1) + [good]:
            assert health.note({**stats, "loss_td": (torch.tensor(2.0), torch.tensor(1.0))}).keys() == {"loss_td"}
        health.require_progress("stage3, t_env 5")
    assert health.record() == {SKIPPED: 3.0 * (MOST_SKIPPED - 1)}
    for _ in range(MOST_SKIPPED // 2):
        health.note(bad)
    resumed = Health(config, "lr")  # in the middle of a row, as a checkpoint has it
    resumed.load_state_dict(health.state_dict())
    resumed.require_finite({"loss_td": 2.5, "epsilon": 1.0}, "stage3, t_env 6")
    for _ in range(MOST_SKIPPED - MOST_SKIPPED // 2):
        resumed.note(bad)
    resumed.note(good)  # too late: whether a run ends does not depend on when the counts are read
    with pytest.raises(UserError, match=r"^stage3, t_env 7: .* in 10 updates in a row.*loss_td=2\.5.*lr=0.*precision="):
        resumed.require_progress("stage3, t_env 7")
    for name in ("loss_td", "train/graph_loss", "loss_actor", "eval/error"):
        with pytest.raises(UserError, match=f"{name}=nan is not finite"):
            Health(config, "lr").require_finite({name: math.nan, "return_mean": math.nan}, "stage2", also="eval/error")
    Health(config, "lr").require_finite({"return_mean": math.nan}, "stage2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--config=omagd_small", "with", *BUDGETS, "graph_lr=1e30"),
            r"^stage1, epoch \d+: .*graph_lr=1e\+30, .*smaller graph_lr$",
        ),
        (
            ("--config=qmix", "with", *BUDGETS, "lr=1e38", "save_model=False", "enable_checkpointing=False"),
            r"^stage3, t_env \d+: .* lr=1e\+38, .*smaller lr$",
        ),
    ],
)
def test_a_training_that_diverges_ends_in_one_line_and_leaves_finite_files(words, message, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        omagd.run(config_from([*words, f"local_results_path={tmp_path}"]))
    (folder,) = tmp_path.glob("*")
    assert "completed" not in (folder / "summary.json").read_text()
    for path in folder.rglob("*.th"):
        assert first_not_finite(torch.load(path, weights_only=True)) is None, path
    assert not list(folder.glob("models/pretrain*"))


def test_a_loss_under_any_name_is_checked(tmp_path, monkeypatch) -> None:
    """A plug-in's loss that becomes NaN ends the run; one that `loss_name` does not name is an error at once."""

    class Plugin(NQLearner):
        loss_name = "objective"

        def update(self, batch: PackedBatch, *, episodes: int) -> Any:
            super().update(batch, episodes=episodes)
            one = torch.ones(())
            return {"objective": (one / 0 if self.updates < 3 else one * math.nan, one)}

    class Unnamed(Plugin):
        loss_name = NQLearner.loss_name

    class NotALearner:
        update = warm_up = None

    kinds = {"plugin": Plugin, "unnamed": Unnamed, "not_a_learner": NotALearner}
    monkeypatch.setattr(learners.REGISTRY, "_objects", {**learners.REGISTRY._objects, **kinds})
    messages = {"plugin": "objective=(inf|nan) is not finite", "unnamed": "loss_name=loss_td .*objective"}
    for name, message in {**messages, "not_a_learner": "learner=not_a_learner: .*warm_up, update, modules"}.items():
        words = ["--config=qmix", "with", *BUDGETS, f"learner={name}", f"local_results_path={tmp_path / name}"]
        with pytest.raises(UserError, match=message):
            omagd.run(config_from(words))
        assert all("completed" not in file.read_text() for file in tmp_path.glob(f"{name}/*/summary.json"))
    Old = type("Old", (), dict.fromkeys(METHODS, lambda self: None))
    monkeypatch.setitem(learners.REGISTRY._objects, "old", Old)
    assert learner_class("old").data == "replay" and Old.loss_name == "loss_td"
    Old.data = "neither"
    with pytest.raises(UserError, match="learner=old: .*neither.*replay, on_policy"):
        learner_class("old")


def test_a_checkpoint_never_holds_what_is_not_finite(tmp_path, monkeypatch) -> None:
    """Weights that overflow between two logs reach no checkpoint, though nothing else looks at them."""
    update = NQLearner.update

    def overflow(self: NQLearner, batch: PackedBatch, *, episodes: int) -> Any:
        stats = update(self, batch, episodes=episodes)
        if self.updates == 3:
            next(self.mac.agent.parameters()).data[0] = math.inf
        return stats

    monkeypatch.setattr(NQLearner, "update", overflow)
    quiet = "log_interval=1000 runner_log_interval=1000 learner_log_interval=1000 save_model=False".split()
    words = ["--config=qmix", "with", *BUDGETS, *quiet, "checkpoint_interval=0", f"local_results_path={tmp_path}"]
    with pytest.raises(UserError, match=r"agent\.\S+ holds values that are not finite, so nothing is saved"):
        omagd.run(config_from(words))
    saved = list(tmp_path.glob("*/checkpoints/*/common*"))
    assert saved
    for path in saved:
        assert first_not_finite(torch.load(path, weights_only=True)) is None, path


def with_nan(tree: Any) -> Any:
    """Return a copy of a file's content whose last number of each float tensor is NaN."""
    if isinstance(tree, torch.Tensor) and tree.is_floating_point():
        tree = tree.clone()
        tree.view(-1)[-1:] = math.nan
        return tree
    if isinstance(tree, dict):
        return {key: with_nan(value) for key, value in tree.items()}
    return [with_nan(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("{step}/agent.th", "checkpoint_path"),
        ("{step}/opt.th", "checkpoint_path"),
        ("pretrain_stage1_best/tokenizer.th", "pretrained_tokenizer_path"),
        ("pretrain_stage2_best/stage2_model.th", "pretrained_mask_predictor_path"),
    ],
)
def test_weights_that_are_not_finite_are_neither_played_nor_continued_from(small_run, tmp_path, capsys, file, key):
    run = tmp_path / "run"
    shutil.copytree(small_run, run, ignore=shutil.ignore_patterns("checkpoints", "pretrain_buffer"))
    step = max(int(path.name) for path in (run / "models").iterdir() if path.name.isdigit())
    path = run / "models" / file.format(step=step)
    torch.save(with_nan(torch.load(path, weights_only=True)), path)
    keys = {"pretrained_tokenizer_path": "stage1", "pretrained_mask_predictor_path": "stage2"}
    best = [f"{name}={run / 'models' / f'pretrain_{stage}_best'}" for name, stage in keys.items()]
    words = ["--config=omagd_small", "with", *BUDGETS, *best, f"checkpoint_path={run}", "auto_resume=False"]
    attempts = [[*words, f"local_results_path={tmp_path}"]]
    if path.name != "opt.th":
        attempts.append(["evaluate", str(run)])
        with pytest.raises(UserError, match=f"{path} holds values that are not finite"):
            omagd.load_policy(run)
    for attempt in attempts:
        assert main(attempt) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {key}={path} holds values that are not finite (in '"), said
        assert said.count("\n") == 1
    assert [entry.name for entry in Path(tmp_path).iterdir()] == ["run"]
