"""What a resumed run cuts off or sets aside, in which order, and that its ranks decide alike."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interruption import SAVED_AT, flip, json_of, plan_of, truncate

from omagd.run.checkpoint import checkpointer, recovery
from omagd.run.checkpoint import store as checkpoint_store
from omagd.run.checkpoint.checkpointer import CheckpointWriter
from omagd.run.checkpoint.recovery import cut_back
from omagd.run.checkpoint.store import CheckpointStore
from omagd.run.reporting.card import versions
from omagd.run.run_folder import RunFolder
from omagd.utils import storage
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError


class KilledError(BaseException):
    """Stands for the end of the process."""


def add_late_weights(folder: RunFolder) -> None:
    folder.step(99).mkdir(parents=True)
    (folder.step(99) / "agent.th").write_bytes(b"late")


def test_where_the_newest_checkpoint_is_gone_what_came_after_the_one_before_is_kept(run, tmp_path):
    """`saved.json` names it, so its absence is noticed."""
    newest, older, *_ = run.checkpoint_folders
    newest.rename(tmp_path / "moved")
    add_late_weights(run)
    plan = plan_of(run)
    assert (plan.kind, plan.state.checkpoint.path, plan.behind) == ("exact", older, True)
    assert plan_of(run, "resume=weights").kind == "weights", "its replay is older than the newest weights"
    aside = Path(cut_back(run, Dist(), plan).aside)
    assert (aside / "models" / "99" / "agent.th").read_bytes() == b"late"
    assert checkpoint_store.read_saved(run) == SAVED_AT - 1


def test_a_kill_at_any_step_of_setting_aside_is_harmless(run, tmp_path, monkeypatch):
    """Whatever step is the last one, the next start ends up with the same files, and each content is still there."""
    truncate(run.checkpoint_folders[0] / "common.th")
    for path in (run.metrics_jsonl, run.episode_log(0)):
        path.write_bytes(path.read_bytes() + b'{"t_env": 99}\n')  # behind both checkpoints
    add_late_weights(run)
    wanted = {content for name, content in run.contents().items() if name != "saved.json"}
    left = 0

    def counted(inner: Callable) -> Callable:
        def step(*arguments):
            nonlocal left
            left -= 1
            if left == 0:
                raise KilledError
            return inner(*arguments)

        return step

    for name in ("sync", "link", "clean", "note_saved"):
        monkeypatch.setattr(recovery, name, counted(getattr(recovery, name)))
    ends, last, killed = [], 0, True
    while killed:
        last, killed = last + 1, False
        copy = run.copy(tmp_path / str(last))
        for killed_at in (last, 0):
            left = killed_at
            try:
                cut_back(copy, Dist(), plan_of(copy))
            except KilledError:
                killed = True
            assert wanted <= set(copy.contents().values()), f"something is lost after step {last}"
        ends.append({name: text for name, text in copy.contents().items() if not name.startswith("set_aside/")})
    assert last > 12
    assert all(end == ends[0] for end in ends)


def test_what_the_system_refuses_is_one_line_that_says_where(run, monkeypatch):
    truncate(run.checkpoint_folders[0] / "common.th")
    (run.path / "set_aside").touch()
    with pytest.raises(UserError, match=r"set_aside\S* \(.*\): move it away, then start again"):
        cut_back(run, Dist(), plan_of(run))
    monkeypatch.setattr(recovery.shutil, "copy2", lambda *_: os.fsync(10**6))  # its error names no file
    (run.path / "set_aside").unlink()
    with pytest.raises(UserError, match=rf"{run.path} \(Bad file descriptor\): check the disk"):
        cut_back(run, Dist(), plan_of(run))


def test_episodes_of_ranks_that_the_run_no_longer_has_stay(run):
    """Also where the newest checkpoint is of fewer ranks; what they wrote after it is cut off, and kept."""
    log = run.episode_log(1)
    log.write_text("a\nb\n")
    run.change_part("common", lambda state: state["run"].pop("earlier_ranks"))  # as versions before this key wrote it
    for more in (1, 2):
        run.continue_until(SAVED_AT + more)
        assert log.read_text() == "a\nb\n"
        assert not (run.path / "set_aside").exists()
    common = torch.load(run.checkpoint_folders[0] / "common.th", weights_only=True)
    assert common["run"]["earlier_ranks"] == {1: 4}
    card = json_of(run.card_json)
    card["recorded"]["ranks"] = 2  # a start with two ranks was killed before its first checkpoint
    run.card_json.write_text(json.dumps(card))
    log.write_text("a\nb\nc\n")
    run.episode_log(2).write_text("d\n")
    aside = Path(cut_back(run, Dist(), plan_of(run)).aside) / "episodes"
    assert log.read_text() == "a\nb\n" and not run.episode_log(2).exists()
    assert (aside / "rank_1.jsonl").read_text() == "a\nb\nc\n"
    assert (aside / "rank_2.jsonl").read_text() == "d\n"


def test_names_are_on_the_disk_in_the_order_in_which_they_are_relied_on(run, monkeypatch):
    done, before = [], set(run.checkpoint_folders)

    def record(module: object, name: str) -> None:
        inner = getattr(module, name)

        def call(path: Path, *more: object) -> object:
            done.append((name, Path(path).name))
            return inner(path, *more)

        monkeypatch.setattr(module, name, call)

    for module in (checkpoint_store, checkpointer, recovery):
        record(module, "sync")
    record(Path, "rename")
    record(checkpoint_store, "write_json")
    monkeypatch.setattr(checkpointer, "stop_wanted", lambda: True)
    assert run.start() == 143
    (newest,) = set(run.checkpoint_folders) - before
    (draft,) = {name for what, name in done if what == "rename" and name.startswith(f".{newest.name}.")}
    at, parent = done.index(("rename", draft)), run.path.parent.name
    after = [step for step in done[at:] if step[1] in {"checkpoints", run.path.name, parent, "saved.json"}]
    assert ("sync", "kept") in done[:at]
    assert done[at - 1] == ("sync", draft)
    steps = "checkpoints", run.path.name, parent, "saved.json", run.path.name
    assert after == [("write_json" if name == "saved.json" else "sync", name) for name in steps]


def on_two_ranks(work: Callable[[Any], object]) -> list[Any]:
    """Return what `work(dist)` returns, or the message of its error, on each of two ranks: threads of this process."""
    box, barrier = [None, None], threading.Barrier(2)

    def run_rank(rank: int) -> object:
        def gather(value: object) -> list[object]:
            box[rank] = value
            barrier.wait(10)
            found = list(box)
            barrier.wait(10)
            return found

        facts = {"rank": rank, "world_size": 2, "is_main": rank == 0}
        try:
            return work(SimpleNamespace(**facts, gather=gather, broadcast=lambda value: gather(value)[0]))
        except UserError as problem:
            return problem.message

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run_rank, range(2)))


@pytest.fixture
def of_two(tmp_path) -> RunFolder:
    """Return a run with checkpoints 1 and 2 of two ranks, each rank with a file of replay that both share."""
    folder = RunFolder(tmp_path / "run")
    stores = [CheckpointStore(folder.checkpoints, rank, 2, "aa", 2) for rank in range(2)]
    run = {"metrics_bytes": 3, "wall_seconds": 1.0, "sinks": {}}
    common = {"stage": "stage3", "finished": [], "shared": {}, "modules": {}, "products": {}, "run": run}
    own = {"stage": {}, "random": {}, "runners": {}, "past": {}, "episode_bytes": 2}
    for iteration in (1, 2):
        for rank, store in reversed(list(enumerate(stores))):
            draft = CheckpointWriter(store, iteration)
            name = draft.keep(f"rank{rank}.episodes", lambda path, rank=rank: path.write_bytes(bytes([rank] * 50)))
            draft.put(f"rank_{rank}", own)
            if rank == 0:
                draft.put("common", common)
            part = {"file": name, "first": 0, "count": 4, "entry": draft.files[name], "codec": None}
            draft.report({"replay": {"added": 4, "kept": 3, "parts": [part]}})
        facts = {"iteration": iteration, "stage": "stage3", "t_env": 10 * iteration, "score": None, "clock": {}}
        draft.commit(facts, 5.0)
    (folder.path / "episodes").mkdir()
    folder.metrics_jsonl.write_text("abcdef")
    for rank in range(2):
        folder.episode_log(rank).write_text("xyz")
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_came_after_the_checkpoint_is_kept_where_ranks_or_versions_change(ranks, of_two):
    add_late_weights(of_two)
    known = {"ranks": 2, "versions": {**versions(), **({"torch": "1.0"} if ranks == 2 else {})}}
    of_two.card_json.write_text(json.dumps({"id": "x", "compared": {}, "recorded": known}))
    if ranks == 1:
        cut = cut_back(of_two, Dist(), plan_of(of_two))
    else:
        cut, _ = on_two_ranks(lambda dist: cut_back(of_two, dist, plan_of(of_two, dist=dist)))
    aside = Path(cut.aside)
    assert (aside / "models" / "99" / "agent.th").read_bytes() == b"late"
    assert (aside / "episodes" / "rank_1.jsonl").read_text() == "xyz"
    assert of_two.episode_log(1).read_text() == "xy"


def test_ranks_decide_alike(of_two, monkeypatch):
    """Though each compares only its share of the files, and only one of them meets an error of its disk."""
    flip(of_two.checkpoints / "kept" / "rank0.episodes")
    first, second = on_two_ranks(lambda dist: plan_of(of_two, dist=dist))
    assert first == second and "rank0.episodes" in first and "resume=lossy" in first
    plans = on_two_ranks(lambda dist: plan_of(of_two, "resume=lossy", dist=dist))
    for plan in plans:
        assert (plan.kind, plan.state.iteration, plan.state.lost) == ("lossy", 2, {"kept/rank0.episodes"})
        assert plan.state.lost_episodes() == 3, "the oldest of four had left the replay already"
    inner, here = checkpoint_store.digest, threading.local()

    def digest(path: Path) -> str:
        if getattr(here, "rank", 0) == 1:
            raise OSError(errno.EIO, "broken disk")
        return inner(path)

    def plan_with_a_broken_disk(dist: SimpleNamespace) -> object:
        here.rank = dist.rank
        return plan_of(of_two, "resume=lossy", dist=dist)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "RETRY_SECONDS", ())
        patch.setattr(checkpoint_store, "digest", digest)
        first, second = on_two_ranks(plan_with_a_broken_disk)
    assert first == second and "cannot be read (broken disk)" in first
    assert of_two.metrics_jsonl.read_text() == "abcdef", "nothing has changed until here"
    aside, _ = (cut.aside for cut in on_two_ranks(lambda dist: cut_back(of_two, dist, plans[dist.rank])))
    assert (Path(aside) / "metrics.jsonl").read_text() == "abcdef"
    assert of_two.metrics_jsonl.read_text() == "abc"
    assert [of_two.episode_log(rank).read_text() for rank in range(2)] == ["xy", "xy"]
