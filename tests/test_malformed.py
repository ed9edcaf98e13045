"""Malformed commands and configurations, out of a grammar: each is refused in one line, with exit code 2."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_harness import MAIN, PYTHON, TORCHRUN_VARIABLES
from malformed_inputs import FAMILIES, FILES, Malformed

from omagd.run.cli import preflight
from omagd.run.cli.main import main
from omagd.run.reporting import sacred_record

# How many of each family are tried as commands, too: most of them end before torch is imported.
AS_COMMANDS = {"unknown keys": 1, "wrong types": 1, "broken files": 2, "unknown configurations": 1, "wrong words": 2}
UNKNOWN_MAP = ["--config=qmix", "--env-config=sc2", "with", "env_args.map_name=x"]
# A package beside omagd that is broken: its folder of configurations, and what it adds.
PLUGINS = {
    "no such module": ("omagd.config_dirs", "x = omagd_nothing:CONFIGS", ["--config=qmix"]),
    "no such name": ("omagd.config_dirs", "x = omagd_broken:CONFIG", ["--config=qmix"]),
    "no package": ("omagd.config_dirs", "x = omagd_broken.deep:CONFIGS", ["--list"]),
    "broken algorithm": ("omagd.config_dirs", "x = omagd_broken:CONFIGS", ["--config=torn"]),
    "broken environment": ("omagd.config_dirs", "x = omagd_broken:CONFIGS", ["--env-config=torn"]),
    "unknown key": ("omagd.config_dirs", "x = omagd_broken:CONFIGS", ["--config=foreign"]),
    "wrong type": ("omagd.config_dirs", "x = omagd_broken:CONFIGS", ["--config=typed"]),
    "no mapping": ("omagd.config_dirs", "x = omagd_broken:CONFIGS", ["--config=listed"]),
    "a folder": ("omagd.config_dirs", "x = omagd_broken:CONFIGS", ["--config=folder"]),
    "learner that is not there": (
        "omagd.learners",
        "x = omagd_nothing:Learner",
        ["--config=qmix", "with", "learner=x"],
    ),
    "maps that are not there": ("omagd.smac_maps", "x = omagd_nothing:MAPS", UNKNOWN_MAP),
    "maps that are no mapping": ("omagd.smac_maps", "x = omagd_broken:CONFIGS", UNKNOWN_MAP),
    "agent that is not there": ("omagd.agents", "x = omagd_broken:Agent", ["--config=qmix", "with", "agent=x"]),
}


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
    lines = err.splitlines()
    if code != 2:
        return f"exit code {code}: {out[-200:]}{err[-300:]}"
    if out or not lines or not lines[0].startswith("error: ") or len(lines[0]) < 12:
        return f"no line of an error: {out[:200]}{err[:300]}"
    if len(lines) > 1 or not err.endswith("\n"):
        return f"more than a line: {err[:300]}"
    if "Traceback" in err or "\x1b" in err or len(err) > 1500:
        return f"not to be read: {len(err)} characters, {err[:300]!r}"
    return ""


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def attempt(case: Malformed, folder: Path, capsys, monkeypatch) -> str:
    place(folder, case.files)
    before = files_in(folder.parent)
    with monkeypatch.context() as patch:
        for name, value in case.variables.items():
            patch.setenv(name, value)
        try:
            code = main(case.argv)
        except BaseException as error:  # noqa: BLE001 (whatever comes through would be a traceback)
            code = -1
            print(f"{type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    said = capsys.readouterr()
    found = complaint(code, said.out, said.err)
    if files_in(folder.parent) != before:
        found += f" it wrote {sorted(set(files_in(folder.parent)) - set(before))}"
    return f"{str(case.argv)[:200]} {case.variables} {str(case.files)[:200]}: {found}" if found else ""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mistake_is_one_line(family, here, capsys, monkeypatch):
    wrong = [said for case in FAMILIES[family] if (said := attempt(case, here, capsys, monkeypatch))]
    assert wrong == [], "\n".join([f"{len(wrong)} of {len(FAMILIES[family])}", *wrong])


@pytest.mark.parametrize("case", PLUGINS)
def test_broken_packages_beside_omagd_are_named(case, here, capsys, monkeypatch):
    group, point, argv = PLUGINS[case]
    facts = "Metadata-Version: 2.1\nName: omagd-broken\nVersion: 1.0\n"
    files = {
        "omagd_broken.py": "import os\nCONFIGS = os.path.join(os.path.dirname(__file__), 'configs')\n",
        "omagd_broken-1.0.dist-info/METADATA": facts,
        "omagd_broken-1.0.dist-info/entry_points.txt": f"[{group}]\n{point}\n",
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
    assert attempt(Malformed(tuple(argv)), here, capsys, monkeypatch) == ""


@pytest.mark.processes
def test_some_of_them_as_commands(here, monkeypatch):
    cases = [case for family, count in AS_COMMANDS.items() for case in FAMILIES[family][:count]]
    for case in cases:
        place(here, case.files)
    before = files_in(here.parent)

    def run(case: Malformed) -> str:
        variables = {**os.environ, **case.variables}
        done = subprocess.run(
            [PYTHON, MAIN, *case.argv], cwd=here, env=variables, capture_output=True, timeout=60, check=False
        )
        found = complaint(done.returncode, done.stdout.decode(), done.stderr.decode())
        return f"{case.argv} {case.variables}: {found}" if found else ""

    with ThreadPoolExecutor(2) as pool:
        assert [said for said in pool.map(run, cases) if said] == []
    assert files_in(here.parent) == before


def test_networks_that_no_memory_holds_are_refused(here, capsys, monkeypatch):
    def too_large(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 51539607552 bytes.")

    monkeypatch.setattr(preflight, "_build_learner", too_large)
    assert main(["--config=qmix", "with", "rnn_hidden_dim=65536"]) == 2
    said = capsys.readouterr()
    assert complaint(2, said.out, said.err) == ""
    assert "48.0 GB" in said.err and "rnn_hidden_dim=65536" in said.err
