"""One process per run folder, with and without the file system's locks; the second start names the first."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_budgets import BUDGETS

from omagd.config.schema import Config
from omagd.run.checkpoint import resuming, run_lock
from omagd.run.checkpoint.resuming import claimed_folder, rank_at_work
from omagd.run.checkpoint.run_lock import Busy, ProcessIdentity, busy_rank, mark_rank, start_ticks, take
from omagd.run.cli.main import config_from, main
from omagd.run.launch.launcher import _claim_together
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
KINDS = ("flock", "ENOLCK")
COMMAND = ("--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, "auto_resume=True", "t_max=20")


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch) -> str:
    """Run a test with `flock`, and with an error of file systems without it."""
    assert {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS} <= run_lock.UNSUPPORTED
    if request.param != "flock":
        code = getattr(errno, request.param)

        def flock(handle, how):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    return request.param


def config(results: Path, *more: str) -> Config:
    return config_from([*COMMAND, f"local_results_path={results}", *more])


def ended_process() -> ProcessIdentity:
    """Return the identity of a process of this host that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = ProcessIdentity.own()
    identity = ProcessIdentity(own.host, own.boot, own.space, child.pid, start_ticks(child.pid) or 0, own.since - 300)
    child.communicate(b"\n")
    return identity


def test_one_process_has_the_lock_and_the_next_one_names_it(kind, tmp_path):
    lock = take(tmp_path)
    for _ in range(2):
        with pytest.raises(Busy) as refused:
            take(tmp_path)
    assert refused.value.holder is not None
    assert refused.value.holder.pid == os.getpid()
    assert re.fullmatch(rf"process {os.getpid()} on host .+, for \d+ s", str(refused.value))
    lock.release()
    lock.release()
    take(tmp_path).release()
    assert len(list(tmp_path.glob("lock*"))) <= 2, "numbers do not pile up"


def test_ranks_at_work_are_seen(kind, tmp_path):
    assert busy_rank(tmp_path) is None
    first, second = mark_rank(tmp_path), mark_rank(tmp_path)
    busy = busy_rank(tmp_path)
    assert busy is not None and busy.holder is not None and busy.holder.pid == os.getpid()
    first.release()
    second.release()
    assert busy_rank(tmp_path) is None


@needs_proc
def test_a_lock_of_a_process_that_has_ended_is_stale(tmp_path):
    (tmp_path / "lock.7").write_text(json.dumps(ended_process().plain()))
    lock = run_lock._take_numbered(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("lock.*")) == ["lock.8"]
    lock.release()


def test_a_lock_of_another_host_is_stale_once_it_is_no_longer_renewed(tmp_path):
    own = ProcessIdentity.own()
    other = ProcessIdentity("elsewhere", "another boot", own.space, 1, 1, own.since - 7200)
    (tmp_path / "lock.1").write_text(json.dumps(other.plain()))
    with pytest.raises(Busy, match="process 1 on host elsewhere, for 2 hours"):
        run_lock._take_numbered(tmp_path)
    os.utime(tmp_path / "lock.1", (time.time() - 2 * run_lock.STALE_SECONDS,) * 2)
    run_lock._take_numbered(tmp_path).release()


def test_the_holder_renews_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    lock = run_lock._take_numbered(tmp_path)
    os.utime(tmp_path / "lock.1", (1.0, 1.0))
    until = time.monotonic() + 10
    while (tmp_path / "lock.1").stat().st_mtime < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert (tmp_path / "lock.1").stat().st_mtime > time.time() - 60
    lock.release()


