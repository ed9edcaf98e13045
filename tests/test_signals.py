"""Being asked to end: raised once, held back while something is written, put off to the end of an iteration."""

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


def tell(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_first_signal_stops_once_and_the_old_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    done = []
    with pytest.raises(Stopped) as stopped, stoppable():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("went on")
        finally:
            os.kill(os.getpid(), signal.SIGINT)  # the same wish again, by another way, a moment later
            done.append("cleaned up")
    assert done == ["cleaned up"]
    assert (stopped.value.exit_code, stop_requested()) == (143, True)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_arrives_in_a_finalizer_is_neither_lost_nor_a_traceback(capsys):
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Stopped) as stopped, stoppable():
        finalized = Finalized()
        del finalized
        time.sleep(10)
    assert stopped.value.number == signal.SIGINT
    assert capsys.readouterr().err == ""


def test_what_must_be_written_is_written_before_a_signal_counts():
    done = []
    with pytest.raises(Stopped), stoppable():
        assert not stop_requested()
        with unhurried():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("written")
        done.append("went on")
    assert done == ["written"]


def test_a_put_off_sigterm_is_noted_and_raised_where_it_suits():
    done = []
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(5.0):
        assert not stop_wanted()
        tell()
        done.append("noted")
        assert stop_wanted()
        with unhurried():
            tell()
        done.append("saved")
        stop_now()
    assert done == ["noted", "saved"]
    assert stopped.value.exit_code == 143
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_a_put_off_sigterm_is_raised_at_the_end_of_the_block_but_hides_no_error():
    with pytest.raises(Stopped), stoppable(), deferred(5.0):
        tell()
    with pytest.raises(ZeroDivisionError), stoppable(), deferred(5.0):
        tell()
        raise ZeroDivisionError


def test_a_put_off_sigterm_waits_only_so_long():
    began = time.monotonic()
    with pytest.raises(Stopped), stoppable(), deferred(0.2):
        tell()
        time.sleep(5)
    assert 0.15 < time.monotonic() - began < 2


@pytest.mark.parametrize("told", ["here", "elsewhere", "here, a moment later"])
def test_the_save_gets_its_time(told):
    """Wherever the signal arrived: this rank was told, another one, or this one when it saves already."""
    done = []
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(0.2):
        if told == "here":
            tell()
        saving(5.0)
        if told == "here, a moment later":
            tell()
        time.sleep(0.4)
        done.append("saved")
        stop_now()
    assert done == ["saved"]
    assert stopped.value.number == signal.SIGTERM


def test_time_that_ends_while_something_is_written_counts_afterwards():
    done = []
    with pytest.raises(Stopped), stoppable(), deferred(0.1):
        with unhurried():
            tell()
            time.sleep(0.3)
            done.append("written")
        done.append("went on")
    assert done == ["written"]


@pytest.mark.parametrize("held", [False, True])
def test_an_alarm_from_outside_is_named(held):
    with pytest.raises(Stopped, match="SIGALRM") as stopped, stoppable(), deferred(50.0):
        with unhurried() if held else nullcontext():
            tell(signal.SIGALRM)
    assert stopped.value.exit_code == 142


def test_a_person_is_not_put_off(monkeypatch):
    done = []
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(50.0):
        tell(signal.SIGINT)
        done.append("went on")
    assert stopped.value.exit_code == 130
    monkeypatch.setattr(signals, "PATIENCE_SECONDS", 0.1)
    with pytest.raises(Stopped) as stopped, stoppable(), deferred(50.0):
        tell(signal.SIGTERM)
        time.sleep(0.2)
        tell(signal.SIGTERM)  # once more, after a while
        done.append("went on")
    assert stopped.value.exit_code == 143
    assert done == []


def test_outside_nothing_changes():
    with pytest.raises(Stopped), stoppable():
        with deferred(5.0):
            pass
        tell()
        time.sleep(5)
    before = signal.getsignal(signal.SIGALRM)
    with deferred(1.0):
        assert not stop_wanted()
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_closed_terminal_saves_like_sigterm_and_nohup_keeps_ignoring_it():
    before, done = signal.signal(signal.SIGHUP, signal.SIG_DFL), []  # these tests may run under nohup
    try:
        with pytest.raises(Stopped) as stopped, stoppable(), deferred(5.0):
            tell(signal.SIGHUP)
            done.append(stop_wanted())
            stop_now()
        assert (stopped.value.exit_code, stopped.value.render()) == (129, "interrupted by SIGHUP")
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with suppress(Stopped), stoppable():
            tell(signal.SIGHUP)
            done.append(stop_requested())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done == [True, False]


def test_who_asks_for_the_end_is_named():
    with pytest.raises(Stopped) as stopped, stoppable():
        ask_to_end("the launcher (process 7) has ended")
        time.sleep(5)
    assert stopped.value.render() == "interrupted: the launcher (process 7) has ended"
    with pytest.raises(Stopped) as stopped, stoppable():
        tell(signal.SIGINT)
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
