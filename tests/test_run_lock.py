"""Which folder a start continues, and that only one process uses it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_budgets import BUDGETS
from interruption import unfinished

from omagd.config.loading import REMOVED
from omagd.config.schema import Config
from omagd.run.checkpoint import resuming
from omagd.run.checkpoint.resuming import (
    ADDED,
    ELSEWHERE,
    busy_rank,
    identity_of,
    locked_folder,
    mark_rank,
    rank_at_work,
    take,
)
from omagd.run.cli.main import config_from, main
from omagd.run.run_folder import RunFolder, write_json
from omagd.utils.errors import UserError

COMMAND = ("--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, "auto_resume=True", "t_max=20")


def config(results: Path, *more: str) -> Config:
    return config_from([*COMMAND, f"local_results_path={results}", *more])


def test_a_file_system_without_locks_is_no_error_and_named(tmp_path, monkeypatch, caplog):
    def flock(handle, how):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(resuming.fcntl, "flock", flock)
    locks = [take(tmp_path), mark_rank(tmp_path)]
    assert busy_rank(tmp_path) is None
    for lock in locks:
        lock.close()
    assert "no locks (flock)" in caplog.text


def left_unfinished(given: Config) -> str:
    with unfinished(given) as lock:
        return lock.path


def test_a_second_start_beside_a_running_one_is_rejected_and_starts_nothing(tmp_path, capsys):
    given = config(tmp_path)
    with unfinished(given) as first:
        assert main(["-u", *COMMAND, f"local_results_path={tmp_path}"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]  # after warnings of keys that nothing reads
        assert line.startswith(f"error: auto_resume=True: {first.path} is in use by process {os.getpid()} on host ")
        assert "auto_resume_wait=" in line and "auto_resume=False" in line
        assert [folder.parent.name for folder in tmp_path.glob("*/run.json")] == ["run"]
    assert left_unfinished(given) == first.path


@pytest.mark.parametrize("ends", [False, True])
def test_it_waits_up_to_the_limit_for_a_run_that_may_be_finished_meanwhile(ends, tmp_path, capfd):
    given = config(tmp_path, "auto_resume_wait=0.5")
    path = left_unfinished(given)
    lock, calls = take(Path(path)), []

    def waits() -> None:
        calls.append(None)
        if len(calls) == 2:
            if ends:
                entry = json.loads(Path(path, "run.json").read_text())
                write_json(Path(path, "run.json"), {**entry, "finished": True})
            lock.close()

    if ends:
        with pytest.raises(UserError, match="was just finished by another process"):
            locked_folder(given, "run", waits).__enter__()
    else:
        with locked_folder(given, "run", waits) as again:
            assert again.path == path
    assert len(calls) == 2
    assert f"waiting 30 s at most: {path} is in use by process {os.getpid()} on host" in capfd.readouterr().out
    assert [folder.parent.name for folder in tmp_path.glob("*/run.json")] == ["run"], "no run begins from scratch"


def test_a_rank_that_outlives_its_launcher_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "OLD_RANKS_SECONDS", 0.1)
    given = config(tmp_path)
    path = left_unfinished(given)
    in_use = pytest.raises(UserError, match=rf"in use by process {os.getpid()} on host")
    with rank_at_work(RunFolder(path)), in_use, locked_folder(given, "run"):
        pass
    with locked_folder(given, "run") as again:
        assert again.path == path
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]
    assert json.loads(Path(path, "run.json").read_text())["finished"] is True


def test_only_the_newest_unfinished_run_of_the_same_configuration_is_continued(tmp_path):
    given = config(tmp_path)
    mine = left_unfinished(given)
    assert left_unfinished(given) == mine
    other, fresh = (left_unfinished(config(tmp_path, word)) for word in ("lr=0.01", "auto_resume=False"))
    assert len({mine, other, fresh}) == 3
    assert left_unfinished(given) == fresh


def test_with_a_unique_token_that_folder_is_continued_or_the_start_rejected_in_one_line(tmp_path, capfd):
    left_unfinished(config(tmp_path))
    mine = config(tmp_path, "unique_token=mine")
    with unfinished(mine, "mine") as first:
        assert first.path == str(tmp_path / "mine"), "not the unfinished run of another name"
    changed = mine.model_copy(update={"learner_args": {"clip": 0.3}})
    capfd.readouterr()
    in_use = f"^unique_token=mine: {first.path} exists already.*continues only an unfinished run"
    with pytest.raises(UserError, match=in_use), locked_folder(changed, "mine"):
        pass
    with locked_folder(mine, "mine") as again:
        assert again.path == first.path
    with pytest.raises(UserError, match=f"unique_token=mine: {first.path} is finished"), locked_folder(mine, "mine"):
        pass
    assert "a new run begins" not in "".join(capfd.readouterr())
    assert {path.name for path in tmp_path.iterdir()} == {"run", "mine"}


def started_in_child(mine: Config, kill: Callable) -> int:
    """Start `mine` in a forked process with an audit hook that may kill it; return its exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        sys.addaudithook(kill)
        with locked_folder(mine, "mine"):
            os._exit(0)
    finally:
        os._exit(9)


