"""Numbers that are not finite change no weight, are counted, end the run in one line, and reach no file."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterable
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
from omagd.learners.synced_optimizer import SKIPPED
from omagd.run.checkpoint.store import first_not_finite
from omagd.run.cli.main import config_from, main
from omagd.run.run_folder import RunFolder
from omagd.run.training.stages.base import MOST_SKIPPED, Health
from omagd.utils.errors import UserError
from omagd.utils.packing import PackedBatch, pack_episodes


def learner_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "ddpg":
        return ddpg_toys.make_ddpg(dtype=torch.float32)
    if name.startswith("stage"):
        return graph_toys.graph_learner(name, torch.float32, tokenizer_config__revive_interval=1)
    return q_toys.make_learner(q_toys.toy_config(mixer=name, target_update_updates=1))


def update(name: str, learner: Any, number: int, value: float | None = None) -> dict[str, Any]:
    """Take an update on a batch by number, of which one `value` may not be finite."""
    if name == "ddpg":
        episodes, field = ddpg_toys.random_steps(number, 6), "agent_reward"
    elif name.startswith("stage"):
        episodes, field = graph_toys.toy_episodes(4, seed=number), "full_obs"
    else:
        episodes, field = [q_toys.random_episode(10 * number + i, 5) for i in range(4)], "reward"
    if value is not None:
        episodes[0][field].view(-1)[0] = value
    if name != "stage2" or value is None:
        return learner.update(pack_episodes(episodes), **({} if name.startswith("stage") else {"episodes": 0}))
    weight = next(learner.predictor.parameters())  # the predictor reads tokens alone, so its own weight is spoilt
    kept = weight.detach().clone()
    weight.data.fill_(value)
    stats = learner.update(pack_episodes(episodes))
    weight.data.copy_(kept)
    return stats


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["qmix", "none", "ddpg", "stage1", "stage2"])
def test_an_update_that_is_not_finite_changes_nothing_and_the_next_one_learns(name: str, value: float) -> None:
    learner = learner_of(name)
    assert float(update(name, learner, 1)[SKIPPED][0]) == 0
    if name == "stage1":
        learner.tokenizer.cluster_size[2:5] = 1e-3  # codes that the next update would put elsewhere
    before = state_of(learner)
    stats = update(name, learner, 3, value)
    assert float(stats.pop(SKIPPED)[0]) == 1
    assert all(float(total) == float(count) == 0 for total, count in stats.values()), stats
    after = state_of(learner)
    assert equal(before, after) and first_not_finite(after) is None
    learned = update(name, learner, 4)
    assert float(learned[SKIPPED][0]) == 0 and all(math.isfinite(float(total)) for total, _ in learned.values())
    assert not equal(after, state_of(learner))


def test_an_update_whose_finite_gradients_have_an_infinite_norm_changes_nothing() -> None:
    """Clipping would divide by infinity, and Adam's momentum move the weights."""
    learner = learner_of("qmix")
    update("qmix", learner, 1)
    before = state_of(learner)
    assert float(update("qmix", learner, 3, 1e25)[SKIPPED][0]) == 1
    assert equal(before, state_of(learner))
    kept = copy.deepcopy(learner.target_agent.state_dict())
    next(learner.mac.agent.parameters()).data[0] = math.inf
    update("qmix", learner, 2)  # targets are copied after each update, but not weights that have overflowed
    assert equal(kept, learner.target_agent.state_dict())


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


def train(results: Path, words: str, config: str = "qmix") -> None:
    omagd.run(config_from([f"--config={config}", "with", *BUDGETS, *words.split(), f"local_results_path={results}"]))


def all_finite(paths: Iterable[Path]) -> bool:
    return all(first_not_finite(torch.load(path, weights_only=True)) is None for path in paths)


