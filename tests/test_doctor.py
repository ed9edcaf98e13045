"""The doctor: a line for each thing, its mend, an exit code, and never a traceback, whatever is broken."""

from __future__ import annotations

import importlib
import os
import resource
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import sc2_stand_in
from documented import questions

from omagd.run.cli import doctor
from omagd.run.cli.doctor import CHECKS, examine, game, machine, packages
from omagd.run.cli.doctor.findings import Check, Settings
from omagd.run.cli.main import main

MARKS = {"ok", "warning", "missing"}


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """An empty folder, no game, no W&B key, and a check of torch that costs nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SC2PATH", str(tmp_path / "nowhere"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def ask(capsys, *arguments: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Return exit code, mark and text of each line by name, and the last line."""
    code = main(["doctor", *arguments])
    captured = capsys.readouterr()
    *lines, last = captured.out.splitlines()
    assert captured.err == "" and "Traceback" not in captured.out
    names = [check.name for check in CHECKS]
    assert [line[9:24].strip() for line in lines] == names
    found = {name: (line[:9].strip(), line[24:]) for name, line in zip(names, lines, strict=True)}
    assert {mark for mark, _ in found.values()} <= MARKS
    assert [name for name, (mark, text) in found.items() if mark != "ok" and " → " not in text and not text] == []
    return code, found, last


def test_without_the_game_skirmish_can_be_played_and_sc2_cannot(capsys):
    code, found, last = ask(capsys)
    assert code == 0
    assert found["game"][0] == "missing" and "./install_sc2.sh" in found["game"][1] and "SC2PATH" in found["game"][1]
    assert found["SMAC maps"][0] == "missing" and "0 of 23" in found["SMAC maps"][1]
    assert "skirmish can be played" in last and "sc2 cannot be played (game, SMAC maps)" in last
    code, _, last = ask(capsys, "--env-config=sc2")
    assert code == 2 and last.startswith("sc2 cannot be played (game, SMAC maps)")
    assert ask(capsys, "--env-config=skirmish")[0] == 0


def test_with_the_stand_in_everything_is_found(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "StarCraftII")))
    sc2_stand_in.install(tmp_path / "StarCraftII", version="4.6.2")
    code, found, last = ask(capsys, "--env-config=sc2")
    assert code == 0 and last.startswith("sc2 can be played")
    mark, text = found["game"]
    assert mark == "ok" and "StarCraft II 4.10 (75689) is played" in text and "4.6.2 (69232)" in text
    assert found["SMAC maps"][1].startswith("23 of 23") and found["SMACv2 map"][0] == "ok"
    assert (found["game messages"][0], found["pysc2"][0], found["game port"][0]) == ("ok", "ok", "ok")
    _, found, _ = ask(capsys, "--env-config=sc2", "with", "env_args.game_version=4.6.2")
    assert "4.6.2 (69232) is played" in found["game"][1]


def test_a_map_that_is_not_there_is_named_and_matters_where_it_is_wanted(capsys, tmp_path, monkeypatch):
    folder = sc2_stand_in.install(tmp_path / "StarCraftII")
    monkeypatch.setenv("SC2PATH", str(folder))
    (folder / "Maps" / "SMAC_Maps" / "corridor.SC2Map").unlink()
    code, found, _ = ask(capsys, "--env-config=sc2")
    mark, text = found["SMAC maps"]
    assert code == 0 and mark == "warning" and "22 of 23" in text and "corridor" in text and "--maps-only" in text
    code, found, _ = ask(capsys, "--env-config=sc2", "with", "env_args.map_name=corridor")
    assert code == 2 and found["SMAC maps"][0] == "missing"
    (folder / "Maps" / "SMAC_Maps" / "32x32_flat.SC2Map").unlink()
    assert "32x32_flat" in ask(capsys)[1]["SMACv2 map"][1]


