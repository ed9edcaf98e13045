"""Every key runs at least once with a value that is not its default: the runs of tests/every_key.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from every_key import RUNS, Run

import omagd
from omagd.config.loading import resolve
from omagd.modules.kernels import compiling
from omagd.run.training import device as machine

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("every_key")


@pytest.fixture
def any_machine(monkeypatch):
    """Let a processor without bf16 and without a compiler run what asks for both: slow, and the same code."""
    monkeypatch.setattr(machine, "processor_features", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(machine, "check_compiler", lambda: None)
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    threads = torch.get_num_threads()
    yield
    torch.compiler.reset()
    torch.set_num_threads(threads)


def updates_of(run: Run, place: Path) -> dict[str, Any]:
    """Return a run's values with the folders of earlier runs filled in."""
    found = {}
    for key, where in run.needs.items():
        name, _, inner = where.partition("/")
        (folder,) = folders_of(name, place)
        found[key] = str(folder / inner)
    return {**run.updates, **found, "local_results_path": str(place / name_of_folder(run))}


def name_of_folder(run: Run) -> str:
    return next(name for name, other in RUNS.items() if other is run).replace(" ", "_")


def folders_of(name: str, place: Path) -> list[Path]:
    return [path.parent for path in (place / name_of_folder(RUNS[name])).glob("*/config.json")]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_these_values_ends_well(name, place, any_machine, capsys, monkeypatch):
    run = RUNS[name]
    monkeypatch.setattr(
        "omagd.run.launch.processes.start_method", lambda: "fork"
    )  # as the command line's ranks: imported once
    monkeypatch.setattr("omagd.run.reporting.plots.curves", lambda *_: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    result = omagd.run(resolve(run.config, run.env, updates_of(run, place)))
    summaries = result.get("runs", [result])
    assert [summary["exit_state"] for summary in summaries] == ["completed"] * run.folders
    folders = folders_of(name, place)
    assert len(folders) == run.folders
    missing = [pattern for pattern in run.makes if not list(folders[0].glob(pattern))]
    assert missing == [], sorted(str(path.relative_to(folders[0])) for path in folders[0].rglob("*"))
