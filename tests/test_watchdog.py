"""Heartbeats and the watchdog: which rank is named when an exchange or any progress is missing."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from runner_toys import FakeEnv, Probe, runner_of
from steady_walk import SteadyArgs, SteadyWalk

from omagd.config.loading import resolve
from omagd.envs import REGISTRY
from omagd.envs.workers.vector import SerialEnvs
from omagd.run.cli.preflight import describe_env
from omagd.run.launch import watchdog
from omagd.run.launch.watchdog import Heartbeat, beating, ended_if_hung, watching
from omagd.run.reporting.profiling import Profiler
from omagd.run.training.session import BUILDING, CLOSING, Session
from omagd.utils.dist_utils import Dist
from omagd.utils.errors import RankFailed
from omagd.utils.signals import Stopped, deferred, raise_in_main_thread, stoppable, unhurried


class Board:
    """The ranks' key-value store, in this process; texts of `frozen` ranks no longer change."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.frozen: set[str] = set()
        self.there = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.there:
            if key not in self.frozen:
                self.texts[key] = value
            self.there.notify_all()

    def get(self, key: str) -> bytes:
        with self.there:
            self.there.wait_for(lambda: key in self.texts)
            return self.texts[key].encode()


def group(timeout: float, world_size: int = 3) -> tuple[Board, list[Dist], list[Heartbeat], list[list[str]]]:
    board, said = Board(), [[] for _ in range(world_size)]
    ranks = [Dist(rank, world_size) for rank in range(world_size)]
    hear = [lambda line, stack, heard=heard: heard.append(line) for heard in said]
    pulses = [Heartbeat(dist, board, timeout, one) for dist, one in zip(ranks, hear, strict=True)]
    for pulse in pulses:
        pulse.start()
    for rank in ranks:
        board.get(str(rank.rank))  # each has written a first heartbeat
    return board, ranks, pulses, said


def end(pulses: list[Heartbeat]) -> None:
    for pulse in pulses:
        pulse.stop()
        pulse.join(30)
    assert not any(pulse.is_alive() for pulse in pulses)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true() and time.monotonic() < until:
        time.sleep(0.02)


def test_the_rank_that_does_not_come_is_named_by_those_that_wait():
    _, ranks, pulses, said = group(1.2)
    late = Profiler(ranks[1])
    late.begin("stage3")
    with late.phases("collect"):
        for rank in (0, 2):
            ranks[rank].waits.enter()
        wait_until(lambda: all(said[rank] for rank in (0, 2)))
    end(pulses)
    for rank in (0, 2):
        assert said[rank][0].startswith("rank 1 (host ")
        assert re.search(r" hangs: in stage3 \(collect\) for \d+ s, while the others wait for it", said[rank][0])
        assert said[rank][0].count("hangs") == 1, "the other rank that waits is not named"
    assert said[1] == []


def test_a_rank_that_has_stopped_in_the_middle_of_an_exchange_is_named():
    board, ranks, pulses, said = group(0.5, 2)
    for dist in ranks:
        dist.waits.enter()
    board.frozen.add("1")
    wait_until(lambda: bool(said[0]))
    end(pulses)
    assert said[0][0].startswith("rank 1 (host ")
    assert "hangs: no heartbeat for " in said[0][0]


def test_nobody_is_named_where_all_compute_for_long_or_have_left():
    _, ranks, pulses, said = group(0.6, 3)
    pulses[2].stop()
    time.sleep(0.9)  # longer than an exchange may take, but nobody waits in one
    end(pulses)
    assert said == [[], [], []]
    with beating(Dist(0, 1), Board(), 0.2, lambda line, stack: said[0].append(line)):
        ranks[0].waits.enter()
    assert said[0] == []


