"""The doctor: one line per check with its fix, an exit code, and never a traceback, whatever is broken."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import sc2_stand_in

from omagd.lab.commands import doctor
from omagd.lab.commands.doctor import CHECKS
from omagd.run.cli.main import main
from omagd.run.training import device


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """An empty folder, no game and no W&B key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SC2PATH", str(tmp_path / "nowhere"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def ask(capsys, *arguments: str) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Return exit code, status and text of each line by name, and the last line."""
    code = main(["doctor", *arguments])
    captured = capsys.readouterr()
    *lines, last = captured.out.splitlines()
    assert captured.err == "" and "Traceback" not in captured.out
    names = [check.name for check in CHECKS]
    assert [line[9:24].strip() for line in lines] == names
    found = {name: (line[:9].strip(), line[24:]) for name, line in zip(names, lines, strict=True)}
    assert {mark for mark, _ in found.values()} <= {"ok", "warning", "missing"}
    return code, found, last


def test_without_the_game_skirmish_can_be_played_and_sc2_cannot(capsys):
    code, found, last = ask(capsys)
    assert code == 0 and "skirmish can be played" in last and "sc2 cannot be played (game, SMAC maps)" in last
    for name, words in (("game", "./install_sc2.sh SC2PATH"), ("SMAC maps", "0 of 23")):
        assert found[name][0] == "missing" and [word for word in words.split() if word not in found[name][1]] == []
    code, _, last = ask(capsys, "--env-config=sc2")
    assert code == 2 and last.startswith("sc2 cannot be played (game, SMAC maps)")


def test_versions_and_maps_of_an_installed_game_are_reported(capsys, tmp_path, monkeypatch):
    folder = sc2_stand_in.install(tmp_path / "StarCraftII")
    monkeypatch.setenv("SC2PATH", str(folder))
    sc2_stand_in.install(folder, version="4.6.2")
    code, found, last = ask(capsys, "--env-config=sc2")
    assert code == 0 and last.startswith("sc2 can be played")
    mark, text = found["game"]
    assert mark == "ok" and "StarCraft II 4.10 (75689)" in text and "4.6.2 (69232)" in text
    assert found["SMAC maps"][1].startswith("23 of 23") and found["SMACv2 map"][0] == "ok"
    assert found["pysc2"][0] == "ok"
    _, found, _ = ask(capsys, "--env-config=sc2", "with", "env_args.game_version=4.6.2")
    assert "4.6.2 (69232) is used" in found["game"][1]
    for name in ("corridor", "32x32_flat"):
        (folder / "Maps" / "SMAC_Maps" / f"{name}.SC2Map").unlink()
    code, found, _ = ask(capsys, "--env-config=sc2")
    mark, text = found["SMAC maps"]
    assert code == 0 and mark == "warning" and "22 of 23" in text and "corridor" in text and "--maps-only" in text
    assert "32x32_flat" in found["SMACv2 map"][1]
    code, found, _ = ask(capsys, "--env-config=sc2", "with", "env_args.map_name=corridor")
    assert code == 2 and found["SMAC maps"][0] == "missing"


def with_version(package: str, number: str | None = None):
    """Return a change that makes a package look as if it had another version, or were missing."""
    real = metadata.version

    def version(asked: str) -> str:
        if asked == package and number is None:
            raise metadata.PackageNotFoundError(package)
        return number if asked == package and number else real(asked)

    return lambda patch, _: patch.setattr(metadata, "version", version)


def patched(*arguments: object):
    return lambda patch, _: patch.setattr(*arguments)


def without_module(name: str):
    return lambda patch, _: patch.setitem(sys.modules, name, None)


def a_card(numba_cuda=None, free=60):
    """Return a change that simulates a GPU beside this version of numba-cuda."""

    def change(patch, folder):
        shown = {"is_available": True, "device_count": 1, "get_device_name": "Card", "mem_get_info": (free * 2**30, 0)}
        for name, value in shown.items():
            patch.setattr(f"torch.cuda.{name}", lambda *_, value=value: value)
        patch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
        with_version("numba-cuda", numba_cuda)(patch, folder)

    return change


def little_shared_memory(patch, _):
    real, little = os.statvfs, SimpleNamespace(f_bavail=16, f_frsize=4096)
    patch.setattr(doctor.os, "statvfs", lambda path: little if path == device.SHARED else real(path))


# What is broken: how, the line that reports it, its status and text, and the environments that it makes unplayable.
BROKEN = {
    "no torch": (without_module("torch"), "torch", "missing", "pip install -e .", "all"),
    "old NumPy": (with_version("numpy", "1.26.4"), "packages", "missing", "numpy 1.26.4 (needs >=2.0)", "all"),
    "old Python": (patched(doctor.sys, "version_info", (3, 10, 4, "final", 0)), "python", "missing", "3.10.4", "all"),
    "results": (lambda _, folder: (folder / "results").touch(), "disk", "missing", "local_results_path=", "all"),
    "no W&B": (with_version("wandb"), "W&B", "missing", "omagd[full]", ""),
    "little shared memory": (little_shared_memory, "shared memory", "warning", "--shm-size", ""),
    "no numba-cuda": (a_card(), "gpu battles", "missing", "omagd[gpu]", ""),
    "no pettingzoo": (with_version("pettingzoo"), "pettingzoo", "missing", "omagd[pettingzoo]", "pettingzoo"),
    "no gymnasium": (with_version("gymnasium"), "gymma", "missing", "omagd[gymnasium]", "gymma"),
    "no protobuf": (with_version("protobuf"), "pysc2", "missing", "protobuf", "sc2"),
    "no shared memory": (patched(device, "SHARED", Path("/nowhere")), "shared memory", "missing", "/dev/shm", "sc2"),
    "game not executable": (
        lambda _, folder: next((folder / "SC2").glob("Versions/*/SC2_x64")).chmod(0o644), "game", "missing",
        "chmod +x", "sc2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_problem_is_reported_and_decides_the_exit_code_where_it_matters(case, capsys, tmp_path, monkeypatch):
    breaks, name, mark, words, concerned = BROKEN[case]
    monkeypatch.setenv("SC2PATH", str(sc2_stand_in.install(tmp_path / "SC2")))
    breaks(monkeypatch, tmp_path)
    env = concerned if concerned not in {"", "all"} else "skirmish"
    code, found, last = ask(capsys, f"--env-config={env}")
    assert code == (2 if concerned else 0) and found[name][0] == mark and words in found[name][1]
    assert last.startswith(f"{env} cannot be played (" if concerned else "skirmish can be played")
    assert not concerned or name in last
    assert concerned in {"", "all"} or "skirmish can be played" in last


def test_too_many_threads_are_a_warning_and_a_key_is_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret-value")
    code, found, _ = ask(capsys, "with", f"torch_threads={len(os.sched_getaffinity(0)) + 1}")
    assert code == 0 and found["torch"][0] == "warning" and "lower torch_threads" in found["torch"][1]
    assert "online" in found["W&B"][1] and "secret" not in str(found)
