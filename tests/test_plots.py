"""Plots: the panels that they show, and pictures that can be decoded."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from many_runs import make_study
from matplotlib import image
from pictures import curves, evaluation

from omagd.lab.analysis import curves as study_curves
from omagd.lab.analysis import plot
from omagd.lab.analysis.groups import groups
from omagd.lab.analysis.runs import load
from omagd.run.reporting import plots
from omagd.run.reporting.plots import PANELS, _lines, _title, panels_of_maps, read_metrics


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
    assert _title(metrics) == "Training"
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
    axes = plot.Axes(kind, "x", "y", tuple(labels), unit=unit)
    made = plot._figure(panels, axes, "caption", 7.16, set(marked))
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


def test_groups_have_one_colour_in_all_figures_and_their_bands(tmp_path):
    from matplotlib.colors import to_hex

    make_study(tmp_path, rates=(0.001, 0.005, 0.01), seeds=(1, 2, 3))
    found = groups(load([tmp_path]))
    labels = [group.label for group in found]
    (panel,) = study_curves.curve_panels(found, WON, "steps", None)
    figure = figure_of([panel], "curves", labels, marked=[labels[2]])
    (axis,) = figure.axes
    for line, band in zip(panel.lines, axis.collections, strict=True):
        outline = band.get_paths()[0].vertices
        assert (outline[:, 1].min(), outline[:, 1].max()) == pytest.approx((line.band[0].min(), line.band[1].max()))
    (legend,) = figure.legends
    keys = zip(legend.get_texts(), legend.get_lines(), strict=True)
    colours = {text.get_text(): to_hex(line.get_color()) for text, line in keys}
    assert colours == dict(zip([*labels[:2], f"{labels[2]}*"], plot.COLOURS, strict=False))
    alone = figure_of([replace(panel, lines=panel.lines[1:])], "curves", labels).axes[0]
    assert [to_hex(line.get_color()) for line in alone.get_lines()] == list(plot.COLOURS[1:3])
    many = [replace(panel.lines[0], label=str(i)) for i in range(9)]
    axis = figure_of([replace(panel, lines=tuple(many))], "curves", [str(i) for i in range(9)]).axes[0]
    looks = {(to_hex(line.get_color()), line.get_linestyle()) for line in axis.get_lines()}
    assert len(looks) == 9, "more groups than colours have other dashes"
