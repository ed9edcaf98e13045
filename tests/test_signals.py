"""Stop requests: raised once, delayed while files are written, delayed until the end of an iteration."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from contextlib import nullcontext, suppress

import pytest

from omagd.utils import signals
from omagd.utils.progress import _show, close_bars
from omagd.utils.signals import (
    Stopped,
    ask_to_end,
    deferred,
    saving,
    stop_now,
    stop_requested,
    stop_wanted,
    stoppable,
    unhurried,
)
from omagd.utils.writing import STORAGE, drop_lost_output


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_stops_once_and_the_old_handlers_come_back():
    before, done = signal.getsignal(signal.SIGTERM), []
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
    assert done == ["cleaned up"]
    assert (stopped.value.exit_code, stop_requested()) == (143, True)
    assert signal.getsignal(signal.SIGTERM) is before
    alarm = signal.getsignal(signal.SIGALRM)
    with deferred(1.0):  # no effect outside `stoppable`
        assert not stop_wanted()
    assert signal.getsignal(signal.SIGALRM) is alarm


def test_a_signal_that_arrives_in_a_finalizer_is_neither_lost_nor_a_traceback(capsys):
    class Finalized:
        def __del__(self) -> None:
            send(signal.SIGINT)

    with pytest.raises(Stopped) as stopped, stoppable():
        finalized = Finalized()
        del finalized
        time.sleep(10)
    assert stopped.value.number == signal.SIGINT
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("seconds", [None, 0.1])
def test_files_are_written_before_a_signal_counts(seconds):
    """seconds: of `deferred`, which end while the file is written."""
    done = []
    with pytest.raises(Stopped), stoppable(), nullcontext() if seconds is None else deferred(seconds):
        with unhurried():
            send(signal.SIGINT if seconds is None else signal.SIGTERM)
            time.sleep(3 * (seconds or 0))
            done.append("written")
        done.append("continued")
    assert done == ["written"]


def test_a_put_off_sigterm_is_noted_and_raised_where_it_suits():
    done = []
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(5.0):
        assert not stop_wanted()
        send()
        done.append("noted")
        assert stop_wanted()
        with unhurried():
            send()
        done.append("saved")
        stop_now()
    assert done == ["noted", "saved"]
    assert stopped.value.exit_code == 143
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_a_delayed_sigterm_is_raised_in_time_and_hides_no_error():
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


@pytest.mark.parametrize("received", ["here", "elsewhere", "here, a moment later"])
def test_the_save_gets_its_time(received):
    done = []
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(0.2):
        if received == "here":
            send()
        saving(5.0)
        if received == "here, a moment later":
            send()
        time.sleep(0.4)
        done.append("saved")
        stop_now()
    assert done == ["saved"]
    assert stopped.value.number == signal.SIGTERM


@pytest.mark.parametrize("held", [False, True])
def test_an_alarm_from_outside_is_named(held):
    with pytest.raises(Stopped, match="SIGALRM") as stopped, stoppable(), deferred(50.0):
        with unhurried() if held else nullcontext():
            send(signal.SIGALRM)
    assert stopped.value.exit_code == 142


def test_a_person_is_not_put_off(monkeypatch):
    """SIGINT raises immediately, and so does a second SIGTERM after a while."""
    done = []
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(50.0):
        send(signal.SIGINT)
        done.append("continued")
    assert stopped.value.exit_code == 130
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(50.0):
        send()
        time.sleep(0.2)
        send()
        done.append("continued")
    assert stopped.value.exit_code == 143
    assert done == []


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


def test_the_sender_of_a_stop_request_is_named_once():
    with pytest.raises(Stopped) as stopped, stoppable():
        ask_to_end("the launcher (process 7) has ended")
        time.sleep(5)
    assert stopped.value.render() == "interrupted: the launcher (process 7) has ended"
    with pytest.raises(Stopped) as stopped, stoppable():
        send(signal.SIGINT)
    assert stopped.value.render() == "interrupted by SIGINT"


def test_output_to_a_closed_terminal_is_dropped_and_other_output_stays(monkeypatch, tmp_path):
    outer, inner = pty.openpty()
    with open(inner, "w") as terminal, open(tmp_path / "file", "w") as file:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", file)
        drop_lost_output()
        assert terminal.isatty()
        os.close(outer)
        with pytest.raises(OSError):
            os.write(inner, b"lost")
        _show("a line", terminal)
        _show("another one", terminal)
        _show("kept", file)
        close_bars()
    assert (tmp_path / "file").read_text() == "kept\n"
    assert STORAGE._broken == {}
    STORAGE.close()
