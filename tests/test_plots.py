"""Plots: the panels that they show, and pictures that can be decoded."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from many_runs import STEPS, make_run, make_study
from matplotlib import image

from omagd.config.env_info import EntityLayout
from omagd.envs.frames import Scene
from omagd.lab.analysis import curves as study_curves
from omagd.lab.analysis import plot
from omagd.lab.analysis.groups import groups
from omagd.lab.analysis.runs import load
from omagd.run.reporting import plots
from omagd.run.reporting.battle_plot import _notes, _view, battle_moment, battle_nodes, spread
from omagd.run.reporting.plots import (
    PANELS,
    _bins,
    _extent,
    _lines,
    _title,
    curves,
    evaluation,
    panels_of_maps,
    read_metrics,
)


def unit(kind, number, x=0.0, y=0.0, present=True, guessed=False):
    name = f"{'e' if kind == 'enemy' else 'a'}{number}"
    return {"type": kind, "id": name, "x": x, "y": y, "health": 0.5, "present": present, "guessed": guessed}


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
    first = pixels(curves(metrics, tmp_path / "plots" / "curves.png", "skirmish 3m"))
    write_lines(metrics, [{**record, "test_battle_won_mean": 0.0} for record in records])
    second = pixels(curves(metrics, tmp_path / "other.png", "skirmish 3m"))
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
    assert (_title(metrics, ""), _title(metrics, "skirmish 3m")) == ("Training", "skirmish 3m: training")
    (tmp_path / "env_info.json").write_text(json.dumps({"name": "skirmish", "map_name": "3m"}))
    card.write_text(json.dumps({"recorded": {"name": "omagd_small", "seed": 7, "ranks": 2}}))
    assert _title(metrics, "") == "skirmish 3m · omagd_small · seed 7 · 2 ranks: training"
    for damaged in ("[]", "{", '{"recorded": 3}'):
        card.write_text(damaged)
        assert _title(metrics, "") == "skirmish 3m: training"


def test_panels_of_a_stage_have_the_same_x_axis():
    records = [{"stage": "stage3", "t_env": t, "epsilon": 0.5} for t in (1000, 2000)]
    records += [{"stage": "stage3", "t_env": 0, "loss_td": 1.0}, {"stage": "stage1", "epoch": 9, "train/mse": 1.0}]
    found = panels_of(records)
    assert [panel.title for panel, _ in found] == ["Tokenizer: reconstruction error", "TD loss", "Exploration"]
    assert (_extent("stage3", found), _extent("stage1", found)) == ((-80, 2080), (8.5, 9.5))


def test_lengths_of_episodes_have_bins_of_whole_steps(tmp_path):
    assert _bins("length", [20, 18, 21]) == [17.5, 18.5, 19.5, 20.5, 21.5]
    wide = _bins("length", [1, 400])
    assert set(np.diff(wide)) == {7} and wide[0] == 0.5 and wide[-1] > 400
    assert _bins("return", [1.5, 2.5]) == _bins("length", []) == 20
    log = tmp_path / "rank_0.jsonl"
    write_lines(log, [{"return": 3.5, "length": 18 + i % 4, "battle_won": i % 3 == 0} for i in range(40)])
    assert pixels(evaluation([log], tmp_path / "evaluation.png")).std() > 0.03


def test_a_battle_moment_has_three_panels_with_counted_guesses(tmp_path):
    """An ally in sight, a hidden enemy, a dead enemy, and guesses of both enemies."""
    truth = [unit("self", 2), unit("ally", 0, 2, 1), unit("enemy", 0, 12, 3), unit("enemy", 1, present=False)]
    seen = [*truth[:2], unit("enemy", 0, present=False), truth[3]]
    made = [*truth[:2], unit("enemy", 0, 12, 6, guessed=True), unit("enemy", 1, -5, -5, guessed=True)]
    info = {"label": "skirmish 5m_vs_6m", "step": 14, "agent": "a2", "sight": 9.0, "errors": {"feature error": 0.01}}
    picture = pixels(battle_moment(tmp_path / "plots" / "m.png", seen, made, truth, info))
    assert picture.shape[0] > 600 and picture.shape[1] > 1500 and picture.std() > 0.05
    panels = np.array_split(picture[150:650], 3, axis=1)
    enemy, ally = np.array([1.0, 0.48, 0.33]), np.array([0.3, 0.79, 0.75])
    orange, teal = ([int((np.abs(p - c).max(-1) < 0.06).sum()) for p in panels] for c in (enemy, ally))
    assert orange[0] == 0 and min(orange[1:]) > 50, "no enemy is in sight"
    assert min(teal) > 100, "the ally is seen in all panels"
    assert _notes(seen, made, truth) == (
        "1 of 2 living units in sight", "2 unseen believed alive, off by 3.0 cells, 1 of them dead", "2 alive, 1 dead"
    )  # fmt: skip
    with pytest.raises(ValueError, match="same units"):
        battle_moment(tmp_path / "m.png", seen, made[::-1], truth, info)


def test_views_hold_all_units():
    for units, limit in (([unit("enemy", 0, 12, 3)], 13.56), ([unit("self", 0)], 9.9), ([unit("ally", 0, 500)], 28.8)):
        assert _view(units, 9.0).limit == pytest.approx(limit)


def test_marks_at_one_place_are_moved_apart_but_not_far():
    places = np.array([[0.0, 0.0], [0.0, 0.0], [0.1, 0.0], [9.0, 9.0]])
    moved = spread(places, 1.0, 2.0)
    away = np.hypot(*(moved[:, None] - moved[None]).T)[~np.eye(4, dtype=bool)]
    assert away.min() > 0.9 and np.hypot(*(moved - places).T).max() <= 2.0 and (moved[3] == places[3]).all()
    crowd = spread(np.zeros((40, 2)), 1.0, 0.5)
    assert np.isfinite(crowd).all() and np.hypot(*crowd.T).max() <= 0.5 + 1e-9
    assert spread(np.zeros((0, 2)), 1.0, 1.0).shape == (0, 2)


def test_nodes_become_units_with_their_columns():
    nodes = np.zeros((4, 9), np.float32)
    nodes[0, [0, 8]] = 1.0, 0.25
    nodes[1, :5] = 1.0, 0.5, 0.3, -0.4, 0.9
    nodes[3, :5] = 0.0, 0.2, 0.0, 0.2, 1.0
    layout = EntityLayout(move_dim=4, n_enemies=2, enemy_dim=5, n_allies=1, ally_dim=5, own_dim=1)
    beans = Scene(
        ("a0", "a1", "e0", "b0"), (0, 0, 1, 2), ("snake",) * 3 + ("bean",), (), health_max=(1.0, 1.0, 1.0, 0.0)
    )
    units = battle_nodes(nodes, layout, beans, 1, guessed=np.array([0, 0, 0, 1], bool))
    assert [(u["type"], u["id"], u["present"], u["guessed"]) for u in units] == [
        ("self", "a1", True, False), ("ally", "a0", True, False), ("enemy", "e0", False, False),
        ("thing", "b0", True, True),
    ]  # fmt: skip
    assert units[3]["health"] is None, "a bean has no health"
    names = [unit["id"] for unit in battle_nodes(nodes, layout, Scene(("a0", "a1"), (0, 0), ("", ""), ()), 0)]
    assert names == ["a0", "a1", "e0", "e1"], "the environment names only its agents"
    assert (units[1]["x"], units[1]["y"], units[1]["health"]) == pytest.approx((2.7, -3.6, 0.9))
    assert units[0]["health"] == 0.25 and (units[0]["x"], units[0]["y"]) == (0.0, 0.0)
    assert battle_nodes(nodes, replace(layout, health=-1), beans, 0)[1]["health"] is None


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


def test_the_part_that_not_all_seeds_reached_is_drawn_where_it_is(tmp_path):
    make_run(tmp_path / "whole", (0.0, 0.2, 0.4, 0.6), seed=1)
    make_run(tmp_path / "killed", (0.0, 0.4), seed=2)
    (panel,) = study_curves.curve_panels(groups(load([tmp_path])), WON, "steps", None)
    axis = figure_of([panel], "curves", ["qmix"]).axes[0]
    assert [tuple(line.get_xdata()) for line in axis.get_lines()] == [STEPS[:2], STEPS[1:]]
