"""A run that is cut off ends as if it never had been; whose folder it finds; what it says where something is wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import summary_of
from run_equality import differences, reproducible_lines

from omagd.config.schema import Config
from omagd.learners import REGISTRY
from omagd.learners.nq_learner import NQLearner
from omagd.run.checkpoint import store as checkpoint_store
from omagd.run.checkpoint import writer as snapshot_writer
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.checkpoint.resuming import RunLock, claimed_folder, identity_of
from omagd.run.checkpoint.run_lock import start_ticks
from omagd.run.checkpoint.store import SAVED, folders, read_checkpoint
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import launch
from omagd.run.reporting import report
from omagd.run.reporting.report import runs_table
from omagd.run.training import experiment
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder, reproducible, write_json

QMIX = ("--config=qmix", "--env-config=skirmish", "with", "env_args.map_name=3m", *BUDGETS, "checkpoint_interval=0")
GRAPH = ("--config=omagd", "--env-config=skirmish", "with", "env_args.map_name=3m", *BUDGETS, "checkpoint_interval=0")
# Two or three iterations between two lines: what has been measured since the last one is in the checkpoints.
SIZES = ("t_max=400", "buffer_size=12", "log_interval=80", "runner_log_interval=80", "learner_log_interval=120")


def config(results: Path, base: tuple[str, ...] = QMIX, *more: str) -> Config:
    return config_from([*base, *SIZES, f"local_results_path={results}", "auto_resume=True", *more])


class Cut(Exception):
    """What ends a run in these tests at a moment of their choice."""


def cut_at(monkeypatch: pytest.MonkeyPatch, iteration: int = -1) -> None:
    """Let the run end in the middle of its `iteration`, counted over its stages; every save is waited for."""
    inner = Checkpointer.ask

    def ask(self) -> None:
        self.finish()
        if self.iteration == iteration:
            raise Cut
        inner(self)

    monkeypatch.setattr(Checkpointer, "ask", ask)


def cut_run(given: Config, iteration: int) -> RunFolder:
    """Run until `iteration` and return the folder."""
    with pytest.MonkeyPatch.context() as patch:
        cut_at(patch, iteration)
        with pytest.raises(Cut):
            launch(given, "run")
    (folder,) = [path.parent for path in Path(given.local_results_path).glob("*/run.json")]
    return RunFolder(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return the folder of a run that nobody has cut off."""
    torch.set_num_threads(1)
    return Path(launch(config(tmp_path_factory.mktemp("whole")), "whole")["folder"])


@pytest.mark.parametrize(("runner", "cuts"), [("parallel", (0, 1, 2, 5, 7)), ("stream", (1, 4))])
def test_a_run_that_is_cut_off_again_and_again_ends_with_the_same_bits(runner, cuts, whole, tmp_path):
    if runner != "parallel":
        whole = Path(launch(config(tmp_path / "whole", QMIX, f"runner={runner}"), "whole")["folder"])
    given = config(tmp_path / "cut", QMIX, f"runner={runner}")
    for cut in cuts:
        folder = cut_run(given, cut)
        if cut:
            manifest = read_checkpoint(folders(folder.checkpoints)[0]).manifest
            assert manifest["iteration"] == cut
            assert_summary_of_what_was_reached(folder, manifest["clock"])
            for log in (folder.metrics_jsonl, folder.episode_log(0)):  # what is written after a save is written again
                with log.open("a") as file:
                    file.write('{"stage": "stage3", "t_env": 1}\n')
    summary = launch(given, "another")
    assert Path(summary["folder"]) == folder.path
    assert differences(whole, folder.path) == []
    assert summary["exit_state"] == "completed"
    assert summary["stages"]["stage3"]["clock"] == summary_of(whole)["stages"]["stage3"]["clock"]
    assert len(reproducible_lines(whole)) >= 4
    assert (
        sum(1 for line in (folder.path / "episodes" / "rank_0.jsonl").open())
        == summary["stages"]["stage3"]["clock"]["episodes"]
    )


