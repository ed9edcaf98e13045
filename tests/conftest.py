"""Runs that several test files look at, each made once in a session by a real command."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import sc2_stand_in
from command_harness import end_what_goes_on, train
from reaper import watch_this_session

if TYPE_CHECKING:
    from interruption import TornRun

# A shell that starts this suite in the background lets it, and all that it starts, ignore Ctrl-C; tests send that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

watch_this_session()


@pytest.fixture(autouse=True)
def text_log_as_it_was() -> Iterator[None]:
    """Take away what runs within a test, or within a fixture of its module, did to the package's text log."""
    _forget_text_log()
    yield
    _forget_text_log()


@pytest.fixture(autouse=True)
def nothing_goes_on() -> Iterator[None]:
    """Leave no command of a failed test running beside the tests that follow."""
    yield
    end_what_goes_on()


def _forget_text_log() -> None:
    logger = logging.getLogger("omagd")
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture
def sc2_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a stand-in for StarCraft II, whose processes must all have ended after the test."""
    folder, temporary = sc2_stand_in.install(tmp_path / "StarCraftII"), tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("SC2PATH", str(folder))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert sc2_stand_in.wait_for(lambda: not sc2_stand_in.running(folder))


@pytest.fixture(scope="session")
def qmix_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of QMIX without graphs, in one process."""
    return _made_once(
        tmp_path_factory, "qmix", "--config=qmix", "--env-config=skirmish", "with", "env_args.map_name=3m"
    )


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of all stages with all defaults: skirmish 3m, one rank on a machine without GPUs."""
    return _made_once(tmp_path_factory, "small", "with", "run=ddp", "learner=nq_graph_learner_ddp")


@pytest.fixture(scope="session")
def published_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the published command's run: all stages on 5m_vs_6m with two ranks."""
    options = ("--config=omagd", "--env-config=skirmish", "with", "env_args.map_name=5m_vs_6m", "run=ddp")
    updates = ("learner=nq_graph_learner_ddp", "use_ddp=True", "world_size=2", "ddp_port=12355")
    return _made_once(tmp_path_factory, "published", *options, *updates)


@pytest.fixture(scope="session")
def torn(tmp_path_factory: pytest.TempPathFactory) -> TornRun:
    """Return a run that was interrupted in its middle."""
    from interruption import SAVED_AT, TornRun

    found = TornRun(tmp_path_factory.mktemp("torn") / "run")
    found.continue_until(SAVED_AT)
    return found


@pytest.fixture
def run(torn: TornRun, tmp_path: Path) -> TornRun:
    """Return a copy of `torn`."""
    return torn.copy(tmp_path)


def _made_once(tmp_path_factory: pytest.TempPathFactory, name: str, *arguments: str) -> Path:
    """Return the folder of a run that one of pytest's processes makes for all of them."""
    several = "PYTEST_XDIST_WORKER" in os.environ
    root = tmp_path_factory.getbasetemp().parent if several else tmp_path_factory.getbasetemp()
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        place, made = root / name, root / f"{name}.made"
        if not made.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a test that has failed here
            place.mkdir()
            made.write_text(str(train(place, *arguments)))
    return Path(made.read_text())
