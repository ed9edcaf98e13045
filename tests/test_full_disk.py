"""A disk that is full, for a while or for good: a line in the log, whole lines in the files, and an honest end."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_budgets import BUDGETS
from command_harness import ROOT, run_folders, summary_of
from run_equality import differences

from omagd.config.loading import resolve
from omagd.run.checkpoint.checkpointer import Snapshot, SnapshotWriter
from omagd.run.cli.main import main
from omagd.run.reporting.log_sinks import EpisodeLog, JsonLinesSink
from omagd.run.reporting.sacred_record import StoredObserver, run_recorded
from omagd.run.run_folder import RunFolder
from omagd.run.training.stages.rl import RLStage
from omagd.utils import storage
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import Record, RunFacts, setup_logging
from omagd.utils.storage import STORAGE, AppendFile, open_records

NO_SPACE = os.strerror(errno.ENOSPC)
INTERVALS = [f"{name}_interval=10" for name in ("log", "runner_log", "learner_log", "save_model")]
COMMAND = ["--config=qmix", "--env-config=matrix_game", "with", *BUDGETS, *INTERVALS, "t_max=60"]
COMMAND += ["enable_checkpointing=False", "torch_threads=1"]


class Disk:
    """Lets `os.write` write `room` bytes, then fail with `code`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.room, self.code = 0, errno.ENOSPC
        self._write = os.write
        patch.setattr(storage.os, "write", self.write)

    def write(self, handle: int, content: bytes) -> int:
        part = bytes(content[: self.room])
        if not part:
            raise OSError(self.code, os.strerror(self.code))
        self.room -= len(part)
        return self._write(handle, part)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, NO_SPACE)


@pytest.fixture
def log(tmp_path) -> Iterator[list[str]]:
    """Return the list of what is logged; nothing of other tests is left, and nothing is left to them."""
    STORAGE.close()
    STORAGE.begin(tmp_path)
    lines, handler = [], logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore
    logging.getLogger("omagd").addHandler(handler)
    logging.getLogger("omagd").setLevel(logging.INFO)
    yield lines
    STORAGE.close()


@pytest.fixture
def disk(monkeypatch, log) -> Disk:
    return Disk(monkeypatch)


def test_lines_are_whole_at_every_moment_and_complete_in_the_end(disk, tmp_path):
    """Room comes and goes at random: no line is torn, doubled, lost or out of order."""
    rng = random.Random(5)
    for trial in range(20):
        path, lines = tmp_path / f"{trial}.jsonl", []
        file = AppendFile(path)
        for number in range(60):
            disk.room = rng.choice((0, 0, rng.randrange(40), 10_000))
            lines.append(json.dumps({"n": number, "x": "y" * rng.randrange(30)}))
            file.write((lines[-1] + "\n").encode())
            written = path.read_text() if path.exists() else ""
            assert written == "".join(line + "\n" for line in lines[: written.count("\n")])
        disk.room = 1 << 20
        file.close()
        assert path.read_text().splitlines() == lines


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
def test_one_line_reports_a_failure_and_one_its_end(disk, log, tmp_path, code):
    disk.code = code
    episodes, metrics = EpisodeLog(tmp_path / "episodes" / "rank_0.jsonl"), JsonLinesSink()
    metrics.open(RunFacts(tmp_path))
    for t in range(30):
        episodes.add([{"won": True}], t_env=t)
        metrics.log(Record({"loss": 0.5}, "stage3", "t_env", t))
    failed = f"cannot be written ({os.strerror(code)}): episodes/rank_0.jsonl; training continues and tries again"
    assert log == [f"WARNING {failed}"]
    disk.room = 1 << 20
    STORAGE.retry()
    for path in (tmp_path / "metrics.jsonl", episodes.path):
        assert [json.loads(line)["t_env"] for line in path.open()] == list(range(30))
    assert STORAGE.size(episodes.path) == episodes.path.stat().st_size > 0
    episodes.close()
    metrics.close("completed")
    STORAGE.close()
    assert log[1:] == ["WARNING there is room again: episodes/rank_0.jsonl, metrics.jsonl could be written"]


def test_what_does_not_fit_into_memory_or_is_never_written_is_counted_as_lost(disk, log, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "PENDING_BYTES", 50)
    late, never = (AppendFile(tmp_path / name) for name in "ab")
    binary = AppendFile(tmp_path / "c", open_records)
    for number in range(20):
        late.write(f"{number:04d}\n".encode())
    for _ in range(3):
        never.write(b"a\nb\n")
        binary.write(b"\x00")
    never.close()
    binary.close()
    disk.room = 1000
    late.close()
    assert late.path.read_text().split() == [f"{number:04d}" for number in range(10, 20)]
    STORAGE.close()
    assert log[1:] == [f"ERROR lost, since it could not be written ({NO_SPACE}): a (10 lines), b (6 lines), c"]


def test_weights_are_written_later_in_their_order(log, tmp_path, monkeypatch):
    """The agent's file comes last: a folder that has it is complete."""
    step = tmp_path / "models" / "100"
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, "fsync", full)
        assert not STORAGE.write(step / "opt.th", b"0")
        assert list(step.iterdir()) == [], "nothing half written"
        patch.undo()
        patch.setattr(storage, "replace_file", lambda path, content: full() if path.name == "opt.th" else None)
        assert [STORAGE.write(step / name, b"1") for name in ("mixer.th", "agent.th")] == [False, False]
    assert STORAGE.unwritten(tmp_path / "models") == []
    content = {path.name: path.read_bytes() for path in step.iterdir()}
    assert content == {"opt.th": b"0", "mixer.th": b"1", "agent.th": b"1"}


