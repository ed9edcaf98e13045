"""Seeds: lists of runs that are continued, and SplitMix64 with its published test vectors."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from command_budgets import BUDGETS

from omagd.envs.snakes.engine import Engine
from omagd.run.cli.main import config_from
from omagd.run.launch import launcher as launching
from omagd.run.run import run
from omagd.run.run_folder import write_json
from omagd.run.signals import Stopped
from omagd.utils.errors import UserError
from omagd.utils.seeding import GOLDEN, random_state, set_random_state, splitmix64, uniform


class Trainer:
    """Stands in for the training of one run: records seed and folder, and is interrupted at one seed."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, str]] = []
        self.interrupted: int | None = None

    def __call__(self, config, dist, path, channel, attempt=0):
        self.runs.append((config.seed, path))
        if config.seed == self.interrupted:
            raise Stopped(signal.SIGINT)
        facts = {"name": config.name, "env": config.env, "map_name": config.map_name, "exit_state": "completed"}
        summary = {**facts, "seed": config.seed, "folder": path, "return": config.seed / 10, "wall_seconds": 1.0}
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
    return run(None, config_from(["--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, *words]))


def interrupt(trainer: Trainer, seed: int, *words: str) -> None:
    """Start a list that is interrupted in the run of one seed."""
    trainer.interrupted = seed
    with pytest.raises(Stopped):
        start(*words)


def test_a_list_that_was_interrupted_is_continued_and_a_finished_one_begins_again(trainer, capsys):
    interrupt(trainer, 2, "seeds=1,2,3")
    first = dict(trainer.runs)
    assert trainer.took() == [1, 2]
    interrupt(trainer, 3, "seeds=1,2,3", "auto_resume=True")
    assert dict(trainer.runs)[2] == first[2]  # the unfinished one goes on in its folder
    assert trainer.took() == [2, 3]
    trainer.interrupted = None
    found = start("seeds=1,2,3", "auto_resume=True")
    out = capsys.readouterr().out
    assert trainer.took() == [3]
    assert [run["seed"] for run in found["runs"]] == [1, 2, 3]
    assert [run["folder"] for run in found["runs"][:2]] == [first[1], first[2]]
    assert [run["return"] for run in found["runs"]] == [0.1, 0.2, 0.3]
    assert "3 seeds" in out and first[1] in out
    interrupt(trainer, 1, "seeds=1,2,3", "auto_resume=True")
    assert "a new list begins" in capsys.readouterr().out
    trainer.interrupted = None
    again = start("seeds=1,2,3", "auto_resume=True")  # skips no run of the old list
    assert trainer.took() == [1, 1, 2, 3]
    assert not {run["folder"] for run in again["runs"]} & {run["folder"] for run in found["runs"]}


def test_other_lists_other_keys_and_lists_without_auto_resume_start_from_scratch(trainer):
    for words in (("seeds=1,2",), ("seeds=1,2",), ("seeds=1,2", "auto_resume=True", "lr=0.01")):
        interrupt(trainer, 2, *words)
        assert trainer.took() == [1, 2]
    interrupt(trainer, 2, "seeds=2,1", "auto_resume=True")
    assert trainer.took() == [2]


@pytest.mark.parametrize("content", ["{}", "{"])
def test_a_run_whose_note_is_damaged_is_known_by_its_configuration(content, trainer, capsys):
    interrupt(trainer, 2, "seed=2")
    ((_, first),) = trainer.runs
    (Path(first) / "run.json").write_text(content)
    trainer.interrupted = None
    assert start("seed=2", "auto_resume=True")["folder"] == first
    (Path(first) / "run.json").write_text(content)
    with pytest.raises(UserError, match="is finished already"):
        start("seed=2", "auto_resume=True", f"unique_token={Path(first).name}")
    assert "run.json was damaged" in capsys.readouterr().out


def test_all_global_generators_go_on_from_a_saved_state():
    def draws() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(1).item()]

    saved, first = random_state(), draws()
    set_random_state(saved)
    assert draws() == first


def test_splitmix64_gives_the_published_vectors_and_all_streams_keep_their_bits():
    outputs = splitmix64(np.arange(1, 4, dtype=np.uint64) * np.uint64(GOLDEN))  # of the seed 0
    assert outputs.tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    boards = Engine(3)
    boards.reset(np.arange(3), np.array([0, 7, 2**62 + 3]))
    assert boards.board.keys.tolist() == [0xE220A8397B1DCDAF, 0xC584133AC916AB3C, 0x64AE8065F1CA0B55]
    numbers = uniform(torch.tensor([0, 5, 2**40]), 123456789)
    assert numbers.tolist() == [0.13373499211736684, 0.7004310576226229, 0.17513188866386764]
