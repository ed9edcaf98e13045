"""Metrics, counters, logger, log sinks and progress bars."""

from __future__ import annotations

import io
import json
import logging
import math
import multiprocessing
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omagd.run.reporting.log_sinks import REGISTRY, make_logger, render_block
from omagd.run.reporting.sacred_sink import SacredRelay, SacredSink
from omagd.utils import progress as progress_module
from omagd.utils.clock import Counters, Every
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.logging import Logger, Record, RunFacts, Sink, setup_logging
from omagd.utils.metrics import Metrics
from omagd.utils.progress import BarSafeHandler, Progress, close_bars

LOG = logging.getLogger("test_omagd")


class FakeRun:
    """A Sacred run."""

    def __init__(self, error=None):
        self.scalars = []
        self.error = error

    def log_scalar(self, name, value, step=None):
        if self.error:
            raise self.error
        self.scalars.append((name, value, step))


def test_means_over_ranks_weigh_every_sample_alike():
    rng = np.random.default_rng(0)
    samples = [rng.normal(size=size) for size in (3, 17, 1)]
    ranks = []
    for values in samples:
        metrics = Metrics()
        for part in np.array_split(values, 3):
            metrics.add({"loss": (torch.tensor(part.sum()), torch.tensor(len(part)))}, prefix="train/")
        ranks.append(metrics)
    ranks[1].add({"won_mean": (2.0, 3)})
    states = [metrics.state_dict() for metrics in ranks]
    dist = SimpleNamespace(gather=lambda _: states)
    reduced = [metrics.reduce(dist) for metrics in ranks]
    assert reduced[0] == reduced[1] == reduced[2]
    assert reduced[0] == pytest.approx({"train/loss": np.concatenate(samples).mean(), "won_mean": 2 / 3})
    assert all(metrics.reduce(Dist()) == {} for metrics in ranks), "reduce starts again"


def test_metrics_sum_in_double_precision_without_graph_and_skip_empty_counts():
    weight = torch.tensor(2.0, requires_grad=True)
    total, count = weight * 3, torch.tensor(2)
    metrics = Metrics()
    metrics.add({"a": (total, count), "nobody": (torch.tensor(0.0), torch.tensor(0))})
    metrics.add({"a": (total, count)})
    metrics.add({"a": (1.0, 1)})
    assert total.item() == 6.0 and count.item() == 2
    restored = Metrics()
    restored.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    assert metrics.reduce(Dist()) == restored.reduce(Dist()) == {"a": pytest.approx(13 / 5)}
    for _ in range(2000):
        metrics.add({"x": (torch.tensor(1e8 + 1, dtype=torch.float64), torch.tensor(1))})
        metrics.add({"y": (torch.tensor(0.1), torch.tensor(1))})
    assert metrics.reduce(Dist()) == {"x": 1e8 + 1, "y": pytest.approx(float(torch.tensor(0.1)), rel=1e-12)}


def test_due_depends_on_the_times_alone_and_continues_from_its_state():
    times = [0, 30, 99, 100, 130, 199, 230, 299, 1000, 1001]
    due = Every(100)
    fired = [t for t in times if due.due(t)]
    assert fired == [100, 230, 1000]  # the first at or after each multiple of 100
    late = Every(100)
    assert [t for t in (150, 210, 290, 300) if late.due(t)] == [150, 210, 300]  # no drift
    first, resumed = Every(100), Every(100)
    early = [t for t in times[:5] if first.due(t)]
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert early + [t for t in times[5:] if resumed.due(t)] == fired
    eager = Every(100, first=True)
    assert [t for t in times if eager.due(t)] == [0, 100, 230, 1000]
    with pytest.raises(ValueError, match="interval=0"):
        Every(0)
    counters, other = Counters(epoch=1, t_env=2**40, episodes=3, updates=4), Counters()
    other.load_state_dict(json.loads(json.dumps(counters.state_dict())))
    assert other == counters


