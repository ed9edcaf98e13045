"""Every command of benchmarks/README.md runs with a small budget, so that no benchmark becomes outdated.

A new command on the page needs a small form below. Benchmarks run in this process and fork instead of spawning.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_budgets import BUDGETS

from omagd.lab.studies.spec import config_of_words, load
from omagd.run.cli.main import main

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
# Options whose value is other code, which is left out.
PEERS = ("--peer", "--pymarl3", "--epymarl")
# Words appended to a command, by its script and, where it has several parts, the part; OUT is a folder of the test.
SMALL: dict[str, str] = {
    "env_speed.py": "--slots 4 --steps 40 --rounds 1",
    "learning.py": "--seeds 1 --t-max 30 --results OUT --env skirmish --config qmix",  # SMAX is slow to compile
    "ppo_update.py": "--map 3m --batch 4 --updates 1 --epochs 1",
    "pymarl3.py learning": "--seeds 1 --t-max 30 --test-episodes 4 --out OUT --results OUT",
    "qmix_update.py": "--map 3m --batch 4 --updates 1",
    "runner_speed.py": "--maps 3m --battles 1 2 --ours skirmish --seconds 0.01 --rounds 1 --rows OUT/r",
    "scripted.py": "--maps 3m --episodes 2",
    "resident.py": "--device cpu --map 3m --slots 4 --rounds 1 --updates 1 --batch 4",
    "snakes.py scripts": "--games 1 --out OUT --pictures OUT",
    "time_to_win.py": "--map 3m --rate 0 batch_size_run=4 test_nepisode=4 test_interval=20 --seeds 1",
    "two_ranks.py": "--maps 3m --batch 4 --turns 1 --calls 1",
}
# Reasons why a command does not run here; only its imports and `--help` are tested.
NOT_RUN: dict[str, str] = {
    "chaos.py": "tests/test_chaos.py and tests/test_dealt_resuming.py are its short forms",
    "many_maps.py": "compiles kernels for a minute; tests/test_many_maps.py trains on sets of maps",
    "mutations.py": "copies the tree and runs tests on it for hours",
    "snakes.py learners": "trains as learning.py does; the other part plays its games",
    "startup.py": "starts runs and only measures them",
    "pymarl3.py gradients": "compares with a checkout of PyMARL3; tests/test_q_learning.py has the formula",
}


def commands() -> list[str]:
    """Return the commands of the page after `python`, one for each script and set of options."""
    lines = re.findall(r"^(?:\w+=\S+ )*python (benchmarks/.+)$", PAGE.replace("\\\n", " "), re.MULTILINE)
    words = {line: shlex.split(line, comments=True) for line in reversed(lines)}
    forms = {(parts[0], *sorted(w for w in parts if w.startswith("--"))): line for line, parts in words.items()}
    return sorted(forms.values(), key=lines.index)


def play(token: str, results: str, config: str, env: str, words: list[str]) -> Path:
    """Do a small run in this process; benchmarks start a process for it."""
    small = [word for word in BUDGETS if not word.startswith("t_max=")]  # which `words` give
    given = [f"local_results_path={results}", f"unique_token={token}", *words, *small, "run=default"]
    assert main([f"--config={config}", f"--env-config={env}", "-u", "with", *given]) == 0
    return Path(results) / token


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fork instead of spawning, run in this process; restore threads, cores and the path."""
    context, cores, threads = multiprocessing.get_context, os.sched_getaffinity(0), torch.get_num_threads()
    forked = partial(torch.multiprocessing.start_processes, start_method="fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: context(method and "fork"))
    monkeypatch.setattr(torch.multiprocessing, "spawn", forked)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("runs"), "play", play)
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


@pytest.mark.processes
@pytest.mark.parametrize("command", commands(), ids=lambda command: Path(command.split()[0]).stem)
def test_a_command_of_the_page_runs(command, monkeypatch, tmp_path):
    script, *words = shlex.split(command, comments=True)
    name = Path(script).name
    part = " ".join([name, *words[:1]]) if words and not words[0].startswith("-") else name
    for peer in set(PEERS) & set(words):
        del words[words.index(peer) : words.index(peer) + 2]
    if part in NOT_RUN:
        words = ["--help"]
    else:
        assert part in SMALL, f"{part} is new: add a small form to SMALL, or a reason to NOT_RUN"
        words += [word.replace("OUT", str(tmp_path)) for word in shlex.split(SMALL[part])]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *words])
    try:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    except SystemExit as end:
        assert not end.code


def test_the_tables_of_the_benchmark_follow_from_the_lines_of_its_studies():
    page = importlib.import_module("make_benchmark")

    def line(arm: str, map_name: str, score: float, **more: str | int) -> dict[str, Any]:
        values = {"absolute_return_mean": score, "test_return_mean": -1.0}
        stages = {"stage3": {"values": values}}
        tests = {"cpu_seconds": [0, 120]}
        return {"arm": arm, "map": map_name, "seed": 1, "summary": {"stages": stages}, "tests": tests, **more}

    scores = (7.0, 0.4, 0.5, 0.6, 9.0, 1.0, 0.0)  # the last line is again seed 0 of map a
    lines = [line("qmix", "aaaaaba"[i], score, seed=i % 6) for i, score in enumerate(scores)]
    lines += [line("vdn", "a", 0.2, code="Peer 1")]
    rows = [
        re.split(r" *\| *", row)[1:-1] for row in page.table(lines, ["qmix", "vdn"], ["a", "b"], "return").splitlines()
    ]
    assert rows[2][0] == "`qmix`" and rows[2][1].startswith("0.500 [") and rows[2][2] == "1.000"
    assert rows[2][3:] == ["1.550", "6", "2.0"], "the mean of the maps' means, as one has few seeds"
    assert rows[3:] == [["`vdn`", "-", "-", "-", "-", "-"], ["`vdn`, Peer 1", "0.200", "-", "-", "1", "2.0"]]


@pytest.mark.parametrize("file", sorted((BENCHMARKS / "studies").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_study_of_the_benchmark_has_the_learners_that_are_compared_and_the_absolute_metric(file):
    jobs = load(file).jobs
    others = {"vdn", "iql", "qplex", "ippo"} if file.stem != "smax_long" else set()
    assert {job.arm for job in jobs} == {"qmix", "mappo", "pqn_vdn", *others}
    assert {config_of_words(job.words).absolute_episodes for job in jobs[::10]} == {320}
