"""Runs that several test files read, each made once in a session by a real command; cleaning up after each test."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import command_server
import pytest
import sc2_stand_in
from command_harness import end_what_goes_on, train
from reaper import watch_this_session
from sockets import wait_until

# Hundreds of processes are started here; without its bytecode each would compile the package anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts this suite in the background lets it, and all that it starts, ignore Ctrl-C; tests send that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

watch_this_session()
if "PYTEST_XDIST_WORKER" not in os.environ:
    command_server.share()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Say how busy the machine was where a command took longer than a test allows."""
    report = (yield).get_result()
    if call.excinfo is not None and call.excinfo.errisinstance((subprocess.TimeoutExpired, TimeoutError)):
        said = f"{call.excinfo.value}: the load is {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
        report.sections.append(("A limit of this test was too tight, or something hangs", said))


def pytest_collection_modifyitems(items):
    """Begin with the files that start most processes: where files are dealt to workers, the last ones are short."""
    started = Counter(item.path for item in items if item.get_closest_marker("processes"))
    items.sort(key=lambda item: -started[item.path])


def pytest_collection_finish():
    """Let torch use one thread, and collections of garbage leave out what is imported by now, until the end."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """End `./run_tests.sh --gpu` with a table: a line for each check."""
    outcomes, counts, seconds = ("passed", "failed", "error", "skipped"), defaultdict(Counter), Counter()
    for outcome in outcomes:
        for report in terminalreporter.stats.get(outcome, []):
            if report.nodeid.startswith("tests/gpu/"):
                name = report.nodeid.partition("[")[0]
                counts[name][outcome] += 1
                seconds[name] += getattr(report, "duration", 0.0)
    for name, of in sorted(counts.items()):
        said = ", ".join(f"{of[outcome]} {outcome}" for outcome in outcomes if of[outcome])
        terminalreporter.write_line(f"{name:<105} {said:>12} {seconds[name]:6.0f} s")


@pytest.fixture(autouse=True)
def clean():
    """Reset the package's text log before and after each test, and end the commands that a failed test has left."""
    reset_text_log()
    yield
    if "jax" in sys.modules:  # imported by a test: its collection must not lose the signals of later tests
        from omagd.envs.jax_env import leave_collection_to_xla

        leave_collection_to_xla()
    reset_text_log()
    end_what_goes_on()


def reset_text_log():
    logger = logging.getLogger("omagd")
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def sc2_game(tmp_path, monkeypatch):
    """Return the folder of a stand-in for StarCraft II, whose processes must all have ended after the test."""
    folder, temporary = sc2_stand_in.install(tmp_path / "StarCraftII"), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("SC2PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # on the way to the game nothing asks it
    yield folder
    wait_until(lambda: not sc2_stand_in.running(folder))


@pytest.fixture(scope="session")
def qmix_run(tmp_path_factory):
    """Return the folder of a run of QMIX without graphs, in one process."""
    words = "--config=qmix --env-config=skirmish with env_args.map_name=3m keep_checkpoints=True"
    return made_once(tmp_path_factory, "qmix", words)


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Return the folder of a run of all stages: skirmish 3m, one rank on a machine without GPUs."""
    return made_once(tmp_path_factory, "small", "--config=omagd_small with run=ddp learner=nq_graph_learner_ddp")


@pytest.fixture(scope="session")
def published_run(tmp_path_factory):
    """Return the folder of the published command's run: all stages on 5m_vs_6m with two ranks."""
    words = "--config=omagd --env-config=skirmish with env_args.map_name=5m_vs_6m run=ddp "
    more = "learner=nq_graph_learner_ddp use_ddp=True world_size=2 ddp_port=12355 keep_checkpoints=True"
    return made_once(tmp_path_factory, "published", words + more)


@pytest.fixture(scope="session")
def torn(tmp_path_factory):
    """Return a `TornRun`, interrupted in its middle."""
    from interruption import SAVED_AT, TornRun

    found = TornRun(tmp_path_factory.mktemp("torn") / "run")
    found.continue_until(SAVED_AT)
    return found


@pytest.fixture
def run(torn, tmp_path):
    """Return a copy of `torn`."""
    return torn.copy(tmp_path)


def made_once(tmp_path_factory, name, words):
    """Return the folder of a run that one of pytest's processes makes for all of them."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place, made = root / name, root / f"{name}.made"
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a test that has failed here
            place.mkdir()
            made.write_text(str(train(place, *words.split())))
    return Path(made.read_text())
