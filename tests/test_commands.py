"""Commands as they are promised and documented: run with small budgets, and resolved as they stand."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import FORKED, MAIN, PYTHON, ROOT, records, run_command, run_folders, summary_of, train
from documented import Documented, documented_commands, parse
from matplotlib.image import imread

from omagd.config.loading import validate
from omagd.run.cli.main import main

PLAIN_FILES = ("config.json", "env_info.json", "metrics.jsonl", "summary.json")
COMMANDS = documented_commands()
# Program, algorithm and environment of commands that fixtures and other tests run already.
RUN_ELSEWHERE = {
    ("main", "omagd_small", "skirmish"),
    ("main", "omagd", "skirmish"),
    ("main", "qmix", "skirmish"),
    ("main", "omagd", "smax"),
    ("torchrun", "qmix", "skirmish"),
    ("run_pretrain_ddp.sh", "omagd_origin", "skirmish"),
    ("run_gnn_stage3_ddp.sh", "omagd", "skirmish"),
}


def check_run_folder(folder: Path, ranks: int, stages: tuple[str, ...]) -> dict:
    """Assert that a completed run left what it promises; return its summary."""
    assert [name for name in PLAIN_FILES if not (folder / name).is_file()] == []
    assert validate(json.loads((folder / "config.json").read_text())).name
    summary = summary_of(folder)
    assert (summary["exit_state"], summary["world_size"]) == ("completed", ranks)
    assert tuple(summary["stages"]) == stages
    assert [path for path in summary["artifacts"].values() if not Path(path).exists()] == []
    _check_logs(folder, ranks, stages)
    expected = {f"pretrain_{stage}{best}" for stage in stages if stage != "stage3" for best in ("", "_best")}
    expected |= {str(summary["stages"]["stage3"]["clock"]["t_env"])} if "stage3" in stages else set()
    assert {path.name for path in (folder / "models").iterdir()} == expected
    assert not [name for path in folder.rglob("*.th") for name in tensor_names(path) if "module." in name]
    pictures = list((folder / "plots").glob("*.png"))
    assert folder / "plots" / "curves.png" in pictures
    assert all(min(imread(picture).shape[:2]) > 100 for picture in pictures)
    return summary


def _check_logs(folder: Path, ranks: int, stages: tuple[str, ...]) -> None:
    lines = records(folder)
    assert {line["stage"] for line in lines} == set(stages)
    assert all(("t_env" if line["stage"] == "stage3" else "epoch") in line for line in lines)
    if "stage3" in stages:
        named = {name for line in lines for name in line}
        wanted = "test_battle_won_mean return_mean ep_length_mean epsilon loss_td grad_norm td_error_abs q_taken_mean"
        assert {*wanted.split(), "target_mean", "episode"} <= named
    if "stage1" in stages:
        assert {"train/graph_loss", "eval/graph_loss"} <= {name for line in lines for name in line}
    logs = sorted(path.name for path in (folder / "logs").iterdir())
    assert logs == [f"rank_{rank}.log" for rank in range(ranks)]
    assert "results:" in (folder / "logs" / "rank_0.log").read_text()


def tensor_names(path: Path) -> list[str]:
    """Return the dotted names of everything in a weights file."""

    def names(value: object, prefix: str) -> list[str]:
        if not isinstance(value, dict):
            return [prefix]
        return [name for key, inner in value.items() for name in names(inner, f"{prefix}.{key}")]

    return names(torch.load(path, map_location="cpu", weights_only=True), "")


def sacred_scalars(folder: Path) -> dict:
    return json.loads((folder.parent / "sacred" / "1" / "metrics.json").read_text())


@pytest.mark.processes
def test_all_defaults_play_all_stages(small_run):
    summary = check_run_folder(small_run, 1, ("stage1", "stage2", "stage3"))
    assert (summary["env"], summary["map_name"]) == ("skirmish", "3m")
    assert len(list((small_run / "plots").glob("*.png"))) >= 2
    assert "eval/graph_loss" in " ".join(sacred_scalars(small_run))


@pytest.mark.processes
def test_the_published_command_with_two_ranks(published_run):
    summary = check_run_folder(published_run, 2, ("stage1", "stage2", "stage3"))
    assert (summary["map_name"], summary["environments"]) == ("5m_vs_6m", 4)
    assert summary["updates"] > 0
    assert "test_battle_won_mean" in sacred_scalars(published_run)


@pytest.mark.processes
def test_qmix_in_one_process(qmix_run):
    check_run_folder(qmix_run, 1, ("stage3",))
    assert "loss_td" in sacred_scalars(qmix_run)


@pytest.mark.processes
def test_the_scripts_one_after_another_from_elsewhere(tmp_path):
    """Relative paths are the caller's; a file's own path is taken; stage 3 finds both pre-trainings by itself."""
    before: set[Path] = set()
    folders = []
    for number, (script, given) in enumerate(
        [
            ("run_pretrain_ddp.sh", {"STAGE": "stage1", "NUM_GPUS": "2"}),
            ("run_pretrain_ddp.sh", {"STAGE": "stage2", "NUM_GPUS": "1"}),
            ("run_gnn_stage3_ddp.sh", {"NUM_GPUS": "1"}),
        ]
    ):
        if number == 1:
            path = folders[0] / "models" / "pretrain_stage1_best" / "tokenizer.th"
            given["TOKENIZER_PATH"] = os.path.relpath(path, tmp_path)
        run_command([str(ROOT / script), *BUDGETS], tmp_path, ENV_CONFIG="skirmish", CUDA_VISIBLE_DEVICES="", **given)
        (folder,) = run_folders(tmp_path) - before
        before.add(folder)
        folders.append(folder)
    for number, folder in enumerate(folders, 1):
        check_run_folder(folder, 2 if number == 1 else 1, (f"stage{number}",))
    resolved = json.loads((folders[2] / "config.json").read_text())
    assert (resolved["mac"], resolved["agent"]) == ("gnn_graph_mac", "gnn_rnn")
    for key, folder, name in (("tokenizer", folders[0], "tokenizer"), ("mask_predictor", folders[1], "stage2_model")):
        found = folder / "models" / f"pretrain_stage{2 if name == 'stage2_model' else 1}_best" / f"{name}.th"
        assert resolved[f"pretrained_{key}_path"] == str(found)


@pytest.mark.processes
def test_the_main_job_on_smax(tmp_path):
    if importlib.util.find_spec("jaxmarl") is None:
        pytest.skip("the extra smax is not installed")
    options = ("--config=omagd", "--env-config=smax", "with", "env_args.map_name=3m", "run=ddp", "world_size=2")
    folder = train(tmp_path, *options, "learner=nq_graph_learner_ddp")
    assert check_run_folder(folder, 2, ("stage1", "stage2", "stage3"))["env"] == "smax"


# --- what is documented


def why_not(command: Documented) -> str:
    """Return why a documented command cannot be tried here, or nothing."""
    text = " ".join([*command.arguments, *command.variables.values()])
    if "--env-config=smax" in text and importlib.util.find_spec("jaxmarl") is None:
        return "the extra smax is not installed"
    if "sc2" in text:
        return "needs StarCraft II"
    if "soft_qmix" in text or "crossroads" in text:
        return "needs the example package: test_example_package.py runs it"
    if command.open_places:
        return f"the reader fills in {command.open_places}"
    return ""


def shown(command: Documented) -> str:
    """Return how a command is called among the tests."""
    return re.sub(r"[^\w=.-]+", " ", f"{command.where} {command.line}")[:120]


def distinct(commands: list[Documented]) -> list[Documented]:
    """Return the first of those commands that only name other places of an earlier run's files."""
    return list({command.meaning: command for command in reversed(commands)}.values())[::-1]


