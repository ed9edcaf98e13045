"""Commands as they are promised and documented: run with small budgets, and resolved as they stand."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from command_budgets import BUDGETS
from command_harness import FORKED, MAIN, PYTHON, ROOT, records, run_command, summary_of
from documented import Documented, documented_commands, parse
from matplotlib.image import imread

from omagd.config.loading import read_preset, validate
from omagd.learners.protocol import learner_class
from omagd.run.cli.main import main

COMMANDS = documented_commands()
# Program and learner of commands that fixtures and other tests run already; the last two start one that is run here.
RUN_ELSEWHERE = {
    ("main", "nq_learner"), ("main", "nq_graph_learner"), ("torchrun", "nq_learner"),
    ("run_gnn_stage3_ddp.sh", "nq_graph_learner"), ("quickstart.sh", "nq_graph_learner"),
}  # fmt: skip
STAGES = ("stage1", "stage2", "stage3")
NAMES = {
    "stage1": "epoch train/graph_loss eval/graph_loss",
    "stage2": "epoch train/graph_loss eval/graph_loss",
    "stage3": "t_env test_battle_won_mean return_mean ep_length_mean epsilon loss_td grad_norm td_error_abs"
    " q_taken_mean target_mean episode",
}


def check_run_folder(folder: Path, ranks: int, stages: tuple[str, ...] = STAGES) -> dict:
    """Assert that a completed run left what it promises; return its summary."""
    assert validate(json.loads((folder / "config.json").read_text())).name
    assert (folder / "env_info.json").is_file()
    summary, lines = summary_of(folder), records(folder)
    assert (summary["exit_state"], summary["world_size"], tuple(summary["stages"])) == ("completed", ranks, stages)
    assert [path for path in summary["artifacts"].values() if not Path(path).exists()] == []
    for stage in stages:
        assert set(NAMES[stage].split()) <= {name for line in lines if line["stage"] == stage for name in line}
    logs = {path.name: path.read_text() for path in (folder / "logs").iterdir()}
    assert logs.keys() == {f"rank_{rank}.log" for rank in range(ranks)} and "results:" in logs["rank_0.log"]
    assert ("stage3" in logs["rank_0.log"]) == ("stage3" in stages and summary["name"] != "qmix")
    expected = {f"pretrain_{stage}{best}" for stage in stages if stage != "stage3" for best in ("", "_best")}
    expected |= {str(summary["stages"]["stage3"]["clock"]["t_env"])} if "stage3" in stages else set()
    assert {path.name for path in (folder / "models").iterdir()} == expected
    weights = [torch.load(path, map_location="cpu", weights_only=True) for path in folder.rglob("*.th")]
    assert weights and "module." not in str([list(names(value)) for value in weights])
    pictures = list((folder / "plots").glob("*.png"))
    assert len(pictures) >= len(stages) - 1
    assert all(min(imread(picture).shape[:2]) > 100 for picture in pictures)
    return summary


def names(value: object, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of everything in a weights file."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield from (f"{prefix}{key}", *names(inner, f"{prefix}{key}."))


@pytest.mark.processes
@pytest.mark.parametrize(("run", "ranks", "stages", "facts", "scalar"), [
    ("small_run", 1, STAGES, {"env": "skirmish", "map_name": "3m"}, "eval/graph_loss"),
    ("published_run", 2, STAGES, {"map_name": "5m_vs_6m", "environments": 4}, "test_battle_won_mean"),
    ("qmix_run", 1, ("stage3",), {"map_name": "3m"}, "loss_td"),
])  # fmt: skip
def test_a_run_leaves_its_files_and_a_record_of_sacred(run, ranks, stages, facts, scalar, request):
    folder = request.getfixturevalue(run)
    summary = check_run_folder(folder, ranks, stages)
    assert facts.items() <= summary.items() and summary["updates"] > 0
    assert scalar in (folder.parent / "sacred" / "1" / "metrics.json").read_text()


# --- what is documented


def why_not(command: Documented) -> str:
    """Return why a documented command cannot be tried here, or nothing."""
    text = " ".join([*command.arguments, *command.variables.values()])
    if ("--env-config=smax" in text or "--env-config=jaxmarl" in text) and importlib.util.find_spec("jaxmarl") is None:
        return "the extra smax or jaxmarl is not installed"
    if "sc2" in text:
        return "needs StarCraft II"
    if "soft_qmix" in text or "crossroads" in text:
        return "needs the example package: test_example_package.py runs it"
    if "--config=rloo" in text and command.paths:
        return "continues a run of PPO: test_groups.py does"
    return f"the reader fills in {command.open_places}" if command.open_places else ""


def shown(command: Documented) -> str:
    """Return how a command is called among the tests."""
    return re.sub(r"[^\w=.-]+", " ", f"{command.where} {command.line}")[:120]


def distinct(commands: list[Documented]) -> list[Documented]:
    """Return the first of those commands that only name other places of an earlier run's files."""
    return list({command.meaning: command for command in reversed(commands)}.values())[::-1]


