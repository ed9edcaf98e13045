"""Metrics, counters, phases, memory and traces of a run, text logs and progress bars."""

import json
import logging
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omagd.run.reporting import profiling
from omagd.run.reporting.metrics import Counters, Every, Metrics
from omagd.run.reporting.profiling import OTHER, Phases, Profiler, Tracer, shares
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import setup_logging


def test_means_over_ranks_weigh_every_sample_alike():
    rng = np.random.default_rng(0)
    samples, ranks = [rng.normal(size=size) for size in (3, 17, 1)], [Metrics() for _ in range(3)]
    for metrics, values in zip(ranks, samples, strict=True):
        for part in np.array_split(values, 3):
            metrics.add({"loss": (torch.tensor(part.sum()), torch.tensor(len(part)))}, prefix="train/")
        metrics.add({"length_mean": (5.0 * len(values), len(values))}, prefix="test_")
    ranks[1].add({"won_mean": (2.0, "length_mean")}, prefix="test_")  # no episode of other ranks reports it
    states = [metrics.state_dict() for metrics in ranks]
    reduced = [metrics.reduce(SimpleNamespace(gather=lambda _: states)) for metrics in ranks]
    assert reduced[0] == reduced[1] == reduced[2]
    loss = np.concatenate(samples).mean()
    assert reduced[0] == pytest.approx({"train/loss": loss, "test_length_mean": 5, "test_won_mean": 2 / 21})
    assert all(metrics.reduce(Dist()) == {} for metrics in ranks), "reduce starts again"


def test_metrics_sum_in_double_precision_without_graph_and_skip_empty_counts():
    weight = torch.tensor(2.0, requires_grad=True)
    total, count = weight * 3, torch.tensor(2)
    metrics, restored = Metrics(), Metrics()
    metrics.add({"a": (total, count), "empty": (torch.tensor(0.0), torch.tensor(0))})
    metrics.add({"a": (total, count)})
    metrics.add({"a": (1.0, 1), "b": (1.0, "a")})
    assert total.item() == 6.0 and count.item() == 2
    restored.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    assert metrics.reduce(Dist()) == restored.reduce(Dist()) == {"a": pytest.approx(13 / 5), "b": 0.2}
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
    counters, other = Counters(epoch=1, t_env=2**40, episodes=3, updates=4), Counters()
    other.load_state_dict(json.loads(json.dumps(counters.state_dict())))
    assert other == counters


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by an object whose `now` a test changes."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def test_every_second_is_counted_once(clock):
    phases, own = Phases(), SimpleNamespace(seconds=7.0)
    clock.now += 1
    with phases("update"):
        clock.now += 2
        with phases("sample"):
            clock.now += 4
        clock.now += 8
        with phases("sample"):
            clock.now += 16
    with pytest.raises(ZeroDivisionError), phases("collect"):
        clock.now += 3
        raise ZeroDivisionError
    clock.now += 32
    assert phases.totals() == {OTHER: 33, "update": 10, "sample": 20, "collect": 3}
    phases = Phases()
    phases.watch("communicate", lambda: own.seconds)
    with phases("update"):
        clock.now += 5
        own.seconds += 2
    with phases("collect"):
        clock.now += 1
        own.seconds += 50  # more than the phase took: it ran in another thread
    assert phases.totals() == {OTHER: 0, "communicate": 3, "update": 3, "collect": 0}
    assert sum(total / wall for total, wall in shares(phases.totals()).values()) == pytest.approx(1.0)


def test_a_record_has_shares_and_speed_since_the_last_one(clock):
    profiler, acting = Profiler(), SimpleNamespace(seconds=1.0, calls=5, frames=7)
    profiler.watch_acting(SimpleNamespace(reconstructor=acting))
    profiler.begin("stage3")
    for name, seconds in (("update", 6), ("log", 2)):
        with profiler.phases(name):
            clock.now += seconds
    values = profiler.record(4)
    assert (values["time/update"], values["time/log"], values["updates_per_second"]) == (0.75, 0.25, 0.5)
    assert "communicate_ms_per_sync" not in values
    with profiler.phases("collect"):
        clock.now += 10
        acting.seconds, acting.calls, acting.frames = 2.0, 9, 17
    values = profiler.record(14)
    assert (values["reconstruct_ms_per_tick"], values["reconstruct_frames_per_tick"]) == (250.0, 2.5)
    assert (values["time/collect"], values["time/update"], values["updates_per_second"]) == (0.9, 0.0, 1.0)
    assert profiler.end() == {"wall": 18, "update": 6, "log": 2, "collect": 9, "reconstruct": 1}


def test_a_trace_is_bounded_and_holds_the_phases(tmp_path, monkeypatch):
    profiler = Profiler(traces=tmp_path / "profile")
    profiler.begin("stage1")
    written = []
    for number in range(12):
        with profiler.phases("update"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        if profiler.tracer.step(learned=number >= 4):
            written.append(number)
    assert written == [4 + profiling.SKIPPED + profiling.RECORDED - 1], "after the first updates, once"
    (path,) = (tmp_path / "profile").glob("*")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert path.name == "stage1_rank0.json"
    assert names.count("aten::matmul") == names.count("update") == profiling.RECORDED
    monkeypatch.setattr(profiling, "ENOUGH_SECONDS", 0.0)
    tracer = Tracer(tmp_path / "long.json")
    assert [tracer.step(True) for _ in range(6)] == [False] * profiling.SKIPPED + [True, False, False, False]
    assert tracer.iterations == 1, "one long iteration is enough"


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