def assert_summary_of_what_was_reached(folder: RunFolder, clock: dict[str, int]) -> None:
    summary = summary_of(folder.path)
    (stage,) = summary["stages"].values()
    assert (summary["exit_state"], stage["unfinished"], stage["clock"]) == ("failed", True, clock)
    assert summary["updates"] == clock["updates"]
    lines = [json.loads(line) for line in folder.metrics_jsonl.read_text().splitlines()]
    tests = [line["test_battle_won_mean"] for line in lines if "test_battle_won_mean" in line]
    assert (summary["win_rate"], summary["best_win_rate"]) == (tests[-1], max(tests))


class Visits:
    """State of a plug-in."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, count: int) -> None:
        self.count = count


def test_what_a_plug_in_registers_is_saved_and_restored(tmp_path, monkeypatch):
    """A learner with state beside its `state_dict`: shared, and of one rank."""
    made = []

    class Counting(NQLearner):
        def register_state(self, register):
            self.shared, self.own, self.register = Visits(), Visits(), register
            register("plugin", self.shared)
            register("plugin of this rank", self.own, "rank")
            made.append(self)

        def update(self, batch, *, episodes):
            self.shared.count += 1
            self.own.count += 2
            return super().update(batch, episodes=episodes)

    monkeypatch.setitem(REGISTRY._objects, "counting", Counting)
    given = config(tmp_path, QMIX, "learner=counting")
    cut_run(given, 6)
    updates = launch(given, "again")["stages"]["stage3"]["clock"]["updates"]
    assert (made[-1].shared.count, made[-1].own.count) == (updates, 2 * updates)
    assert sum(1 for learner in made if 0 < learner.shared.count < updates) == 1, "the run that was cut off"
    for name, scope in (("plugin", "rank"), ("clock", "shared"), ("new", "everywhere")):
        with pytest.raises(ValueError, match=f"{name}' is registered already|scope='{scope}'"):
            made[-1].register(name, Visits(), scope)


def test_three_stages_are_cut_off_in_each_of_them(tmp_path):
    torch.set_num_threads(1)
    whole = Path(launch(config(tmp_path / "whole", GRAPH), "whole")["folder"])
    given = config(tmp_path / "cut", GRAPH)
    last = read_checkpoint(folders(whole / "checkpoints")[0]).manifest["iteration"]
    stages = []
    for cut in (1, 8, last - 2):
        folder = cut_run(given, cut)
        stages.append(read_checkpoint(folders(folder.checkpoints)[0]).manifest["stage"])
        reached = summary_of(folder.path)["stages"]
        assert list(reached) == ["stage1", "stage2", "stage3"][: len(stages)], "the finished ones, and the current one"
        assert [name for name, stage in reached.items() if stage.get("unfinished")] == stages[-1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "build_session", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            launch(given, "run")
    assert summary_of(folder.path)["stages"] == reached, "a start that reaches nothing forgets nothing"
    assert "win rate" in runs_table([summary_of(folder.path)])
    assert stages[0] == "stage1", "while it was playing the episodes to learn from"
    assert set(stages) == {"stage1", "stage2", "stage3"}
    summary = launch(given, "another")
    assert differences(whole, folder.path) == []
    assert summary["stages"].keys() == {"stage1", "stage2", "stage3"}
    assert summary["stages"]["stage2"]["values"] == summary_of(whole)["stages"]["stage2"]["values"]
    log = (folder.logs / "rank_0.log").read_text()
    assert log.count("stage1: 2 epochs") <= 2, "a finished stage is not run twice"


def test_pretraining_continues_without_its_episodes_or_from_its_saved_modules(tmp_path):
    """Cut off in stage 2. `lossy` plays lost episodes again; `weights` keeps stage 1 and begins stage 2."""
    torch.set_num_threads(1)
    short = (GRAPH, "t_max=60", "test_nepisode=2")
    folder = cut_run(config(tmp_path / "lossy", *short), 8)
    assert read_checkpoint(folders(folder.checkpoints)[0]).manifest["stage"] == "stage2"
    shutil.copytree(tmp_path / "lossy", tmp_path / "weights")
    for path in (folder.checkpoints / "kept").glob("*.episodes"):
        path.write_bytes(b"torn")
    shutil.rmtree(tmp_path / "weights" / folder.token / "checkpoints")
    ends = {}
    for mode in ("lossy", "weights"):
        ends[mode] = launch(config(tmp_path / mode, *short, f"resume={mode}"), "another")
        card = json.loads((tmp_path / mode / folder.token / "card.json").read_text())
        assert [entry["kind"] for entry in card["resumed"]] == [mode]
        assert ends[mode]["stages"].keys() == {"stage1", "stage2", "stage3"}
        assert ends[mode]["stages"]["stage2"]["clock"]["epoch"] == 2
    assert card["resumed"][0]["from"] == "models/pretrain_stage1_best/tokenizer.th"
    assert ends["weights"]["stages"]["stage1"]["clock"] == {}, "it is not run again"
    log = (folder.logs / "rank_0.log").read_text()
    assert log.count("stage1: 2 epochs") == 1
    assert "12 episode(s) are lost" in log
    one, other = (tmp_path / mode / folder.token / "models" / "pretrain_stage1_best" for mode in ends)
    assert (one / "tokenizer.th").read_bytes() == (other / "tokenizer.th").read_bytes()


def test_what_a_checkpoint_copies_does_not_grow_with_the_replay(tmp_path):
    """Every episode is written once: the files of a save hold those since the last one, and no file is changed."""
    torch.set_num_threads(1)
    seen: dict[str, tuple[int, int]] = {}
    numbers: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        inner = checkpoint_store.CheckpointStore.prune

        def prune(self) -> None:
            found = read_checkpoint(folders(self.path)[0])
            (log,) = [said["replay"] for said in found.manifest["logs"]]
            parts = log["parts"]
            assert sum(part["count"] for part in parts) >= log["kept"]
            for part in parts:
                path = self.path / part["file"]
                facts = (path.stat().st_ino, path.stat().st_mtime_ns)
                assert seen.setdefault(part["file"], facts) == facts
            numbers.append((parts[-1]["first"], parts[-1]["count"]))
            assert all(a["first"] + a["count"] == b["first"] for a, b in zip(parts, parts[1:], strict=False))
            inner(self)

        patch.setattr(checkpoint_store.CheckpointStore, "prune", prune)
        cut_at(patch)
        summary = launch(config(tmp_path), "run")
    folder = RunFolder(summary["folder"])
    assert max(count for _, count in numbers) < 12, "fewer than the buffer holds"
    kept = list((folder.checkpoints / "kept").iterdir())
    assert len(kept) < len(seen), "files that no checkpoint needs go"


def test_no_save_begins_while_another_one_is_being_written(tmp_path, monkeypatch):
    """A second one would refer to files that the first one has not finished."""
    written, release, ask = [], threading.Event(), Checkpointer.ask

    def write(self, snapshot, logger):
        written.append(snapshot.facts["iteration"])
        release.wait(60)
        return ""

    def release_later(self) -> None:
        ask(self)
        if self.iteration == 4:
            release.set()

    monkeypatch.setattr(snapshot_writer.SnapshotWriter, "write", write)
    monkeypatch.setattr(Checkpointer, "ask", release_later)
    launch(config(tmp_path, QMIX, "checkpoint_interval=0"), "run")
    assert written[0] == 1 and not {2, 3, 4, 5} & set(written) and len(written) > 1


def test_a_full_disk_is_logged_and_the_previous_checkpoint_remains(whole, tmp_path, monkeypatch):
    torch.set_num_threads(1)
    inner, full = snapshot_writer.write_part, []

    def write_part(path, state):
        if 2 <= len(folders(path.parents[1])) or full:
            if len(full) < 2:
                full.append(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return inner(path, state)

    monkeypatch.setattr(snapshot_writer, "write_part", write_part)
    cut_at(monkeypatch)
    run = Path(launch(config(tmp_path), "run")["folder"])
    assert len(full) == 2
    log = (run / "logs" / "rank_0.log").read_text()
    line = "could not be saved (No space left on device)"
    assert log.count(line) == 1, "not once for each save"
    for path in folders(run / "checkpoints"):
        read_checkpoint(path).check()
    assert not list((run / "checkpoints").glob(".*"))
    assert differences(whole, run) == [], "nothing of it shows in what is learned"


def test_a_longer_run_continues_from_a_finished_one_with_its_whole_state(whole, tmp_path):
    """`checkpoint_path=<run folder>`: a new folder, the same past; the old run is left as it is."""
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file() and "lock" not in p.name}
    given = config(tmp_path, QMIX, f"checkpoint_path={whole}", "t_max=700", "auto_resume=False")
    summary = launch(given, "longer")
    folder = Path(summary["folder"])
    clock, earlier = summary["stages"]["stage3"]["clock"], summary_of(whole)["stages"]["stage3"]["clock"]
    assert clock["t_env"] >= 700 > earlier["t_env"]
    assert clock["updates"] > earlier["updates"]
    assert reproducible_lines(folder)[: len(reproducible_lines(whole))] == reproducible_lines(whole)
    episodes = (folder / "episodes" / "rank_0.jsonl").read_text()
    assert episodes.startswith((whole / "episodes" / "rank_0.jsonl").read_text())
    assert before == {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file() and "lock" not in p.name}
    log = (folder / "logs" / "rank_0.log").read_text()
    assert f"stage3, t_env {earlier['t_env']:,}" in log


def test_a_run_killed_after_its_last_iteration_is_finished_and_then_left_alone(tmp_path, monkeypatch, capfd):
    """Closing pictures and summary are made again; a finished run is not continued."""
    given = config(tmp_path, QMIX, "t_max=60")
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_summary", lambda folder, summary: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            launch(given, "run")
    shutil.rmtree(tmp_path / "run" / "models")  # as where the disk was full
    summary = launch(given, "again")
    assert Path(summary["folder"]).name == "run"
    assert (Path(summary["stages"]["stage3"]["files"]["agent"]) / "agent.th").is_file()
    assert summary["exit_state"] == "completed"
    assert launch(given, "another")["folder"] != summary["folder"]
    assert f"{summary['folder']} is finished already; a new run begins" in "".join(capfd.readouterr())


@contextmanager
def claim_cut_off(given: Config, token: str) -> Iterator[RunLock]:
    """Have a folder and leave it unfinished."""
    with suppress(Cut), claimed_folder(given, token) as claim:
        yield claim
        raise Cut


def test_only_an_unfinished_run_of_the_same_kind_is_continued_and_only_by_one(tmp_path):
    given = config(tmp_path)
    with claim_cut_off(given, "run") as mine:
        with pytest.raises(UserError, match="is in use by process"), claimed_folder(given, "run"):
            pass
    with claim_cut_off(given, "run") as again:
        assert again.path == mine.path
    with claim_cut_off(config(tmp_path, QMIX, "lr=0.01"), "run") as another:
        assert another.path != mine.path
    with claim_cut_off(config(tmp_path, QMIX, "auto_resume=False"), "run") as fresh:
        assert fresh.path not in (mine.path, another.path)
    with claim_cut_off(given, "run") as newest:
        assert newest.path == fresh.path


def test_a_changed_key_beside_an_unfinished_run_is_named(tmp_path, capfd):
    """Not beside one that has no checkpoint, that goes on, is finished, or is of another seed; never raw names."""
    given, longer = config(tmp_path), config(tmp_path, QMIX, "t_max=250000", "lr=0.01")

    def said(wanted: Config) -> str:
        capfd.readouterr()
        with claim_cut_off(wanted, "longer"):
            pass
        return "".join(capfd.readouterr())

    with claim_cut_off(given, "run") as mine:
        pass
    assert "differs in" not in said(longer)  # it has saved nothing
    write_json(Path(mine.path) / SAVED, {"iteration": 4})
    lock, parent = Path(mine.path) / "lock", os.getppid()
    mine_alone, other = lock.read_text(), {"pid": parent, "started": start_ticks(parent)}
    lock.write_text(json.dumps(json.loads(mine_alone) | other))
    assert "differs in" not in said(longer.model_copy(update={"lr": 0.02}))  # it goes on
    lock.write_text(mine_alone)
    changed = longer.model_copy(update={"lr": 0.03})
    advice = f"{mine.path} is unfinished and differs in lr, t_max; to extend it: checkpoint_path={mine.path}"
    assert advice in said(changed)
    assert "differs in" not in said(changed)  # now it is continued
    assert "differs in" not in said(changed.model_copy(update={"lr": 0.04, "seed": 9}))
    planted = Path(mine.path).rename(tmp_path / "run\x1b[2J")
    shown = said(changed.model_copy(update={"lr": 0.05}))
    assert "\x1b" not in shown and r"run\x1b[2J is unfinished" in shown
    for content in ("[]", '{"env_args": 3}', "{"):
        (planted / "config.json").write_text(content)
        assert "differs in" not in said(changed.model_copy(update={"lr": 0.1, "t_max": len(content)}))


def test_keys_that_may_change_when_resuming(tmp_path):
    given = config(tmp_path)
    may = {"world_size": 2, "run": "ddp", "ddp_port": 23456, "log_interval": 7, "use_wandb": True, "unique_token": "x"}
    may |= {"checkpoint_interval": 9.0, "auto_resume_wait": 5.0}
    must_not = {"seed": 2, "lr": 0.1, "t_max": 7, "runner": "stream", "env_args": {"map_name": "8m"}}
    same = {key: identity_of(given.model_copy(update={key: value})) for key, value in {**may, **must_not}.items()}
    assert {key for key, identity in same.items() if identity == identity_of(given)} == may.keys()


def test_a_module_that_has_moved_is_the_same_and_another_one_is_not(tmp_path):
    def of(path: Path, content: bytes) -> str:
        path.mkdir()
        (path / "tokenizer.th").write_bytes(content)
        return identity_of(config(tmp_path).model_copy(update={"pretrained_tokenizer_path": str(path)}))

    first = of(tmp_path / "a", b"weights")
    assert first == of(tmp_path / "b", b"weights")
    assert first != of(tmp_path / "c", b"WEIGHTS")


def test_a_checkpoint_of_another_configuration_is_refused_in_one_line(tmp_path, capsys):
    torch.set_num_threads(1)
    folder = cut_run(config(tmp_path / "cut"), 3)
    for change in ("rnn_hidden_dim=32", "mixer=vdn"):
        updates = [*SIZES, f"local_results_path={tmp_path / 'other'}", f"checkpoint_path={folder.path}", change]
        assert main([*QMIX, *updates]) == 2
        err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(err) == 1
        assert f"checkpoint_path={folder.path}" in err[0]
        assert "does not fit" in err[0]
        assert not (tmp_path / "other").exists()


def test_values_about_the_machine_are_separated_from_what_is_learned():
    learned = {"loss_td": 1.0, "t_env": 3, "test_return_mean": 2.0, "updates": 4.0, "lost_episodes": 1.0}
    machine = dict.fromkeys(
        ("time/update", "steps_per_second", "wall_seconds", "worker_restarts", "memory/rss_mb"), 3.0
    )
    assert reproducible({**machine, **learned}) == learned
