"""Checkpoints on disk: complete or not there; damage is found and named."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from interruption import change_manifest, manifest_of

from omagd.components.episode_buffer import EpisodeBuffer
from omagd.config.loading import resolve
from omagd.run.checkpoint.checkpointer import Checkpointer, CheckpointWriter
from omagd.run.checkpoint.recovery import RecoveredState, ResumePlan
from omagd.run.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    Damaged,
    clean,
    folders,
    pack,
    read_checkpoint,
    read_part,
)
from omagd.run.run_folder import RunFolder
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError

FACTS = {"stage": "stage3", "t_env": 0, "clock": {}, "score": None}
STATE = {
    "weights": {"a": torch.randn(3, 4), "b": torch.arange(5)},
    "rng": np.random.default_rng(7).bit_generator.state,  # wider than 64 bits
    "array": np.arange(6.0).reshape(2, 3),
    "flags": np.array([True, False]),
    "plain": [1, 2.5, "text", None, (True, b"x")],
}


def store_in(tmp_path: Path, rank: int = 0, world_size: int = 1, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", rank, world_size, "aa", keep)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    return store_in(tmp_path)


def save(store: CheckpointStore, iteration: int, *others: CheckpointStore, **facts: object) -> Path:
    """Save a state as all ranks of `store` would."""
    for other in others:
        theirs = CheckpointWriter(other, iteration)
        theirs.put(f"rank_{other.rank}", pack({"number": other.rank}))
        theirs.report({})
    draft = CheckpointWriter(store, iteration)
    draft.keep(f"replay_{iteration}.bin", lambda path: path.write_bytes(os.urandom(100)))
    draft.put("rank_0", pack({"number": iteration}))
    path = finish(draft, iteration, **facts)
    store.prune()
    return path


def finish(draft: CheckpointWriter, iteration: int, patience: float = 5.0, **facts: object) -> Path:
    draft.put("common", pack(STATE))
    draft.report({"replay": {"added": iteration, "kept": 0, "parts": []}})
    return draft.commit({**FACTS, "iteration": iteration, **facts}, patience)


def names_in(store: CheckpointStore) -> list[str]:
    return [path.name for path in folders(store.path)]


def kept_in(store: CheckpointStore) -> set[str]:
    return {path.name for path in (store.path / "kept").iterdir()}


def test_what_is_saved_comes_back_with_every_bit(store):
    path = save(store, 3)
    assert read_checkpoint(path).faults() == {}
    state = read_part(path / "common.th")
    assert torch.equal(state["weights"]["a"], STATE["weights"]["a"])
    assert state["array"].tobytes() == STATE["array"].tobytes() and state["flags"].dtype == bool
    assert (state["rng"], state["plain"]) == (STATE["rng"], STATE["plain"])
    assert read_part(path / "rank_0.th") == {"number": 3}


def test_the_newest_and_the_best_stay_with_the_files_that_they_need(store):
    for iteration, score in ((1, 0.1), (2, 0.9), (3, 0.2), (10, None), (11, 0.3)):
        save(store, iteration, score=score)
    assert names_in(store) == ["00000011", "00000010", "00000002"], "two newest, and the best"
    assert kept_in(store) == {"replay_11.bin", "replay_10.bin", "replay_2.bin"}
    for path in folders(store.path):
        assert read_checkpoint(path).faults() == {}


def test_a_file_that_several_checkpoints_share_stays_until_the_last_of_them_goes(tmp_path):
    store = store_in(tmp_path, keep=1)
    files = read_checkpoint(save(store, 1)).manifest["files"]
    shared = {name: entry for name, entry in files.items() if "kept" in name}
    for iteration, refers in ((2, True), (3, False)):
        draft = CheckpointWriter(store, iteration)
        draft.refer(shared if refers else {})
        path = finish(draft, iteration)
        store.prune()
        assert names_in(store) == [path.name]
        assert ("replay_1.bin" in kept_in(store)) is refers


def test_what_a_kill_leaves_half_written_is_no_checkpoint_and_goes(store):
    save(store, 1)
    draft = CheckpointWriter(store, 2)
    draft.put("common", pack(STATE))
    draft.keep("replay_2.bin", lambda path: path.write_bytes(b"x"))
    assert names_in(store) == ["00000001"]
    clean(store.path)
    assert kept_in(store) == {"replay_1.bin"}
    assert {path.name for path in store.path.iterdir()} == {"00000001", "kept"}


def test_a_damaged_one_is_not_written_over(store):
    first = save(store, 5)
    (first / "common.th").write_bytes(b"torn")
    save(store, 5)
    assert (first / "common.th").read_bytes() == b"torn"
    assert names_in(store) == ["00000005_2", "00000005"]


def test_pruning_leaves_what_another_rank_is_writing(tmp_path):
    """Rank 1 may be in its next save, asked for by SIGTERM, while rank 0 still prunes after the one before."""
    store, other = store_in(tmp_path, world_size=2), store_in(tmp_path, rank=1, world_size=2)
    for iteration in (1, 2, 3):
        save(store, iteration, other)
    late = CheckpointWriter(other, 4)
    late.keep("replay_rank1_4.bin", lambda path: path.write_bytes(b"new"))
    save(store, 4, other)
    assert kept_in(store) == {"replay_3.bin", "replay_4.bin", "replay_rank1_4.bin"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        late.report_failure("no space")
    late.report_failure("no space")
    assert "replay_rank1_4.bin" not in kept_in(store), "no later start needs it"


def test_an_unreadable_manifest_does_not_mean_that_nothing_is_needed(store):
    (save(store, 1) / "manifest.json").write_text("{")
    for iteration in (2, 3, 4):
        save(store, iteration)
    for _ in range(2):
        assert kept_in(store) == {f"replay_{iteration}.bin" for iteration in (1, 2, 3, 4)}
        clean(store.path)


def test_every_file_truncated_flipped_or_deleted_is_found_and_named(store):
    """A pipe in the place of a file does not keep its reader waiting."""
    path = save(store, 4)
    names = [*read_checkpoint(path).manifest["files"], f"{path.name}/manifest.json"]
    assert len(names) == 4
    for file in (path.parent / name for name in names):
        whole = file.read_bytes()
        middle = len(whole) // 2
        for harm in (whole[:-2], whole[:middle] + bytes([whole[middle] ^ 64]) + whole[middle + 1 :], b"", None, "pipe"):
            file.unlink(missing_ok=True)
            if isinstance(harm, bytes):
                file.write_bytes(harm)
            elif harm:
                os.mkfifo(file)
            with pytest.raises(Damaged, match=file.name.replace(".", r"\.")):
                for problem in read_checkpoint(path).faults().values():
                    raise Damaged(problem)
        file.unlink()
        file.write_bytes(whole)
    assert read_checkpoint(path).faults() == {}


def test_a_run_that_ends_early_waits_no_longer_for_the_part_of_a_rank_that_is_gone(tmp_path):
    store = store_in(tmp_path, world_size=2)
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(finish, CheckpointWriter(store, 1), 1, 60.0)
        time.sleep(0.1)
        assert not saving.done()
        began = time.monotonic()
        Checkpointer.close(SimpleNamespace(_writer=SimpleNamespace(store=store), _thread=thread), 0.1)
        assert time.monotonic() - began < 10
    with pytest.raises(OSError, match="rank 1 has not written its part"):
        saving.result()


def test_without_a_ranks_part_there_is_no_checkpoint(tmp_path):
    store, other = store_in(tmp_path, world_size=2), store_in(tmp_path, rank=1, world_size=2)
    draft = CheckpointWriter(store, 1)
    with pytest.raises(OSError, match="rank 1 has not written its part"):
        finish(draft, 1, 0.1)
    CheckpointWriter(other, 1).report_failure("No space left on device")
    with pytest.raises(OSError, match="rank 1: No space left on device"):
        finish(draft, 1, 0.1)
    draft.discard()
    assert list(store.path.iterdir()) == []


OUTSIDE = ("../../etc/passwd", "/etc/passwd", "kept/../x", "kept/.x", "..", "", "kept/../x/y", "00000003/.x", "a/b\0")
CHANGES = (
    *({"files": {name: {"bytes": 1, "sha256": "0" * 64}}} for name in OUTSIDE), {"files": {"kept/x": 3}}, {"files": []},
    {"logs": None}, {"iteration": "12"}, {"world_size": None}, {"format": 3}, {"format": None}, {"format": []},
)  # fmt: skip
WRONG_FACTS = (
    ("t_env", None), ("t_env", []), ("t_env", "x"), ("t_env", True), ("t_env", -1), ("score", []), ("score", "x"),
    ("logs", []), ("logs", [[]]), ("logs", [{"replay": 1}]),
    ("logs", [{"replay": {"added": 1, "kept": 1, "parts": [{}]}}]),
    ("stage", 3), ("clock", None), ("world_size", 0), ("iteration", 10**30),
    ("files", {"\ud800/c": {"bytes": 1, "sha256": ""}}),
    ("files", {"a" * 300 + "/c": {"bytes": 1, "sha256": ""}}), ("files", {"a/c": {"bytes": "x", "sha256": None}}),
)  # fmt: skip
NO_MANIFEST = (b"", b"\xff", b"[]", b"null", b"{", b"3", b"[" * 100_000, b'{"format": 2}', b'{"format": []}')


def test_a_manifest_with_other_content_is_damaged(store):
    path = save(store, 4)
    file, manifest = path / "manifest.json", manifest_of(path)
    for change in (*CHANGES, *({key: value} for key, value in WRONG_FACTS)):
        change_manifest(path, **change)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_checkpoint(path)
        file.write_text(json.dumps(manifest))
    for content in (json.dumps({**manifest, "iteration": 5}).encode(), *NO_MANIFEST):
        file.write_bytes(content)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_checkpoint(path)


def test_what_is_removed_is_within_the_run(store, tmp_path):
    """A link in the place of `kept/` or of a checkpoint leads nowhere when old files are removed."""
    save(store, 3)
    (store.path / "kept").rename(tmp_path / "elsewhere")
    precious = tmp_path / "precious" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years")
    for name in ("kept", ".00000009.b.partial", "00000001"):
        (store.path / name).symlink_to(precious.parent)
        clean(store.path)
        store.prune()
    assert precious.read_text() == "years"


def test_episodes_of_several_ranks_are_dealt_by_age(tmp_path):
    logs, found = [], EpisodeBuffer(9)
    for rank, count in enumerate((3, 5)):
        buffer = EpisodeBuffer(9)
        buffer.add({"number": torch.full((2,), 10 * rank + i)} for i in range(count))
        buffer.since(0).save(tmp_path / f"rank{rank}")
        part = {**buffer.since(0).describe(), "file": f"rank{rank}"}
        logs.append({"replay": {"added": count, "kept": count - 1, "parts": [part]}})
    checkpoint = Checkpoint(tmp_path / "1", {"world_size": 2, "files": ["rank0", "rank1"], "logs": logs})
    RecoveredState(checkpoint, {}, own=None).refill("replay", found, Dist())
    assert [int(episode["number"][0]) for episode in found.episodes] == [11, 12, 1, 13, 2, 14]


@pytest.mark.parametrize("modules", [{}, {"tokenizer": torch.nn.Linear(1, 1)}])
def test_a_run_continues_only_with_the_pretrained_modules_with_which_it_began(modules, tmp_path):
    saved = {"products": {"tokenizer": "checksum"}, "run": {"wall_seconds": 0.0}, "finished": [], "modules": {}}
    state = RecoveredState(Checkpoint(tmp_path, {"iteration": 1, "files": {}, "logs": [{}]}), saved, own={})
    checkpointer = Checkpointer(resolve("qmix"), Dist(), RunFolder(tmp_path), ResumePlan(state))
    with pytest.raises(UserError, match="pretrained_tokenizer_path or .*: not the modules with which this run began"):
        checkpointer.restore(SimpleNamespace(pretrained=SimpleNamespace(modules=lambda: modules)))
