"""Ranks that are forked from a process which has imported everything: when there is one, and what becomes of them."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing import forkserver

import pytest
from command_budgets import BUDGETS
from command_harness import MAIN, PYTHON, Started, children, left_behind

from omagd.run import prestart
from omagd.run.command_line import config_from

DDP = ("--config=qmix", "with", "run=ddp", "world_size=2")


@pytest.mark.parametrize(
    ("words", "rank", "wanted"),
    [
        (DDP, None, True),
        (DDP, "0", False),  # torchrun has started the ranks
        ((*DDP, "use_ddp=False"), None, False),
        ((*DDP[:-1], "world_size=1"), None, False),
        (("--config=qmix", "with"), None, False),
    ],
)
def test_it_is_begun_where_ranks_will_be_started_here(words, rank, wanted, monkeypatch):
    started = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: started.append(True))
    monkeypatch.setattr(forkserver, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(prestart, "_begun", False)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert prestart.start_method() == "spawn"
    config = config_from(list(words))
    prestart.begin(config)
    prestart.begin(config)
    assert started == [True] * wanted
    assert prestart.start_method() == ("forkserver" if wanted else "spawn")


@pytest.mark.processes
def test_ranks_end_with_the_process_that_started_them(tmp_path):
    """Also where it is killed, so that it can tell nobody; and nothing of it stays outside the run's folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    started = Started([PYTHON, MAIN, "-u", *DDP, *BUDGETS, "t_max=100000000"], tmp_path, TMPDIR=str(temporary))
    until = time.monotonic() + 60
    while not list(tmp_path.glob("results/*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.1)
    assert len(children(started.process.pid)) == 2
    os.kill(started.process.pid, signal.SIGKILL)
    started.wait(60)
    assert left_behind(started.group, patience=20) == []
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
