"""A finished run drops the replay of its checkpoints; `omagd clean` frees that of earlier runs, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from interruption import COMMAND

from omagd.run.checkpoint.resuming import take
from omagd.run.cli.main import main


def train(results: Path, token: str, *more: str) -> Path:
    words = (f"local_results_path={results}", f"unique_token={token}", "auto_resume=False", *more)
    assert main([*COMMAND, *words]) == 0
    return results / token


def replay(run: Path) -> list[Path]:
    return sorted(run.glob("checkpoints/kept/*.episodes"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("kept"), "kept", "keep_checkpoints=True")


def copies(kept: Path, results: Path, *names: str) -> list[Path]:
    """Return copies of a run with its replay, as runs of earlier versions have it."""
    found = []
    for name in names:
        os.system(f"cp -r {kept} {results / name}")
        config = json.loads((kept / "config.json").read_text())
        (results / name / "config.json").write_text(json.dumps({**config, "keep_checkpoints": False}))
        found.append(results / name)
    return found


def test_a_finished_run_without_its_replay_says_so_where_a_longer_one_begins(kept, tmp_path, capsys):
    run = train(tmp_path, "first")
    assert replay(kept) and not replay(run) and list(run.glob("checkpoints/*/manifest.json"))
    longer = [*COMMAND, "t_max=60", "auto_resume=False", f"local_results_path={tmp_path / 'new'}"]
    capsys.readouterr()
    assert main([*longer, f"checkpoint_path={run}"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "replay was removed" in line and "keep_checkpoints" in line and "resume=lossy" in line
    assert not list((tmp_path / "new").glob("*/run.json"))
    assert main([*longer, f"checkpoint_path={run}", "resume=lossy"]) == 0
    assert "6 episode(s)" in capsys.readouterr().out
    assert main([*longer, f"checkpoint_path={kept}"]) == 0
    assert "resume=lossy" not in capsys.readouterr().out


def test_clean_frees_finished_runs_and_leaves_everything_else(kept, tmp_path, capsys):
    results, elsewhere = tmp_path / "results", tmp_path / "elsewhere"
    for path in (results / "study" / "runs", results / "sacred" / "1", elsewhere):
        path.mkdir(parents=True)
    (results / "sacred" / "1" / "run.json").write_text('{"status": "COMPLETED"}')
    done, unfinished, locked, linked = copies(kept, results, "done", "unfinished", "locked", "linked")
    (inside,) = copies(kept, results / "study" / "runs", "inside")
    (away,) = copies(kept, elsewhere, "away")
    (results / "link").symlink_to(away)
    (unfinished / "run.json").write_text('{"identity": "x"}')
    (linked / "checkpoints").rename(tmp_path / "checkpoints")
    (linked / "checkpoints").symlink_to(tmp_path / "checkpoints")
    os.link(replay(done)[0], tmp_path / "shared")
    everything = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    size = sum(path.stat().st_size for path in (*replay(done)[1:], *replay(inside)))
    with take(locked):
        assert main(["clean", str(results), "--dry-run"]) == 0
        first = capsys.readouterr()
        assert everything.keys() == {path for path in tmp_path.rglob("*") if path.is_file()}
        assert main(["clean", str(results)]) == 0
        second = capsys.readouterr()
        assert main(["clean", str(locked)]) == 2
        assert main(["clean", str(unfinished)]) == main(["clean", str(results / "link")]) == 2
    for text in (first, second):
        assert f"{size / 1e6:.1f} MB" in text.out.splitlines()[-1] and "2 finished" in text.out
        assert f"{locked} stays" in text.err and f"{unfinished} stays" in text.err and "sacred" not in text.err
    freed = everything.keys() - {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.parents[2] for path in freed} == {done, inside}
    assert {path.suffix for path in freed} == {".episodes"}
    assert main(["clean", str(kept)]) == 2 and "keep_checkpoints=True" in capsys.readouterr().err
