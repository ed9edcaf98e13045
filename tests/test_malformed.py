"""Malformed commands and configurations, out of a grammar: each is refused in one line, with exit code 2."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from command_harness import TORCHRUN_VARIABLES
from malformed_inputs import FAMILIES, FILES, Malformed

from omagd.run.cli import preflight
from omagd.run.cli.main import main
from omagd.run.reporting import sacred_record

UNKNOWN_MAP = "--config=qmix --env-config=sc2 with env_args.map_name=x"
# A package beside omagd that is broken: the entry point that it declares, and a command that uses it.
CONFIGS = "omagd.config_dirs x=omagd_broken:CONFIGS"
PLUGINS = [
    ("omagd.config_dirs x=omagd_nothing:CONFIGS", "--config=qmix"),
    ("omagd.config_dirs x=omagd_broken:CONFIG", "--config=qmix"),
    ("omagd.config_dirs x=omagd_broken.deep:CONFIGS", "--list"),
    *((CONFIGS, f"--config={name}") for name in ("torn", "foreign", "typed", "listed", "folder")),
    (CONFIGS, "--env-config=torn"),
    ("omagd.learners x=omagd_nothing:Learner", "--config=qmix with learner=x"),
    ("omagd.agents x=omagd_broken:Agent", "--config=qmix with agent=x"),
    ("omagd.smac_maps x=omagd_nothing:MAPS", UNKNOWN_MAP),
    ("omagd.smac_maps x=omagd_broken:CONFIGS", UNKNOWN_MAP),
]


def place(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Type the commands in a folder with junk, outside any torchrun; nothing may get as far as a run."""
    folder = tmp_path / "here"
    place(folder, FILES)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sacred_record, "_experiment", lambda: pytest.fail("it runs"))
    return folder


def complaint(code: int, out: str, err: str) -> str:
    """Return what is wrong with a refusal, or nothing."""
    one_line = re.fullmatch(r"error: .{5,1500}\n", err) and len(err.splitlines()) == 1
    fine = code == 2 and not out and one_line and "Traceback" not in err and "\x1b" not in err
    return "" if fine else f"exit code {code}, {out[-200:]!r} {len(err)}: {err[:300]!r}"


def attempt(case: Malformed, folder: Path, capsys, monkeypatch) -> str:
    place(folder, case.files)
    before = set(folder.parent.rglob("*"))
    with monkeypatch.context() as patch:
        for name, value in case.variables.items():
            patch.setenv(name, value)
        try:
            code = main(case.argv)
        except BaseException as error:  # noqa: BLE001 (whatever comes through would be a traceback)
            code = -1
            print(f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    found = complaint(code, *capsys.readouterr())
    if written := set(folder.parent.rglob("*")) - before:
        found += f" it wrote {written}"
    return f"{str(case)[:500]}: {found}" if found else ""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mistake_is_one_line(family, here, capsys, monkeypatch):
    wrong = [found for case in FAMILIES[family] if (found := attempt(case, here, capsys, monkeypatch))]
    assert wrong == []


@pytest.mark.parametrize(("point", "words"), PLUGINS)
def test_broken_packages_beside_omagd_are_named(point, words, here, capsys, monkeypatch):
    facts = "Metadata-Version: 2.1\nName: omagd-broken\nVersion: 1.0\n"
    files = {
        "omagd_broken.py": "import os\nCONFIGS = os.path.join(os.path.dirname(__file__), 'configs')\n",
        "omagd_broken-1.0.dist-info/METADATA": facts,
        "omagd_broken-1.0.dist-info/entry_points.txt": "[{}]\n{}\n".format(*point.split()),
        "configs/algs/torn.yaml": "lr: [1, 2\n",
        "configs/envs/torn.yaml": "env: {skirmish\n",
        "configs/algs/foreign.yaml": "learning_rate: 1\n",
        "configs/algs/typed.yaml": "lr: fast\n",
        "configs/algs/listed.yaml": "- lr\n",
        "configs/algs/folder.yaml/readme": "",
    }
    place(here.parent / "plugin", {name: text.encode() for name, text in files.items()})
    monkeypatch.syspath_prepend(str(here.parent / "plugin"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "omagd_broken", raising=False)
    for name in ("learners", "modules.agents"):
        monkeypatch.setattr(importlib.import_module(f"omagd.{name}").REGISTRY, "_plugins_read", False)
    assert attempt(Malformed(tuple(words.split())), here, capsys, monkeypatch) == ""


def test_networks_that_no_memory_holds_are_refused(here, capsys, monkeypatch):
    def too_large(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 51539607552 bytes.")

    monkeypatch.setattr(preflight, "_build_learner", too_large)
    assert main(["--config=qmix", "with", "rnn_hidden_dim=65536"]) == 2
    out, err = capsys.readouterr()
    assert complaint(2, out, err) == ""
    assert "48.0 GB" in err and "rnn_hidden_dim=65536" in err
