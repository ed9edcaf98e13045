"""Heartbeats and the watchdog: which rank is named when an exchange or any progress is missing; ranks that hang."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from sockets import wait_until
from trap_env import TrapRun
from walk_env import SteadyArgs, SteadyWalk

from omagd.config.loading import resolve
from omagd.envs import REGISTRY
from omagd.envs.workers.vector import SerialEnvs
from omagd.run.cli.preflight import describe_env
from omagd.run.launch.watchdog import Heartbeat, Watchdog, ended_if_hung
from omagd.run.reporting.profiling import Profiler
from omagd.run.signals import stoppable, uninterrupted
from omagd.run.training.stages.base import BUILDING, CLOSING, Session
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RankFailed


class Board:
    """The ranks' store of texts, in this process; texts of `frozen` ranks no longer change."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.frozen: set[str] = set()

    def set(self, key: str, value: str) -> None:
        if key not in self.frozen:
            self.texts[key] = value

    def get(self, key: str) -> bytes:
        assert wait_until(lambda: key in self.texts)
        return self.texts[key].encode()


@contextmanager
def group(timeout: float, world_size: int = 2) -> Iterator[tuple[Board, list[Dist], list[Heartbeat], list[list[str]]]]:
    """Yield a board, the ranks, their heartbeats and the lines that each rank reports."""
    board, lines = Board(), [[] for _ in range(world_size)]
    ranks = [Dist(rank, world_size) for rank in range(world_size)]
    pulses = [Heartbeat(d, board, timeout, lambda line, _, i=d.rank: lines[i].append(line)) for d in ranks]
    with ExitStack() as stack:
        for pulse in pulses:
            stack.enter_context(pulse)
        for rank in ranks:
            board.get(str(rank.rank))  # each has written a first heartbeat
        yield board, ranks, pulses, lines
    assert not any(pulse.is_alive() for pulse in pulses)


def test_the_ranks_that_wait_name_the_one_that_is_missing():
    with group(1.2, 3) as (_, ranks, _, lines):
        late = Profiler(ranks[1])
        late.begin("stage3")
        with late.phases("collect"):
            for rank in (0, 2):
                ranks[rank].waits.entered += 1
            assert wait_until(lambda: lines[0] and lines[2])
    for rank in (0, 2):
        pattern = r"rank 1 \(host .* hangs: in stage3 \(collect\) for \d+ s, while the others wait for it"
        assert re.fullmatch(pattern, lines[rank][0]) and lines[rank][0].count("hangs") == 1
    assert lines[1] == []


def test_a_rank_that_has_stopped_within_an_exchange_is_named():
    with group(0.5) as (board, ranks, _, lines):
        for dist in ranks:
            dist.waits.entered += 1
        board.frozen.add("1")
        assert wait_until(lambda: lines[0])
    assert re.match(r"rank 1 \(host .* hangs: no heartbeat for \d", lines[0][0])


def test_no_rank_is_named_while_all_compute_or_after_they_have_left():
    with group(0.6, 3) as (_, ranks, pulses, lines):
        pulses[2].__exit__()
        time.sleep(0.9)  # longer than an exchange may take, but no rank waits in one
        ranks[0].waits.entered += 1  # this one begins now
        time.sleep(0.2)
    with group(0.2, 1) as (_, ranks, _, alone):
        ranks[0].waits.entered += 1
    assert lines == [[], [], []] and alone == [[]]


def watch(dist: Dist, timeout: float, work: Callable[[Callable[[], None]], None]) -> list[tuple[str, str]]:
    """Return what the watchdog reports during `work`, which receives a function that blocks until then."""
    found: list[tuple[str, str]] = []

    def stuck() -> None:
        wait_until(lambda: found)

    with Watchdog(dist, timeout, lambda line, stack: found.append((line, stack))):
        work(stuck)
    return found