def preset(command: Documented) -> str:
    """Return the preset of a command."""
    given = dict(word.lstrip("-").split("=", 1) for word in command.arguments if "=" in word)
    defaults = {"run_pretrain_ddp.sh": "omagd_origin", "run_gnn_stage3_ddp.sh": "omagd", "quickstart.sh": "omagd_small"}
    return given.get("config") or command.variables.get("CONFIG") or defaults.get(command.program, "qmix_fast")


def learner_of(name: str) -> str:
    """Return the learner of a preset, without `_ddp`."""
    return read_preset("algs", name).get("learner", "nq_learner").removesuffix("_ddp")


def kind(command: Documented) -> tuple[str, str]:
    """Return program and learner of a command; keys are tested where they are implemented."""
    return command.program, learner_of(preset(command))


def different(commands: list[Documented]) -> list[Documented]:
    """Return one documented command of each kind that no other test runs."""
    kinds = {kind(command): command for command in reversed(commands) if command.ranks <= 2 and not why_not(command)}
    return [command for found, command in kinds.items() if found not in RUN_ELSEWHERE and not command.paths]


def filled_in(command: Documented, runs: dict[str, Path]) -> tuple[dict[str, str], list[str]]:
    """Return variables and arguments of a documented command with paths of real runs in them.

    runs: by --config; a run of the published sizes stands in for all others, with its map.
    """
    script = command.program.endswith(".sh")
    name = command.variables.get("CONFIG", "omagd") if script else preset(command)
    graph = runs["omagd_small" if name == "omagd_small" else "omagd"]
    tokenizer, predictor = (str(graph / "models" / f"pretrain_stage{stage}_best") for stage in (1, 2))
    where = {
        "checkpoint_path": str(runs.get(name, graph)), "graph_pretrain_policy": str(runs["qmix"]),
        "pretrained_tokenizer_path": tokenizer, "pretrained_mask_predictor_path": predictor,
        "TOKENIZER_PATH": tokenizer, "MASK_PREDICTOR_PATH": predictor,
    }  # fmt: skip
    keys = [(word, word.partition("=")[0]) for word in command.arguments]
    # A run's folder stays one: it means something else than its models/.
    ends = {key: "/models" for word, key in keys if key == "checkpoint_path" and word.endswith("/models")}
    words = [f"{key}={where[key]}{ends.get(key, '')}" if key in command.paths else word for word, key in keys]
    words += ["with"] * (not script and "with" not in words)
    if command.paths and graph == runs["omagd"] and name not in {"qmix", "vdn"}:
        words.append("env_args.map_name=5m_vs_6m")
    return command.variables | {key: where[key] for key in command.paths if key.isupper()}, words


