"""Pictures: the curves of one run, and the figures of many, as they are drawn."""

import io
import json

import numpy as np
import pytest
from many_runs import make_run
from matplotlib import image

from omagd.lab.analysis import run_curves
from omagd.lab.analysis.runs import load


def pixels(content):
    """Return [rows, columns, 3] of a picture."""
    return image.imread(io.BytesIO(content))[..., :3]


def write_lines(path, records, more=""):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + more)


def run_of(folder):
    (run,) = load([folder])
    return run


@pytest.fixture
def drawn(monkeypatch):
    """Return the lines of each diagram that is drawn, by its title."""
    found = {}

    def picture(figure, *_, **__):
        found.update({axis.get_title(loc="left"): axis.get_lines() for axis in figure.axes if axis.get_lines()})
        return b""

    monkeypatch.setattr(run_curves, "picture", picture)
    return found


def test_curves_show_the_values_of_metrics_jsonl(tmp_path, drawn):
    records, folder = [], make_run(tmp_path / "run")
    for n in range(1, 6):
        records.append({"stage": "stage1", "epoch": 20 * n, "train/graph_loss": 1 / n, "eval/graph_loss": 2 / n})
        records.append({"stage": "stage2", "epoch": 20 * n, "eval/top1": n / 5, "eval/graph_loss": None})
        records.append({"stage": "stage3", "t_env": 1000 * n, "test_battle_won_mean": n / 6, "epsilon": 1 - n / 6})
    write_lines(folder / "metrics.jsonl", records, more='{"stage": "stage3", "t_e')  # of a killed run
    assert run_curves.curves(run_of(folder)) == b""
    firsts = {title: {line.get_label(): line.get_ydata()[0] for line in lines} for title, lines in drawn.items()}
    assert firsts == {
        "Tokenizer: loss": {"training": 1.0, "held out": 2.0}, "Predictor: accuracy on unseen units": {"top 1": 0.2},
        "Win rate": {"test": 1 / 6}, "Exploration": {"epsilon": 5 / 6},
    }  # fmt: skip
    assert [*drawn["Win rate"][0].get_xdata()] == [1000, 2000, 3000, 4000, 5000]
    write_lines(folder / "metrics.jsonl", [{"stage": "stage3", "t_env": 1, "unknown": 2.0}])
    assert run_curves.curves(run_of(folder)) is None


def test_pictures_of_one_run_can_be_decoded(tmp_path):
    folder = make_run(tmp_path / "run")
    one, other = (pixels(run_curves.curves(run_of(make))) for make in (folder, make_run(tmp_path / "b", (0.0,) * 4)))
    assert one.shape == other.shape and np.abs(one - other).sum() > 100
    assert run_curves.evaluation(run_of(folder)) is None
    lines = [{"return": 3.5, "length": 18 + i % 4, "battle_won": i % 3 == 0} for i in range(40)]
    write_lines(folder / "episodes" / "rank_0.jsonl", lines)
    assert pixels(run_curves.evaluation(run_of(folder))).std() > 0.03
