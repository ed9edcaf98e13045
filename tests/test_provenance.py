"""What made a run: its code is named by the commit or by the sources, wherever git is missing, slow or refuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from interruption import COMMAND

import omagd
from omagd.lab.analysis.groups import differences
from omagd.lab.analysis.run_report import card_rows
from omagd.lab.analysis.runs import load
from omagd.run.cli.main import main
from omagd.run.reporting import card
from omagd.run.reporting.card import read_card


@pytest.fixture
def package(tmp_path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "code.py").write_text("1")
    return tmp_path / "src"


def git(package: Path, *words: str) -> str:
    names = [word for key in ("user.name", "user.email") for word in ("-c", f"{key}=x@y.z")]
    done = subprocess.run(["git", "-C", package.parent, *names, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(package: Path) -> str:
    git(package, "add", ".")
    git(package, "commit", "-q", "-m", "one")
    return git(package, "rev-parse", "HEAD")


def code(package: Path) -> card.Code:
    return card.code.__wrapped__(package)


def test_code_is_named_by_its_commit_and_what_was_changed_by_its_content(package, monkeypatch):
    bare = code(package)
    assert bare.commit == "" and bare.name.startswith(f"{omagd.__version__} (sources ")
    git(package, "init", "-q")
    assert code(package) == bare, "a package that somebody's repository does not track"
    first = commit(package)
    clean = code(package)
    assert (clean.commit, clean.changed) == (first, False) and first[:12] in clean.name
    (package.parent / "results.jsonl").write_text("of a study")
    (package / "notes").write_text("no code")
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert code(package) == clean
    monkeypatch.delenv("GIT_DIR")
    second = commit(package)
    (package.parent / "results.jsonl").write_text("more")
    assert code(package).commit == second
    names = set()
    for path, text in (("code.py", "2"), ("code.py", "3"), ("new.py", "4")):
        (package / path).write_text(text)
        found = code(package)
        assert found.changed and found.commit == second
        names.add(found.name)
    assert len(names) == 3


@pytest.mark.parametrize("how", ["missing", "slow", "another user's"])
def test_where_git_does_not_answer_a_run_starts_all_the_same(how, package, tmp_path, monkeypatch):
    bare = code(package).name
    git(package, "init", "-q")
    commit(package)
    if how == "missing":
        monkeypatch.setenv("PATH", "")
    elif how == "slow":
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "git").write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / "bin" / "git").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(card, "GIT_SECONDS", 0.2)
    elif os.geteuid() != 0:
        pytest.skip("only root can give files away")
    else:
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
        monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
        for path in (tmp_path, *tmp_path.rglob("*")):
            os.chown(path, 4321, 4321)
    assert code(package).name == bare


def test_a_run_says_what_made_it_and_another_code_is_not_comparable(tmp_path, monkeypatch):
    results = tmp_path / "results"
    monkeypatch.setattr("sys.argv", ["omagd", "with", "name=a b"])
    assert main([*COMMAND, f"local_results_path={results}", "unique_token=one"]) == 0
    made_by = json.loads((results / "one" / "summary.json").read_text())["made_by"]
    assert made_by["command"] == "omagd with 'name=a b'" and made_by["host"] and made_by["versions"]["torch"]
    assert {"commit", "changed"} <= made_by.keys()
    assert ["command", "omagd with 'name=a b'"] in card_rows(load([results / "one"])[0])
    monkeypatch.setattr(card, "code", lambda: card.Code("c" * 40, False, "another"))
    assert main([*COMMAND, f"local_results_path={results}", "unique_token=two"]) == 0
    one, two = read_card(results / "one"), read_card(results / "two")
    assert one["id"] == two["id"]
    assert differences(two, one) == f"code omagd another, not {made_by['versions']['omagd']}"
    assert differences(one, one) == ""
    begun = {**two, "resumed": [{"continues": {"omagd": "older"}}]}
    assert differences(begun, two) == "code omagd older, then another, not another"