def without(monkeypatch, *names: str) -> None:
    """Let packages look as if they were not installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


def of_version(monkeypatch, name: str, number: str) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda asked: number if asked == name else real(asked))


def no_torch(monkeypatch, _tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)


def torch_that_ends_python(monkeypatch, _tmp_path):
    """A library whose import ends the interpreter must not end the doctor."""
    monkeypatch.setattr(machine, "_cores", lambda: sys.exit("no cores"))


def no_pydantic(monkeypatch, _tmp_path):
    without(monkeypatch, "pydantic")


def old_numpy(monkeypatch, _tmp_path):
    of_version(monkeypatch, "numpy", "1.26.4")


def other_scipy(monkeypatch, _tmp_path):
    of_version(monkeypatch, "scipy", "1.99.0")


def no_protobuf(monkeypatch, _tmp_path):
    without(monkeypatch, "protobuf")


def messages_that_do_not_load(monkeypatch, _tmp_path):
    monkeypatch.setitem(sys.modules, "omagd.envs.sc2.client", None)


def no_pysc2(monkeypatch, _tmp_path):
    without(monkeypatch, "pysc2")


def no_smax(monkeypatch, _tmp_path):
    without(monkeypatch, "jaxmarl")


def no_wandb(monkeypatch, _tmp_path):
    without(monkeypatch, "wandb")


def no_tensorboard(monkeypatch, _tmp_path):
    without(monkeypatch, "tensorboard")


def no_compiler(monkeypatch, _tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")


def results_are_a_file(_monkeypatch, tmp_path):
    (tmp_path / "results").write_text("")


def a_full_disk(monkeypatch, _tmp_path):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))


def no_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "SHARED", tmp_path / "shm")


def little_shared_memory(monkeypatch, _tmp_path):
    real, little = os.statvfs, SimpleNamespace(f_bavail=16, f_frsize=4096)
    monkeypatch.setattr(machine.os, "statvfs", lambda path: little if path == machine.SHARED else real(path))


def little_memory(monkeypatch, _tmp_path):
    monkeypatch.setattr("omagd.run.memory_budget.available_bytes", lambda: 2.0**28)


def few_files(monkeypatch, _tmp_path):
    limits = {resource.RLIMIT_NOFILE: 256, resource.RLIMIT_NPROC: resource.RLIM_INFINITY}
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))


def no_limits_known(monkeypatch, _tmp_path):
    def refuse(_kind):
        raise OSError("not here")

    monkeypatch.setattr(machine.resource, "getrlimit", refuse)


def a_driver_without_cuda(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def a_game_that_may_not_run(monkeypatch, tmp_path):
    folder = sc2_stand_in.install(tmp_path / "StarCraftII")
    next(folder.glob("Versions/*/SC2_x64")).chmod(0o644)
    monkeypatch.setenv("SC2PATH", str(folder))


def no_game_port(monkeypatch, _tmp_path):
    monkeypatch.setattr("omagd.envs.sc2.resources._is_free", lambda _port: False)


def slow_protobuf(monkeypatch, _tmp_path):
    monkeypatch.setattr("google.protobuf.internal.api_implementation.Type", lambda: "python")


def old_python(monkeypatch, _tmp_path):
    monkeypatch.setattr(packages.sys, "version_info", (3, 10, 4, "final", 0))


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None)


NEEDED_BY_ALL = [
    (no_torch, "torch", "missing", "pip install -e ."),
    (torch_that_ends_python, "torch", "missing", "SystemExit"),
    (no_pydantic, "packages", "missing", "pydantic"),
    (old_numpy, "packages", "missing", "numpy 1.26.4 (needs >=2.0)"),
    (old_python, "python", "missing", "3.10.4"),
    (results_are_a_file, "disk", "missing", "local_results_path="),
]
NEEDED_BY_NONE = [
    (other_scipy, "packages", "warning", "scipy 1.99.0"),
    (no_wandb, "W&B", "missing", "use_wandb=False"),
    (no_tensorboard, "TensorBoard", "missing", "use_tensorboard=False"),
    (no_compiler, "compiler", "missing", "CXX=no-such-compiler"),
    (a_full_disk, "disk", "warning", "0.0 GB left"),
    (little_shared_memory, "shared memory", "warning", "--shm-size"),
    (little_memory, "memory", "warning", "buffer_size"),
    (few_files, "limits", "warning", "ulimit -n 4096"),
    (no_limits_known, "limits", "missing", "OSError: not here"),
    (a_driver_without_cuda, "gpu", "warning", "nvidia-smi"),
    (slow_protobuf, "game messages", "warning", "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"),
]
NEEDED_BY_SC2 = [
    (no_protobuf, "game messages", "missing", "protobuf"),
    (messages_that_do_not_load, "game messages", "missing", "Error"),
    (no_pysc2, "pysc2", "missing", "not installed: pysc2"),
    (no_shared_memory, "shared memory", "missing", "/dev/shm"),
    (a_game_that_may_not_run, "game", "missing", "chmod +x"),
    (no_game_port, "game port", "missing", "no free port"),
]


@pytest.mark.parametrize(("breaks", "name", "mark", "words"), NEEDED_BY_ALL, ids=name_of)
def test_what_every_run_needs_ends_with_2(breaks, name, mark, words, capsys, tmp_path, monkeypatch):
    breaks(monkeypatch, tmp_path)
    code, found, last = ask(capsys)
    assert code == 2 and found[name][0] == mark and words in found[name][1]
    assert last.startswith("skirmish cannot be played (") and name in last


@pytest.mark.parametrize(("breaks", "name", "mark", "words"), NEEDED_BY_NONE, ids=name_of)
def test_what_no_run_needs_is_said_and_ends_with_0(breaks, name, mark, words, capsys, tmp_path, monkeypatch):
    if breaks is other_scipy and sys.version_info[:2] != packages.TESTED_PYTHON:
        pytest.skip("constraints.txt is for another Python")
    breaks(monkeypatch, tmp_path)
    code, found, last = ask(capsys)
    assert code == 0 and found[name][0] == mark and words in found[name][1]
    assert last.startswith("skirmish can be played")


@pytest.mark.parametrize(("breaks", "name", "mark", "words"), NEEDED_BY_SC2, ids=name_of)
def test_what_the_game_needs_ends_with_2_for_the_game_only(breaks, name, mark, words, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "StarCraftII")))
    breaks(monkeypatch, tmp_path)
    code, found, last = ask(capsys, "--env-config=sc2")
    assert code == 2 and found[name][0] == mark and words in found[name][1]
    assert name in last and "skirmish can be played" in last


def test_the_extra_is_needed_by_its_environment_only(capsys, tmp_path, monkeypatch):
    no_smax(monkeypatch, tmp_path)
    assert ask(capsys)[0] == 0
    code, found, last = ask(capsys, "--env-config=smax")
    assert code == 2 and ".[smax]" in found["smax"][1] and last.startswith("smax cannot be played (smax)")


def test_a_taken_port_is_a_warning(capsys):
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, found, _ = ask(capsys, "with", f"ddp_port={port}")
    assert code == 0 and found["ddp port"][0] == "warning" and str(port) in found["ddp port"][1]
    assert ask(capsys, "with", f"ddp_port={port}")[1]["ddp port"][0] == "ok"


def test_more_threads_than_cores_are_a_warning(capsys):
    threads = machine._cores() + 1
    code, found, _ = ask(capsys, "with", f"torch_threads={threads}")
    assert code == 0 and found["torch"][0] == "warning" and "lower torch_threads" in found["torch"][1]


def test_a_key_is_told_but_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")
    text = ask(capsys)[1]["W&B"][1]
    assert "online" in text and "secret" not in text


def test_help_names_it(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "\n  doctor " in out and "\n  compare FOLDER" in out


def test_a_mistake_in_the_command_is_a_line(capsys):
    assert main(["doctor", "--env-config=sc3"]) == 2
    assert main(["doctor", "with", "ddp_prt=1"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("error: ") and "ddp_prt" in lines[-1]


def test_without_the_packages_that_read_configurations_the_doctor_still_speaks(capsys, monkeypatch):
    def broken(*_):
        raise ModuleNotFoundError("No module named 'yaml'", name="yaml")

    monkeypatch.setattr("omagd.run.cli.main._resolve", broken)
    assert ask(capsys, "--env-config=sc2")[2].startswith("sc2 cannot be played")


def test_a_check_that_breaks_is_its_own_finding():
    def look(_settings):
        raise RuntimeError("first line\nsecond line")

    (found,) = examine(Settings(), [Check("odd", look, frozenset({"all"}), mend="do this")])
    text, ready = doctor.render([found], "skirmish")
    assert not ready and text.splitlines()[0] == "missing  odd            RuntimeError: first line → do this"


def test_what_is_asked_of_packages_is_the_same_from_the_repository_and_from_the_installation(monkeypatch):
    from_file = packages.requirements(), packages.requirements("smax")
    monkeypatch.setattr(packages, "_project", dict)
    monkeypatch.setattr(packages.metadata, "requires", lambda _name: [
        *(f"{name}{spec}" for name, spec in from_file[0].items()), 'jaxmarl==0.2.0; extra == "smax"',
        'pytest>=8; extra == "dev"',
    ])  # fmt: skip
    assert (packages.requirements(), packages.requirements("smax")) == from_file
    assert "torch" in from_file[0] and from_file[1] == {"jaxmarl": "==0.2.0"}


def test_the_real_modules_are_what_the_checks_name():
    for name in ("pysc2.run_configs", "pysc2.lib.sc_process"):
        importlib.import_module("omagd.envs.sc2.client")
        assert importlib.import_module(name)
    assert game.GET_MAPS.split()[0] == "./install_sc2.sh"


@pytest.mark.processes
def test_documented_questions_are_answered(tmp_path):
    asked = [question for question in questions() if question[0] == "doctor"]
    assert asked
    for words in asked:
        started = time.monotonic()
        command = [sys.executable, "-m", "omagd", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert time.monotonic() - started < 20
        assert done.returncode == (2 if "sc2" in shlex.join(words) else 0), done.stdout + done.stderr
        assert len(done.stdout.splitlines()) == len(CHECKS) + 1
    assert list(Path(tmp_path).iterdir()) == []
