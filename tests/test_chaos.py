"""Killed or damaged anywhere, a run ends with the bits of one left alone; benchmarks/chaos.py is the long form."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from chaos_harness import PATIENCE, Trial, differences
from command_harness import run_folders, summary_of

from omagd.run.checkpoint import checkpointer as checkpointer
from omagd.run.checkpoint import resuming, set_aside
from omagd.run.checkpoint import store as checkpoint_store
from omagd.run.checkpoint import writer as saver
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.checkpoint.manifest import sealed
from omagd.run.checkpoint.plan import ResumePlan
from omagd.run.checkpoint.recovery import recover
from omagd.run.checkpoint.set_aside import cut_back
from omagd.run.checkpoint.store import FORMAT, Checkpoint, CheckpointStore
from omagd.run.checkpoint.writer import CheckpointWriter
from omagd.run.cli.main import config_from, main
from omagd.run.reporting import plots
from omagd.run.reporting.card import versions
from omagd.utils import storage
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.run_folder import RunFolder

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")

# --- killed


@needs_proc
@pytest.mark.processes
def test_a_run_that_is_killed_four_ways_ends_with_the_same_bits(tmp_path):
    """Of one stage: test_resume.py ends runs in each of three, and the benchmark kills those too."""
    words = ("world_size=2", "t_max=2500", "checkpoint_interval=0", "env_processes=True", "test_interval=2500")
    alone = Trial(tmp_path / "alone", words, options=("--config=qmix",))
    undisturbed = alone.start()  # beside the other, which mostly waits
    killed = Trial(tmp_path / "killed", words, stride=2, options=("--config=qmix",))
    plan = [("rank", "any"), ("launcher", "save"), ("worker", "any"), ("group", "any")]
    killed.disturbed(random.Random(3), plan)
    assert undisturbed.wait(PATIENCE) == 0, alone.said()
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
    before, calls = Checkpointer.boundary, []

    def boundary(checkpointer, stage):
        before(checkpointer, stage)
        checkpointer.finish()
        calls.append(stage)
        if len(calls) == KILLED_AT:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "curves", lambda *_: None)
        assert main([*COMMAND, f"local_results_path={places[0]}/results"]) == 0
        patch.setattr(Checkpointer, "boundary", boundary)
        with pytest.raises(KilledError):
            main([*COMMAND, f"local_results_path={places[1]}/results"])
    (alone,), (torn,) = (run_folders(place) for place in places)
    assert [path.name for path in newest_first(torn)][:1] == [f"{KILLED_AT:08d}"]
    return alone, torn


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch) -> None:
    monkeypatch.setattr(plots, "curves", lambda *_: None)


def start(run: Path, *words: str) -> int:
    """Start the command again in the folder of results of a run; return the exit code."""
    return main([*COMMAND, f"local_results_path={run.parent}", *words])


def plan_of(folder: RunFolder, dist: object = None, *words: str) -> ResumePlan:
    """Return what a start with `COMMAND` would continue from."""
    return recover(folder, dist or Dist(), config_from([*COMMAND[1:], *words]))


def resaved(run: Path, part: str, change: Callable[[dict], object]) -> None:
    """Change a part of the newest checkpoint and write checksums that fit."""
    newest = newest_first(run)[0]
    state = torch.load(newest / f"{part}.th", weights_only=True)
    change(state)
    manifest = manifest_of(newest)
    manifest["files"][f"{newest.name}/{part}.th"] = saver.write_part(newest / f"{part}.th", state)
    (newest / "manifest.json").write_text(json.dumps(sealed(manifest)))


def kill_at(boundary: int, run: Path, monkeypatch) -> None:
    """Continue a run and end it after some iterations, each of them saved."""
    inner, left = Checkpointer.boundary, [None] * boundary

    def ended(checkpointer, stage):
        inner(checkpointer, stage)
        checkpointer.finish()
        left.pop()
        if not left:
            raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "boundary", ended)
        with pytest.raises(KilledError):
            start(run)


def manifest_of(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "manifest.json").read_text())


def newest_first(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("[0-9]*"), reverse=True)


def files_of(run: Path) -> list[str]:
    """Return the files of the newest checkpoint, below checkpoints/."""
    newest = newest_first(run)[0]
    return [f"{newest.name}/manifest.json", *manifest_of(newest)["files"]]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


def contents(run: Path) -> dict[str, bytes]:
    """Return all files of a run but its locks, by their path in it."""
    files = [path for path in run.rglob("*") if path.is_file() and "lock" not in path.name]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def rejected(run: Path, capsys, *words: str) -> str:
    """Return the one line with which a start ends that changes nothing."""
    before = contents(run)
    capsys.readouterr()
    assert start(run, *words) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    assert contents(run) == before
    assert line.startswith("error: ")
    return line


def copied(torn: Path, place: Path) -> Path:
    run = place / "results" / torn.name
    shutil.copytree(torn, run)
    return run


def resumed(run: Path) -> list[dict]:
    return json.loads((run / "card.json").read_text())["resumed"]


def shared_by_all(run: Path) -> str:
    """Return a file of episodes that every checkpoint names."""
    named = [set(manifest_of(path)["files"]) for path in newest_first(run)]
    return sorted(name for name in set.intersection(*named) if name.endswith(".episodes"))[0]


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=["truncated", "flipped", "deleted"])
def test_every_damaged_file_is_named_and_an_exact_continuation_found_or_rejected(
    damage, unfinished, tmp_path, monkeypatch, capsys
):
    alone, torn = unfinished
    names = files_of(torn)
    assert {Path(name).name for name in names} >= {"manifest.json", "common.th", "rank_0.th"}
    assert any(name.startswith("kept/") for name in names)
    ends = set()
    for number, name in enumerate(names):
        run = copied(torn, tmp_path / str(number))
        damaged, *others = newest_first(run)
        damage(run / "checkpoints" / name)
        sound = [path for path in others if name not in manifest_of(path)["files"]]
        ends.add(bool(sound))
        if not sound:
            said = rejected(run, capsys)
            assert all(
                word in said for word in (Path(name).name, "resume=lossy", "resume=weights", "auto_resume=False")
            )
            continue
        before = contents(run)
        assert start(run) == 0, capsys.readouterr().err
        log = (run / "logs" / "rank_0.log").read_text()
        (said,) = [line for line in log.splitlines() if f"{damaged} is damaged" in line]
        assert Path(name).name in said
        assert f"continuing from {sound[0]}: " in log and f"{sound[0]}, an earlier one, is used" in log
        assert differences(alone, run) == []
        (aside,) = (run / "set_aside").iterdir()
        for kept, content in before.items():  # weights, lines and the damaged checkpoint itself
            if kept.startswith((f"checkpoints/{damaged.name}/", "models/", "metrics", "episodes/")):
                places = [run / kept, aside / kept]
                assert any(path.read_bytes().startswith(content) for path in places if path.exists()), kept
        (entry,) = resumed(run)
        assert (entry["kind"], entry["from"]) == ("exact", f"checkpoints/{sound[0].name}")
        assert entry["set_aside"] == f"set_aside/{aside.name}"
    assert ends == {True, False}


@pytest.mark.parametrize("every", [False, True])
def test_lossy_continues_without_the_damaged_episodes_and_counts_them(every, unfinished, tmp_path, monkeypatch, capsys):
    """One flipped byte in a file that all checkpoints share, or in each file: then no batch is left."""
    run = copied(unfinished[1], tmp_path)
    newest, name = newest_first(run)[0], shared_by_all(run)
    manifest = manifest_of(newest)
    (said,) = [said["replay"] for said in manifest["logs"]]
    oldest = said["added"] - said["kept"]
    parts = [part for part in said["parts"] if part["file"] == name or every]
    lost = sum(part["first"] + part["count"] - max(part["first"], oldest) for part in parts)
    for part in parts:
        flip(run / "checkpoints" / part["file"])
    before = contents(run)
    assert parts[0]["file"] in rejected(run, capsys)
    assert 0 < lost < said["kept"] or every
    seen: dict[str, int] = {}

    with monkeypatch.context() as patch:
        inner = Checkpointer.restore

        def restore(checkpointer, stage):
            inner(checkpointer, stage)
            seen.update(left=len(stage.data.buffer), t_env=stage.clock.t_env, iteration=checkpointer.iteration)
            raise KilledError

        patch.setattr(Checkpointer, "restore", restore)
        with pytest.raises(KilledError):
            start(run, "resume=lossy")
    assert seen == {"left": said["kept"] - lost, "t_env": manifest["t_env"], "iteration": manifest["iteration"]}
    assert start(run, "resume=lossy") == 0
    log = (run / "logs" / "rank_0.log").read_text()
    assert f"resume=lossy: {lost} episode(s) in {parts[0]['file']}" in log
    entries = resumed(run)
    assert [(e["kind"], e["from"], e["lost_episodes"]) for e in entries] == [
        ("lossy", f"checkpoints/{newest.name}", lost)
    ] * 2
    assert entries[0]["versions"]["torch"] == torch.__version__
    asides = list((run / "set_aside").iterdir())
    named = [f"checkpoints/{file}" for file in manifest["files"]]
    for kept, content in before.items():
        if kept in named or kept.startswith("models/"):
            found = [path.read_bytes() for path in (run / kept, *(aside / kept for aside in asides)) if path.exists()]
            assert content in found, kept
    assert summary_of(run)["exit_state"] == "completed"


@pytest.mark.parametrize("harm", ["rank_0.th", "common.th", "checkpoints"])
def test_weights_continues_from_the_newest_weights_where_no_checkpoint_is_whole(
    harm, unfinished, tmp_path, monkeypatch, capsys
):
    run = copied(unfinished[1], tmp_path)
    newest = newest_first(run)[0]
    t_env = manifest_of(newest)["t_env"]
    steps = sorted(int(path.name) for path in (run / "models").iterdir())
    if harm == "checkpoints":
        (run / "checkpoints").rename(tmp_path / "elsewhere")
    for path in newest_first(run):
        truncate(path / harm)
    before = contents(run)
    assert "resume=weights" in rejected(run, capsys)
    assert "resume=weights" in rejected(run, capsys, "resume=lossy")
    seen: dict[str, object] = {}
    inner = Checkpointer.restore

    def restore(checkpointer, stage):
        inner(checkpointer, stage)
        weights = [value.clone() for value in stage.mac.agent.state_dict().values()]
        seen.setdefault(
            "start", (len(stage.data.buffer), stage.clock.t_env, checkpointer.iteration >= KILLED_AT, weights)
        )

    monkeypatch.setattr(Checkpointer, "restore", restore)
    assert start(run, "resume=weights") == 0, capsys.readouterr().err
    left, began, later, weights = seen["start"]
    assert (left, later) == (0, True)
    if harm == "rank_0.th":
        assert began == t_env
        saved = torch.load(newest_first(unfinished[1])[0] / "common.th", weights_only=True)
        expected = saved["shared"]["modules"]["agent"]
    else:
        assert began == steps[-1] <= t_env
        expected = torch.load(unfinished[1] / "models" / str(steps[-1]) / "agent.th", weights_only=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, expected.values(), strict=True))
    assert [entry["kind"] for entry in resumed(run)] == ["weights"]
    steps_logged = [json.loads(line)["t_env"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps_logged == sorted(steps_logged) and steps_logged[-1] >= 40
    asides = list((run / "set_aside").iterdir()) if (run / "set_aside").exists() else []
    for kept, content in before.items():
        if kept.startswith(("models/", f"checkpoints/{newest.name}/", "episodes/", "metrics")):
            found = [path.read_bytes() for path in (run / kept, *(aside / kept for aside in asides)) if path.exists()]
            assert any(each.startswith(content) for each in found), kept
    assert summary_of(run)["exit_state"] == "completed"
    last = manifest_of(newest_first(run)[0])
    assert last["t_env"] >= 40 and last["iteration"] > KILLED_AT


def test_where_the_newest_checkpoint_is_gone_what_came_after_the_one_before_is_kept(unfinished, tmp_path):
    """`saved.json` names it, so its absence is noticed."""
    run = copied(unfinished[1], tmp_path)
    newest, older = newest_first(run)
    newest.rename(tmp_path / "moved")
    (run / "models" / "99").mkdir()
    (run / "models" / "99" / "agent.th").write_bytes(b"late")
    folder = RunFolder(run)
    taken = plan_of(folder)
    assert (taken.kind, taken.state.checkpoint.path, taken.behind) == ("exact", older, True)
    aside = Path(cut_back(folder, Dist(), taken).aside)
    assert (aside / "models" / "99" / "agent.th").read_bytes() == b"late"
    assert checkpoint_store.read_saved(folder) == KILLED_AT - 1


@pytest.mark.parametrize("how", ["exact", "weights"])
def test_folders_in_the_place_of_files_are_kept_and_not_in_the_way(how, unfinished, tmp_path, monkeypatch, capsys):
    run = copied(unfinished[1], tmp_path)
    newest, older = newest_first(run)
    named = [set(manifest_of(path)["files"]) for path in (newest, older)]
    (episodes,) = [name for name in named[0] - named[1] if name.endswith(".episodes")]
    places = [run / "checkpoints" / episodes]  # exact: the older checkpoint does not name it
    places += [newest / "rank_0.th", older / "manifest.json"] * (how == "weights")
    for path in places:
        path.unlink()
        (path / "mine").mkdir(parents=True)
    assert start(run, f"resume={how}") == 0, capsys.readouterr().err
    assert [entry["kind"] for entry in resumed(run)] == [how]
    assert len([path for path in run.rglob("mine") if path.is_dir()]) == len(places)


def test_another_format_is_rejected_and_named(unfinished, tmp_path, capsys):
    run = copied(unfinished[1], tmp_path)
    for path in newest_first(run):
        manifest = manifest_of(path)
        (path / "manifest.json").write_text(json.dumps(sealed({**manifest, "format": FORMAT + 7})))
    assert f"format {FORMAT + 7}" in rejected(run, capsys)
    assert f"format {FORMAT + 7}" in rejected(run, capsys, "resume=lossy")


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_what_the_system_cannot_read_is_tried_again_then_rejected(number, unfinished, tmp_path, monkeypatch, capsys):
    """Such an error is no damage: also `lossy` and `weights` wait until the disk answers."""
    run = copied(unfinished[1], tmp_path)
    name = f"checkpoints/{newest_first(run)[0].name}/common.th"
    monkeypatch.setattr(storage, "RETRY_SECONDS", (0.0, 0.0))
    inner, tried = checkpoint_store.digest, []

    def digest(path: Path) -> str:
        if path == run / name:
            tried.append(path)
            if len(tried) <= fail:
                raise OSError(number, os.strerror(number), str(path))
        return inner(path)

    monkeypatch.setattr(checkpoint_store, "digest", digest)
    for mode in ("exact", "lossy", "weights"):
        tried, fail = [], 99
        said = rejected(run, capsys, f"resume={mode}")
        assert len(tried) == 3
        assert f"{run / name} cannot be read ({os.strerror(number)})" in said
    with monkeypatch.context() as patch:
        patch.setattr(
            resuming,
            "require_own",
            lambda path: (_ for _ in ()).throw(OSError(number, "no answer")),
        )
        assert "cannot be read (no answer)" in rejected(run, capsys), "it is not left for a new run either"
        assert [path.name for path in run.parent.iterdir() if path.is_dir()] == [run.name]
    fail = 0
    with monkeypatch.context() as patch:  # after the comparison
        broken = OSError(number, os.strerror(number))
        patch.setattr("omagd.components.episode_file._read_field", lambda *_: (_ for _ in ()).throw(broken))
        assert start(run) == 2
        assert f"episodes cannot be read ({os.strerror(number)})" in capsys.readouterr().err
    tried, fail = [], 2
    assert plan_of(RunFolder(run)).kind == "exact"
    assert len(tried) == 3


def test_a_run_that_was_never_saved_begins_from_scratch_and_keeps_what_it_wrote(unfinished, tmp_path, monkeypatch):
    """Killed before its first checkpoint was complete, which `saved.json` proves."""
    alone, torn = unfinished
    run = copied(torn, tmp_path)
    shutil.rmtree(run / "checkpoints")
    (run / "saved.json").write_text('{"iteration": 0}')
    (run / "checkpoints" / ".00000001.abc.partial").mkdir(parents=True)
    (run / "models" / "20" / ".agent.th.123.tmp").write_bytes(b"half")
    assert start(run) == 0
    assert differences(alone, run) == []
    assert not list((run / "checkpoints").glob(".*")) and not list(run.rglob(".*.tmp"))
    (aside,) = (run / "set_aside").iterdir()
    assert (aside / "metrics.jsonl").read_bytes() == (torn / "metrics.jsonl").read_bytes()
    assert "resumed" not in json.loads((run / "card.json").read_text())


def test_a_kill_at_any_step_of_setting_aside_is_harmless(unfinished, tmp_path, monkeypatch):
    """Whatever step is the last one, the next start ends up with the same files, and each content is still there."""
    whole = copied(unfinished[1], tmp_path / "whole")
    truncate(newest_first(whole)[0] / "common.th")
    for path in (whole / "metrics.jsonl", whole / "episodes" / "rank_0.jsonl"):
        path.write_bytes(path.read_bytes() + b'{"t_env": 99}\n')  # behind both checkpoints
    (whole / "models" / "99").mkdir()
    (whole / "models" / "99" / "agent.th").write_bytes(b"late")
    wanted = {content for name, content in contents(whole).items() if name != "saved.json"}
    steps = ("sync", "link", "clean", "note_saved")
    inner = {name: getattr(set_aside, name) for name in steps}
    count = 0

    def counted(name: str):
        def step(*arguments):
            nonlocal count
            count -= 1
            if count == 0:
                raise KilledError
            return inner[name](*arguments)

        return step

    for name in steps:
        monkeypatch.setattr(set_aside, name, counted(name))
    ends, last, killed = [], 0, True
    while killed:
        last, killed = last + 1, False
        run = copied(whole, tmp_path / str(last))
        folder = RunFolder(run)
        for kill in (last, 0):
            count = kill
            try:
                cut_back(folder, Dist(), plan_of(folder))
            except KilledError:
                killed = True
                assert wanted <= set(contents(run).values()), f"something is lost after step {last}"
        found = contents(run)
        assert wanted <= set(found.values()), f"something is lost after step {last}"
        ends.append({name: content for name, content in found.items() if not name.startswith("set_aside/")})
    assert last > 12
    assert all(end == ends[0] for end in ends)


WRONG_FACTS = [
    ("t_env", None), ("t_env", []), ("t_env", "x"), ("t_env", True), ("t_env", -1), ("score", []), ("score", "x"),
    ("logs", []), ("logs", [[]]), ("logs", [{"replay": 1}]),
    ("logs", [{"replay": {"added": 1, "kept": 1, "parts": [{}]}}]),
    ("stage", 3), ("clock", None), ("world_size", 0), ("iteration", 10**30),
    ("files", {"\ud800/c": {"bytes": 1, "sha256": ""}}),
    ("files", {"a" * 300 + "/c": {"bytes": 1, "sha256": ""}}), ("files", {"a/c": {"bytes": "x", "sha256": None}}),
]  # fmt: skip
WRONG_PARTS = [
    ("common", "finished", None), ("common", "finished", 5), ("common", "finished", [{"name": "stage1"}]),
    ("common", "products", None), ("common", "run", {}), ("common", "stage", 3), ("common", "modules", [1]),
    ("rank_0", "episode_bytes", "x"), ("rank_0", "episode_bytes", [1]), ("rank_0", "past", None),
]  # fmt: skip


def test_values_of_other_types_make_a_checkpoint_damaged(unfinished, tmp_path, capsys):
    """Though its seal and checksums fit: the one before it is used, and nothing by `checkpoint_path` of it alone."""
    for number, (*part, key, value) in enumerate([*WRONG_FACTS, *WRONG_PARTS]):
        run = copied(unfinished[1], tmp_path / str(number))
        newest, older = newest_first(run)
        if part:
            resaved(run, part[0], lambda state, key=key, value=value: state.update({key: value}))
        else:
            manifest = manifest_of(newest)
            (newest / "manifest.json").write_text(json.dumps(sealed({**manifest, key: value})))
        name = f"{part[0]}.th" if part else "manifest.json"
        taken = plan_of(RunFolder(run))
        assert taken.state.checkpoint.path == older, (key, value)
        assert taken.problems[newest].startswith(name), (key, value)
        words = [f"local_results_path={tmp_path}/results", "auto_resume=False", f"checkpoint_path={newest}"]
        assert main([*COMMAND, *words]) == 2
        said = capsys.readouterr().err
        assert (said.startswith("error: checkpoint_path="), len(said.splitlines()), name in said) == (True, 1, True)
    assert not (tmp_path / "results").exists()
    assert [path.name for path in newest_first(run)] == [newest.name, older.name]
    weights = plan_of(RunFolder(run), None, "resume=weights")
    assert (weights.kind, weights.state.checkpoint.path) == ("weights", newest), "a rank's part is not needed for them"


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("part", ["common", "rank_0"])
def test_code_in_a_checkpoint_is_not_run_though_its_checksum_fits(part, unfinished, tmp_path):
    run, marker = copied(unfinished[1], tmp_path), tmp_path / "marker"
    newest, older = newest_first(run)
    resaved(run, part, lambda state: state.update(hidden=Hostile(marker)))
    plan = plan_of(RunFolder(run))
    assert (plan.state.checkpoint.path, marker.exists()) == (older, False)
    assert plan.problems[newest].startswith(f"{part}.th")


def test_episodes_of_ranks_that_the_run_no_longer_has_stay(unfinished, tmp_path, monkeypatch):
    """Also where the newest checkpoint is of fewer ranks; what they wrote after it is cut off, and kept."""
    run = copied(unfinished[1], tmp_path)
    log = run / "episodes" / "rank_1.jsonl"
    log.write_text("a\nb\n")
    resaved(run, "common", lambda state: state["run"].pop("earlier_ranks"))  # as versions before this key wrote it
    for _ in range(2):
        kill_at(1, run, monkeypatch)
        assert log.read_text() == "a\nb\n"
        assert not (run / "set_aside").exists()
    common = torch.load(newest_first(run)[0] / "common.th", weights_only=True)
    assert common["run"]["earlier_ranks"] == {1: 4}
    card = json.loads((run / "card.json").read_text())
    card["told"]["ranks"] = 2  # a start with two ranks was killed before its first checkpoint
    (run / "card.json").write_text(json.dumps(card))
    log.write_text("a\nb\nc\n")
    (run / "episodes" / "rank_2.jsonl").write_text("d\n")
    folder = RunFolder(run)
    cut = cut_back(folder, Dist(), plan_of(folder))
    assert log.read_text() == "a\nb\n" and not folder.episode_log(2).exists()
    aside = Path(cut.aside) / "episodes"
    assert (aside / "rank_1.jsonl").read_text() == "a\nb\nc\n"
    assert (aside / "rank_2.jsonl").read_text() == "d\n"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_came_after_the_checkpoint_is_kept_where_ranks_or_versions_change(ranks, tmp_path):
    folder = RunFolder(tmp_path / "run")
    saved_by_two(folder)
    (folder.step(99)).mkdir(parents=True)
    (folder.step(99) / "agent.th").write_bytes(b"late")
    told = {"ranks": 2, "versions": {**versions(), **({"torch": "1.0"} if ranks == 2 else {})}}
    folder.card_json.write_text(json.dumps({"id": "x", "compared": {}, "told": told}))
    if ranks == 1:
        cut = cut_back(folder, Dist(), plan_of(folder))
    else:
        cut, _ = on_two_ranks(lambda dist: cut_back(folder, dist, plan_of(folder, dist)))
    aside = Path(cut.aside)
    assert (aside / "models" / "99" / "agent.th").read_bytes() == b"late"
    assert (aside / "episodes" / "rank_1.jsonl").read_text() == "xyz"
    assert folder.episode_log(1).read_text() == "xy"


def test_missing_lines_and_other_versions_are_reported(unfinished, tmp_path, monkeypatch):
    run = copied(unfinished[1], tmp_path)
    card = json.loads((run / "card.json").read_text())
    card["told"]["versions"]["torch"] = "1.0"
    (run / "card.json").write_text(json.dumps(card))
    metrics, episodes = run / "metrics.jsonl", run / "episodes" / "rank_0.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[:-1]))
    lost = {"metrics.jsonl": len(lines[-1]), "episodes/rank_0.jsonl": episodes.stat().st_size}
    episodes.unlink()
    kill_at(1, run, monkeypatch)
    log = (run / "logs" / "rank_0.log").read_text()
    for name, size in lost.items():
        assert f"WARNING omagd {run / name}: {size} bytes that were there at that checkpoint are missing" in log
    assert resumed(run)[0]["missing_bytes"] == lost
    assert f"this run continues with other versions: torch {torch.__version__} (was 1.0)" in log
    assert resumed(run)[0]["versions_before"]["torch"] == "1.0"


def test_what_stands_in_the_place_of_a_file_or_folder_of_the_run(unfinished, tmp_path, monkeypatch, capsys):
    """Folders move to `set_aside/`; a file instead of a folder is rejected by its name; `run.json` is named."""
    run = copied(unfinished[1], tmp_path)
    (run / "models").rename(tmp_path / "models")
    (run / "models").write_text("mine")
    assert f"{run / 'models'} is not a folder: move it away" in rejected(run, capsys)
    (run / "models").unlink()
    (tmp_path / "models").rename(run / "models")
    names = ("saved.json", "summary.json", "card.json", "env_info.json", "metrics.jsonl")
    for name in names:
        (run / name).unlink(missing_ok=True)
        (run / name / "mine").mkdir(parents=True)
    kill_at(1, run, monkeypatch)
    (aside,) = (run / "set_aside").iterdir()
    assert all((aside / name / "mine").is_dir() for name in names)
    (run / "run.json").unlink()
    (run / "run.json").mkdir()
    capsys.readouterr()
    assert start(run, "t_max=4") == 0
    assert f"{run / 'run.json'} is damaged: that run is not continued" in capsys.readouterr().out


class Together:
    """The place of one of two ranks, which are threads of this process."""

    def __init__(self, rank: int, box: list[object], barrier: threading.Barrier) -> None:
        self.rank, self.world_size, self.is_main = rank, 2, rank == 0
        self._box, self._barrier = box, barrier

    def gather(self, value: object) -> list[object]:
        self._box[self.rank] = value
        self._barrier.wait(10)
        found = list(self._box)
        self._barrier.wait(10)
        return found

    def broadcast(self, value: object) -> object:
        return self.gather(value)[0]


def on_two_ranks(work: Callable[[Together], object]) -> list[object]:
    """Return what `work` returns, or raises, on each of two ranks."""

    def told(dist: Together) -> object:
        try:
            return work(dist)
        except UserError as problem:
            return problem.message

    box: list[object] = [None, None]
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(told, [Together(rank, box, barrier) for rank in range(2)]))


def saved_by_two(folder: RunFolder) -> None:
    """Write the checkpoints 1 and 2 of a run of two ranks, each rank with a file of replay that both share."""
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


def test_ranks_decide_alike(tmp_path, monkeypatch):
    """Though each compares only its share of the files, and only one of them meets an error of its disk."""
    folder = RunFolder(tmp_path / "run")
    saved_by_two(folder)
    flip(folder.checkpoints / "kept" / "rank1.episodes")
    first, second = on_two_ranks(lambda dist: plan_of(folder, dist))
    assert first == second and "rank1.episodes" in first and "resume=lossy" in first
    found = on_two_ranks(lambda dist: plan_of(folder, dist, "resume=lossy"))
    for taken in found:
        assert (taken.kind, taken.state.iteration) == ("lossy", 2)
        assert taken.state.lost == {"kept/rank1.episodes"}
        assert taken.state.lost_episodes() == 3, "the oldest of four had left the replay already"
    inner, alike = checkpoint_store.digest, threading.local()

    def digest(path: Path) -> str:
        if getattr(alike, "rank", 0) == 1:
            raise OSError(errno.EIO, "broken disk")
        return inner(path)

    def unlucky(dist: Together) -> object:
        alike.rank = dist.rank
        return plan_of(folder, dist, "resume=lossy")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "RETRY_SECONDS", ())
        patch.setattr(checkpoint_store, "digest", digest)
        first, second = on_two_ranks(unlucky)
    assert first == second and "cannot be read (broken disk)" in first
    assert folder.metrics_jsonl.read_text() == "abcdef", "nothing has changed until here"
    aside, _ = (cut.aside for cut in on_two_ranks(lambda dist: cut_back(folder, dist, found[dist.rank])))
    assert (Path(aside) / "metrics.jsonl").read_text() == "abcdef"
    assert folder.metrics_jsonl.read_text() == "abc"
    assert [folder.episode_log(rank).read_text() for rank in range(2)] == ["xy", "xy"]


def test_a_stop_reports_saved_only_if_the_files_are_found(unfinished, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointer, "stop_wanted", lambda: True)
    inner = CheckpointStore.prune

    def prune(store):
        said = inner(store)
        for path in (store.path / "kept").iterdir():
            path.unlink()
        return said

    for harmed in (False, True):
        if harmed:
            monkeypatch.setattr(CheckpointStore, "prune", prune)
        run = copied(unfinished[1], tmp_path / str(harmed))
        assert start(run) == 143
        (line,) = [line for line in (run / "logs" / "rank_0.log").read_text().splitlines() if "asked to stop" in line]
        assert ("is saved" in line) is not harmed
        assert ("ERROR" in line and "is not saved (rank 0: kept/replay" in line) is harmed


def test_names_are_on_the_disk_in_the_order_in_which_they_are_relied_on(unfinished, tmp_path, monkeypatch):
    run, done = copied(unfinished[1], tmp_path), []
    before = {path.name for path in newest_first(run)}

    def record(module: object, name: str) -> None:
        inner = getattr(module, name)

        def call(path: Path, *more: object) -> object:
            done.append((name, Path(path).name))
            return inner(path, *more)

        monkeypatch.setattr(module, name, call)

    for module in (checkpoint_store, saver, set_aside):
        record(module, "sync")
    record(Path, "rename")
    record(checkpoint_store, "write_json")
    monkeypatch.setattr(checkpointer, "stop_wanted", lambda: True)
    assert start(run) == 143
    (newest,) = {path.name for path in newest_first(run)} - before
    (draft,) = {name for what, name in done if what == "rename" and name.startswith(f".{newest}.")}
    save = done[: done.index(("rename", draft))]
    after = [step for step in done[len(save) :] if step[1] in {"checkpoints", run.name, run.parent.name, "saved.json"}]
    assert ("sync", "kept") in save
    assert save[-1] == ("sync", draft)
    assert after[:4] == [
        ("sync", "checkpoints"), ("sync", run.name), ("sync", run.parent.name), ("write_json", "saved.json"),
    ]  # fmt: skip
    assert after[4:] == [("sync", run.name)]


@pytest.mark.parametrize("moment", [1, 2])
def test_a_running_run_is_continued_in_a_new_folder(moment, unfinished, tmp_path, monkeypatch):
    """It replaces its checkpoint just after that was compared: before it is read, and before it is linked."""
    run = copied(unfinished[1], tmp_path)
    newest, other = newest_first(run)
    other.rename(tmp_path / "not yet")
    inner, calls = Checkpoint.check, []

    def check(found, *arguments):
        inner(found, *arguments)
        calls.append(found.path)
        if len(calls) == moment:
            shutil.rmtree(newest)
            (tmp_path / "not yet").rename(other)

    monkeypatch.setattr(Checkpoint, "check", check)
    words = [f"local_results_path={tmp_path}/new", "auto_resume=False", f"checkpoint_path={run}"]
    assert main([*COMMAND, *words]) == 0
    (folder,) = (tmp_path / "new").glob("*/summary.json")
    log = (folder.parent / "logs" / "rank_0.log").read_text()
    assert f"continuing from {folder.parent / 'checkpoints' / other.name}: iteration {KILLED_AT - 1}" in log
    assert resumed(folder.parent)[0]["kind"] == "exact"
