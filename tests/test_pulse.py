"""Who is named when an exchange between the ranks does not come about."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable

from omagd.utils.dist_utils import Dist
from omagd.utils.measures import Measures
from omagd.utils.pulse import Pulse, beating


class Board:
    """What the store of the ranks does, in this process; texts of `frozen` ranks no longer change."""

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


def group(timeout: float, world_size: int = 3) -> tuple[Board, list[Dist], list[Pulse], list[list[str]]]:
    board, said = Board(), [[] for _ in range(world_size)]
    ranks = [Dist(rank, world_size) for rank in range(world_size)]
    pulses = [Pulse(dist, board, timeout, heard.append) for dist, heard in zip(ranks, said, strict=True)]
    for pulse in pulses:
        pulse.start()
    for rank in ranks:
        board.get(str(rank.rank))  # each has said something, so that whoever falls silent has been heard before
    return board, ranks, pulses, said


def end(pulses: list[Pulse]) -> None:
    for pulse in pulses:
        pulse.stop()
        pulse.join(30)
    assert not any(pulse.is_alive() for pulse in pulses)


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true() and time.monotonic() < until:
        time.sleep(0.02)


def test_the_rank_that_does_not_come_is_named_by_those_that_wait():
    _, ranks, pulses, said = group(2.0)
    late = Measures(ranks[1])
    late.begin("stage3")
    with late.phases("collect"):
        for rank in (0, 2):
            ranks[rank].waits.enter()
        wait_until(lambda: all(said[rank] for rank in (0, 2)))
    end(pulses)
    for rank in (0, 2):
        assert said[rank][0].startswith("rank 1 (host ")
        assert re.search(r" hangs: in stage3 \(collect\) for \d+ s, while the others wait for it", said[rank][0])
    assert said[1] == []


def test_a_rank_that_has_stopped_in_the_middle_of_an_exchange_is_named():
    board, ranks, pulses, said = group(1.0, 2)
    for dist in ranks:
        dist.waits.enter()
    board.frozen.add("1")
    wait_until(lambda: bool(said[0]))
    end(pulses)
    assert said[0][0].startswith("rank 1 (host ")
    assert "hangs: no sign of life for " in said[0][0]


def test_nobody_is_named_where_all_compute_for_long_or_have_left():
    _, ranks, pulses, said = group(0.5, 3)
    pulses[2].stop()
    time.sleep(1.2)  # longer than an exchange may take, but nobody waits in one
    end(pulses)
    assert said == [[], [], []]
    with beating(Dist(0, 1), Board(), 0.5, said[0].append):
        ranks[0].waits.enter()
    assert said[0] == []