def test_a_rank_without_progress_is_named_with_slot_seed_and_stack():
    dist, env = Dist(1, 2), SerialEnvs(SteadyWalk, SteadyArgs(), 2)
    dist.waits.slots = env.busy_slots
    profiler = Profiler(dist)
    profiler.begin("stage3")

    def play(stuck: Callable[[], None]) -> None:
        def stuck_in_step(actions):
            stuck()
            return 0.0, False, {}

        dist.waits.ask(np.ones(2, bool), np.array([11, 12]))  # both, but the environment knows which one is busy
        env.reset(np.ones(2, bool), np.array([11, 12]))
        env._envs[1].step = stuck_in_step
        with profiler.phases("collect"):
            env.step(np.zeros((2, env.info.n_agents), np.int64), np.ones(2, bool))

    ((line, stack),) = watch(dist, 0.2, play)
    place = r"in stage3 \(collect\) for \d+ s, in slot 1 from seed 12"
    assert re.fullmatch(rf"rank 1 \(host \S+, process \d+\) hangs: {place}", line)
    assert "in stuck_in_step" in stack and "time.sleep(0.02)" in stack


@pytest.mark.parametrize("call, phase", [("__init__", BUILDING), ("close", CLOSING)])
def test_an_environment_that_cannot_be_built_or_closed_is_found_before_the_run_begins(call, phase, monkeypatch, caplog):
    def never_over(*_: object) -> None:
        time.sleep(10)

    config = resolve("qmix", "matrix_game", {"dist_timeout_minutes": 0.2 / 60})
    monkeypatch.setattr(REGISTRY.get("matrix_game"), call, never_over)
    with pytest.raises(RankFailed, match=rf"^rank 0 \(host \S+, process {os.getpid()}\) hangs: in {phase} for \d+ s$"):
        describe_env(config)
    assert "in never_over\n    time.sleep(10)" in caplog.text


@pytest.mark.parametrize("held", [nullcontext, uninterrupted])
def test_a_session_whose_environment_cannot_be_closed_is_ended(held):
    """Also while signals are delayed, as when a run is closed."""
    dist, nothing = Dist(), SimpleNamespace(close=lambda *patience: None)
    env = SimpleNamespace(close=lambda: time.sleep(30))
    session = SimpleNamespace(dist=dist, checkpointer=nothing, episode_log=nothing, env=env)
    with pytest.raises(RankFailed, match=f"in {CLOSING} for"), stoppable(), ended_if_hung(dist, 0.2), held():
        Session.close(session)


def test_long_work_with_progress_or_on_a_disk_or_in_an_exchange_is_no_hang():
    dist = Dist()
    profiler = Profiler(dist)

    def work(_: Callable[[], None]) -> None:
        with profiler.phases("collect"):
            for step in range(9):
                dist.waits.played(step < 8)
                time.sleep(0.05 if step < 8 else 0.0)
        for name, seconds in {"checkpoint": 0.4, "prepare": 0.1, "finish": 0.1, "save": 0.1}.items():
            with profiler.phases(name):
                time.sleep(seconds)  # another phase is progress
        with profiler.phases("update"), dist.waits.counted():
            time.sleep(0.4)

    assert watch(dist, 0.25, work) == []


HANGS = {
    # how, settings, rank, words of the error
    "stop": ("stop", (), "1", "no heartbeat for"),
    "endless": ("endless", ("env_args.rank=-1",), "[01]", "in stage3 (collect) for"),
}


@pytest.mark.processes
def test_a_rank_that_hangs_is_named_and_ends_the_run(tmp_path):
    """One rank is stopped; all hang at once; in runs side by side."""
    runs = {name: TrapRun(tmp_path / name, h, *w, "dist_timeout_minutes=0.06") for name, (h, w, *_) in HANGS.items()}
    for name, (how, _, rank, words) in HANGS.items():
        ended = runs[name].end()
        assert (ended.code, runs[name].summary["exit_state"]) == (1, "failed"), ended.text
        (line,) = [line for line in ended.err.splitlines() if line.startswith("error: ")]
        assert re.match(rf"error: rank {rank} \(host \S+, process \d+\) hangs: {re.escape(words)} \d+ s", line), line
        if how == "endless":
            assert re.search(r", in slot [01] from seed \d+", line)
            assert "trap_env.py" in ended.text and "in fail" in ended.text  # the stack
        assert "Traceback" not in ended.err and "restarting" not in ended.text
        assert runs[name].shared_memory == []