def kind(command: Documented) -> tuple[str, str, str]:
    """Return program, algorithm and environment of a command; keys are tested where they are implemented."""
    given = dict(word.lstrip("-").split("=", 1) for word in command.arguments if "=" in word)
    defaults = {"run_pretrain_ddp.sh": "omagd_origin", "run_gnn_stage3_ddp.sh": "omagd"}
    config = given.get("config") or command.variables.get("CONFIG") or defaults.get(command.program, "omagd_small")
    return command.program, config, given.get("env-config", "skirmish")


def different(commands: list[Documented]) -> list[Documented]:
    """Return one documented command of each kind that no other test runs."""
    kinds = {kind(command): command for command in reversed(commands) if command.ranks <= 2 and not why_not(command)}
    return [command for found, command in kinds.items() if found not in RUN_ELSEWHERE and not command.paths]


def filled_in(command: Documented, runs: dict[str, Path]) -> tuple[dict[str, str], list[str]]:
    """Return variables and arguments of a documented command with paths of real runs in them.

    runs: by --config; a run of the published sizes stands in for all others, with its map.
    """
    words, variables = list(command.arguments), dict(command.variables)
    name = next((word.partition("=")[2] for word in words if word.startswith("--config=")), "omagd_small")
    if command.program.endswith(".sh"):
        name = variables.get("CONFIG", "omagd")
    graph = runs["omagd_small" if name == "omagd_small" else "omagd"]
    where = {
        "checkpoint_path": runs.get(name, graph) / "models",
        "graph_pretrain_policy": runs["qmix"],
        "pretrained_tokenizer_path": graph / "models" / "pretrain_stage1_best",
        "pretrained_mask_predictor_path": graph / "models" / "pretrain_stage2_best",
    }
    where |= {"TOKENIZER_PATH": where["pretrained_tokenizer_path"]}
    where |= {"MASK_PREDICTOR_PATH": where["pretrained_mask_predictor_path"]}
    keys = [(word, word.partition("=")[0]) for word in words]
    words = [f"{key}={where[key]}" if key in command.paths else word for word, key in keys]
    variables |= {key: str(where[key]) for key in command.paths if key.isupper()}
    if not command.program.endswith(".sh") and "with" not in words:
        words.append("with")
    if command.paths and graph == runs["omagd"] and name not in {"qmix", "vdn"}:
        words.append("env_args.map_name=5m_vs_6m")
    return variables, words


