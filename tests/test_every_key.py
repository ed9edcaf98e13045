"""The runs of tests/every_key.py, which set every key to a value that is not its default."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_key import RUNS

import omagd
from omagd.config.loading import resolve
from omagd.modules.kernels import compiling
from omagd.run.launch import processes
from omagd.run.reporting import plots
from omagd.run.training import device as machine

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("every_key")


@pytest.fixture
def any_machine(monkeypatch):
    """Allow bf16 and compile on processors without them: slow, and the same code."""
    monkeypatch.setattr(machine, "processor_features", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(machine, "check_compiler", lambda: None)
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    threads = torch.get_num_threads()
    yield
    torch.compiler.reset()
    torch.set_num_threads(threads)


def folder_of(name: str, place: Path) -> Path:
    (config,) = (place / name.replace(" ", "_")).glob("*/config.json")
    return config.parent


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_these_values_completes(name, place, any_machine, monkeypatch):
    run, found = RUNS[name], {}
    monkeypatch.setattr(processes, "start_method", lambda: "fork")
    for plot in ("curves", "evaluation"):
        monkeypatch.setattr(plots, plot, lambda *_: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for key, where in run.needs.items():
        earlier, _, inner = where.partition("/")
        found[key] = str(folder_of(earlier, place) / inner)
    results = {"local_results_path": str(place / name.replace(" ", "_"))}
    assert omagd.run(resolve(run.config, run.env, {**run.updates, **found, **results}))["exit_state"] == "completed"
    folder = folder_of(name, place)
    missing = [pattern for pattern in run.makes if not list(folder.glob(pattern))]
    assert missing == [], sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