# Stands in for the Python of a script: installs nothing, has no GPU, and records the arguments of main.py if asked to.
INTERPRETER = f"""#!/usr/bin/env bash
case "$*" in
    *"-m pip"*) ;;
    *torch.cuda*) echo 0 ;;
    *main.py*) [ -z "${{CALLED:-}}" ] && exec "{PYTHON}" "$@" || printf '%s\\0' "${{@:2}}" >"$CALLED" ;;
    *) exec "{PYTHON}" "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """Return a virtual environment for the scripts, with the stand-in for Python."""
    python = tmp_path_factory.mktemp("venv") / "bin" / "python"
    python.parent.mkdir()
    python.write_text(INTERPRETER)
    python.chmod(0o755)
    return python.parents[1]


def test_commands_are_found_in_the_texts():
    assert {"main", "run_pretrain_ddp.sh", "run_gnn_stage3_ddp.sh"} <= {command.program for command in COMMANDS}
    line = "STAGE=stage2 TOKENIZER_PATH=results/<run>/models ./run_pretrain_ddp.sh t_max=3   # a comment"
    command = parse(line, "here")
    assert (command.program, command.arguments) == ("run_pretrain_ddp.sh", ("t_max=3",))
    assert (command.paths, command.variables["TOKENIZER_PATH"]) == ({"TOKENIZER_PATH"}, "results/<run>/models")
    assert parse("python src/main.py --config=<yours> with lr=1", "here").open_places == ["--config=<yours>"]


def budgets_of(words):
    """Return small budgets for a command; learners without replay have no buffer, and groups fill two battles."""
    presets = [word.removeprefix("--config=") for word in words if word.startswith("--config=")]
    learner = learner_of(presets[0]) if presets else "nq_learner"
    on_policy = learner_class(learner).data == "on_policy"
    groups = ["group_size=2"] * (learner == "rloo_learner")
    return [word for word in BUDGETS if not (on_policy and word.startswith("buffer_size="))] + groups


@pytest.mark.processes
@pytest.mark.parametrize("command", distinct(COMMANDS), ids=shown)
def test_documented_commands_resolve_as_they_stand(command, request, tmp_path, monkeypatch, capsys, venv):
    if reason := why_not(command):
        pytest.skip(reason)
    names = {"qmix": "qmix_run", "omagd_small": "small_run", "omagd": "published_run"}
    runs = {key: request.getfixturevalue(name) if command.paths else Path() for key, name in names.items()}
    variables, words = filled_in(command, runs)
    # The runs that stand in for the reader's were small; the weights' sizes must be said to fit them.
    words += budgets_of(words) if command.paths else ()
    words += ["t_max=400"] * ("checkpoint_path" in command.paths)  # steps are left to a run that continues
    monkeypatch.chdir(tmp_path)
    if command.program.endswith(".sh"):
        called = venv / "called"
        place = {"PYTHON": str(venv / "bin" / "python"), "VENV": str(venv), "CALLED": str(called)}
        script = [str(ROOT / command.program), *words]
        run_command(script, tmp_path, **variables, **place, DRY_RUN="1", ENV_CONFIG="skirmish")
        *arguments, end = called.read_text().split("\0")
        called.unlink()
        assert "--dry-run" in arguments and end == ""
    else:
        arguments = ["--dry-run", *words]
        if command.program == "torchrun":
            group = {"RANK": 0, "WORLD_SIZE": command.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
            for name, value in group.items():
                monkeypatch.setenv(name, str(value))
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "# stages: " in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.parametrize("command", different(COMMANDS), ids=shown)
def test_documented_commands_run(command, tmp_path, venv):
    program = [PYTHON, MAIN] if command.program == "main" else [str(ROOT / command.program)]
    words = [*command.arguments, *["with"] * (command.program == "main" and "with" not in command.arguments)]
    place = {"ENV_CONFIG": "skirmish", "VENV": str(venv), "NUM_GPUS": "2", **FORKED}
    run_command([*program, *words, *budgets_of(words)], tmp_path, **{**command.variables, **place})
    folders = {path.parent for path in tmp_path.rglob("summary.json") if "sacred" not in path.parts}
    assert {summary_of(folder)["exit_state"] for folder in folders} == {"completed"}
