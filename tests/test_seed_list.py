"""`seeds=1,2,3` as one unit: what has finished is not repeated, the rest is continued, and then a new list begins."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command_budgets import BUDGETS

from omagd.run.cli.main import config_from
from omagd.run.launch import launcher as launching
from omagd.run.run import run_seeds
from omagd.utils.run_folder import write_json
from omagd.utils.signals import Stopped


class Trainer:
    """Stands for the training of one run: notes seed and folder, and is interrupted where it is asked to be."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, str]] = []
        self.interrupted: int | None = None

    def __call__(self, config, dist, path, channel, attempt=0):
        self.runs.append((config.seed, path))
        if config.seed == self.interrupted:
            raise Stopped(signal.SIGINT)
        names = {"name": config.name, "env": config.env, "map_name": config.map_name, "exit_state": "completed"}
        summary = {**names, "seed": config.seed, "folder": path, "return": config.seed / 10, "wall_seconds": 1.0}
        write_json(Path(path) / "summary.json", summary)
        return summary

    def took(self) -> list[int]:
        seeds, self.runs = [seed for seed, _ in self.runs], []
        return seeds


@pytest.fixture
def trainer(monkeypatch, tmp_path) -> Trainer:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    made = Trainer()
    monkeypatch.setattr(launching, "run_experiment", made)
    return made


def start(*words: str) -> dict:
    return run_seeds(None, config_from(["--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, *words]))


def test_a_list_that_was_interrupted_is_continued_and_a_finished_one_begins_again(trainer, capsys):
    trainer.interrupted = 2
    with pytest.raises(Stopped):
        start("seeds=1,2,3")
    first = dict(trainer.runs)
    assert trainer.took() == [1, 2]
    trainer.interrupted = 3
    with pytest.raises(Stopped):
        start("seeds=1,2,3", "auto_resume=True")
    assert dict(trainer.runs)[2] == first[2]  # the unfinished one goes on in its folder
    assert trainer.took() == [2, 3]
    trainer.interrupted = None
    capsys.readouterr()
    found = start("seeds=1,2,3", "auto_resume=True")
    said = capsys.readouterr().out
    assert trainer.took() == [3]
    assert [run["seed"] for run in found["runs"]] == [1, 2, 3]
    assert [run["folder"] for run in found["runs"][:2]] == [first[1], first[2]]
    assert [run["return"] for run in found["runs"]] == [0.1, 0.2, 0.3]
    assert "3 seeds" in said and f"seed 1 is finished: {first[1]}" in said
    again = start("seeds=1,2,3", "auto_resume=True")
    assert trainer.took() == [1, 2, 3]
    assert not {run["folder"] for run in again["runs"]} & {run["folder"] for run in found["runs"]}
    assert "all runs of seeds=1,2,3 are finished already; a new list begins" in capsys.readouterr().out


def test_a_list_killed_between_two_seeds_is_continued(trainer, monkeypatch):
    real = launching.claimed_folder

    def killed(config, token, **more):
        if config.seed == 2:
            raise Stopped(signal.SIGKILL)
        return real(config, token, **more)

    monkeypatch.setattr(launching, "claimed_folder", killed)
    with pytest.raises(Stopped):
        start("seeds=1,2")
    assert trainer.took() == [1]
    monkeypatch.setattr(launching, "claimed_folder", real)
    start("seeds=1,2", "auto_resume=True")
    assert trainer.took() == [2]


def test_other_lists_other_keys_and_lists_without_auto_resume_start_from_scratch(trainer, tmp_path):
    trainer.interrupted = 2
    for words in (("seeds=1,2",), ("seeds=1,2",), ("seeds=1,2", "auto_resume=True", "lr=0.01")):
        with pytest.raises(Stopped):
            start(*words)
        assert trainer.took() == [1, 2]
    with pytest.raises(Stopped):
        start("seeds=2,1", "auto_resume=True")
    assert trainer.took() == [2]


def test_a_list_whose_file_is_damaged_or_planted_trusts_nothing_in_it(trainer, tmp_path):
    """A run that is not finished, of another configuration or elsewhere is not taken for a finished seed."""
    trainer.interrupted = 2
    with pytest.raises(Stopped):
        start("seeds=1,2")
    (_, first), _ = trainer.runs
    trainer.took()
    (file,) = (tmp_path / "results").glob(".seeds_*.json")
    other = json.loads((Path(first) / "run.json").read_text()) | {"identity": "another"}
    (tmp_path / "run.json").write_text(json.dumps(other))
    for content in ("{", "[]", '{"runs": {"1": ".."}}', '{"runs": {"1": 7}}', '{"runs": {"1": "gone"}}', '{"runs": 3}'):
        file.write_text(content)
        with pytest.raises(Stopped):
            start("seeds=1,2", "auto_resume=True")
        assert trainer.took() == [1, 2], content
