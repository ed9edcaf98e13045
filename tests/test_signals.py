"""Stop requests: raised once, delayed while files are written, delayed until the end of an iteration."""

from __future__ import annotations

import os
import signal
import time
import weakref
from contextlib import nullcontext, suppress

import pytest

from omagd.run import signals
from omagd.run.signals import (
    Stopped,
    ask_to_end,
    deferred,
    saving,
    stop_now,
    stop_requested,
    stop_wanted,
    stoppable,
    uninterrupted,
)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_stops_once_and_the_handlers_are_restored():
    before, done = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)], []
    with pytest.raises(Stopped) as stopped, stoppable():
        assert not stop_requested()
        with deferred(5.0):
            pass
        try:
            send(signal.SIGTERM)
            done.append("continued")
        finally:
            send(signal.SIGINT)  # the same request again, a moment later
            done.append("cleaned up")
    assert (done, stopped.value.exit_code, stop_requested()) == (["cleaned up"], 143, True)
    with deferred(1.0):  # no effect outside `stoppable`
        assert not stop_wanted()
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)] == before


def ignored(how: str) -> None:
    """Send SIGINT, and again, where an exception is ignored."""

    class Finalized:
        def __del__(self) -> None:
            finalized()

    def finalized(*_: object) -> None:
        try:
            send(signal.SIGINT)
        finally:
            send(signal.SIGINT)  # from the terminal and from the parent process

    if how == "dropped":
        with suppress(BaseException):
            finalized()
        return
    found = Finalized() if how == "__del__" else type("Other", (), {})()
    watch = weakref.ref(found, finalized) if how == "weakref" else None
    del found, watch


@pytest.mark.parametrize("how", ["__del__", "weakref", "dropped"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_signal_where_exceptions_are_ignored_is_neither_lost_nor_a_traceback(how, times, capsys):
    with pytest.raises(Stopped, match="SIGINT"), stoppable():
        ignored(how)
        for _ in range(times - 1):
            with suppress(BaseException):
                time.sleep(10)
        time.sleep(10)
    assert capsys.readouterr().err == ""
    time.sleep(0.05)  # what has left the block is not repeated


@pytest.mark.parametrize("seconds", [None, 0.1])
def test_files_are_written_before_a_signal_counts(seconds):
    """seconds: of `deferred`, which pass while the file is written."""
    done = []
    with pytest.raises(Stopped), stoppable(), nullcontext() if seconds is None else deferred(seconds):
        with uninterrupted():
            send(signal.SIGINT if seconds is None else signal.SIGTERM)
            time.sleep(3 * (seconds or 0))
            done.append("written")
        done.append("continued")
    assert done == ["written"]


@pytest.mark.parametrize(("number", "tells"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGINT, False)])
def test_a_deferred_signal_is_raised_at_the_end_of_the_iteration(number, tells, capfd):
    done = []
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(5.0, tells=tells):
        assert not stop_wanted()
        send(number)
        assert stop_wanted()
        with uninterrupted():
            send(number)
        done.append("saved")
        stop_now()
    assert (done, stopped.value.exit_code, signal.getitimer(signal.ITIMER_REAL)[0]) == (["saved"], 128 + number, 0.0)
    assert capfd.readouterr().err.count("Ctrl-C") == (tells and number == signal.SIGINT)


def test_ctrl_c_without_a_terminal_and_the_end_of_the_launcher_after_a_signal_still_save(monkeypatch):
    read, closed = os.pipe()
    os.close(read)
    write = os.write
    monkeypatch.setattr(os, "write", lambda _, text: write(closed, text))
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(Stopped), stoppable(), deferred(5.0, tells=True):
            send(number)
            ask_to_end("the launcher has ended")
            assert stop_wanted()
            stop_now()
    os.close(closed)


def test_a_signal_is_not_deferred_for_ever():
    with pytest.raises(Stopped), stoppable(), deferred(5.0):
        send()  # raised at the end of the block
    with pytest.raises(ZeroDivisionError), stoppable(), deferred(5.0):
        send()
        raise ZeroDivisionError
    began = time.monotonic()
    with pytest.raises(Stopped), stoppable(), deferred(0.2):
        send()
        time.sleep(5)
    assert 0.15 < time.monotonic() - began < 2


@pytest.mark.parametrize("received", ["before", "never", "during the save"])
def test_the_save_gets_its_time(received):
    done = []
    with pytest.raises(Stopped, match="SIGTERM"), stoppable(), deferred(0.2):
        if received == "before":
            send()
        saving(5.0)
        if received == "during the save":
            send()
        time.sleep(0.4)
        done.append("saved")
        stop_now()
    assert done == ["saved"]


def test_a_repeated_signal_the_end_of_the_launcher_and_a_foreign_alarm_are_not_deferred(monkeypatch):
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", 0.05)
    cases = ((signal.SIGINT, signal.SIGINT), 130), ((None,), 130), ((signal.SIGALRM,), 142)
    for held in (nullcontext, uninterrupted):
        for numbers, code in cases:
            done = []
            with pytest.raises(Stopped) as stopped, stoppable(), deferred(50.0), held():
                for number in numbers:
                    time.sleep(0.1)
                    send(number) if number else ask_to_end("the launcher has ended")
                done.append("continued")
            assert stopped.value.exit_code == code
            assert bool(done) == (held is uninterrupted and len(numbers) == 1), "a second signal interrupts it"


def test_a_closed_terminal_saves_like_sigterm_and_nohup_keeps_ignoring_it():
    before, done = signal.signal(signal.SIGHUP, signal.SIG_DFL), []  # these tests may run under nohup
    try:
        with pytest.raises(Stopped) as stopped, stoppable(), deferred(5.0):
            send(signal.SIGHUP)
            done.append(stop_wanted())
            stop_now()
        assert (stopped.value.exit_code, stopped.value.render()) == (129, "interrupted by SIGHUP")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with suppress(Stopped), stoppable():
            send(signal.SIGHUP)
            done.append(stop_requested())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done == [True, False]
