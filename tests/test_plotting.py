"""`omagd plot`: what the curves are, the pictures, marl-eval's format, mistakes in one line."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from many_runs import STEPS, make_run, make_study
from matplotlib import image

from omagd.run.analysis import curves, figures, plot
from omagd.run.analysis.groups import groups
from omagd.run.analysis.runs import load
from omagd.run.cli.main import main

WON = "test_battle_won_mean"


def lines_of(folder, axis="steps", statistic=None, metric=WON):
    """Return {title: {label: line}} of the curves of runs."""
    found = curves.curve_panels(groups(load([folder])), metric, axis, statistic)
    return {panel.title: {line.label: line for line in panel.lines} for panel in found}


def test_curves_are_means_over_seeds_on_a_map_and_iqms_over_maps(tmp_path):
    make_study(tmp_path, rates=(0.001, 0.005), maps=("3m", "8m"), seeds=(1, 2, 3))
    found = lines_of(tmp_path)
    assert list(found) == ["skirmish 3m", "skirmish 8m", "all 2 maps"]
    line = found["skirmish 3m"]["lr=0.005"]
    assert line.x.tolist() == list(STEPS) and line.seeds == (3, 3)
    assert line.y == pytest.approx([0.44 * k / 3 for k in range(4)]), "seeds 1, 2, 3 end at 0.42, 0.44, 0.46"
    assert (line.band[0][-1], line.band[1][-1]) == pytest.approx((0.42, 0.46), abs=0.011)
    ends = [0.22, 0.24, 0.26, 0.27, 0.29, 0.31]  # of both maps: the IQM leaves out the outer ones
    assert found["all 2 maps"]["lr=0.001"].y[-1] == pytest.approx(np.mean(ends[1:5]))
    assert lines_of(tmp_path, statistic="mean")["all 2 maps"]["lr=0.001"].y[-1] == pytest.approx(np.mean(ends))


def test_bands_end_where_a_seed_has_no_data(tmp_path, caplog, monkeypatch):
    make_run(tmp_path / "whole", (0.0, 0.2, 0.4, 0.6), seed=1)
    make_run(tmp_path / "killed", (0.0, 0.4), seed=2, finished=False)
    (line,) = lines_of(tmp_path)["skirmish 3m"].values()
    assert line.x.tolist() == list(STEPS[:2]) and line.y == pytest.approx([0.0, 0.3])
    assert line.rest[0].tolist() == list(STEPS[1:]) and line.rest[1] == pytest.approx([0.3, 0.4, 0.6])
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "."]) == 0
    (note,) = caplog.messages
    assert note.startswith("runs of different length (qmix): bands only where all seeds have data")
    assert main(["plot", ".", "--kind", "final"]) == 0
    assert caplog.messages[-1] == "not finished, left out: killed"


def test_tests_at_nearly_the_same_steps_are_one_point_and_others_are_interpolated(tmp_path):
    make_run(tmp_path / "1", (0.0, 0.2, 0.4), steps=(100, 10_100, 20_100), seed=1)
    make_run(tmp_path / "2", (0.0, 0.4, 0.6), steps=(120, 10_300, 20_000), seed=2)
    (line,) = lines_of(tmp_path)["skirmish 3m"].values()
    assert line.x.tolist() == [110, 10_200, 20_050] and line.y == pytest.approx([0.0, 0.3, 0.5])
    make_run(tmp_path / "3", (0.0, 1.0), steps=(0, 20_000), seed=3)  # as if it had tested at other intervals
    (line,) = lines_of(tmp_path)["skirmish 3m"].values()
    assert line.x[0] == 120 and 10_100 in line.x and line.x[-1] == 20_000, "from where all have begun, at every test"
    at = line.x[1]
    wanted = [np.interp(at, x, y) for x, y in (((100, 10_100, 20_100), (0, 0.2, 0.4)), ((120, 10_300, 20_000),
              (0, 0.4, 0.6)), ((0, 20_000), (0, 1)))]  # fmt: skip
    assert line.y[1] == pytest.approx(np.mean(wanted))


def test_the_wall_clock_axis_has_seconds_and_readable_units(tmp_path):
    make_run(tmp_path / "1", seed=1, seconds_per_step=1.0)
    found = curves.curve_panels(groups(load([tmp_path])), WON, "wall", None)
    assert found[0].lines[0].x.tolist() == list(STEPS)
    (panel,), label = plot._in_units(found)
    assert panel.lines[0].x[-1] == pytest.approx(30_100 / 3600) and label == "wall-clock hours"


def test_metrics_that_are_no_shares_are_scaled_on_each_map_before_they_are_averaged(tmp_path):
    make_study(tmp_path, rates=(0.001, 0.005), maps=("3m", "8m"), seeds=(1,))
    found = curves.curve_panels(groups(load([tmp_path])), "test_return_mean", "steps", "mean")
    assert [panel.normalised for panel in found] == [False, False, True]
    assert found[2].lines[1].y[-1] == pytest.approx(1.0) and found[0].lines[1].y[-1] == pytest.approx(8.4)


def test_a_seed_that_is_there_twice_counts_once(tmp_path):
    make_run(tmp_path / "long", seed=1)
    make_run(tmp_path / "short", (0.0, 1.0), seed=1)
    (group,), notes = curves.without_repeats(groups(load([tmp_path])))
    assert [run.label for run in group.runs] == ["long"]
    assert notes == ["qmix: the same map and seed again, left out: short"]


def test_groups_with_another_card_are_marked(tmp_path):
    make_run(tmp_path / "a", lr=0.001, seed=1)
    make_run(tmp_path / "b", lr=0.002, seed=1, env_args__reward_sparse=True)
    marked, notes = curves.incomparable(groups(load([tmp_path])))
    assert len(marked) == 1 and notes[0].endswith("env_args.reward_sparse True, not the default")


@pytest.mark.parametrize("kind", plot.KINDS)
def test_every_kind_writes_a_picture_of_print_size_and_says_what_a_point_is(tmp_path, kind, capsys, monkeypatch):
    make_study(tmp_path / "runs", rates=(0.001, 0.005), maps=("3m", "8m"), seeds=(1, 2))
    captions = []
    rendered = figures.render
    monkeypatch.setattr(figures, "render", lambda *args: captions.append(args[2]) or rendered(*args))
    assert main(["plot", str(tmp_path / "runs"), "--kind", kind, "--out", str(tmp_path / "new" / "figure.png")]) == 0
    png, svg = map(str, (tmp_path / "new" / "figure.png", tmp_path / "new" / "figure.svg"))
    assert capsys.readouterr().out.split() == [png, svg]
    width = image.imread(png).shape[1] / 300
    assert width == pytest.approx(7.16 if kind in ("curves", "final") else 3.5, abs=0.01)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    (caption,) = captions
    assert "2 seeds" in caption and "tests of 32 greedy episodes" in caption and "95 %" in caption


def test_pictures_are_the_same_in_each_call(tmp_path):
    make_study(tmp_path / "runs", rates=(0.001,))
    found = []
    for name in ("one", "two"):
        assert main(["plot", str(tmp_path / "runs"), "--out", str(tmp_path / name)]) == 0
        found.append((tmp_path / f"{name}.svg").read_bytes())
    assert found[0] == found[1]


def test_labels_stand_apart_in_the_order_of_their_lines():
    found = figures._apart([0.5, 0.52, 0.1, 0.51], 0.1)
    assert sorted(range(4), key=found.__getitem__) == [2, 0, 3, 1]
    assert np.diff(sorted(found)).min() >= 0.1 - 1e-3 and found[2] == pytest.approx(0.1)


def test_marl_evals_format(tmp_path):
    """Environment, task, algorithm, seed, step: one value for each metric; the absolute metrics come last."""
    make_study(tmp_path, rates=(0.001, 0.005), maps=("3m", "8m"))
    out = tmp_path / "all.json"
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "x"), "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert list(data) == ["skirmish"] and list(data["skirmish"]) == ["3m", "8m"]
    assert list(data["skirmish"]["8m"]) == ["lr=0.001", "lr=0.005"]
    seeds = data["skirmish"]["3m"]["lr=0.005"]
    assert list(seeds) == ["seed_1", "seed_2"]
    steps = seeds["seed_1"]
    assert list(steps) == ["step_0", "step_1", "step_2", "step_3", "absolute_metrics"]
    values = {"battle_won": [pytest.approx(0.42)], "return": [pytest.approx(8.4)]}
    assert steps["step_3"] == {"step_count": 30100, "elapsed_time": pytest.approx(301.0), **values}
    assert steps["absolute_metrics"] == {"elapsed_time": [pytest.approx(301.0)], **values}


MISTAKES = [
    (["plot"], "error: plot: name runs or a study"),
    (["plot", "~nobody_here/x"], "error: plot ~nobody_here/x: holds no run"),
    (["plot", "x" * 300 + ".jsonl"], "error: plot xxx"),
    (["plot", "nowhere"], "error: plot nowhere: holds no run"),
    (["plot", "runs", "--metric", "battle_wun"], "error: --metric battle_wun: no run has it. Did you mean"),
    (["plot", "runs", "--kind", "curve"], "error: argument --kind: invalid choice"),
    (["plot", "one", "--kind", "improvement"], "error: --kind improvement: compares groups"),
    (["plot", "runs", "--kind", "improvement", "--baseline", "lr=1"], "error: --baseline lr=1: no group has this"),
    (["plot", "apart", "--kind", "profile"], "error: plot: the groups share no map"),
    (["plot", "begun"], "error: plot: the runs have no test yet"),
    (["plot", "runs", "--out", "/proc/x/y"], "error: plot: /proc/x/y.png cannot be written"),
]


@pytest.fixture(scope="module")
def some_runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("some")
    make_study(place / "runs", rates=(0.001, 0.005))
    make_study(place / "one", rates=(0.001,))
    make_run(place / "apart" / "a", config="qmix")
    make_run(place / "apart" / "b", config="vdn", env_args__map_name="8m")
    make_run(place / "begun", won=(), finished=False)
    return place


@pytest.mark.parametrize("words, line", MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_one_line(some_runs, words, line, monkeypatch, capsys):
    monkeypatch.chdir(some_runs)
    before = sorted(some_runs.iterdir())
    assert main(words) == 2
    (found,) = capsys.readouterr().err.splitlines()
    assert found.startswith(line)
    assert sorted(some_runs.iterdir()) == before


def test_a_damaged_run_among_many_is_one_line_and_the_others_are_drawn(tmp_path):
    """In a process of its own: that line is on standard error, and torch is not imported."""
    make_study(tmp_path / "runs", rates=(0.001,), seeds=(1, 2, 3))
    for name in ("config.json", "summary.json"):
        (tmp_path / "runs" / "lr0.001_3m_seed2" / name).write_text("{")
    code = "import sys; from omagd.run.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "plot", str(tmp_path / "runs"), "--out", str(tmp_path / "figure")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert line.startswith("left out: ") and "lr0.001_3m_seed2" in line and len(done.stdout.splitlines()) == 2


def test_help_of_plot_names_its_options(capsys):
    assert main(["plot", "--help"]) == 0
    text = capsys.readouterr().out
    parser = argparse.ArgumentParser()
    plot.arguments(parser)
    assert all(action.option_strings[-1] in text for action in parser._actions if action.option_strings)
