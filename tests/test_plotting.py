"""`omagd plot`: what the curves are, the pictures, mistakes in one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import sacred
import sacred.observers
from many_runs import STEPS, make_run, make_run_on_a_set, make_study

from omagd.lab.analysis import curves, plot
from omagd.lab.analysis.groups import groups
from omagd.lab.analysis.runs import load
from omagd.lab.analysis.statistics import interval, iqm
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


def test_a_seed_that_is_there_twice_counts_once(tmp_path):
    make_run(tmp_path / "long", seed=1)
    make_run(tmp_path / "short", (0.0, 1.0), seed=1)
    (group,), notes = curves.without_repeats(groups(load([tmp_path])))
    assert [run.label for run in group.runs] == ["long"]
    assert notes == ["qmix: the same map and seed again, left out: short"]


def losing(root, maps=("3m", "8m"), seeds=(1, 2, 3, 4)):
    """Write runs of two methods whose returns are negative and of another size on each map; return their groups."""
    for i, rate in enumerate((0.001, 0.005)):
        for size, map_name in enumerate(maps, 1):
            for seed in seeds:
                won = tuple(-size * (10 - i - t - seed**2 / 16) / 20 for t in range(3))
                make_run(root / f"{rate}_{map_name}_{seed}", won, lr=rate, seed=seed, env_args__map_name=map_name)
    return groups(load([root]))


def test_tests_are_scaled_by_the_range_of_each_map_before_they_are_put_together(tmp_path):
    found, metric = losing(tmp_path), "test_return_mean"
    curves_of = {p: [r.test_curve(metric)[2] for g in found for r in g.at(p)] for p in curves.places(found)}
    low_high = {p: (np.min(all_of), np.max(all_of)) for p, all_of in curves_of.items()}

    def scaled(group, place):
        low, high = low_high[place]
        return np.array([(run.tests[-1][metric] - low) / (high - low) for run in group.at(place)])

    (curve,) = [p for p in curves.curve_panels(found, metric, "steps", None) if p.normalised]
    for group, line in zip(found, curve.lines, strict=True):
        both = [scaled(group, place) for place in low_high]
        assert line.label == group.label and line.y[-1] == pytest.approx(iqm(both))
        ends = [float(end) for end in interval(iqm, both)]
        assert (line.band[0][-1], line.band[1][-1]) == pytest.approx(ends, abs=0.02)


def test_maps_that_some_group_has_not_played_are_not_put_together(tmp_path):
    make_study(tmp_path, rates=(0.001, 0.005), maps=("3m", "8m"), seeds=(1, 2))
    make_study(tmp_path / "more", rates=(0.005,), maps=("2s3z",), seeds=(1, 2))
    found = groups(load([tmp_path, tmp_path / "more"]))
    panels = curves.curve_panels(found, WON, "steps", None)
    assert [panel.title for panel in panels][-1] == "all 2 maps"
    assert {panel.title: len(panel.lines) for panel in panels}["skirmish 2s3z"] == 1
    assert [line.seeds for line in panels[-1].lines] == [(2, 2), (2, 2)]


def test_runs_that_cannot_be_drawn_are_named_and_runs_of_unknown_seed_all_count(tmp_path):
    for name in ("a", "b"):
        config = json.loads((make_run(tmp_path / name) / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "seed": None}))
    make_run(tmp_path / "begun", won=(), finished=False, seed=5)
    make_run(tmp_path / "played", seed=3, evaluate=True, checkpoint_path="x", finished=False)
    kept, notes = curves.usable(load([tmp_path]), WON)
    assert [run.label for run in kept] == ["a", "b"]
    assert notes == ["1 evaluation left out: they have no curve", f"1 run without {WON} left out: begun"]
    (group,), notes = curves.without_repeats(groups(kept))
    assert len(group.runs) == 2 and notes == []
    assert curves.metric_name(None, kept) == WON and curves.metric_name("return", kept) == "test_return_mean"


@pytest.fixture
def drawn(monkeypatch):
    """Return a list of what is drawn: (panels, axes, caption, width, marked)."""
    found = []
    monkeypatch.setattr(plot, "_figure", lambda *args: found.append(args))
    monkeypatch.setattr(plot, "picture", lambda *_, **__: b"")
    return found


def test_the_options_of_plot_reach_the_figure(tmp_path, drawn, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_study(tmp_path / "runs", rates=(0.001, 0.005), maps=("3m", "8m"), seeds=(1, 2))
    for words in ([], ["--stat", "iqm"], ["--x", "wall"]):
        assert main(["plot", "runs", *words]) == 0
    plain, iqms, wall = drawn
    assert [[panel.statistic for panel in each[0]] for each in (plain, iqms)] == [["mean", "mean", "iqm"], ["iqm"] * 3]
    assert (plain[1].x, wall[1].x) == ("environment steps", "wall-clock minutes")
    assert (plain[0][0].lines[0].x[-1], wall[0][0].lines[0].x[-1]) == pytest.approx((STEPS[-1], STEPS[-1] / 100))
    assert plain[1].unit and plain[1].groups == ("lr=0.001", "lr=0.005")
    assert plain[2].startswith("Mean on a map, IQM over maps, 2 seeds per map; band: 95 %")
    assert main(["plot", "runs", "--metric", "return"]) == 0
    assert not drawn[-1][1].unit and "over maps: shares of each map's range" in drawn[-1][2]
    make_run(tmp_path / "cpu" / "one", (0.0, 0.2), more={"cpu_seconds": [0.0, 600.0]})
    assert main(["plot", "cpu", "--x", "cpu"]) == 0
    assert drawn[-1][0][0].lines[0].x == pytest.approx([0, 600]) and drawn[-1][1].x == "CPU minutes"
    make_run(tmp_path / "long" / "one", (0.0, 0.2), more={"cpu_seconds": [0.0, 7200.0]})
    assert main(["plot", "long", "--x", "cpu"]) == 0
    assert (drawn[-1][1].x, drawn[-1][1].seconds) == ("CPU hours", 3600)
    assert main(["plot", "runs", "--x", "cpu"]) == 2
    assert "have no cpu_seconds" in capsys.readouterr().err


def test_a_set_of_maps_has_its_own_panel_first_then_one_for_each_map(tmp_path):
    for rate in (0.001, 0.005):
        for seed in (1, 2):
            make_run_on_a_set(tmp_path / f"{rate}{seed}", lr=rate, seed=seed)
    found = groups(load([tmp_path]))
    titles = ["skirmish marine-easy", "held-out maps", "3m", "5m", "10m", "4m (held out)"]
    ends = [0.3, 0.7, 0.1, 0.3, 0.5, 0.7]
    drawn = curves.curve_panels(found, WON, "steps", None)
    assert [panel.title for panel in drawn] == titles, "maps of the set without a test have no panel"
    assert [panel.held_out for panel in drawn] == [False, True, False, False, False, True]
    lines = [line for panel in drawn for line in panel.lines]
    assert len(lines) == 12 and all(line.seeds == (2, 2) and line.band is not None for line in lines)
    assert [panel.lines[0].y[-1] for panel in drawn] == pytest.approx([end + 0.015 for end in ends])
    axes = plot.Axes("", "", tuple(group.label for group in found), unit=True)
    grid = plot._figure(drawn, axes, "", 7.16, set()).axes
    styles = [{line.get_linestyle() for line in axis.get_lines()} for axis in grid]
    assert styles == [{"-"}, {"--"}, {"-"}, {"-"}, {"-"}, {"--"}], "lines of held-out maps are dashed"
    assert "dashed: maps that are not trained on" in plot.caption(drawn, found)
    alone = curves.curve_panels(found, "test/5m/battle_won_mean", "steps", None)
    assert [panel.title for panel in alone] == titles[:1], "a metric of one map has no parts"


MISTAKES = [
    (["plot"], "error: plot: name runs or a study"),
    (["plot", "~nobody_here/x"], "error: plot ~nobody_here/x: holds no run"),
    (["plot", "x" * 300 + ".jsonl"], "error: plot xxx"),
    (["plot", "nowhere"], "error: plot nowhere: holds no run"),
    (["plot", "runs", "--metric", "battle_wun"], "error: --metric battle_wun: no run has it. Known: "),
    (["plot", "runs", "--stat", "median"], "error: argument --stat: invalid choice"),
    (["plot", "begun"], "error: plot: the runs have no test yet"),
    (["plot", "runs", "--out", "/proc/x/y"], "error: plot: /proc/x/y.png cannot be written"),
]


@pytest.fixture(scope="module")
def some_runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("some")
    make_study(place / "runs", rates=(0.001, 0.005))
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


def record_as_pymarl(folder: Path, won: tuple[float, ...], scalars: bool, **config: object) -> None:
    """Write a run as Sacred does for PyMARL; with `scalars` as for EPyMARL."""
    found = sacred.Experiment("pymarl", save_git_info=False, base_dir=str(folder.parent))
    found.observers.append(sacred.observers.FileStorageObserver(str(folder)))
    found.add_config({"env": "skirmish", "env_args": {"map_name": "3m"}, "lr": 0.0005, **config})

    @found.main
    def run(_run):
        for step, rate in zip(STEPS, won, strict=True):
            value = np.float64(rate)
            _run.info.setdefault(WON, []).append(value)
            _run.info.setdefault(f"{WON}_T", []).append(step)
            _run.info.setdefault("loss", []).append(0.1)
            _run.info.setdefault("loss_T", []).append(step + 7)
            if scalars:
                _run.log_scalar(WON, value, step)

    root, before = logging.getLogger(), logging.getLogger().level
    handlers = list(root.handlers)
    try:
        found.run(options={"--loglevel": "ERROR", "--capture": "no"})
    finally:
        root.handlers[:] = handlers
        root.setLevel(before)


def test_runs_of_pymarl_and_epymarl_are_drawn_beside_own_ones(tmp_path, capsys, caplog):
    theirs, nested = tmp_path / "pymarl" / "sacred", tmp_path / "epymarl" / "results" / "sacred" / "vdn" / "3m"
    for seed, end in ((1, 0.5), (2, 0.7)):
        record_as_pymarl(theirs, (0.0, 0.2, 0.4, end), False, name="qmix", seed=seed)
        record_as_pymarl(nested, (0.0, 0.1, 0.2, end / 2), True, name="vdn", seed=seed)
    record_as_pymarl(nested, (0.0, 0.0, 0.0, 0.1), True, name="vdn", seed=1, lr=0.001)
    make_run(tmp_path / "own" / "run", (0.0, 0.25, 0.5, 0.75))
    places = [tmp_path / "own", theirs, tmp_path / "epymarl"]
    (panel,) = curves.curve_panels(groups(load(places)), WON, "steps", None)
    found = {line.label: (line.x.tolist(), line.y[-1], line.seeds) for line in panel.lines}
    ends = {"qmix": (0.75, 1), "qmix (Sacred)": (0.6, 2)}
    ends |= {"vdn (Sacred) lr=0.0005": (0.3, 2), "vdn (Sacred) lr=0.001": (0.1, 1)}
    assert found == {label: (list(STEPS), pytest.approx(end), (n, n)) for label, (end, n) in ends.items()}
    beside = (places[:1], "own/curves_win_rate"), (places, "curves_win_rate")
    for words, base in (*beside, ([*places, "-o", tmp_path / "f.png"], "f")):
        assert main(["plot", *map(str, words)]) == 0
        assert capsys.readouterr().out.split() == [f"{tmp_path / base}.png", f"{tmp_path / base}.svg"]
    assert (tmp_path / "f.png").is_file() and "is not comparable" in caplog.text
    assert main(["compare", *map(str, places)]) == 0
    table = capsys.readouterr().out
    assert "qmix (Sacred)*" in table and "0.600" in table