def test_a_checkpoint_waits_for_the_lines_that_belong_to_it(disk, tmp_path):
    """What is cut back to it keeps them: its sizes count lines that wait, and it is not saved before they are there."""
    episodes = EpisodeLog(tmp_path / "rank_0.jsonl")
    disk.room = 1 << 20
    episodes.add([{"won": True}])
    disk.room = 0
    episodes.add([{"won": False}])
    claimed = STORAGE.size(episodes.path)
    assert claimed > episodes.path.stat().st_size
    draft = SimpleNamespace(report_failure=lambda reason: None, discard=lambda: None)
    writer = SnapshotWriter(SimpleNamespace(waits_until=math.inf), Dist(), RunFolder(tmp_path), 1.0)  # type: ignore[arg-type]
    lines: list[str] = []
    snapshot = Snapshot(draft, {}, None, {}, {}, {"iteration": 3}, {episodes.path: claimed})  # type: ignore[arg-type]
    for _ in range(2):
        assert writer.write(snapshot, SimpleNamespace(error=lines.append)) == "lines of rank_0.jsonl wait to be written"
    assert len(lines) == 1 and lines[0].startswith("iteration 3 could not be saved (lines of rank_0.jsonl wait")
    disk.room = 1 << 20
    episodes.add([{"won": True}])
    assert claimed == sum(map(len, episodes.path.read_bytes().splitlines(keepends=True)[:2]))
    episodes.close()


@pytest.mark.parametrize("fails", ["mkdir", "copy"])
def test_without_a_sacred_record_the_run_continues_with_a_warning(tmp_path, capfd, monkeypatch, fails):
    inner, results = os.mkdir, tmp_path / "results"

    def mkdir(path, *more, **how):
        return full() if Path(path).parent.name == "sacred" else inner(path, *more, **how)

    def run_mode(_run, config, log):
        _run.log_scalar("loss", 1.0, 2)
        return {"reached": 7}

    broken, name, replacement = (os, "mkdir", mkdir) if fails == "mkdir" else (StoredObserver, "save_sources", full)
    monkeypatch.setattr(broken, name, replacement)
    config = resolve("qmix", "matrix_game", {"local_results_path": str(results)})
    assert run_recorded(config, run_mode) == {"reached": 7}
    text = "".join(capfd.readouterr())
    assert text.count(f"{results}/sacred cannot be written ({NO_SPACE}): this run has no Sacred record") == 1
    assert "Traceback" not in text and "TypeError" not in text and "observer" not in text
    assert list((results / "sacred").iterdir()) == []


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Limit the size of files in this process, which is an error of the same kind as a full disk.

    No bytecode is written: Python would keep the first part of a file as if it were whole.
    """
    before, bytecode = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = bytecode
        setup_logging(None)
        STORAGE.close()


@pytest.mark.processes
def test_a_run_that_could_not_write_its_weights_fails_in_one_line(tmp_path, capsys):
    with limited(9000):
        code = main([*COMMAND, "use_tensorboard=True", f"local_results_path={tmp_path}/results"])
        out, err = capsys.readouterr()
    assert code == 1
    assert "Traceback" not in out and "Error" not in out and "Logging error" not in out
    line = err.splitlines()[-1]
    (folder,) = run_folders(tmp_path)
    assert line.startswith(f"error: {folder}/models/") and os.strerror(errno.EFBIG) in line and "auto_resume" in line
    lines = [line for line in out.splitlines() if "Sacred" not in line]
    assert [sum(text in line for line in lines) for text in ("cannot be written", "lost, since it could not")] == [1, 1]
    assert summary_of(folder)["exit_state"] == "failed"
    for path in (folder / "metrics.jsonl", folder / "episodes" / "rank_0.jsonl"):
        assert path.stat().st_size <= 9000 and [json.loads(line) for line in path.open()], "whole lines only"
    assert list(folder.rglob(".*.tmp")) == []


@pytest.mark.processes
def test_a_run_catches_up_once_there_is_room(tmp_path, capsys, monkeypatch):
    """Its files are those of a run that always had room."""
    inner, calls, lifted = RLStage.write_log, [], resource.getrlimit(resource.RLIMIT_FSIZE)

    def write_log(stage):
        calls.append(None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, lifted[1]) if len(calls) < 5 else lifted)
        inner(stage)

    def run(place: Path) -> Path:
        assert main(["-u", *COMMAND, f"local_results_path={place}/results"]) == 0
        (folder,) = run_folders(place)
        return folder

    one = run(tmp_path / "one")
    capsys.readouterr()
    monkeypatch.setattr(RLStage, "write_log", write_log)
    with limited(1 << 30):
        other = run(tmp_path / "other")
    text = "".join(capsys.readouterr())
    assert "Error" not in text and "Logging error" not in text
    assert re.findall("cannot be written|there is room again", text) == ["cannot be written", "there is room again"]
    assert differences(one, other) == []
    assert {path.relative_to(one) for path in one.rglob("*")} == {path.relative_to(other) for path in other.rglob("*")}
    assert (other / "config.json").read_text().count("\n") > 100
    assert summary_of(other)["exit_state"] == "completed"


def test_a_launcher_whose_log_cannot_be_written_continues(tmp_path):
    log = tmp_path / "logs" / "launch.log"
    words = [sys.executable, str(ROOT / "scripts" / "with_log.py"), str(log), "seq", "1", "2000"]
    command = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == [str(number) for number in range(1, 2001)]
    first, last = done.stderr.splitlines()
    assert "cannot be written" in first and last.startswith("lost, since it could not be written")
    assert log.read_text().split() == [str(number) for number in range(1, log.read_text().count("\n") + 1)]
    assert 900 < log.stat().st_size <= 1024
