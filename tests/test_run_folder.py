"""Run folders, JSON files, and the closing words of a run."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

from omagd.run.reporting.report import next_command, render_summary, seeds_table, write_summary
from omagd.utils.progress import duration
from omagd.utils.run_folder import RunFolder, make_token, write_json


def summary_of(folder, seed=1, won=0.9, **changes):
    """Return a summary as a finished run writes it."""
    clocks = {"stage1": (200, 0, 0, 200), "stage2": (150, 0, 0, 150), "stage3": (9, 205000, 6400, 1600)}
    values = {"test_battle_won_mean": won, "best_test_battle_won_mean": 0.95, "test_return_mean": 19.25}
    files = {
        "stage1": {"stage1": str(folder.pretrained("stage1", best=True) / "tokenizer.th")},
        "stage2": {"stage2": str(folder.pretrained("stage2", best=True) / "stage2_model.th")},
        "stage3": {"agent": str(folder.step(205000))},
    }
    stages = {
        name: {
            "clock": dict(zip(("epoch", "t_env", "episodes", "updates"), clock, strict=True)),
            "values": values if name == "stage3" else {"graph_loss": 1.5},
            "files": files[name],
        }
        for name, clock in clocks.items()
    }
    facts = {
        "name": "omagd_small", "env": "skirmish", "map_name": "3m", "seed": seed, "world_size": 2, "environments": 16,
        "folder": str(folder.path), "exit_state": "completed", "wall_seconds": 572.3, "stages": stages,
    }  # fmt: skip
    return {**facts, **changes}


def test_two_runs_never_share_a_folder_and_its_name_is_a_file_name(tmp_path):
    token = make_token("my run/2", "skirmish", "3m", 7, now=0)
    assert token.startswith("my-run-2_skirmish_3m_seed7_19") and Path(token).name == token
    assert "_seed7_evaluation_19" in make_token("omagd", "skirmish", "3m", 7, now=0, evaluation=True)
    assert "__" not in make_token("a", "memory_game", "", 1)
    folders = [RunFolder.create(tmp_path / "results", token) for _ in range(3)]
    assert [folder.token for folder in folders] == [token, f"{token}_2", f"{token}_3"]
    with pytest.raises(FileExistsError):
        RunFolder.create(tmp_path / "results", token, generated=False)


def test_paths_and_artifacts_are_the_published_ones(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.path.exists()
    folder = RunFolder.create(tmp_path, "run")
    assert folder.artifacts() == {}
    for step in (900, 10240, 2000):
        folder.step(step).mkdir()
    for path in (folder.pretrained("stage1"), folder.pretrained("stage2", best=True), folder.replays):
        path.mkdir()
    for path in (folder.plots / "curves.png", folder.log(1), *folder.files()):
        path.touch()
    assert {name: str(Path(path).relative_to(folder.path)) for name, path in folder.artifacts().items()} == {
        "config": "config.json", "card": "card.json", "env_info": "env_info.json", "metrics": "metrics.jsonl",
        "pretrain_stage1": "models/pretrain_stage1", "pretrain_stage2_best": "models/pretrain_stage2_best",
        "model": "models/10240", "plots/curves": "plots/curves.png", "replays": "replays",
    }  # fmt: skip
    assert (folder.path / "logs" / "rank_1.log").exists() and (folder.path / "summary.json").exists()


def test_json_is_strict_and_written_whole_or_not_at_all(tmp_path):
    value = {"nan": math.nan, "path": Path("x"), 3: np.arange(2), "n": np.float32(1)}
    path = tmp_path / "deep" / "a.json"
    write_json(path, value)
    assert json.loads(path.read_text()) == {"nan": None, "path": "x", "3": [0, 1], "n": 1.0}
    before = path.read_bytes()
    with pytest.raises(TypeError, match="object"):
        write_json(path, {"good": 1, "bad": object()})
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_summary_and_closing_text(tmp_path):
    folder = RunFolder.create(tmp_path, "run")
    (folder.plots / "curves.png").touch()
    folder.step(205000).mkdir()
    write_summary(folder, summary_of(folder, won=math.nan))
    read = json.loads(folder.summary_json.read_text())
    expected = {"win_rate": None, "best_win_rate": 0.95, "return": 19.25, "updates": 1950, "world_size": 2}
    assert read.items() >= expected.items()
    assert read["artifacts"]["plots/curves"] == str(folder.plots / "curves.png")
    values = summary_of(folder)
    write_summary(folder, values)
    text = render_summary(values)
    for part in ("skirmish 3m", "2 ranks, 16 environments", "9 min 32 s", "completed", "win rate 0.900 (best 0.950)",
                 "205,000 steps", "200 epochs", str(folder.path), "plots/curves.png", "models/205000"):  # fmt: skip
        assert part in text, part


def test_next_command_follows_the_stages(tmp_path):
    folder = RunFolder.create(tmp_path / "with space", "run")
    values = summary_of(folder)
    stages = values["stages"]
    assert shlex.split(next_command(values)) == ["python", "-m", "omagd", "evaluate", str(folder.path)]
    base = "python src/main.py --config=omagd_small --env-config=skirmish with env_args.map_name=3m run=ddp".split()
    paths = [f"pretrained_tokenizer_path={stages['stage1']['files']['stage1']}"]
    paths += [f"pretrained_mask_predictor_path={stages['stage2']['files']['stage2']}"]
    for last in (1, 2):
        command = next_command({**values, "stages": {f"stage{n}": stages[f"stage{n}"] for n in range(1, last + 1)}})
        words = [*base, "world_size=2", f"reconstructer_stage=stage{last + 1}", *paths[:last]]
        assert sorted(shlex.split(command)) == sorted(words)
    write_json(folder.config_json, {"pretrained_tokenizer_path": "/given/tokenizer.th"})
    command = next_command({**values, "stages": {"stage2": stages["stage2"]}})
    assert "pretrained_tokenizer_path=/given/tokenizer.th" in command
    for changes in ({"exit_state": "failed"}, {"kind": "evaluation"}):
        assert next_command({**values, **changes}) == ""


def test_seeds_end_in_one_table_with_median_and_spread(tmp_path):
    folder = RunFolder(tmp_path)
    won = [0.5, 0.9, 0.7, 0.8]
    results = [summary_of(folder, seed=seed, won=value) for seed, value in enumerate(won)]
    results.append(summary_of(folder, seed=9, exit_state="failed", stages={}))
    lines = seeds_table(results).splitlines()
    assert lines[1] == "skirmish 3m · omagd_small · 5 seeds"
    rows = {line.split()[0]: line.split() for line in lines[3:] if line and line[0] != "─"}
    assert [rows[str(seed)][1] for seed in range(4)] == ["0.500", "0.900", "0.700", "0.800"]
    assert rows["9"][1] == "-" and rows["9"][-1] == "failed"
    assert [rows[name][1] for name in ("median", "quartiles", "min-max")] == ["0.750", "0.650-0.825", "0.500-0.900"]


def test_durations():
    assert [duration(s) for s in (3.4, 59.6, 545, 11220)] == ["3 s", "1 min 00 s", "9 min 05 s", "3 h 07 min"]