@pytest.mark.parametrize("config", ["omagd_small", "qmix"])
def test_a_training_that_diverges_ends_in_one_line_and_leaves_finite_files(config, tmp_path) -> None:
    where, key, files = "stage1, epoch", "graph_lr", ""
    if config == "qmix":
        where, key = "training, t_env", "lr"
        files = "save_model=False enable_checkpointing=False updates_per_iteration=4"
    with pytest.raises(UserError, match=rf"^{where} \d+: .* {key}=1e\+38, .*smaller {key}$"):
        train(tmp_path, f"{key}=1e38 {files}", config)
    (folder,) = tmp_path.glob("*")
    assert "completed" not in (folder / "summary.json").read_text()
    assert all_finite(folder.rglob("*.th")) and not list(folder.glob("models/pretrain*"))


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

    class NoPairs(Plugin):
        def update(self, batch: PackedBatch, *, episodes: int) -> Any:
            return {"loss_td": torch.ones(1), "objective": 1.0}

    class NotALearner:
        update = warm_up = None

    for name, kind, message in (
        ("plugin", Plugin, "objective=(inf|nan) is not finite"),
        ("unnamed", Unnamed, "loss_name=loss_td .*objective"),
        ("no_pairs", NoPairs, "learner=no_pairs: .*loss_td=tensor.*sum, count"),
        ("not_a_learner", NotALearner, "learner=not_a_learner: .*warm_up, update, modules"),
    ):
        monkeypatch.setitem(learners.REGISTRY._objects, name, kind)
        with pytest.raises(UserError, match=message):
            train(tmp_path / name, f"learner={name}")
        assert all("completed" not in file.read_text() for file in tmp_path.glob(f"{name}/*/summary.json"))


def test_a_checkpoint_never_holds_what_is_not_finite(tmp_path, monkeypatch) -> None:
    """Weights that overflow between two logs reach no checkpoint, though nothing else looks at them."""
    update = NQLearner.update

    def overflow(self: NQLearner, batch: PackedBatch, *, episodes: int) -> Any:
        stats = update(self, batch, episodes=episodes)
        if self.updates == 3:
            next(self.mac.agent.parameters()).data[0] = math.inf
        return stats

    monkeypatch.setattr(NQLearner, "update", overflow)
    intervals = "log_interval=1000 runner_log_interval=1000 learner_log_interval=1000 checkpoint_interval=0"
    with pytest.raises(UserError, match=r"agent\.\S+ holds values that are not finite, so nothing is saved"):
        train(tmp_path, f"save_model=False {intervals}")
    saved = list(tmp_path.glob("*/checkpoints/*/common*"))
    assert saved and all_finite(saved)


def spoil(tree: Any) -> None:
    """Make the last number of each float tensor in nested values NaN."""
    if isinstance(tree, torch.Tensor) and tree.is_floating_point():
        tree.view(-1)[-1:] = math.nan
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        spoil(value)


FILES = {
    "{step}/agent.th": "checkpoint_path",
    "{step}/opt.th": "checkpoint_path",
    "pretrain_stage1_best/tokenizer.th": "pretrained_tokenizer_path",
    "pretrain_stage2_best/stage2_model.th": "pretrained_mask_predictor_path",
}
NOT_EVALUATED = "opt.th"


@pytest.mark.parametrize(("file", "key"), FILES.items())
def test_weights_that_are_not_finite_are_neither_played_nor_continued_from(small_run, tmp_path, capsys, file, key):
    run = tmp_path / "run"
    shutil.copytree(small_run, run, ignore=shutil.ignore_patterns("checkpoints", "pretrain_buffer"))
    models = run / "models"
    path = models / file.format(step=RunFolder(run).saved_steps()[-1])
    content = torch.load(path, weights_only=True)
    spoil(content)
    torch.save(content, path)
    words = f"pretrained_tokenizer_path={models}/pretrain_stage1_best checkpoint_path={run} auto_resume=False"
    words += f" pretrained_mask_predictor_path={models}/pretrain_stage2_best local_results_path={tmp_path} t_max=1000"
    attempts = [["--config=omagd_small", "with", *BUDGETS, *words.split()]]
    if not str(path).endswith(NOT_EVALUATED):
        attempts.append(["evaluate", str(run)])
        with pytest.raises(UserError, match=f"{path} holds values that are not finite"):
            omagd.load_policy(run)
    for attempt in attempts:
        assert main(attempt) == 2
        line = capsys.readouterr().err.splitlines()[0]
        assert line.startswith(f"error: {key}={path} holds values that are not finite (in '")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
