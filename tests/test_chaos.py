"""Killed or damaged anywhere, a run ends with the bits of one left alone; benchmarks/chaos.py is the long form."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from chaos_harness import Trial, differences
from command_harness import run_folders, summary_of

from omagd.run.command_line import main
from omagd.run.keeper import Keeper

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")

# --- killed


@needs_proc
@pytest.mark.processes
def test_a_run_that_is_killed_four_ways_ends_with_the_same_bits(tmp_path):
    words = ("world_size=2", "t_max=1000", "graph_pretrain_epochs=4", "checkpoint_interval=0", "env_processes=True")
    alone = Trial(tmp_path / "alone", words)
    alone.undisturbed()
    killed = Trial(tmp_path / "killed", words, stride=3)
    plan = [("rank", "any"), ("launcher", "save"), ("worker", "any"), ("group", "any")]
    killed.disturbed(random.Random(3), plan)
    assert [kill.kind for kill in killed.kills] == [kind for kind, _ in plan]
    assert killed.codes == [-9, -9, 0]
    assert differences(alone.folder, killed.folder) == []
    assert summary_of(killed.folder)["exit_state"] == "completed"
    assert (alone.left(), killed.left()) == ([], [])


# --- damaged

WORDS = (
    "run=default", "use_cuda=False", "batch_size_run=2", "batch_size=4", "buffer_size=6", "t_max=40",
    "updates_per_iteration=1", "rnn_hidden_dim=8", "mixing_embed_dim=4", "hypernet_embed=4", "test_nepisode=2",
    "test_interval=20", "log_interval=4", "runner_log_interval=4", "learner_log_interval=4", "save_model_interval=20",
    "checkpoint_interval=0", "auto_resume=True",
)  # fmt: skip
COMMAND = ("-u", "--config=qmix", "--env-config=matrix_game", "with", *WORDS)
KILLED_AT = 11


class KilledError(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory) -> tuple[Path, Path]:
    """Return the folders of a run that was left alone, and of one that was killed in its middle."""
    torch.set_num_threads(1)
    places = [tmp_path_factory.mktemp(name) for name in ("alone", "torn")]
    before, calls = Keeper.boundary, []

    def boundary(keeper, stage):
        before(keeper, stage)
        keeper.finish()
        calls.append(stage)
        if len(calls) == KILLED_AT:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omagd.utils.plots.curves", lambda *_: None)
        assert main([*COMMAND, f"local_results_path={places[0]}/results"]) == 0
        patch.setattr(Keeper, "boundary", boundary)
        with pytest.raises(KilledError):
            main([*COMMAND, f"local_results_path={places[1]}/results"])
    (alone,), (torn,) = (run_folders(place) for place in places)
    assert [path.name for path in newest_first(torn)][:1] == [f"{KILLED_AT:08d}"]
    return alone, torn


def newest_first(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("[0-9]*"), reverse=True)


def files_of(run: Path) -> list[str]:
    """Return the files of the newest checkpoint, below checkpoints/."""
    newest = newest_first(run)[0]
    return [f"{newest.name}/manifest.json", *json.loads((newest / "manifest.json").read_text())["files"]]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=["truncated", "flipped", "deleted"])
def test_every_damaged_file_is_named_and_the_checkpoint_before_is_used(
    damage, unfinished, tmp_path, monkeypatch, capsys
):
    alone, torn = unfinished
    monkeypatch.setattr("omagd.utils.plots.curves", lambda *_: None)
    names = files_of(torn)
    assert {Path(name).name for name in names} >= {"manifest.json", "common.th", "rank_0.th"}
    assert any(name.startswith("kept/") for name in names)
    for number, name in enumerate(names):
        run = tmp_path / str(number) / "results" / torn.name
        shutil.copytree(torn, run)
        damaged, *others = newest_first(run)
        damage(run / "checkpoints" / name)
        sound = [path for path in others if name not in json.loads((path / "manifest.json").read_text())["files"]]
        assert main([*COMMAND, f"local_results_path={run.parent}"]) == 0, capsys.readouterr().err
        log = (run / "logs" / "rank_0.log").read_text()
        (said,) = [line for line in log.splitlines() if f"{damaged} is damaged" in line]
        assert Path(name).name in said
        assert (f"continuing from {sound[0]}: " in log) if sound else ("continuing from" not in log)
        assert damaged.is_dir()
        assert differences(alone, run) == []


def test_where_nothing_is_sound_it_begins_again_ends_the_same_and_tidies_up(unfinished, tmp_path, monkeypatch):
    alone, torn = unfinished
    monkeypatch.setattr("omagd.utils.plots.curves", lambda *_: None)
    run = tmp_path / "results" / torn.name
    shutil.copytree(torn, run)
    for path in (run / "checkpoints").rglob("*"):
        if path.is_file():
            truncate(path)
    half = [run / "models" / "20" / ".agent.th.123.tmp", run / ".summary.json.123.tmp"]
    half += [run / "checkpoints" / ".00000011.abc.partial" / "rank_0.th"]
    for path in half:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"half")
    assert main([*COMMAND, f"local_results_path={run.parent}"]) == 0
    assert (run / "logs" / "rank_0.log").read_text().count("is damaged") == len(newest_first(torn))
    assert [path for path in half if path.exists()] == []
    assert differences(alone, run) == []


def test_a_checkpoint_that_is_asked_for_by_name_must_be_sound(unfinished, tmp_path, monkeypatch, capsys):
    torn = unfinished[1]
    run = tmp_path / "torn"
    shutil.copytree(torn, run)
    newest = newest_first(run)[0]
    truncate(newest / "common.th")
    words = [f"local_results_path={tmp_path}/results", "auto_resume=False", f"checkpoint_path={newest}"]
    assert main([*COMMAND, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: checkpoint_path=")
    assert (len(said.splitlines()), "common.th" in said) == (1, True)
    assert not (tmp_path / "results").exists()