def test_what_cannot_be_read_is_no_sign_of_life_and_does_not_end_the_watch(caplog):
    """Whatever a rank writes, the threads of the others go on, wait as for a silent rank and name it."""
    logging.getLogger("omagd").propagate = True
    texts = ("{", "7", "[]", '{"rank": 1}', '{"rank": 1, "beat": "x"}', "[" * 100_000)
    groups = [group(0.4, 2) for _ in texts]
    for text, (board, ranks, _, _) in zip(texts, groups, strict=True):
        board.frozen.add("1")
        board.texts["1"] = text
        ranks[1].waits.entered = 1
        ranks[0].waits.enter()
    wait_until(lambda: all(said[0] for _, _, _, said in groups))
    for text, (_, _, pulses, said) in zip(texts, groups, strict=True):
        end(pulses)
        assert said[0][0].startswith("rank 1 (host "), text
    assert len([record for record in caplog.records if "cannot be read" in record.message]) == len(texts)


def watch(dist: Dist, timeout: float, work: Callable[[Callable[[], None]], None]) -> list[tuple[str, str]]:
    """Return what the watchdog says while `work` is done in this thread; it is given a call that hangs until then."""
    found: list[tuple[str, str]] = []

    def stuck() -> None:
        wait_until(lambda: bool(found))

    with watching(dist, timeout, lambda line, stack: found.append((line, stack))):
        work(stuck)
    return found


def test_a_rank_that_stands_still_is_named_with_slot_seed_and_stack():
    dist, env = Dist(1, 2), SerialEnvs(SteadyWalk, SteadyArgs(), 2)
    dist.waits.slots = env.busy_slots
    measures = Profiler(dist)
    measures.begin("stage3")

    def play(stuck: Callable[[], None]) -> None:
        def stuck_in_step(actions):
            stuck()
            return 0.0, False, {}

        dist.waits.ask(np.ones(2, bool), np.array([11, 12]))  # of both, which the environment knows better
        env.reset(np.ones(2, bool), np.array([11, 12]))
        env._envs[1].step = stuck_in_step
        with measures.phases("collect"):
            env.step(np.zeros((2, env.info.n_agents), np.int64), np.ones(2, bool))

    ((line, stack),) = watch(dist, 0.2, play)
    assert re.match(r"rank 1 \(host \S+, process \d+\) hangs: in stage3 \(collect\) for \d+ s, in slot 1 from", line)
    assert line.endswith("slot 1 from seed 12")
    assert "in stuck_in_step" in stack and "time.sleep(0.02)" in stack


@pytest.mark.parametrize("call", ["reset", "observe", "step"])
def test_slots_and_seeds_are_named_where_all_battles_are_one_object_of_this_process(call):
    """In the first call that asks for some of the slots alone, where it says for which."""
    dist, env, asked = Dist(), FakeEnv(7), {}
    runner = runner_of(env)
    runner.ticked, runner.asked = dist.waits.played, dist.waits.ask

    def play(stuck: Callable[[], None]) -> None:
        real = getattr(env, call)

        def stuck_in_call(*given):
            slots = np.flatnonzero({"reset": given[0], "step": given[-1], "observe": np.ones(7)}[call]).tolist()
            if not asked and (call == "observe" or len(slots) < 7):
                asked.update({slot: (given[1] if call == "reset" else env.seed)[slot] for slot in slots})
                stuck()
            return real(*given)

        setattr(env, call, stuck_in_call)
        runner.run(Probe(), explore=None, episodes_per_slot=3)

    ((line, stack),) = watch(dist, 0.2, play)
    named = [f"slot {slot} from seed {seed}" for slot, seed in asked.items()]
    assert line.endswith(f" s, in {', '.join(named[:4])}{', …' * (len(named) > 4)}")
    assert "in stuck_in_call" in stack
    assert dist.waits.asked is None, "nothing is asked once all has been played"


@pytest.mark.parametrize("call, phase", [("__init__", BUILDING), ("close", CLOSING)])
def test_an_environment_that_cannot_be_built_or_closed_is_found_before_the_run_begins(call, phase, monkeypatch, caplog):
    def never_over(*_: object) -> None:
        time.sleep(10)

    logging.getLogger("omagd").propagate = True
    config = resolve("qmix", "skirmish", {"dist_timeout_minutes": 0.2 / 60})
    monkeypatch.setattr(REGISTRY.get("skirmish"), call, never_over)
    with pytest.raises(RankFailed, match=rf"^rank 0 \(host \S+, process {os.getpid()}\) hangs: in {phase} for \d+ s$"):
        describe_env(config)
    assert "in never_over\n    time.sleep(10)" in caplog.text


