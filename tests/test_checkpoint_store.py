"""Checkpoints on disk: complete or not there, damage found and named, nothing run of what is in them."""

from __future__ import annotations

import json
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.checkpoint.manifest import sealed
from omagd.run.checkpoint.serialization import pack, unpack
from omagd.run.checkpoint.store import FORMAT, UPGRADES, CheckpointStore, Damaged, clean, folders, read_checkpoint
from omagd.run.checkpoint.writer import CheckpointWriter

FACTS = {"stage": "stage3", "t_env": 0, "clock": {}, "score": None}
STATE = {
    "weights": {"a": torch.randn(3, 4), "b": torch.arange(5)},
    "rng": np.random.default_rng(7).bit_generator.state,
    "array": np.arange(6.0).reshape(2, 3),
    "flags": np.array([True, False]),
    "plain": [1, 2.5, "text", None, (True, b"x")],
}


def save(store: CheckpointStore, iteration: int, others: tuple[CheckpointStore, ...] = (), **facts: object) -> Path:
    """Save a state as all ranks of `store` would."""
    draft = CheckpointWriter(store, iteration)
    for other in others:
        theirs = CheckpointWriter(other, iteration)
        theirs.put(f"rank_{other.rank}", pack({"number": other.rank}))
        theirs.report({})
    name = f"replay_{iteration}.bin"
    draft.keep(name, lambda path: path.write_bytes(os.urandom(100)))
    draft.put("common", pack(STATE))
    draft.put("rank_0", pack({"number": iteration}))
    draft.report({"replay": {"added": iteration, "kept": 0, "parts": []}})
    path = draft.commit({**FACTS, "iteration": iteration, "score": None, **facts}, 5.0)
    store.prune()
    return path


def store_in(tmp_path: Path, attempt: str = "aa", rank: int = 0, world_size: int = 1, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", rank, world_size, attempt, keep)


def files_of(path: Path) -> set[str]:
    return {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}


def test_what_is_saved_comes_back_with_every_bit(tmp_path):
    path = save(store_in(tmp_path), 3)
    found = read_checkpoint(path)
    found.check()
    state = found.part("common")
    assert torch.equal(state["weights"]["a"], STATE["weights"]["a"])
    assert state["rng"] == STATE["rng"], "a generator's state is wider than 64 bits"
    assert state["array"].tobytes() == STATE["array"].tobytes()
    assert state["flags"].dtype == bool
    assert state["plain"] == STATE["plain"]
    assert found.part("rank_0") == {"number": 3}


def test_a_packed_copy_is_independent():
    weights, array = torch.ones(2), np.ones(2)
    kept = pack({"w": weights, "a": array})
    weights.add_(1)
    array += 1
    assert kept["w"].tolist() == [1.0, 1.0]
    assert unpack(kept)["a"].tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match="set has no place in a checkpoint"):
        pack({"x": {1, 2}})


def test_the_newest_and_the_best_stay_with_the_files_that_they_need(tmp_path):
    store = store_in(tmp_path, keep=2)
    for iteration, score in ((1, 0.1), (2, 0.9), (3, 0.2), (10, None), (11, 0.3)):
        save(store, iteration, score=score)
    names = [path.name for path in folders(store.path)]
    assert names == ["00000011", "00000010", "00000002"], "two newest, and the best"
    kept = {name for name in files_of(store.path) if name.startswith("kept/")}
    assert kept == {"kept/replay_11.bin", "kept/replay_10.bin", "kept/replay_2.bin"}
    for path in folders(store.path):
        read_checkpoint(path).check()


def test_a_file_that_several_checkpoints_share_stays_until_the_last_of_them_goes(tmp_path):
    store = store_in(tmp_path, keep=1)
    shared = {name: said for name, said in read_checkpoint(save(store, 1)).manifest["files"].items() if "kept" in name}
    for iteration, refers in ((2, True), (3, False)):
        draft = CheckpointWriter(store, iteration)
        if refers:
            draft.refer(shared)
        draft.put("common", pack(STATE))
        draft.report({})
        path = draft.commit({**FACTS, "iteration": iteration}, 5.0)
        store.prune()
        assert [found.name for found in folders(store.path)] == [path.name]
        assert (store.path / "kept/replay_1.bin").exists() is refers


def test_contents_are_on_the_disk_before_the_manifest_is_written(tmp_path, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name))
    save(store_in(tmp_path), 1)
    before = synced[: next(i for i, name in enumerate(synced) if "manifest" in name)]
    assert {"common", "rank_0"} <= {name.split(".")[1] for name in before if name.startswith(".")}