def test_a_folder_whose_start_was_killed_before_it_noted_what_it_is_is_used_by_the_next(tmp_path):
    """A real kill at each moment at which the start makes or renames something, until it survives."""
    mine, folder = config(tmp_path / "results", "unique_token=mine"), tmp_path / "results" / "mine"
    left = []
    for moment in range(100):
        count = [moment]

        def kill(event, arguments, count=count):
            creates = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            if creates or event in {"os.mkdir", "os.rename"}:
                count[0] -= 1
                if count[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        if (code := started_in_child(mine, kill)) == 0:
            break
        assert code == -signal.SIGKILL
        left.append(sorted(path.name.partition(".tmp")[0][:12] for path in folder.glob("*")))
        with unfinished(mine, "mine") as lock:
            assert lock.path == str(folder)
            assert all(path.is_dir() for path in (folder / "models", folder / "plots", folder / "logs"))
        shutil.rmtree(tmp_path / "results")
    assert len(left) >= 8 and ["lock", "logs", "models", "plots"] in left
    assert any("config.json" in names for names in left)


@pytest.mark.parametrize("there", ["notes.txt", "models/agent.th", "checkpoints/", "metrics.jsonl", "run.json"])
def test_a_folder_that_holds_something_is_neither_used_nor_changed(there, tmp_path):
    mine = config(tmp_path, "unique_token=mine")
    path = tmp_path / "mine" / there
    (path if there.endswith("/") else path.parent).mkdir(parents=True)
    if not there.endswith("/"):
        path.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="unique_token=mine: .* exists already"), locked_folder(mine, "mine"):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    plain = mine.model_copy(update={"auto_resume": False})
    with pytest.raises(UserError, match="unique_token=mine: .* exists already"), locked_folder(plain, "mine"):
        pass


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


def test_a_new_key_leaves_the_identity_of_earlier_runs_alone(tmp_path):
    """A key that earlier versions did not have counts only where it differs from how their runs went."""
    plain = config(tmp_path, "graph_pretrain_test_episodes=128")  # the default, not the small form of tests
    values = plain.model_dump()
    gone = {key: default for key, (default, _) in REMOVED.items()}
    assert {key: ({**gone, **values})[key] for key in ADDED} == ADDED
    for key, value in {"group_size": 2, "mixer_args": {"n_heads": 2}, "task_weights": {"3m": 1.0}}.items():
        assert identity_of(plain.model_copy(update={key: value})) != identity_of(plain)
    for kind in ("none", "features"):  # nothing reads the weight of no loss, whose default has changed
        both = [plain.model_copy(update={"belief_loss": kind, "belief_weight": weight}) for weight in (0.3, 1.0)]
        assert (identity_of(both[0]) == identity_of(both[1])) == (kind == "none")
    hashed = [key for key in values if key not in ELSEWHERE and key not in ADDED]
    assert len(hashed) == 84, "a new key of the configuration belongs into ADDED"
