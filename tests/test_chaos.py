"""Killed or damaged anywhere, a run ends with the bits of one left alone; benchmarks/chaos.py is the long form."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from chaos_harness import PATIENCE, TINY, Trial, differences
from command_harness import FORKED, MAIN, PYTHON, Started, left_behind, records, run_folders, summary_of
from interruption import SAVED_AT, TornRun, flip, json_of, manifest_of, plan_of, truncate

from omagd.run.checkpoint import resuming
from omagd.run.checkpoint import store as checkpoint_store
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.utils import storage


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
@pytest.mark.processes
def test_a_run_that_is_killed_twice_ends_with_the_same_bits(tmp_path):
    """A rank, then all at once while they save. test_resume.py ends runs in each stage; the benchmark kills more."""
    words = ("world_size=2", "t_max=2500", "checkpoint_interval=0", "test_interval=2500")
    (tmp_path / "alone").mkdir()
    command = [PYTHON, MAIN, "-u", "--config=qmix", "with", *TINY, *words]
    undisturbed = Started(command, tmp_path / "alone", **FORKED)  # beside the other, which mostly waits
    killed = Trial(tmp_path / "killed", words, stride=2, options=("--config=qmix",))
    plan = [("rank", "any"), ("group", "save")]
    killed.disturbed(random.Random(3), plan)
    ended = undisturbed.wait(PATIENCE)
    assert ended.code == 0, ended.text
    (alone,) = run_folders(tmp_path / "alone")
    assert [kill.kind for kill in killed.kills] == [kind for kind, _ in plan]
    assert killed.codes == [-9, 0]
    assert differences(alone, killed.folder) == []
    assert summary_of(killed.folder)["exit_state"] == "completed"
    assert (left_behind(ended.group), killed.left()) == ([], [])


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Return the folder of a run that nothing interrupted."""
    place = tmp_path_factory.mktemp("alone")
    assert TornRun(place / "run").start("unique_token=run") == 0
    return place / "run"


@pytest.fixture
def restored(monkeypatch) -> list[dict]:
    """Return what the next starts restore: stored episodes, clock, iteration and the agent's weights."""
    seen, inner = [], Checkpointer.restore

    def restore(checkpointer, stage):
        inner(checkpointer, stage)
        weights = [value.clone() for value in stage.mac.agent.state_dict().values()]
        facts = {"left": len(stage.data.buffer), "t_env": stage.clock.t_env, "iteration": checkpointer.iteration}
        seen.append({**facts, "weights": weights})

    monkeypatch.setattr(Checkpointer, "restore", restore)
    return seen


def test_every_damaged_file_is_named_and_an_exact_continuation_found_or_rejected(alone, torn, tmp_path, capsys):
    newest = torn.checkpoint_folders[0]
    names = [f"{newest.name}/manifest.json", *manifest_of(newest)["files"]]
    assert {Path(name).name for name in names} >= {"manifest.json", "common.th", "rank_0.th"}
    assert any(name.startswith("kept/") for name in names)
    ends = set()
    for number, name in enumerate(names):
        run = torn.copy(tmp_path / str(number))
        damaged, *others = run.checkpoint_folders
        flip(run.checkpoints / name)
        sound = [path for path in others if name not in manifest_of(path)["files"]]
        ends.add(bool(sound))
        if not sound:
            line = run.rejected(capsys)
            parts = (Path(name).name, "resume=lossy", "resume=weights", "auto_resume=False")
            assert [part for part in parts if part not in line] == []
            continue
        before = run.contents()
        assert run.start() == 0, capsys.readouterr().err
        (line,) = [line for line in run.log(0).read_text().splitlines() if f"{damaged} is damaged" in line]
        assert Path(name).name in line
        for part in (f"continuing from {sound[0]}: ", f"{sound[0]}, an earlier one, is used"):
            assert part in run.log(0).read_text()
        assert differences(alone, run.path) == []
        (aside,) = (run.path / "set_aside").iterdir()
        run.assert_kept(before, f"checkpoints/{damaged.name}/", "models/", "metrics", "episodes/")
        (entry,) = run.resumed
        assert (entry["kind"], entry["from"]) == ("exact", f"checkpoints/{sound[0].name}")
        assert entry["set_aside"] == f"set_aside/{aside.name}"
    assert ends == {True, False}


