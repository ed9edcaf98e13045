"""Plots: the panels that they show, and pictures that can be decoded."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from many_runs import STEPS, make_run, make_study
from matplotlib import image

from omagd.lab.analysis import charts, figures
from omagd.lab.analysis import curves as study_curves
from omagd.lab.analysis.groups import groups
from omagd.lab.analysis.runs import load
from omagd.run.reporting import plots
from omagd.run.reporting.plots import (
    PANELS,
    _lines,
    _title,
    curves,
    evaluation,
    panels_of_maps,
    read_metrics,
)


def pixels(path):
    """Return [rows, columns, 3] of a picture."""
    return image.imread(path)[..., :3]


def write_lines(path, records, more=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + more)


def panels_of(records):
    return [(panel, lines) for panel in PANELS if (lines := _lines(panel, records))]


def test_curves_show_the_values_of_metrics_jsonl(tmp_path):
    records, metrics = [], tmp_path / "metrics.jsonl"
    for n in range(1, 6):
        records.append({"stage": "stage1", "epoch": 20 * n, "train/graph_loss": 1 / n, "eval/graph_loss": 2 / n})
        records.append({"stage": "stage2", "epoch": 20 * n, "eval/top1": n / 5, "eval/graph_loss": None})
        records.append({"stage": "stage3", "t_env": 1000 * n, "test_battle_won_mean": n / 6, "epsilon": 1 - n / 6})
    write_lines(metrics, records, more='{"stage": "stage3", "t_e')  # of a killed run
    assert list(read_metrics(metrics)) == records
    drawn = {panel.title: {legend: values[0] for legend, _, _, values in lines} for panel, lines in panels_of(records)}
    assert drawn == {
        "Tokenizer: loss": {"training": 1.0, "held out": 2.0}, "Predictor: accuracy on unseen units": {"top 1": 0.2},
        "Win rate": {"greedy test": 1 / 6}, "Exploration": {"epsilon": 5 / 6},
    }  # fmt: skip
    assert panels_of(records)[-1][1][0][1:3] == ("t_env", [1000, 2000, 3000, 4000, 5000])
    first = pixels(curves(metrics, tmp_path / "plots" / "curves.png"))
    write_lines(metrics, [{**record, "test_battle_won_mean": 0.0} for record in records])
    second = pixels(curves(metrics, tmp_path / "other.png"))
    assert first.shape == second.shape and np.abs(first - second).sum() > 100
    write_lines(metrics, [{"stage": "stage3", "t_env": 1, "unknown": 2.0}])
    assert curves(metrics, tmp_path / "none.png") is None and not (tmp_path / "none.png").exists()


def test_ppo_and_held_out_maps_are_drawn(tmp_path):
    names = ("loss_policy", "loss_value", "entropy", "kl", "clipped_share")
    values = {**dict.fromkeys(names, 0.1), "test_battle_won_mean": 1.0, "test_held_out_battle_won_mean": 0.5}
    values |= dict.fromkeys((f"test/{name}/battle_won_mean" for name in ("3m", "5m", "4m")), 1.0)
    records = [{"stage": "stage3", "t_env": t, **values} for t in (0, 100)]
    write_lines(tmp_path / "metrics.jsonl", records)
    (tmp_path / "env_info.json").write_text(json.dumps({"tasks": ["3m", "5m", "4m"], "n_training": 2}))
    with pytest.MonkeyPatch.context() as patch:
        figures = []
        patch.setattr(plots, "save", lambda figure, path: figures.append(figure))
        curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    drawn = {axis.get_title(loc="left"): axis.get_lines() for axis in figures[0].axes if axis.get_lines()}
    assert list(drawn) == [
        "Win rate", "Policy and value loss", "Entropy of the policy", "KL divergence from the old policy",
        "Clipped probability ratios", "Win rate by map",
    ]  # fmt: skip
    styles = {title: {line.get_label(): line.get_linestyle() for line in lines} for title, lines in drawn.items()}
    assert styles["Win rate"] == {"greedy test": "-", "held-out maps": "--"}
    assert styles["Win rate by map"] == {"3m": "-", "5m": "-", "4m": "--"}
    widths = [line.get_linewidth() for line in drawn["Win rate by map"]]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3, "none is covered"


def test_the_title_names_environment_configuration_seed_and_ranks(tmp_path):
    metrics, card = tmp_path / "metrics.jsonl", tmp_path / "card.json"
    assert (_title(metrics), _title(metrics)) == ("Training", "skirmish 3m: training")
    (tmp_path / "env_info.json").write_text(json.dumps({"name": "skirmish", "map_name": "3m"}))
    card.write_text(json.dumps({"recorded": {"name": "omagd_small", "seed": 7, "ranks": 2}}))
    assert _title(metrics) == "skirmish 3m · omagd_small · seed 7 · 2 ranks: training"
    for damaged in ("[]", "{", '{"recorded": 3}'):
        card.write_text(damaged)
        assert _title(metrics) == "skirmish 3m: training"


def test_episodes_of_an_evaluation_are_drawn(tmp_path):
    log = tmp_path / "rank_0.jsonl"
    write_lines(log, [{"return": 3.5, "length": 18 + i % 4, "battle_won": i % 3 == 0} for i in range(40)])
    assert pixels(evaluation([log], tmp_path / "evaluation.png")).std() > 0.03
    assert evaluation([], tmp_path / "none.png") is None


def test_each_map_of_a_set_has_a_line(tmp_path):
    maps = [f"{n}m" for n in range(3, 11)]
    values = {f"test/{task}/{name}": 0.1 * i for i, task in enumerate(maps) for name in ("battle_won_mean", "x_mean")}
    records = [{"stage": "stage3", "t_env": t, **values, "train/3m/visits": 4.0} for t in (0, 100)]
    panels = panels_of_maps(records)
    assert [panel.title for panel in panels] == ["Win rate by map (1 of 2)", "Win rate by map (2 of 2)"]
    lines = [line for panel in panels for line in _lines(panel, records)]
    assert [(line[0], line[2], line[3]) for line in lines] == [
        (task, [0, 100], [0.1 * i] * 2) for i, task in enumerate(maps)
    ]
    assert panels_of_maps([{"stage": "stage3", "t_env": 0, "test_return_mean": 1.0}]) == []
    (panel,) = panels_of_maps([{"stage": "stage3", "t_env": 0, "test/a/return_mean": 1.0}])
    assert panel.title == "Return by map" and panel.lines == (("test/a/return_mean", "a"),)
    write_lines(tmp_path / "metrics.jsonl", records)
    assert pixels(curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")).std() > 0


WON = "test_battle_won_mean"


def figure_of(panels, kind, labels, marked=(), unit=True):
    axes = figures.Axes(kind, "x", "y", tuple(labels), unit=unit)
    made = figures._figure(panels, axes, "caption", 7.16, set(marked))
    made.draw_without_rendering()
    return made


def test_rows_of_points_have_the_names_values_and_intervals_of_their_groups(tmp_path):
    make_study(tmp_path, rates=(0.001, 0.005, 0.01), seeds=(1, 2, 3))
    found = groups(load([tmp_path]))
    panels = study_curves.final_panels(found, WON, None)
    made = figure_of(panels, "final", [group.label for group in found], marked=["lr=0.005"])
    axis = made.axes[0]
    names = {text.get_text(): y for text, y in zip(axis.get_yticklabels(), axis.get_yticks(), strict=True)}
    assert list(names) == ["lr=0.001", "lr=0.005*", "lr=0.01"]
    for line in panels[0].lines:
        y = names[line.label if line.label in names else f"{line.label}*"]
        here = [each for each in axis.get_lines() if set(each.get_ydata()) == {y}]
        drawn = [each.get_xdata() for each in here]
        assert any(np.allclose(x, line.x) for x in drawn if len(x) == 1), "the point"
        assert any(np.allclose(x, [line.band[0][0], line.band[1][0]]) for x in drawn if len(x) == 2), "the interval"
    made = figure_of(
        [study_curves.improvement_panel(found, WON, None)], "improvement", [group.label for group in found]
    )
    assert [0.5, 0.5] in [list(line.get_xdata()) for line in made.axes[0].get_lines()], "where neither is better"


def test_lines_have_one_colour_in_all_figures_their_bands_and_labels_of_their_colour(tmp_path):
    from matplotlib.colors import to_hex

    rates = (0.001, 0.005, 0.01)
    make_study(tmp_path, rates=rates, maps=("3m", "8m"), seeds=(1, 2, 3))
    found = groups(load([tmp_path]))
    labels = [group.label for group in found]
    panels = study_curves.curve_panels(found, WON, "steps", None)
    axis = figure_of(panels[:1], "curves", labels).axes[0]
    colours = {line.get_gid(): to_hex(line.get_color()) for line in axis.get_lines()}
    assert colours == dict(zip(labels, figures.COLOURS, strict=False))
    assert {text.get_text(): to_hex(text.get_color()) for text in axis.texts} == colours, "labels beside the lines"
    places = {text.get_text(): text.get_position()[1] for text in axis.texts}
    assert sorted(places, key=places.__getitem__) == labels, "in the order of their ends"
    for line, band in zip(panels[0].lines, axis.collections, strict=True):
        outline = band.get_paths()[0].vertices
        assert (outline[:, 1].min(), outline[:, 1].max()) == pytest.approx((line.band[0].min(), line.band[1].max()))
    alone = figure_of([replace(panels[0], lines=panels[0].lines[1:])], "curves", labels).axes[0]
    assert {line.get_gid(): to_hex(line.get_color()) for line in alone.get_lines()} == {
        label: colours[label] for label in labels[1:]
    }
    rows = [replace(panels[0], title=str(i)) for i in range(6)]
    (legend,) = figure_of(rows, "curves", labels, marked=[labels[2]]).legends
    keys = zip(legend.get_texts(), legend.get_lines(), strict=True)
    assert {text.get_text().rstrip("*"): to_hex(line.get_color()) for text, line in keys} == colours
    assert legend.get_texts()[2].get_text() == f"{labels[2]}*"
    many = [replace(panels[0].lines[0], label=str(i)) for i in range(8)]
    axis = figure_of([replace(panels[0], lines=tuple(many))], "curves", [str(i) for i in range(8)]).axes[0]
    looks = {(to_hex(line.get_color()), line.get_linestyle()) for line in axis.get_lines()}
    assert len(looks) == 8, "more groups than colours have other dashes"


def test_a_group_without_a_point_that_all_seeds_have_is_named_once():
    times, no_points = np.array([1.0, 2.0]), np.zeros(0)
    whole = study_curves.Line("whole", times, times / 4, None, (1, 1))
    torn = study_curves.Line("torn", no_points, no_points, None, (2, 2), rest=(times, times / 3))
    panel = study_curves.Panel("m", (whole, torn), "mean")
    made = figure_of([panel], "curves", ["whole", "torn"])
    assert [text.get_text() for text in made.legends[0].get_texts()] == ["whole", "torn"]
    assert not made.axes[0].texts, "the labels are in the legend and not beside the lines too"


def test_a_figure_says_how_many_seeds_its_lines_have(tmp_path):
    make_study(tmp_path, rates=(0.001,), seeds=(1, 2, 3, 4, 5))
    make_run(tmp_path / "one", lr=0.005, seed=1)
    panels = study_curves.curve_panels(groups(load([tmp_path])), WON, "steps", None)
    assert figures.population(panels[0].lines) == "1 to 5 seeds"
    assert [figures.population([line]) for line in panels[0].lines] == ["5 seeds", "1 seed"]


def test_the_part_that_not_all_seeds_reached_is_drawn_where_it_is(tmp_path):
    make_run(tmp_path / "whole", (0.0, 0.2, 0.4, 0.6), seed=1)
    make_run(tmp_path / "killed", (0.0, 0.4), seed=2)
    (panel,) = study_curves.curve_panels(groups(load([tmp_path])), WON, "steps", None)
    axis = figure_of([panel], "curves", ["qmix"]).axes[0]
    assert [tuple(line.get_xdata()) for line in axis.get_lines()] == [STEPS[:2], STEPS[1:]]


def read_off(chart, points):
    """Return the values (x, y) of points of a chart, as a reader finds them with the help of its ticks."""
    sizes = {"k": 1e3, "M": 1e6, "G": 1e9}
    places = np.array([pair.split(",") for pair in points.split()], float).T
    for axis, ticks in enumerate((chart.x_ticks, chart.y_ticks)):
        numbers = [float(text.rstrip("kMG")) * sizes.get(text[-1], 1) for _, text in ticks]
        slope, start = np.polyfit([place for place, _ in ticks], numbers, 1)
        places[axis] = start + slope * places[axis]
    return places


def test_a_chart_shows_lines_bands_and_ticks_where_their_values_are():
    x, y = np.linspace(0, 3e6, 1001), np.linspace(2.0, 5.0, 1001) ** 2
    y[-1] = 40.0  # the last test, which no thinning may leave out
    band, rest = (y - x / 1e6, y + 1), (np.array([3e6, 4e6]), np.array([25.0, 9.0]))
    made = charts.chart("win", "steps", "y", [charts.Series("a", x, y, "c0 d0", band, rest)])
    (line,) = made.lines
    found = read_off(made, line.path)
    assert found[0][[0, -1]] == pytest.approx([0, 3e6], abs=2e4) and len(found[0]) <= charts.MOST_POINTS + 1
    assert found[1] == pytest.approx(np.interp(found[0], x, y), abs=0.2)
    outline, half = read_off(made, line.band), len(found[0])
    assert outline[0] == pytest.approx(np.concatenate([found[0], found[0][::-1]]), abs=1e4)
    assert outline[1][:half] == pytest.approx(np.interp(found[0], x, band[0]), abs=0.2)
    assert outline[1][half:] == pytest.approx(np.interp(found[0], x, band[1])[::-1], abs=0.2)
    assert read_off(made, line.rest) == pytest.approx(np.array(rest), rel=0.02)
    assert made.last == [("a", "40")] and "3M" in [text for _, text in made.x_ticks]
    assert made.described == "win: y over steps; last values: a 40"
    only_some = study_curves.Line("b", x[:0], y[:0], None, (1, 2), rest)
    panel = study_curves.Panel("m", (only_some,), "mean")
    drawn = charts.curve_chart(panel, "win rate", {"b": "c0 d0"}, None)
    assert drawn is not None and drawn.lines[0].rest, "what only some seeds reached is there too"


def test_losses_have_a_logarithmic_axis_of_epochs_and_all_panels_reach_the_last_one():
    (panel,) = [panel for panel in PANELS if panel.stage == "stage1" and panel.log][:1]
    losses = [{"stage": "stage1", "epoch": 10 * n, panel.lines[0][0]: 10.0**-n} for n in range(1, 5)]
    made = charts.run_chart(panel, [*losses, {"stage": "stage1", "epoch": 160}, {"stage": "stage3", "t_env": 9}])
    assert made is not None and "epoch" in made.x_label
    x, y = np.array([pair.split(",") for pair in made.lines[0].path.split()], float).T
    assert np.diff(y) == pytest.approx([np.diff(y)[0]] * 3, abs=0.2), "equal factors are equal steps"
    places = {float(text): place for place, text in made.y_ticks}
    assert places[0.01] == pytest.approx(y[1], abs=0.1) and places[0.001] == pytest.approx(y[2], abs=0.1)
    whole = charts.WIDTH - charts.LEFT - charts.RIGHT
    assert (x[-1] - charts.LEFT) / whole == pytest.approx(40 / 160, abs=0.02)


def test_as_many_groups_as_there_are_styles_look_different():
    number = charts.COLOURS * charts.DASHES
    assert len({charts.style_of(i) for i in range(number)}) == number
    assert [charts.tick_text(v) for v in (0, 0.25, 999, 20_000, 1.5e6, 2e9)] == [
        "0",
        "0.25",
        "999",
        "20k",
        "1.5M",
        "2G",
    ]
