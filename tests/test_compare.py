"""`omagd compare`: repetitions in one row, differing keys, seeds, what cannot be compared."""

import json
import re
import shutil
import subprocess
import sys

from many_runs import make_run, make_study
from scipy import stats

from omagd.lab.analysis.comparison import table
from omagd.lab.analysis.runs import load
from omagd.lab.analysis.statistics import INTERVALS
from omagd.run.cli.main import main


def rows_of(text):
    """Return the head and the rows of a table as lists of cells, and the notes below it."""
    head, _, *rest = text.splitlines()
    rule = next(i for i, line in enumerate(rest) if line.startswith("─"))
    starts = [match.start() for match in re.finditer(r"(?:^|(?<=  ))\S", head)]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in rest[:rule]]
    return [head[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)], cells, rest[rule + 1 :]


def test_six_runs_with_three_learning_rates_are_three_rows_with_two_seeds_each(tmp_path, capsys):
    make_study(tmp_path)
    assert main(["compare", str(tmp_path)]) == 0
    head, rows, notes = rows_of(capsys.readouterr().out)
    assert head[:5] == ["run", "lr", "n", "seeds", "win rate"]
    assert [row[:4] for row in rows] == [["qmix", rate, "2", "1, 2"] for rate in ("0.0003", "0.001", "0.005")]
    assert rows[0][4] == "0.230 [0.103, 0.357]", "mean of 0.22 and 0.24, and 12.706 standard errors of 0.01"
    said = " ".join(" ".join(notes).split())
    assert said.startswith(f"rows of several seeds: mean [{INTERVALS}], mean time") and "map, paired by seed;" in said
    _, *leads = (re.split("  +", line) for line in notes[-3:])
    assert [row[:4] for row in leads] == [["qmix", "0.001", "+0.200", "1.00"], ["qmix", "0.005", "+0.400", "1.00"]]
    shutil.rmtree(tmp_path / "lr0.005_3m_seed1")
    make_run(tmp_path / "other", (0.0, 0.5), lr=0.005, seed=3)
    lead = table(load([tmp_path])).splitlines()[-1]
    low, high = stats.ttest_ind([0.64, 0.5], [0.22, 0.24], equal_var=False).confidence_interval()
    assert f"+0.340 [{low:.3f}, {high:.3f}]" in lead, "other seeds: not paired"


def test_the_table_fits_the_terminal_and_says_what_it_leaves_out(tmp_path, capsys, monkeypatch):
    make_study(tmp_path, maps=("3m", "8m"), seeds=(1, 2, 3, 4, 5))
    make_run(tmp_path / "long", t_max=7, seed=1, env_args__difficulty="5")
    for width in (100, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["compare", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= width and "card (--wide shows them)" in " ".join(said.split())
        assert all(word in said for word in ("win rate", "lr", "t_max"))
    assert main(["compare", "--wide", str(tmp_path)]) == 0
    wide = capsys.readouterr().out.splitlines()[0].split("  ")
    assert {"card", "state", "best win rate"} <= {word.strip() for word in wide}


def test_each_run_has_its_row_on_request_and_where_a_seed_is_repeated(tmp_path):
    make_study(tmp_path, rates=(0.001,), seeds=(1, 2, 3))
    _, (row,), _ = rows_of(table(load([tmp_path])))
    assert row[:3] == ["qmix", "3", "1-3"]
    _, rows, _ = rows_of(table(load([tmp_path]), each=True))
    assert [row[0] for row in rows] == [f"lr0.001_3m_seed{seed}" for seed in (1, 2, 3)]
    shutil.copytree(tmp_path / "lr0.001_3m_seed1", tmp_path / "monday")
    _, rows, _ = rows_of(table(load([tmp_path])))
    assert len(rows) == 4, "the same seed again is no repetition"


def test_maps_are_apart_and_their_rows_are_compared_on_each_map(tmp_path):
    for map_name in ("3m", "8m"):
        for seed in (1, 2):
            make_run(tmp_path / f"{map_name} {seed}", env_args__map_name=map_name, seed=seed)
        make_run(tmp_path / f"{map_name} long", env_args__map_name=map_name, t_max=7, seed=1)
    head, rows, notes = rows_of(table(load([tmp_path])))
    assert head[1:3] == ["map", "t_max"]
    assert [row[:2] for row in rows] == [
        ["qmix", "skirmish 3m"], ["3m long*", "skirmish 3m"], ["qmix", "skirmish 8m"], ["8m long*", "skirmish 8m"],
    ]  # fmt: skip
    assert [note.partition(": run ")[2] for note in notes[:2]] == [
        "3m long: t_max 7, not 2050000 (on skirmish 3m)", "8m long: t_max 7, not 2050000 (on skirmish 8m)",
    ]  # fmt: skip


def test_a_run_that_goes_on_and_an_evaluation_have_their_rows(tmp_path):
    make_run(tmp_path / "running", (0.0, 0.5, 0.25), seed=1, finished=False)
    played = make_run(tmp_path / "played", seed=1, evaluate=True, checkpoint_path="x")
    summary = json.loads((played / "summary.json").read_text())
    (played / "summary.json").write_text(json.dumps({**summary, "kind": "evaluation"}))
    head, rows, _ = rows_of(table(load([tmp_path / "running", played])))
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    assert [(each["run"], each["kind"], each["state"]) for each in cells] == [
        ("running", "training", "unfinished"), ("played*", "evaluation", "completed"),
    ]  # fmt: skip
    assert (cells[0]["win rate"], cells[0]["best win rate"]) == ("0.250", "0.500")


def test_tools_for_many_runs_need_no_torch_and_name_a_damaged_run(tmp_path):
    """In a process of its own: a damaged run is one line on standard error, the others are used."""
    make_study(tmp_path / "runs", rates=(0.001,), seeds=(1, 2, 3, 4, 5, 6))
    for name in ("config.json", "summary.json"):
        (tmp_path / "runs" / "lr0.001_3m_seed2" / name).write_text("[")
    code = (
        "import sys, omagd; from omagd.run.cli.main import main\n"
        "for command in ('compare', 'plot', 'report'): assert main([command, 'runs']) == 0\n"
        "assert omagd.load_runs('runs').run.nunique() == 5; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert len(lines) == 4 and all(line.startswith("left out: ") and "lr0.001_3m_seed2" in line for line in lines)
    assert {path.name for path in (tmp_path / "runs").iterdir()} > {"curves_win_rate.png", "report.html"}