def test_of_many_that_find_a_stale_lock_one_gets_it(tmp_path):
    """Also among those that are slow: each looks at the folder, then all try to create the next number."""
    for trial in range(30):
        folder = tmp_path / str(trial)
        folder.mkdir()
        (folder / "lock.3").write_bytes(run_lock.RELEASED)
        got, start = [], threading.Barrier(8)

        def contend(folder=folder, got=got, start=start):
            start.wait()
            with suppress(Busy):
                got.append(run_lock._take_numbered(folder))

        threads = [threading.Thread(target=contend) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        got[0].release()


def test_a_latecomer_does_not_get_a_used_lock_number(tmp_path, monkeypatch):
    (tmp_path / "lock.3").write_bytes(run_lock.RELEASED)
    seen, last = [3], run_lock._last

    def slow(folder):
        if seen:
            (tmp_path / "lock.3").rename(tmp_path / "lock.5")  # others have taken and released 4, then taken 5
            (tmp_path / "lock.3").write_bytes(run_lock.RELEASED)
            return seen.pop()
        return last(folder)

    monkeypatch.setattr(run_lock, "_last", slow)
    with pytest.raises(Busy):
        run_lock._take_numbered(tmp_path)
    assert not (tmp_path / "lock.4").exists()


def test_a_process_id_that_is_used_again_is_another_process():
    own = ProcessIdentity.own()
    if own.runs() is None:
        pytest.skip("looks at processes as Linux shows them")
    assert own.runs() is True
    assert ProcessIdentity(own.host, own.boot, own.space, own.pid, own.started - 1, own.since).runs() is False
    assert ProcessIdentity(own.host, "another boot", own.space, own.pid, own.started, own.since).runs() is None
    assert ProcessIdentity.read({**own.plain(), "pid": "1"}) is None
    assert ProcessIdentity.read(json.loads(json.dumps(own.plain()))) == own


# --- the same command typed twice


def unfinished(given: Config) -> str:
    """Leave an unfinished run."""
    with suppress(ZeroDivisionError), claimed_folder(given, "run") as claim:
        raise ZeroDivisionError
    return claim.path


def test_a_second_start_beside_a_running_one_is_rejected_and_starts_nothing(kind, tmp_path, capsys):
    given = config(tmp_path)
    path = unfinished(given)
    with suppress(ZeroDivisionError), claimed_folder(given, "run"):
        assert main(["-u", *COMMAND, f"local_results_path={tmp_path}"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert said.startswith(f"error: auto_resume=True: {path} is in use by process {os.getpid()} on host ")
        assert "auto_resume_wait=" in said and "auto_resume=False" in said
        assert [folder.parent.name for folder in tmp_path.glob("*/run.json")] == ["run"]
        raise ZeroDivisionError
    with claimed_folder(given, "run") as again:
        assert again.path == path


def test_ranks_of_torchrun_print_the_error_once(tmp_path):
    """The error that rank 0 has found ends all ranks, and is marked as one that only rank 0 prints."""
    given = config(tmp_path)
    path, shared = unfinished(given), []
    lock = take(Path(path))
    first = SimpleNamespace(is_main=True, broadcast=shared.append)
    other = SimpleNamespace(is_main=False, broadcast=lambda nothing: shared[-1])
    for dist in (first, other):
        with ExitStack() as held, pytest.raises(UserError, match="is in use by process") as caught:
            _claim_together(given, "run", dist, held)
        assert caught.value.said_by_rank_0
        shared[-1] = pickle.loads(pickle.dumps(shared[-1]))
    lock.release()


def test_it_waits_up_to_the_limit_and_logs_that(kind, tmp_path, capfd):
    given = config(tmp_path, "auto_resume_wait=0.5")
    path = unfinished(given)
    lock, calls = take(Path(path)), []

    def waits() -> None:
        calls.append(None)
        if len(calls) == 2:
            lock.release()

    with claimed_folder(given, "run", waits) as again:
        assert again.path == path
    assert len(calls) == 2
    assert f"waiting 30 s at most: {path} is in use by process {os.getpid()} on host" in capfd.readouterr().out


def test_a_run_that_was_finished_meanwhile_is_not_started_from_scratch(tmp_path):
    given = config(tmp_path, "auto_resume_wait=0.5")
    path = unfinished(given)
    lock = take(Path(path))

    def waits() -> None:
        entry = json.loads(Path(path, "run.json").read_text())
        Path(path, "run.json").write_text(json.dumps({**entry, "finished": True}))
        lock.release()

    with pytest.raises(UserError, match="was just finished by another process"), claimed_folder(given, "run", waits):
        pass
    assert [folder.parent.name for folder in tmp_path.glob("*/run.json")] == ["run"]


def test_a_rank_that_outlives_its_launcher_is_named(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "OLD_RANKS_SECONDS", 0.1)
    given = config(tmp_path)
    path = unfinished(given)
    with (
        rank_at_work(RunFolder(path)),
        pytest.raises(UserError, match=rf"in use by process {os.getpid()} on host"),
        claimed_folder(given, "run"),
    ):
        pass
    with claimed_folder(given, "run") as again:
        assert again.path == path
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["run"]
    assert json.loads(Path(path, "run.json").read_text())["finished"] is True
