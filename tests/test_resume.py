"""A run that is interrupted ends as if it had never been, in a folder that holds its whole past."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import records, summary_of
from interruption import interrupted_run, wait_for_saves
from run_equality import differences, reproducible_lines

from omagd.config.schema import Config
from omagd.lab.analysis.comparison import table
from omagd.lab.analysis.runs import load
from omagd.learners import PREDICTORS, REGISTRY
from omagd.learners.nq_learner import NQLearner
from omagd.run.checkpoint import checkpointer as snapshot_writer
from omagd.run.checkpoint import store as checkpoint_store
from omagd.run.checkpoint import weights
from omagd.run.checkpoint.store import folders, read_checkpoint
from omagd.run.checkpoint.weights import whole_state
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import launch
from omagd.run.run_folder import RunFolder
from omagd.run.training import experiment
from omagd.utils.errors import UserError

QMIX = ("--config=qmix", "--env-config=skirmish", "with", "env_args.map_name=3m", *BUDGETS, "checkpoint_interval=0")
# Two or three iterations between two lines: what has been measured since the last one is in the checkpoints.
SIZES = ("t_max=400", "buffer_size=12", "log_interval=80", "runner_log_interval=80", "learner_log_interval=120")
SMALLEST = (
    *BUDGETS, "rnn_hidden_dim=8", "mixing_embed_dim=4", "hypernet_embed=4", "test_nepisode=2", "log_interval=10",
    "runner_log_interval=10", "learner_log_interval=10", "checkpoint_interval=0", "updates_per_iteration=1",
)  # fmt: skip
STAGES = ["stage1", "stage2", "stage3"]


def config(results: Path, *more: str, base: str = "qmix") -> Config:
    given = f"local_results_path={results}", "auto_resume=True", "keep_checkpoints=True"
    bases = [word for word in more if word.startswith("--")] or [f"--config={base}"]
    words = [*bases, *QMIX[1:], *SIZES, *given, *(word for word in more if word not in bases)]
    return config_from(words)


def run(results: Path, *more: str, base: str = "qmix") -> RunFolder:
    """Run to the end; return the folder."""
    return RunFolder(launch(config(results, *more, base=base), "run")["folder"])


def newest(folder: RunFolder) -> dict:
    """Return the manifest of the newest checkpoint."""
    return read_checkpoint(folders(folder.checkpoints)[0]).manifest


def log_of(folder: RunFolder) -> str:
    return folder.log(0).read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> RunFolder:
    """Return the folder of a run that nothing interrupted."""
    return run(tmp_path_factory.mktemp("whole"))


def test_a_run_lets_no_gpu_round_float32_to_tf32(whole):
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("words", "iterations"), [
    ((), (0, 1, 5)),
    ("runner=stream use_team_obs=True q_lambda=True optimizer=rmsprop use_per=True standardise_rewards=True".split(),
     (1, 4)),
    (("--config=mappo", "belief_loss=features", "t_max=200"), (2,)),
])  # fmt: skip
def test_a_run_that_is_interrupted_again_and_again_ends_with_the_same_bits(words, iterations, whole, tmp_path):
    if words:
        whole = run(tmp_path / "whole", *words)
    given = config(tmp_path / "cut", *words)
    for iteration in iterations:
        folder, _ = interrupted_run(given, iteration)
        if iteration:
            assert newest(folder)["iteration"] == iteration
            assert_summary_of_what_was_reached(folder)
            for log in (folder.metrics_jsonl, folder.episode_log(0)):  # what is written after a save is written again
                with log.open("a") as file:
                    file.write('{"stage": "stage3", "t_env": 1}\n')
    summary = launch(given, "another")
    clock = summary["stages"]["stage3"]["clock"]
    assert (summary["folder"], summary["exit_state"]) == (str(folder.path), "completed")
    assert differences(whole.path, folder.path) == []
    assert clock == summary_of(whole.path)["stages"]["stage3"]["clock"]
    assert len(reproducible_lines(whole.path)) >= 4
    assert len(folder.episode_log(0).read_text().splitlines()) == clock["episodes"]
    if "use_per=True" in words:  # which differ, since the last batches of iterations told their errors
        priorities = read_checkpoint(folders(folder.checkpoints)[0]).of_rank(0)["stage"]["priorities"]
        assert len(set(priorities)) > 1


def assert_summary_of_what_was_reached(folder: RunFolder) -> None:
    summary, clock = summary_of(folder.path), newest(folder)["clock"]
    (stage,) = summary["stages"].values()
    assert (summary["exit_state"], stage["unfinished"], stage["clock"]) == ("failed", True, clock)
    assert summary["updates"] == clock["updates"]
    tests = [line["test_battle_won_mean"] for line in records(folder.path) if "test_battle_won_mean" in line]
    assert (summary["win_rate"], summary["best_win_rate"]) == (tests[-1], max(tests))
    assert newest(folder)["score"] == tests[-1]


class Visits:
    """State of a plug-in."""

    count = 0

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
    interrupted_run(config(tmp_path, "learner=counting"), 6)
    updates = summary_of(run(tmp_path, "learner=counting").path)["stages"]["stage3"]["clock"]["updates"]
    assert (made[-1].shared.count, made[-1].own.count) == (updates, 2 * updates)
    assert sum(1 for learner in made if 0 < learner.shared.count < updates) == 1, "the interrupted run"
    for name, scope in (("plugin", "rank"), ("clock", "shared"), ("new", "everywhere")):
        with pytest.raises(ValueError, match=f"{name}' is registered already|scope='{scope}'"):
            made[-1].register(name, Visits(), scope)


@pytest.mark.parametrize(
    ("kind", "iterations"), [(kind, (1, 8) if kind == "masked" else (6,)) for kind in PREDICTORS.names()]
)
def test_three_stages_are_interrupted_in_each_of_them(kind, iterations, tmp_path, monkeypatch):
    words = (f"mask_predictor_config.kind={kind}",)
    expected = STAGES[-1 - len(iterations) :]
    whole = run(tmp_path / "whole", *words, base="omagd")
    given = config(tmp_path / "cut", *words, base="omagd")
    for number, iteration in enumerate((*iterations, newest(whole)["iteration"] - 2), 1):
        folder, _ = interrupted_run(given, iteration)
        reached = summary_of(folder.path)["stages"]
        assert list(reached) == expected[:number], "the finished ones, and the current one"
        assert [name for name, stage in reached.items() if stage.get("unfinished")] == [newest(folder)["stage"]]
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "build_session", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            launch(given, "run")
    assert summary_of(folder.path)["stages"] == reached, "a start that reaches nothing forgets nothing"
    assert "win rate" in table(load([folder.path]))
    stages = launch(given, "another")["stages"]
    assert differences(whole.path, folder.path) == []
    assert list(stages) == expected
    assert stages["stage2"]["values"] == summary_of(whole.path)["stages"]["stage2"]["values"]
    assert log_of(folder).count("stage1: 2 epochs") <= 2, "a finished stage is not run twice"


def test_pretraining_continues_without_its_episodes_or_from_its_saved_modules(tmp_path):
    """Interrupted in stage 2. `lossy` plays lost episodes again; `weights` keeps stage 1 and begins stage 2."""
    short = ("t_max=60", "test_nepisode=2")
    lossy, _ = interrupted_run(config(tmp_path / "lossy", *short, base="omagd"), 8)
    assert newest(lossy)["stage"] == "stage2"
    weights = RunFolder(shutil.copytree(tmp_path / "lossy", tmp_path / "weights") / "run")
    for path in (lossy.checkpoints / "kept").glob("*.episodes"):
        path.write_bytes(b"torn")
    shutil.rmtree(weights.checkpoints)
    entries = {}
    for folder in (lossy, weights):
        mode = folder.path.parent.name
        assert run(tmp_path / mode, *short, f"resume={mode}", base="omagd").path == folder.path
        (entries[mode],) = json.loads(folder.card_json.read_text())["resumed"]
        assert entries[mode]["continues"] == entries[mode]["versions"]
        stages = summary_of(folder.path)["stages"]
        assert (entries[mode]["kind"], list(stages), stages["stage2"]["clock"]["epoch"]) == (mode, STAGES, 2)
    assert entries["weights"]["from"] == "models/pretrain_stage1_best/tokenizer.th"
    assert stages["stage1"]["clock"] == {}, "it is not run again"
    assert log_of(lossy).count("stage1: 2 epochs") == 1
    assert "14 episode(s) are lost" in log_of(lossy)
    files = [folder.pretrained("stage1", best=True) / "tokenizer.th" for folder in (lossy, weights)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_a_checkpoint_copies_does_not_grow_with_the_replay(tmp_path, monkeypatch):
    """Every episode is written once: the files of a save hold those since the last one, and no file is changed."""
    seen: dict[str, tuple[int, int]] = {}
    inner = checkpoint_store.CheckpointStore.prune

    def prune(self) -> None:
        (log,) = [each["replay"] for each in read_checkpoint(folders(self.path)[0]).manifest["logs"]]
        parts = log["parts"]
        assert sum(part["count"] for part in parts) >= log["kept"]
        for part in parts:
            facts = (self.path / part["file"]).stat()
            assert seen.setdefault(part["file"], (facts.st_ino, facts.st_mtime_ns)) == (facts.st_ino, facts.st_mtime_ns)
        assert parts[-1]["count"] < 12, "fewer than the buffer holds"
        assert all(a["first"] + a["count"] == b["first"] for a, b in zip(parts, parts[1:], strict=False))
        inner(self)

    monkeypatch.setattr(checkpoint_store.CheckpointStore, "prune", prune)
    wait_for_saves(monkeypatch)
    folder = run(tmp_path)
    assert len(list((folder.checkpoints / "kept").iterdir())) < len(seen), "files that no checkpoint needs go"


def test_a_full_disk_is_logged_and_the_previous_checkpoint_remains(whole, tmp_path, monkeypatch):
    inner, full = snapshot_writer.write_part, []

    def write_part(path, state):
        if len(full) < 2 and (full or len(folders(path.parents[1])) >= 2):
            full.append(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return inner(path, state)

    monkeypatch.setattr(snapshot_writer, "write_part", write_part)
    wait_for_saves(monkeypatch)
    folder = run(tmp_path)
    assert len(full) == 2
    assert log_of(folder).count("could not be saved (No space left on device)") == 1, "not once for each save"
    for path in folders(folder.checkpoints):
        assert read_checkpoint(path).faults() == {}
    assert not list(folder.checkpoints.glob(".*"))
    assert differences(whole.path, folder.path) == [], "nothing of it shows in what is learned"


def test_a_longer_run_continues_from_a_finished_one_with_its_whole_state(whole, tmp_path, capfd):
    """`checkpoint_path=<run folder>`: a new folder, the same past; the old run is left as it is."""

    def times() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in whole.path.rglob("*") if p.is_file() and "lock" not in p.name}

    before = times()
    longer = run(tmp_path, f"checkpoint_path={whole.path}", "t_max=700", "auto_resume=False", "lr=0.002")
    assert times() == before
    (kept,) = [line for line in "".join(capfd.readouterr()).splitlines() if "a whole state keeps" in line]
    assert f"keeps lr={json.loads(whole.config_json.read_text())['lr']}; give the run's models/" in kept
    clock, earlier = (summary_of(folder.path)["stages"]["stage3"]["clock"] for folder in (longer, whole))
    assert clock["t_env"] >= 700 > earlier["t_env"]
    assert clock["updates"] > earlier["updates"]
    past = reproducible_lines(whole.path)
    assert reproducible_lines(longer.path)[: len(past)] == past
    assert longer.episode_log(0).read_text().startswith(whole.episode_log(0).read_text())
    assert f"training, t_env {earlier['t_env']:,}" in log_of(longer)


def test_a_run_that_continues_another_one_is_safe_to_kill_and_soon_needs_it_no_more(whole, tmp_path, monkeypatch):
    """Killed while it copies the other run's state, then in its last iteration; meanwhile the other run goes."""
    old = shutil.copytree(whole.path, tmp_path / "old")
    words = [*QMIX, *SIZES, f"checkpoint_path={old}", f"local_results_path={tmp_path / 'new'}"]
    words += ["auto_resume=True", "unique_token=longer", "t_max=500"]
    with monkeypatch.context() as patch:
        patch.setattr(weights, "write_json", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        child = multiprocessing.get_context("fork").Process(target=main, args=(words,))
        child.start()
        child.join()
    assert child.exitcode == -signal.SIGKILL
    half = tmp_path / "new" / "longer"
    mine = shutil.copytree(half, tmp_path / "mine" / "longer").parent
    launch(config(mine, "unique_token=longer"), "longer")  # another run of that name takes nothing of it
    assert records(mine / "longer")[0]["t_env"] < 100 and not (mine / "longer" / "continued_from.json").exists()
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "write_summary", lambda folder, summary: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(words)
    shutil.rmtree(old)
    assert main(words) == 0
    assert records(tmp_path / "new" / "longer")[-1]["t_env"] >= 500
    assert not (tmp_path / "new" / "longer" / "copying").exists()


def test_a_killed_run_without_checkpoints_begins_again_and_keeps_what_it_had(tmp_path):
    given = config(tmp_path, "enable_checkpointing=False")
    folder, _ = interrupted_run(given, 5)
    before = folder.metrics_jsonl.read_text()
    launch(given, "another")
    (aside,) = (folder.path / "set_aside").iterdir()
    assert before and (aside / "metrics.jsonl").read_text() == before
    clocks = [line["t_env"] for line in records(folder.path)]
    assert clocks == sorted(clocks) and clocks[0] < 100


def test_a_state_of_agents_that_read_something_else_cannot_go_on(whole, tmp_path):
    old = RunFolder(shutil.copytree(whole.path, tmp_path / "old"))
    old.config_json.write_text(json.dumps({**json.loads(old.config_json.read_text()), "belief_loss": "tokens"}))
    for folder, word, theirs in (
        (whole, "use_team_obs=True", "use_team_obs=False, not True"), (old, "lr=0.002", "belief_loss=tokens, not none"),
        (whole, "optimizer=rmsprop", "optimizer=adam, not r"), (whole, "use_per=True", "use_per=False, not True"),
    ):  # fmt: skip
        given = config(tmp_path, f"checkpoint_path={folder.checkpoints}", "t_max=700", word)
        with pytest.raises(UserError, match=f"a state with {theirs}.*Give {folder.path}/models"):
            whole_state(given, id)


def test_a_run_killed_after_its_last_iteration_is_finished_and_then_left_alone(tmp_path, monkeypatch, capfd):
    """The summary is made again; a finished run is not continued."""
    given = config(tmp_path, "t_max=60")
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "write_summary", lambda folder, summary: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            launch(given, "run")
    shutil.rmtree(tmp_path / "run" / "models")  # as where the disk was full
    summary = launch(given, "again")
    assert Path(summary["folder"]).name == "run"
    assert (Path(summary["stages"]["stage3"]["files"]["agent"]) / "agent.th").is_file()
    assert summary["exit_state"] == "completed"
    assert launch(given, "another")["folder"] != summary["folder"]
    assert f"{summary['folder']} is finished already; a new run begins" in "".join(capfd.readouterr())


def test_a_checkpoint_of_another_configuration_is_rejected_in_one_line(whole, tmp_path, capsys):
    for change in ("rnn_hidden_dim=32", "mixer=vdn"):
        words = [*SIZES, f"local_results_path={tmp_path / 'other'}", f"checkpoint_path={whole.path}", change]
        assert main([*QMIX, *words, "t_max=700"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert f"checkpoint_path={whole.path}" in line and "does not fit" in line
        assert not (tmp_path / "other").exists()