def longer(command: Documented) -> list[str]:
    """Return a budget with steps left to train, for a command that continues a run which has ended."""
    return ["t_max=400"] * ("checkpoint_path" in command.paths)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a virtual environment for the scripts whose pip does nothing."""
    bin_folder = tmp_path_factory.mktemp("venv") / "bin"
    bin_folder.mkdir()
    (bin_folder / "python").write_text(f'#!/bin/sh\ncase "$*" in *"-m pip"*) exit 0 ;; esac\nexec "{PYTHON}" "$@"\n')
    (bin_folder / "python").chmod(0o755)
    return bin_folder.parent


# Stands in for Python: writes down with what arguments a script calls main.py.
RECORDER = f"""#!/usr/bin/env bash
case "$*" in
    *"-m pip"*) ;;
    *torch.cuda*) echo 0 ;;
    *main.py*) printf '%s\\0' "${{@:2}}" >"$CALLED" ;;
    *) exec "{PYTHON}" "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def called_by(tmp_path_factory):
    """Return a function that types a script with variables and arguments, and returns what it calls main.py with."""
    venv, called = tmp_path_factory.mktemp("recorder"), tmp_path_factory.mktemp("called") / "arguments"
    (venv / "bin").mkdir()
    python = venv / "bin" / "python"
    python.write_text(RECORDER)
    python.chmod(0o755)

    def call(script: str, words: list[str], cwd: Path, variables: dict[str, str]) -> list[str]:
        place = {"PYTHON": str(python), "VENV": str(venv), "CALLED": str(called)}
        run_command([str(ROOT / script), *words], cwd, **variables, **place)
        *arguments, end = called.read_text().split("\0")
        called.unlink()
        assert end == ""
        return arguments

    return call


def test_commands_are_found_in_the_texts():
    assert {"main", "run_pretrain_ddp.sh", "run_gnn_stage3_ddp.sh"} <= {command.program for command in COMMANDS}
    line = "STAGE=stage2 TOKENIZER_PATH=results/<run>/models ./run_pretrain_ddp.sh t_max=3   # a comment"
    command = parse(line, "here")
    assert (command.program, command.arguments) == ("run_pretrain_ddp.sh", ("t_max=3",))
    assert command.paths == {"TOKENIZER_PATH": "results/<run>/models"}
    assert parse("python src/main.py --config=<yours> with lr=1", "here").open_places == ["--config=<yours>"]


@pytest.mark.processes
@pytest.mark.parametrize("command", distinct(COMMANDS), ids=shown)
def test_documented_commands_resolve_as_they_stand(command, request, tmp_path, monkeypatch, capsys, called_by):
    if reason := why_not(command):
        pytest.skip(reason)
    names = {"qmix": "qmix_run", "omagd_small": "small_run", "omagd": "published_run"}
    runs = {key: request.getfixturevalue(name) if command.paths else Path() for key, name in names.items()}
    variables, words = filled_in(command, runs)
    # The runs that stand in for the reader's were small; the weights' sizes must be said to fit them.
    words = [*words, *BUDGETS, *longer(command)] if command.paths else words
    monkeypatch.chdir(tmp_path)
    if command.program.endswith(".sh"):
        variables |= {"DRY_RUN": "1", "ENV_CONFIG": "skirmish"}
        arguments = called_by(command.program, words, tmp_path, variables)
        assert "--dry-run" in arguments
    else:
        arguments = ["--dry-run", *words]
        if command.program == "torchrun":
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", str(command.ranks))
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", "29500")
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "# stages: " in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize("command", different(COMMANDS), ids=shown)
def test_documented_commands_run(command, tmp_path, installed):
    program = [PYTHON, MAIN] if command.program == "main" else [str(ROOT / command.program)]
    words = [*command.arguments, *["with"] * (command.program == "main" and "with" not in command.arguments)]
    place = {"ENV_CONFIG": "skirmish", "CUDA_VISIBLE_DEVICES": "", "VENV": str(installed), "NUM_GPUS": "2", **FORKED}
    run_command([*program, *words, *BUDGETS], tmp_path, **{**command.variables, **place})
    folders = {path.parent for path in tmp_path.rglob("summary.json") if "sacred" not in path.parts}
    assert {summary_of(folder)["exit_state"] for folder in folders} == {"completed"}