def test_what_a_kill_leaves_half_written_is_no_checkpoint_and_goes(tmp_path):
    store = store_in(tmp_path)
    whole = save(store, 1)
    draft = CheckpointWriter(store, 2)
    draft.put("common", pack(STATE))
    draft.keep("replay_2.bin", lambda path: path.write_bytes(b"x"))
    assert [path.name for path in folders(store.path)] == ["00000001"]
    clean(store.path)
    assert files_of(store.path) == {f"00000001/{p.name}" for p in whole.iterdir()} | {"kept/replay_1.bin"}


def test_a_damaged_one_is_not_written_over(tmp_path):
    store = store_in(tmp_path)
    first = save(store, 5)
    (first / "common.th").write_bytes(b"torn")
    second = save(store, 5)
    assert second.name == "00000005_2"
    assert (first / "common.th").read_bytes() == b"torn"
    assert [path.name for path in folders(store.path)] == ["00000005_2", "00000005"]


def test_pruning_leaves_what_another_rank_is_writing(tmp_path):
    """Rank 1 may be in its next save, asked for by SIGTERM, while rank 0 still tidies up after the one before."""
    store, other = store_in(tmp_path, world_size=2), store_in(tmp_path, rank=1, world_size=2)
    for iteration in (1, 2, 3):
        save(store, iteration, (other,))
    late = CheckpointWriter(other, 4)
    late.keep("replay_rank1_4.bin", lambda path: path.write_bytes(b"new"))
    save(store, 4, (other,))
    kept = {name for name in files_of(store.path) if name.startswith("kept/")}
    assert kept == {"kept/replay_3.bin", "kept/replay_4.bin", "kept/replay_rank1_4.bin"}
    late.give_up("no space")
    assert "kept/replay_rank1_4.bin" not in files_of(store.path), "no later start needs it"


def test_an_unreadable_manifest_does_not_mean_that_nothing_is_needed(tmp_path):
    store = store_in(tmp_path)
    first = save(store, 1)
    (first / "manifest.json").write_text("{")
    for iteration in (2, 3, 4):
        save(store, iteration)
    wanted = {f"kept/replay_{iteration}.bin" for iteration in (1, 2, 3, 4)}
    for _ in range(2):
        assert {name for name in files_of(store.path) if name.startswith("kept/")} == wanted
        clean(store.path)


def test_a_rank_finds_out_what_is_missing_of_its_part(tmp_path):
    store = store_in(tmp_path)
    draft = CheckpointWriter(store, 1)
    draft.keep("replay_1.bin", lambda path: path.write_bytes(b"episodes"))
    draft.put("rank_0", pack({"number": 1}))
    draft.report({})
    path = draft.commit({**FACTS, "iteration": 1, "score": None}, 5.0)
    assert draft.lacks() == ""
    for name in ("kept/replay_1.bin", f"{path.name}/rank_0.th", f"{path.name}/manifest.json"):
        whole = (store.path / name).read_bytes()
        (store.path / name).write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert Path(name).name in draft.lacks()
        (store.path / name).unlink()
        assert Path(name).name in draft.lacks()
        (store.path / name).write_bytes(whole)
    assert draft.lacks() == ""
    later = CheckpointWriter(store, 2)
    later.refer({name: said for name, said in draft.files.items() if name.startswith("kept/")})
    later.report({})
    later.commit({**FACTS, "iteration": 2, "score": None}, 5.0)
    assert later.lacks() == ""
    os.truncate(store.path / "kept/replay_1.bin", 3)  # of an earlier file the size is compared
    assert "3 bytes instead of 8" in later.lacks()


def test_every_file_truncated_flipped_or_deleted_is_found_and_named(tmp_path):
    path = save(store_in(tmp_path), 4)
    names = [*read_checkpoint(path).manifest["files"], f"{path.name}/manifest.json"]
    assert len(names) == 4
    for name in names:
        target = path.parent / name
        whole = target.read_bytes()
        middle = len(whole) // 2
        for harm in (whole[:-2], whole[:middle] + bytes([whole[middle] ^ 64]) + whole[middle + 1 :], b"", None):
            target.unlink()
            if harm is not None:
                target.write_bytes(harm)
            with pytest.raises(Damaged, match=Path(name).name.replace(".", r"\.")):
                read_checkpoint(path).check()
            target.write_bytes(whole)
    read_checkpoint(path).check()


def test_several_ranks_share_the_work_of_checking(tmp_path):
    stores = [store_in(tmp_path, rank=rank, world_size=3) for rank in range(3)]
    path = save(stores[0], 4, tuple(stores[1:]))
    found = read_checkpoint(path)
    assert [found.part(f"rank_{rank}")["number"] for rank in range(3)] == [4, 1, 2]
    size = (path / "rank_2.th").stat().st_size
    (path / "rank_2.th").write_bytes(b"")
    faults = [problem for rank in range(3) for problem in found.faults(rank, 3).values()]
    assert faults == [f"00000004/rank_2.th: 0 bytes instead of {size}"]


