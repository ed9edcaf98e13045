"""Metrics, counters, text logs and progress bars."""

from __future__ import annotations

import io
import json
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omagd.utils import progress as progress_module
from omagd.utils.clock import Counters, Every
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import setup_logging
from omagd.utils.metrics import Metrics
from omagd.utils.progress import BarSafeHandler, Progress, close_bars


def test_means_over_ranks_weigh_every_sample_alike():
    rng = np.random.default_rng(0)
    samples, ranks = [rng.normal(size=size) for size in (3, 17, 1)], [Metrics() for _ in range(3)]
    for metrics, values in zip(ranks, samples, strict=True):
        for part in np.array_split(values, 3):
            metrics.add({"loss": (torch.tensor(part.sum()), torch.tensor(len(part)))}, prefix="train/")
    ranks[1].add({"won_mean": (2.0, 3)})
    states = [metrics.state_dict() for metrics in ranks]
    reduced = [metrics.reduce(SimpleNamespace(gather=lambda _: states)) for metrics in ranks]
    assert reduced[0] == reduced[1] == reduced[2]
    assert reduced[0] == pytest.approx({"train/loss": np.concatenate(samples).mean(), "won_mean": 2 / 3})
    assert all(metrics.reduce(Dist()) == {} for metrics in ranks), "reduce starts again"


def test_metrics_sum_in_double_precision_without_graph_and_skip_empty_counts():
    weight = torch.tensor(2.0, requires_grad=True)
    total, count = weight * 3, torch.tensor(2)
    metrics, restored = Metrics(), Metrics()
    metrics.add({"a": (total, count), "empty": (torch.tensor(0.0), torch.tensor(0))})
    metrics.add({"a": (total, count)})
    metrics.add({"a": (1.0, 1)})
    assert total.item() == 6.0 and count.item() == 2
    restored.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    assert metrics.reduce(Dist()) == restored.reduce(Dist()) == {"a": pytest.approx(13 / 5)}
    for _ in range(2000):
        metrics.add({"x": (torch.tensor(1e8 + 1, dtype=torch.float64), torch.tensor(1))})
        metrics.add({"y": (torch.tensor(0.1), torch.tensor(1))})
    assert metrics.reduce(Dist()) == {"x": 1e8 + 1, "y": pytest.approx(float(torch.tensor(0.1)), rel=1e-12)}


def test_due_depends_on_the_times_alone_and_continues_from_its_state():
    times = [0, 30, 99, 100, 130, 199, 230, 299, 1000, 1001]
    for options, given, expected in (
        ({}, times, [100, 230, 1000]),  # the first at or after each multiple of 100
        ({}, (150, 210, 290, 300), [150, 210, 300]),  # no drift
        ({"first": True}, times, [0, 100, 230, 1000]),
    ):
        due, resumed = Every(100, **options), Every(100, **options)
        early = [t for t in given[:3] if due.due(t)]
        resumed.load_state_dict(json.loads(json.dumps(due.state_dict())))
        assert early + [t for t in given[3:] if resumed.due(t)] == expected
    with pytest.raises(ValueError, match="interval=0"):
        Every(0)
    counters, other = Counters(epoch=1, t_env=2**40, episodes=3, updates=4), Counters()
    other.load_state_dict(json.loads(json.dumps(counters.state_dict())))
    assert other == counters


def test_rank_0_prints_and_every_rank_writes_its_file(tmp_path, capsys):
    for rank in (1, 0):
        setup_logging(tmp_path / f"rank_{rank}.log", rank=rank)
        logging.getLogger("omagd").info(f"hello {rank}")
        logging.getLogger("omagd.learners").error(f"broken {rank}")
    shown = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["rank 1: error: broken 1", "hello 0", "error: broken 0"]
    for rank in (1, 0):
        lines = (tmp_path / f"rank_{rank}.log").read_text().splitlines()
        assert [line.split()[-2:] for line in lines] == [["hello", str(rank)], ["broken", str(rank)]]


class Terminal(io.StringIO):
    """A stream that is a terminal, of 70 columns."""

    def isatty(self):
        return True


def bar_on(stream, monkeypatch, **options):
    monkeypatch.setattr(progress_module.sys, "stderr", stream)
    bar = Progress(1000, "step", "stage3", **options)
    bar._bar.dynamic_ncols = lambda file: (70, 20)
    return bar


def write_line(stream, text):
    BarSafeHandler(stream).emit(logging.LogRecord("omagd", logging.INFO, "", 0, text, None, None))


def test_a_bar_shows_progress_on_a_terminal_and_log_lines_do_not_disturb_it(monkeypatch):
    for stream, enabled in ((io.StringIO(), True), (Terminal(), False)):
        bar = bar_on(stream, monkeypatch, enabled=enabled)
        bar.update(5)
        bar.close()
        assert stream.getvalue() == ""
    stream = Terminal()
    bar = bar_on(stream, monkeypatch, initial=100)
    time.sleep(0.3)
    bar.set(600)
    write_line(stream, "a line")
    bar.set(1500)
    assert bar._bar.n == 1000, "the position is at most the total"
    bar.set(1600, total=2000)
    assert (bar._bar.n, bar._bar.total) == (1600, 2000)
    bars = stream.getvalue().split("\r")
    assert any("stage3" in text and "60%" in text and "steps/s" in text for text in bars)
    assert max(len(text) for text in bars if "stage3" in text) + len("^C") == 70, "space for what the terminal prints"
    assert [line.strip() for line in "\n".join(bars).split("\n") if "a line" in line] == ["a line"]
    stream.write("^C")
    close_bars()
    shown = len(stream.getvalue())
    assert stream.getvalue().split("^C")[1].endswith("\r\x1b[K")
    write_line(stream, "the last line")
    assert stream.getvalue()[shown:] == "the last line\n"
