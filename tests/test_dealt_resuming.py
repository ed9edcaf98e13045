"""Runs on several ranks with maps or groups: interrupted, they end the same; on other ranks counts are exact.

benchmarks/chaos.py is the long form, with kills.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ddp_harness import run_phases
from interruption import Interrupted
from run_counts import miscounted
from run_equality import differences

from omagd.config.loading import resolve
from omagd.config.schema import Config
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.run_folder import RunFolder
from omagd.run.training import evaluate
from omagd.run.training.experiment import run_experiment
from omagd.utils.dist_utils import Dist

pytestmark = pytest.mark.processes
SMALL = {
    "use_cuda": False, "rnn_hidden_dim": 8, "test_nepisode": 1, "test_interval": 10**6, "checkpoint_interval": 0,
    "log_interval": 100, "runner_log_interval": 100, "learner_log_interval": 100, "batch_size_run": 2, "batch_size": 2,
    "t_max": 10**6, "max_episodes": 12,
}  # fmt: skip
GROUPS = {
    "env_args.map_name": ["3m_vs_2m", "4m_vs_2m"], "group_size": 2, "learner_args.epochs": 1,
    "enable_dynamic_sampling": True, "max_sampling_attempts": 1, "max_episodes": 24,
}  # fmt: skip
MAPS = {"env_args.map_name": ["1m", "2m_vs_1m"], "sync_every_n_steps": 2}
REPLAY = {"buffer_size": 8, "updates_per_iteration": 1}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "round robin": ("hpn_rloo", {**MAPS, **GROUPS}),
    "sharded": ("hpn_qmix", {**MAPS, **REPLAY, "task_dealing": "sharded", "balance_tasks_across_gpus": False}),
}  # fmt: skip
# Ranks, the folder, and the iteration that is lost; `others` goes on with `cut`.
PHASES: list[tuple[int, tuple[str, int | None]]] = [
    (2, ("cut", 2)), (3, ("others", 3)), (1, ("others", None)), (2, ("cut", None)), (2, ("whole", None)),
]  # fmt: skip


def config_of(mode: str) -> Config:
    preset, updates = MODES[mode]
    return resolve(preset, "skirmish", {**SMALL, **updates})


def run_until(config: Config, dist: Dist, folder: Path, iteration: int | None) -> None:
    """Run, or go on; what is done in `iteration` is written, but not saved, so it is done again."""
    RunFolder(folder).path.mkdir(parents=True, exist_ok=True)
    inner = Checkpointer.boundary

    def boundary(checkpointer: Checkpointer, stage: Any) -> None:
        if checkpointer.iteration + 1 == iteration:
            checkpointer.finish()
            raise Interrupted
        inner(checkpointer, stage)

    with pytest.MonkeyPatch.context() as patch:
        # Tests would take as long as all training here.
        patch.setattr(evaluate, "play_tests", lambda *_, **__: {"test_return_mean": 0.0})
        patch.setattr(Checkpointer, "boundary", boundary)
        if iteration is None:
            run_experiment(config, dist, str(folder), None)
        else:
            with pytest.raises(Interrupted):
                run_experiment(config, dist, str(folder), None)


def of_ranks(rank: int, dist: Dist, payload: tuple[str, str, int | None]) -> None:
    """Run each mode for one phase."""
    place, name, iteration = payload
    for mode in MODES:
        folder = Path(place) / mode / name
        if dist.is_main and name == "others" and not folder.exists():
            shutil.copytree(folder.parent / "cut", folder)
        dist.gather(None)
        run_until(config_of(mode), dist, folder, iteration)
        dist.gather(None)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the runs of each mode: whole, cut, and with other ranks."""
    found = tmp_path_factory.mktemp("runs")
    run_phases(of_ranks, [(size, (str(found), *what)) for size, what in PHASES])
    return found


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_run_ends_the_same(mode, place):
    whole, cut = place / mode / "whole", place / mode / "cut"
    assert miscounted(whole) == miscounted(cut) == []
    assert differences(whole, cut) == []


@pytest.mark.parametrize("mode", MODES)
def test_counts_are_exact_on_other_ranks(mode, place):
    """Three ranks and then one go on with a run of two."""
    run = place / mode / "others"
    assert miscounted(run) == []
    assert sorted(path.name for path in (run / "episodes").iterdir()) == [f"rank_{rank}.jsonl" for rank in range(3)]
    log = (run / "logs" / "rank_0.log").read_text()
    for before, now in ((2, 3), (3, 1)):
        assert f"it was written by {before} rank(s), now there are {now}" in log
    common = torch.load(sorted((run / "checkpoints").glob("[0-9]*"))[-1] / "common.th", weights_only=True)
    assert sorted(common["run"]["earlier_ranks"]) == [1, 2]