def test_a_run_that_ends_early_waits_no_longer_for_the_part_of_a_rank_that_is_gone(tmp_path):
    store = store_in(tmp_path, world_size=2)
    draft = CheckpointWriter(store, 1)
    draft.report({})
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(draft.commit, {"iteration": 1}, 60.0)
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
    draft.report({})
    with pytest.raises(OSError, match="rank 1 has not written its part"):
        draft.commit({**FACTS, "iteration": 1}, 0.1)
    CheckpointWriter(other, 1).give_up("No space left on device")
    with pytest.raises(OSError, match="rank 1: No space left on device"):
        draft.commit({**FACTS, "iteration": 1}, 0.1)
    draft.discard()
    assert folders(store.path) == []
    assert files_of(store.path) == set()


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    path, proof = save(store_in(tmp_path), 4), tmp_path / "it_ran"
    for content in (pickle.dumps({"a": Hostile(proof)}), None):
        if content is None:
            torch.save({"a": Hostile(proof)}, path / "common.th")
        else:
            (path / "common.th").write_bytes(content)
        with pytest.raises(Damaged, match=r"common\.th"):
            read_checkpoint(path).part("common")
    assert not proof.exists()
    torch.save([1, 2], path / "common.th")
    with pytest.raises(Damaged, match="no state of this program"):
        read_checkpoint(path).part("common")


def rewrite(path: Path, **changes: object) -> dict:
    """Change the manifest of a checkpoint, with a seal that fits; return what it was."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(sealed({**manifest, **changes})))
    return manifest


OUTSIDE = ("../../etc/passwd", "/etc/passwd", "kept/../x", "kept/.x", "..", "", "kept/../x/y", "00000003/.x", "a/b\0")
NO_MANIFEST = (
    b"", b"\xff", b"[]", b"null", b"{", b"3", b"[" * 100_000, b'{"format": 2}', b'{"format": []}', b'{"format": "x"}',
    json.dumps(sealed({"format": []})).encode(),
)  # fmt: skip


def test_a_manifest_with_other_content_is_damaged(tmp_path):
    path = save(store_in(tmp_path), 4)
    whole = (path / "manifest.json").read_bytes()
    changes = [{"files": {name: {"bytes": 1, "sha256": "0" * 64}}} for name in OUTSIDE]
    changes += [{"files": {"kept/x": 3}}, {"files": []}, {"logs": None}, {"iteration": "12"}, {"world_size": None}]
    for change in [*changes, {"format": FORMAT + 1}, {"format": None}]:
        manifest = rewrite(path, **change)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_checkpoint(path)
        (path / "manifest.json").write_bytes(whole)
    (path / "manifest.json").write_text(json.dumps({**manifest, "iteration": manifest["iteration"] + 1}))
    with pytest.raises(Damaged, match=r"manifest\.json: its content has changed"):
        read_checkpoint(path)
    for content in NO_MANIFEST:
        (path / "manifest.json").write_bytes(content)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_checkpoint(path)


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tmp_path):
    path = save(store_in(tmp_path), 3)
    for name in ("common.th", "manifest.json"):
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(Damaged):
            read_checkpoint(path).check()


def test_what_is_removed_is_within_the_run(tmp_path):
    """A link in the place of `kept/` or of a checkpoint leads nowhere when old files are removed."""
    precious, store = tmp_path / "precious", store_in(tmp_path)
    save(store, 3)
    (store.path / "kept").rename(tmp_path / "elsewhere")
    precious.mkdir()
    (precious / "thesis.tex").write_text("years")
    for name in ("kept", ".00000009.b.partial", "00000001"):
        (store.path / name).symlink_to(precious)
    clean(store.path)
    store.prune()
    assert (precious / "thesis.tex").read_text() == "years"


def test_a_manifest_of_an_earlier_format_is_upgraded(tmp_path, monkeypatch):
    path = save(store_in(tmp_path), 4)
    manifest = rewrite(path, format=1, logs=[], episodes=read_checkpoint(path).manifest["logs"])
    with pytest.raises(Damaged, match=f"format 1, which this version does not read .it reads up to {FORMAT}"):
        read_checkpoint(path)
    monkeypatch.setitem(UPGRADES, 1, lambda m: {**m, "format": FORMAT, "logs": m["episodes"]})
    found = read_checkpoint(path)
    found.check()
    assert found.manifest["logs"] == manifest["logs"]