def test_lossy_continues_without_the_damaged_episodes_and_counts_them(run, restored, capsys):
    """One flipped byte in a file that all checkpoints share."""
    newest = run.checkpoint_folders[0]
    manifest = manifest_of(newest)
    shared = set.intersection(*(set(manifest_of(path)["files"]) for path in run.checkpoint_folders))
    (log,) = [logs["replay"] for logs in manifest["logs"]]
    part = min((part for part in log["parts"] if part["file"] in shared), key=itemgetter("file"))
    lost = part["first"] + part["count"] - max(part["first"], log["added"] - log["kept"])
    assert 0 < lost < log["kept"]
    flip(run.checkpoints / part["file"])
    before = run.contents()
    assert part["file"] in run.rejected(capsys)
    assert run.start("resume=lossy") == 0
    facts = {"left": log["kept"] - lost, "t_env": manifest["t_env"], "iteration": manifest["iteration"]}
    assert restored[0].items() >= facts.items()
    assert f"resume=lossy: {lost} episode(s) in {part['file']}" in run.log(0).read_text()
    (entry,) = run.resumed
    expected = {"kind": "lossy", "from": f"checkpoints/{newest.name}", "lost_episodes": lost}
    assert entry.items() >= expected.items()
    assert entry["versions"]["torch"] == torch.__version__
    run.assert_kept(before, "models/", *(f"checkpoints/{file}" for file in manifest["files"]))
    assert summary_of(run.path)["exit_state"] == "completed"


@pytest.mark.parametrize("harm", ["rank_0.th", "checkpoints"])
def test_weights_continues_from_the_newest_weights_where_no_checkpoint_is_whole(
    harm, torn, run, tmp_path, restored, capsys
):
    newest = torn.checkpoint_folders[0]
    t_env = manifest_of(newest)["t_env"]
    step = max(int(path.name) for path in (run.models).iterdir())
    if harm == "checkpoints":
        run.checkpoints.rename(tmp_path / "elsewhere")
    for path in run.checkpoint_folders:
        truncate(path / harm)
    before = run.contents()
    for mode in ("exact", "lossy"):
        assert "resume=weights" in run.rejected(capsys, f"resume={mode}")
    assert run.start("resume=weights") == 0, capsys.readouterr().err
    if harm == "rank_0.th":
        expected = torch.load(newest / "common.th", weights_only=True)["shared"]["modules"]["agent"]
    else:
        expected = torch.load(torn.models / str(step) / "agent.th", weights_only=True)
    first = restored[0]
    assert (first["left"], first["t_env"]) == (0, t_env if harm == "rank_0.th" else step)
    assert first["iteration"] >= SAVED_AT and step <= t_env
    assert all(torch.equal(*pair) for pair in zip(first["weights"], expected.values(), strict=True))
    assert [entry["kind"] for entry in run.resumed] == ["weights"]
    logged = [line["t_env"] for line in records(run.path)]
    assert logged == sorted(logged) and logged[-1] >= 40
    run.assert_kept(before, "models/", f"checkpoints/{newest.name}/", "episodes/", "metrics")
    assert summary_of(run.path)["exit_state"] == "completed"
    last = manifest_of(run.checkpoint_folders[0])
    assert last["t_env"] >= 40 and last["iteration"] > SAVED_AT