@pytest.mark.parametrize("late", [False, True])
def test_a_session_whose_environment_cannot_be_closed_is_ended(late):
    """late: also while signals are held back, as when a run is closed."""
    dist, nothing = Dist(), SimpleNamespace(close=lambda *patience: None)
    env = SimpleNamespace(close=lambda: time.sleep(30))
    session = SimpleNamespace(dist=dist, checkpointer=nothing, episode_log=nothing, env=env)
    with pytest.raises(RankFailed, match=f"in {CLOSING} for"), stoppable(), ended_if_hung(dist, 0.2):
        with unhurried() if late else nullcontext():
            Session.close(session)


def test_a_process_that_no_error_can_free_is_ended(monkeypatch):
    dist, ended = Dist(), []
    monkeypatch.setattr(watchdog, "CLOSING_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "leave_hung", lambda line, stack: ended.append(line))
    with ended_if_hung(dist, 0.1, lambda: ended.append("finished")), dist.waits.doing(CLOSING):
        wait_until(lambda: len(ended) == 2)  # outside `stoppable` no error reaches this thread
    assert ended[0] == "finished" and CLOSING in ended[1]


def test_an_environment_is_watched_while_it_is_saved_and_counted_between_two_iterations():
    dist, env, policy = Dist(), FakeEnv(3), Probe()
    runner = runner_of(env, name="stream")
    runner.ticked, runner.asked = dist.waits.played, dist.waits.ask
    runner.collect(policy, explore=None)
    policy.snapshot = dict

    def save(stuck: Callable[[], None]) -> None:
        env.snapshot = lambda: stuck() or {}
        runner.snapshot()

    ((line, _),) = watch(dist, 0.2, save)
    playing = [f"slot {slot} from seed {env.seed[slot]}" for slot in range(3) if not env.over[slot]]
    assert playing and all(slot in line for slot in playing)

    session = SimpleNamespace(dist=dist, env=SimpleNamespace())

    def count(stuck: Callable[[], None]) -> None:
        session.env.get_stats = lambda: stuck() or {}
        Session.env_stats(session)

    ((line, _),) = watch(dist, 0.2, count)
    assert " hangs: in reading environment counters for " in line


def test_long_work_that_goes_on_or_belongs_to_a_disk_or_another_rank_is_no_hang():
    dist = Dist()
    measures = Profiler(dist)

    def work(_: Callable[[], None]) -> None:
        with measures.phases("collect"):
            for _ in range(8):
                time.sleep(0.05)
                dist.waits.played(True)  # ticks
            dist.waits.played(False)
        for name in ("checkpoint", "prepare", "finish", "save"):
            with measures.phases(name):
                time.sleep(0.1)  # in all longer than the timeout: another phase is progress
        with measures.phases("checkpoint"):
            time.sleep(0.4)
        with measures.phases("update"), dist.waits.counted():
            time.sleep(0.4)

    assert watch(dist, 0.25, work) == []


def test_an_error_is_raised_in_the_main_thread():
    with pytest.raises(RankFailed, match="it hangs"), stoppable(), deferred(5.0):
        threading.Timer(0.2, raise_in_main_thread, [RankFailed("it hangs")]).start()
        time.sleep(10)


def test_a_rank_that_ends_no_longer_uses_the_store():
    """The store is often gone by then; torch would print its C++ stack."""
    board, dist = Board(), Dist(0, 2)
    pulse = Heartbeat(dist, board, 1.0, lambda line, stack: None)
    with pytest.raises(Stopped), stoppable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            pulse.start()
            time.sleep(0.3)
            pulse.stop()
    assert board.texts == {}
