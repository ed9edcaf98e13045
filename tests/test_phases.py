"""Phases, memory and traces of a run; ranks whose weights differ."""

from __future__ import annotations

import json
import mmap
import time
from types import SimpleNamespace

import pytest
import torch
from ddp_harness import run_ranks
from q_toys import make_learner, random_episode, toy_config

from omagd.run.memory_budget import resident_bytes
from omagd.run.reporting import profiling
from omagd.run.reporting.log_sinks import render_block
from omagd.run.reporting.profiling import OTHER, Phases, Profiler, Tracer, over_ranks, shares, usage
from omagd.run.reporting.report import phases_table
from omagd.run.training.stages.health import check_replicas, held_in_common
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import UserError
from omagd.utils.logging import Record, RunFacts
from omagd.utils.packing import pack_episodes

torch.set_num_threads(1)


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
    profiler = Profiler()
    profiler.begin("stage3")
    for name, seconds in (("update", 6), ("log", 2)):
        with profiler.phases(name):
            clock.now += seconds
    values = profiler.record(4)
    assert (values["time/update"], values["time/log"], values["updates_per_second"]) == (0.75, 0.25, 0.5)
    assert "communicate_ms_per_sync" not in values
    with profiler.phases("collect"):
        clock.now += 10
    values = profiler.record(14)
    assert (values["time/collect"], values["time/update"], values["updates_per_second"]) == (1.0, 0.0, 1.0)
    assert profiler.end() == {"wall": 18, "update": 6, "log": 2, "collect": 10}


def test_memory_of_all_ranks(tmp_path):
    before = resident_bytes()
    held = mmap.mmap(-1, 64 << 20)  # new pages, whatever the allocator has kept
    held.write(b"x" * (64 << 20))
    assert 50e6 < resident_bytes() - before < 200e6
    assert 50 < usage(torch.device("cpu"))["memory/rss_mb"] < 1e5
    parts = [{"memory/rss_mb": 5.0}, {"memory/rss_mb": 9.0, "gpu/use": 0.5}]
    highest = {"gpu/use": 0.5, "memory/rss_mb": 9.0}
    assert over_ranks(parts, each=False) == highest
    of_ranks = {"memory/rss_mb_rank0": 5.0, "memory/rss_mb_rank1": 9.0, "gpu/use_rank1": 0.5}
    assert over_ranks(parts, each=True) == highest | of_ranks
    values = {"time/collect": 0.25, "time/update": 0.7, "time/save": 0.0, "loss_td": 1.0} | highest | of_ranks
    lines = render_block(Record(values, "stage3", "t_env", 7), RunFacts(tmp_path), width=120).splitlines()
    assert "  time   update 70.0 % · collect 25.0 %" in lines
    assert "  memory/rss_mb by rank: 5, 9" in lines
    assert "time/" not in "\n".join(lines)


def test_the_report_has_a_row_for_each_stage():
    stages = {
        "stage1": {"phases": {"wall": 10.0, "update": 9.0, "collect": 1.0}},
        "stage3": {"phases": {"wall": 200.0, "collect": 150.0, "update": 49.9, "save": 0.1}},
        "evaluate": {},
    }
    heads, first, last = phases_table({"stages": stages})
    assert heads.split() == ["Time", "wall", "collect", "update"]
    assert first.split()[3:] == ["10.0", "%", "90.0", "%"]
    assert last.split()[:4] == ["stage3", "3", "min", "20"]
    assert phases_table({"stages": {}}) == []
    continued = {"id": "0", "compared": {}, "resumed": [{"kind": "exact"}]}
    for again in ({"restarts": 1}, {"restarts": 0, "card": continued}):
        assert phases_table({"stages": stages, **again})[0].startswith("Time since the last start  wall ")
    assert phases_table({"stages": stages, "restarts": 0, "card": {**continued, "resumed": []}})[0] == heads


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


def change_weights(rank, dist, names):
    """Learn on two ranks, then change one number of each tensor on rank 1; return errors, exchanges and their time."""
    learner = make_learner(toy_config(learner="nq_learner_ddp"), dist=dist)
    for update in range(3):
        batch = pack_episodes([random_episode(10 * update + 100 * rank + i, 3 + i) for i in range(2)])
        learner.update(batch, episodes=update)
    calls, errors = dist.waits.calls, []
    check_replicas(dist, learner, "in iteration 3")
    for name in names:
        value = held_in_common(learner)[name].view(-1)
        value[0] += 1e-6 * rank
        try:
            check_replicas(dist, learner, "in iteration 4 of stage3")
        except UserError as error:
            errors.append(error.message)
        value[0] -= 1e-6 * rank
    return errors, calls, dist.waits.seconds


@pytest.mark.processes
def test_a_changed_weight_is_found_and_named():
    tensors = held_in_common(make_learner(toy_config(), dist=Dist()))
    names = [next(name for name in tensors if name.startswith(part)) for part in ("mixer", "target_a")]
    for errors, calls, seconds in run_ranks(change_weights, names):
        for message, name in zip(errors, names, strict=True):
            assert f"'{name}'" in message and "in iteration 4 of stage3" in message and "rank" in message
        assert calls >= 3 * 2 and 0 < seconds < 30, "each update waits for a count and for gradients"