def test_what_the_system_cannot_read_is_tried_again_then_rejected(run, monkeypatch, capsys):
    """Such an error is no damage: also `lossy` and `weights` wait until the disk answers."""
    path, reason = run.checkpoint_folders[0] / "common.th", os.strerror(errno.EIO)
    inner, tried, fail = checkpoint_store.digest, [], 99

    def broken(*_):
        raise OSError(errno.EIO, reason)

    def digest(each: Path) -> str:
        if each == path:
            tried.append(path)
        return broken() if each == path and len(tried) <= fail else inner(each)

    monkeypatch.setattr(storage, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(checkpoint_store, "digest", digest)
    for mode in ("exact", "lossy", "weights"):
        tried.clear()
        assert f"{path} cannot be read ({reason})" in run.rejected(capsys, f"resume={mode}")
        assert len(tried) == 3
    with monkeypatch.context() as patch:
        patch.setattr(resuming, "require_own", broken)
        assert f"cannot be read ({reason})" in run.rejected(capsys), "it is not left for a new run either"
        assert [each.name for each in run.path.parent.iterdir() if each.is_dir()] == [run.path.name]
    fail = 0
    with monkeypatch.context() as patch:  # after the comparison
        patch.setattr("omagd.components.episode_codec._split", broken)
        assert run.start() == 2
        assert f"episodes cannot be read ({reason})" in capsys.readouterr().err
    fail = 2
    tried.clear()
    assert plan_of(run).kind == "exact"
    assert len(tried) == 3


def test_a_run_that_was_never_saved_begins_from_scratch_and_keeps_what_it_wrote(alone, torn, run):
    """Killed before its first checkpoint was complete, which `saved.json` proves."""
    shutil.rmtree(run.checkpoints)
    (run.path / "saved.json").write_text('{"iteration": 0}')
    (run.checkpoints / ".00000001.abc.partial").mkdir(parents=True)
    (run.models / "20" / ".agent.th.123.tmp").write_bytes(b"half")
    assert run.start() == 0
    assert differences(alone, run.path) == []
    assert not list((run.checkpoints).glob(".*")) and not list(run.models.rglob(".*.tmp"))
    (aside,) = (run.path / "set_aside").iterdir()
    assert (aside / "metrics.jsonl").read_bytes() == (torn.metrics_jsonl).read_bytes()
    assert "resumed" not in json_of(run.card_json)


WRONG_PARTS = [
    ("common", "finished", None), ("common", "finished", 5), ("common", "finished", [{"name": "stage1"}]),
    ("common", "products", None), ("common", "run", {}), ("common", "stage", 3), ("common", "modules", [1]),
    ("rank_0", "episode_bytes", "x"), ("rank_0", "episode_bytes", [1]), ("rank_0", "past", None),
]  # fmt: skip


def test_values_of_other_types_make_a_checkpoint_damaged(torn, tmp_path, capsys):
    """Though its checksums fit: the one before it is used, and `checkpoint_path` rejects it."""
    for number, (part, key, value) in enumerate(WRONG_PARTS):
        run = torn.copy(tmp_path / str(number))
        newest, older = run.checkpoint_folders
        run.change_part(part, lambda state, key=key, value=value: state.update({key: value}))
        plan = plan_of(run)
        assert plan.state.checkpoint.path == older, (key, value)
        assert plan.problems[newest].startswith(f"{part}.th"), (key, value)
    assert run.start("auto_resume=False", f"checkpoint_path={newest}", results=tmp_path / "results") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: checkpoint_path=") and f"{part}.th" in line
    assert not (tmp_path / "results").exists()
    plan = plan_of(run, "resume=weights")
    assert (plan.kind, plan.state.checkpoint.path) == ("weights", newest), "a rank's part is not needed for them"


def test_missing_lines_and_other_versions_are_reported(run):
    card = json_of(run.card_json)
    card["recorded"]["versions"]["torch"] = "1.0"
    (run.card_json).write_text(json.dumps(card))
    metrics, episodes = run.metrics_jsonl, run.episode_log(0)
    *lines, last = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines))
    lost = {"metrics.jsonl": len(last), "episodes/rank_0.jsonl": episodes.stat().st_size}
    episodes.unlink()
    run.continue_until(SAVED_AT + 1)
    for name, size in lost.items():
        line = f"WARNING omagd {run.path / name}: {size} bytes that were there at that checkpoint are missing"
        assert line in run.log(0).read_text()
    (entry,) = run.resumed
    assert entry["missing_bytes"] == lost
    assert f"this run continues with other versions: torch {torch.__version__} (was 1.0)" in run.log(0).read_text()
    assert entry["versions"]["torch"] == torch.__version__