def test_json_lines_hold_one_object_per_log_and_survive_nan_and_a_torn_line(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"stage": "stage1", "ep')
    logger = make_logger(RunFacts(tmp_path), ["jsonl"], LOG)
    logger.log({"a": math.nan, "b": 2, "c": math.inf}, stage="stage1", clock="epoch", t=20)
    logger.log({"a": torch.tensor(1.5)}, stage="stage3", clock="t_env", t=400)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: every line is flushed
    assert [json.loads(line) for line in lines[1:]] == [
        {"stage": "stage1", "epoch": 20, "a": None, "b": 2.0, "c": None},
        {"stage": "stage3", "t_env": 400, "a": 1.5},
    ]
    logger.close()


def test_values_of_one_step_become_one_log(tmp_path):
    run = FakeRun()
    logger = make_logger(RunFacts(tmp_path), ["jsonl", "sacred"], LOG, sacred=run)
    logger.log_stat("return_mean", 1.0, 100)
    logger.log_stat("epsilon", 0.5, 100, to_sacred=False)
    logger.log_stat("return_mean", 2.0, 200)
    logger.close()
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records == [
        {"stage": "stage3", "t_env": 100, "return_mean": 1.0, "epsilon": 0.5},
        {"stage": "stage3", "t_env": 200, "return_mean": 2.0},
    ]
    assert run.scalars == [("return_mean", 1.0, 100), ("return_mean", 2.0, 200)]


def test_the_logger_of_other_ranks_opens_and_writes_nothing(tmp_path, caplog):
    caplog.set_level("INFO", logger=LOG.name)
    run = FakeRun()
    names = ["console", "jsonl", "sacred", "tensorboard", "wandb"]
    logger = make_logger(RunFacts(tmp_path), names, LOG, minimal=True, sacred=run)
    logger.log({"a": 1.0}, stage="stage3", clock="t_env", t=1)
    logger.log_stat("a", 1.0, 1)
    logger.close()
    assert list(tmp_path.iterdir()) == [] and run.scalars == [] and caplog.records == []


def test_an_unknown_sink_is_an_error_and_a_plug_in_gets_every_record(tmp_path, monkeypatch):
    class Own(Sink):
        def _open(self, facts):
            seen.append(facts.label)

        def _log(self, record):
            seen.append((record.stage, record.t, record.values))

        def _close(self, exit_state):
            seen.append(exit_state)

    with pytest.raises(UserError, match="jsonl"):
        make_logger(RunFacts(tmp_path), ["jsnl"], LOG)
    seen = []
    monkeypatch.setattr(REGISTRY, "_objects", {"own": Own})
    facts = RunFacts(tmp_path, env="skirmish", map_name="8m")
    logger = make_logger(facts, ["jsonl"], LOG)
    logger.log({"a": 1.0}, stage="stage2", clock="epoch", t=3)
    logger.close("interrupted")
    assert seen == ["skirmish 8m", ("stage2", 3, {"a": 1.0}), "interrupted"]
    logger = Logger(LOG, facts=facts)
    logger.add_sink(Own())
    assert seen[3:] == ["skirmish 8m"]


def test_a_failing_sink_warns_once_and_the_others_continue(tmp_path, caplog):
    logging.getLogger("omagd").propagate = True
    run = FakeRun(error=RuntimeError("no\nspace"))
    logger = make_logger(RunFacts(tmp_path), ["sacred", "jsonl"], LOG, sacred=run)
    for t in range(3):
        logger.log({"a": 1.0}, stage="stage3", clock="t_env", t=t)
    logger.close()
    (warning,) = caplog.records
    assert SacredSink.name in warning.getMessage() and "no space" in warning.getMessage()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_block_is_aligned_and_holds_every_value_but_those_of_single_features(tmp_path):
    facts = RunFacts(tmp_path, env="skirmish", map_name="3m", totals={"epoch": 200, "episode": 6250})
    head = render_block(Record({"episode": 320.0}, "stage3", "t_env", 10240), facts).splitlines()[0]
    assert head == "Recent Stats | t_env: 10,240 | Episode: 320 / 6,250 | stage3 · skirmish 3m"
    values = {"episode": 320.0, "test_return_mean": 19.5, "epsilon": 0.05, "loss_td": 1.23e-5, "q_taken_mean": math.nan}
    values |= {f"metric_{i}": float(i) for i in range(8)} | {"eval/mse_ally_f3": 1.0}
    facts = RunFacts(tmp_path, env="skirmish", map_name="3m", totals={"t_env": 2_000_000})
    for width in (60, 100, 200):
        head, *rows = render_block(Record(values, "stage3", "t_env", 10240), facts, width).splitlines()
        assert head == "Recent Stats | t_env: 10,240 / 2,000,000 | Episode: 320 | stage3 · skirmish 3m"
        words = " ".join(rows).split()
        assert set(words[::2]) == set(values) - {"episode", "eval/mse_ally_f3"}
        assert all(len(row) <= max(width, 41) for row in rows)
        ends = [[i for i, c in enumerate(row) if c != " " and row[i + 1 : i + 2] in ("", " ")] for row in rows]
        numbers = {end for row in ends for end in row[1::2]}
        assert len(numbers) == len(ends[0]) // 2, "numbers end in the same columns"
        assert rows[0].split()[:2] == ["test_return_mean", "19.5000"]


def test_block_has_one_line_for_a_quantity_of_all_maps():
    values = {"test_battle_won_mean": 0.5, "memory/rss_mb": 3.0, "train/3m/return_mean": 19.25}
    values |= {f"test/{task}/battle_won_mean": won for task, won in (("10m", 0.03125), ("9m", 1.0), ("3m", math.nan))}
    values |= {"test/3m/ep_length_mean": 105.5}
    _, first, *rows = render_block(Record(values, "stage3", "t_env", 7), width=120).splitlines()
    assert first.split() == ["test_battle_won_mean", "0.5000", "memory/rss_mb", "3.0000"]
    assert rows == [
        "  test battle_won by map: 3m nan, 9m 1, 10m 0.0312",
        "  test ep_length by map: 3m 106",
        "  train return by map: 3m 19.2",
    ]


def test_rank_0_prints_and_every_rank_writes_its_file(tmp_path, capsys):
    setup_logging(tmp_path / "rank_1.log", rank=1)
    logging.getLogger("omagd").info("hidden")
    logging.getLogger("omagd.learners").error("broken")
    setup_logging(tmp_path / "rank_0.log", rank=0)
    logging.getLogger("omagd").info("hello")
    shown = capsys.readouterr().out
    assert "hidden" not in shown and "rank 1: error: broken" in shown and shown.count("hello") == 1
    assert "hidden" in (tmp_path / "rank_1.log").read_text() and "broken" in (tmp_path / "rank_1.log").read_text()
    assert "hello" in (tmp_path / "rank_0.log").read_text()
    assert "hello" not in (tmp_path / "rank_1.log").read_text()


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


def test_a_bar_shows_progress_on_a_terminal_and_log_lines_do_not_disturb_it(monkeypatch):
    for stream, enabled in ((io.StringIO(), True), (Terminal(), False)):
        monkeypatch.setattr(progress_module.sys, "stderr", stream)
        with Progress(10, "step", "collecting", enabled=enabled) as bar:
            bar.update(5)
            bar.note(loss=1.0)
        assert stream.getvalue() == ""
    stream = Terminal()
    monkeypatch.setattr(progress_module.sys, "stderr", stream)
    with Progress(1000, "step", "stage3", initial=100) as bar:
        time.sleep(0.3)
        bar.set(600)
        BarSafeHandler(stream).emit(logging.LogRecord("omagd", logging.INFO, "", 0, "a line", None, None))
        bar.set(1500)
        assert bar._bar.n == 1000, "the position is at most the total"
        bar.set(1600, total=2000)
        assert (bar._bar.n, bar._bar.total) == (1600, 2000)
    text = stream.getvalue()
    assert "stage3" in text and "60%" in text and "steps/s" in text
    written = [line for line in text.replace("\r", "\n").split("\n") if "a line" in line]
    assert [line.strip() for line in written] == ["a line"]


def test_sacred_gets_finite_values_with_the_stage_in_the_name_and_keeps_the_ids_of_all_starts(tmp_path):
    run = FakeRun()
    sink = SacredSink(run)
    sink.open(RunFacts(None))
    sink.log(Record({"eval/graph_loss": 1.0, "bad": math.nan}, "stage1", "epoch", 20))
    sink.log(Record({"loss_td": 2.0}, "stage3", "t_env", 30))
    assert run.scalars == [("stage1/eval/graph_loss", 1.0, 20), ("loss_td", 2.0, 30)]
    saved = {}
    for number in (3, 8):
        run = FakeRun()
        run._id = number
        relay = SacredRelay(run)
        logger = make_logger(RunFacts(tmp_path, saved=saved), ["sacred"], LOG, sacred=relay.sender)
        saved = logger.state_dict()
        logger.close()
        relay.stop()
    assert list(saved.values()) == [{"ids": ["3", "8"]}]


def _worker(sender, dies):
    sink = SacredSink(sender)
    sink.open(RunFacts(None))
    for t in range(5000):
        sink.log(Record({"x": float(t)}, "stage3", "t_env", t))
    if dies:
        os._exit(1)
    sink.close("completed")


@pytest.mark.processes
def test_relay_receives_all_that_workers_sent_and_never_waits_for_a_dead_one():
    workers = []
    for dies in (False, True):
        run = FakeRun()
        relay = SacredRelay(run)
        process = multiprocessing.get_context("spawn").Process(target=_worker, args=(relay.sender, dies))
        process.start()
        workers.append((run, relay, process, dies))
    for run, relay, process, dies in workers:
        process.join(60)
        assert process.exitcode == int(dies)
        started = time.monotonic()
        assert relay.stop(timeout=10) and time.monotonic() - started < 8
        assert [scalar[2] for scalar in run.scalars] == list(range(5000))
    relay = SacredRelay(FakeRun())
    os.write(relay.sender.fileno(), b"\x00\x00\x10\x00half a message")
    time.sleep(0.1)
    started = time.monotonic()
    assert relay.stop(timeout=0.3) is False and time.monotonic() - started < 2


def test_relay_keeps_receiving_when_sacred_fails(caplog):
    logging.getLogger("omagd").propagate = True
    relay = SacredRelay(FakeRun(error=RuntimeError("database is gone")))
    for t in range(2000):
        relay.sender.send(("x", 0.5, t))
    assert relay.stop(timeout=10)
    assert sum("database is gone" in r.getMessage() for r in caplog.records) == 1


def test_tensorboard_files_hold_values_by_stage_and_show_once_what_a_resumed_run_logs_again(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def write(saved, values):
        logger = make_logger(RunFacts(tmp_path, saved=saved), ["tensorboard"], LOG)
        states = []
        for t, loss in values:
            logger.log({"loss": loss}, stage="stage3", clock="t_env", t=t)
            states.append(logger.state_dict())
        logger.log({"eval/graph_loss": 0.25}, stage="stage1", clock="epoch", t=20)
        logger.close()
        return states

    def read(stage, name):
        events = EventAccumulator(str(tmp_path / "tb" / stage))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars(name)]

    states = write({}, [(100, 1.0), (200, 0.5), (300, 7.0)])
    time.sleep(1.1)  # the names of files hold whole seconds
    write(states[1], [(300, 0.25), (400, 0.125)])
    assert read("stage3", "loss") == [(100, 1.0), (200, 0.5), (300, 0.25), (400, 0.125)]
    assert read("stage1", "eval/graph_loss")[0] == (20, 0.25)


def test_bars_are_taken_away_before_the_last_lines_of_a_run(monkeypatch):
    """The line has space for the ^C that the terminal prints after the bar."""
    stream = Terminal()
    monkeypatch.setattr(progress_module.sys, "stderr", stream)
    bar = Progress(1000, "step", "stage3")
    bar._bar.dynamic_ncols = lambda file: (70, 20)
    time.sleep(0.3)
    bar.set(600)
    bars = [line for line in stream.getvalue().split("\r") if "stage3" in line]
    assert bars and max(len(line) for line in bars) + len("^C") == 70
    stream.write("^C")
    close_bars()
    shown = len(stream.getvalue())
    assert stream.getvalue().split("^C")[1].endswith("\r\x1b[K")
    BarSafeHandler(stream).emit(logging.LogRecord("omagd", logging.INFO, "", 0, "the last line", None, None))
    assert stream.getvalue()[shown:] == "the last line\n"
