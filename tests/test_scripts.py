"""The launch scripts: from any directory, with any of their variables, they mean what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [
    "run_pretrain_ddp.sh",
    "run_gnn_stage3_ddp.sh",
    "train_ddp.sh",
    "quickstart.sh",
    "run_tests.sh",
    "install_sc2.sh",
    ".ci/run", "scripts/lib.sh", "launch.sh", "scripts/launch_distributed_training.sh", "slurm/lib.sh",
    "scripts/quick_distributed_test.sh", "slurm/one_node.sbatch", "slurm/many_nodes.sbatch", "slurm/snakes.sbatch",
]  # fmt: skip

# Stands in for Python: says 0 GPUs when asked, and writes down how it is called otherwise.
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then
    case "$2" in *cuda*) echo "${FAKE_GPUS:-0}" ;; esac
    exit 0
fi
case "$*" in *find_pretrained.py*) printf '%s\\n' "$@" >"$CALLED.found"; printf 'a b/t.th\\nc/p.th\\n'; exit 0 ;; esac
case "$*" in *--env-config=sc2*--dry-run*) exit "${FAKE_SC2:-2}" ;; esac
printf '%s\\n' "$PWD" "$@" >"$CALLED"
"""


@pytest.fixture
def call(tmp_path):
    """Return a function that runs a script with a stand-in Python: (process, its working directory, its arguments)."""
    fake = tmp_path / "fake_python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    folder = tmp_path / "some where"
    folder.mkdir()
    called = tmp_path / "called"

    def run(script: str, *args: str, **variables: str):
        clean = {key: value for key, value in os.environ.items() if key in {"PATH", "LANG"}}
        env = {**clean, "HOME": str(tmp_path), "PYTHON": str(fake), "CALLED": str(called), **variables}
        done = subprocess.run(
            ["bash", str(ROOT / script), *args], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        lines = called.read_text().splitlines() if called.exists() else [""]
        return done, lines[0], lines[1:]

    run.folder = folder
    return run


def test_scripts_are_bash_that_parses_and_can_be_executed():
    for script in SCRIPTS:
        assert subprocess.run(["bash", "-n", str(ROOT / script)], check=False).returncode == 0
        assert script.endswith("lib.sh") or os.access(ROOT / script, os.X_OK)
    for script in SCRIPTS[:4]:  # launchers never change the directory
        assert not [line for line in (ROOT / script).read_text().splitlines() if line.strip().startswith("cd ")]
    assert "auto_resume" not in (ROOT / "quickstart.sh").read_text()  # a second start begins a new run


def test_stage1_with_defaults(call):
    done, folder, args = call("run_pretrain_ddp.sh")
    assert done.returncode == 0
    assert folder == str(call.folder)
    assert args[:4] == [str(ROOT / "src" / "main.py"), "--config=omagd_origin", "--env-config=skirmish", "with"]
    expected = "recontructer_stage=stage1 run=ddp learner=nq_graph_learner_ddp use_ddp=True world_size=2 ddp_port=12355"
    assert {*expected.split(), "auto_resume=True"} <= set(args)
    assert not [arg for arg in args if "pretrained" in arg or "map_name" in arg]
    assert "skirmish" in done.stderr
    assert "2 CPU workers" in done.stderr


def test_stage2_passes_the_tokenizer_and_further_arguments_come_last(call):
    variables = {"STAGE": "stage2", "TOKENIZER_PATH": "a b/tokenizer.th", "NUM_GPUS": "3", "MAP_NAME": "8m"}
    _, _, args = call("run_pretrain_ddp.sh", "graph_pretrain_epochs=5", "name=a b", **variables)
    assert {"recontructer_stage=stage2", "world_size=3", "env_args.map_name=8m"} <= set(args)
    assert "pretrained_tokenizer_path=a b/tokenizer.th" in args
    assert args[-2:] == ["graph_pretrain_epochs=5", "name=a b"]


MISTAKES = (
    ("run_pretrain_ddp.sh", "", {"STAGE": "stage2"}, "TOKENIZER_PATH"),
    ("run_pretrain_ddp.sh", "", {"STAGE": "stage7"}, "STAGE=stage7"),
    ("run_gnn_stage3_ddp.sh", "", {"MASK_PREDICTOR_PATH": "x"}, "TOKENIZER_PATH"),
    ("train_ddp.sh", "--gpus 0,7", {}, "--gpus 0,7: only 1 of these 2 GPUs"),
    ("train_ddp.sh", "--gpus 0,,1", {}, "--gpus 0,,1"),
    ("train_ddp.sh", "--gpus all", {}, "--gpus all"),
    ("train_ddp.sh", "--max_episodes many", {}, "--max_episodes many: must be a whole number"),
    ("train_ddp.sh", "--gamma", {}, "--gamma needs a value"),
    ("train_ddp.sh", "--alpha 1", {}, "--alpha: not understood"),
    ("train_ddp.sh", "--load_model", {}, "--load_model needs --load_model_run"),
    ("train_ddp.sh", "--load_model --load_model_run nobody", {}, "--load_model_run nobody: no such run in results"),
    ("train_ddp.sh", "--load_model_run_episode 3", {}, "--load_model"),
)


@pytest.mark.parametrize(("script", "typed", "variables", "word"), MISTAKES)
def test_mistakes_are_one_line_before_anything_runs(call, script, typed, variables, word):
    done, _, args = call(script, *typed.split(), FAKE_GPUS="1", **variables)
    assert (done.returncode, args) == (2, [])
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert word in done.stderr


def test_stage3_takes_the_graph_agent_and_all_gpus(call):
    done, folder, args = call(
        "run_gnn_stage3_ddp.sh", "t_max=9", TOKENIZER_PATH="t", MASK_PREDICTOR_PATH="m", FAKE_GPUS="4", DRY_RUN="1"
    )
    assert (done.returncode, folder) == (0, str(call.folder))
    assert "--config=omagd" in args
    assert "--dry-run" in args
    expected = "recontructer_stage=stage3 mac=gnn_graph_mac agent=gnn_rnn world_size=4 pretrained_tokenizer_path=t"
    assert {*expected.split(), "pretrained_mask_predictor_path=m", "auto_resume=True"} <= set(args)
    assert args[-1] == "t_max=9"


def test_stage3_as_printed_takes_what_is_found(call, tmp_path):
    done, _, args = call(
        "run_gnn_stage3_ddp.sh", "t_max=9", "env_args.move_amount=3", MAP_NAME="8m", RESULTS_PATH="a b"
    )
    assert done.returncode == 0
    assert {"pretrained_tokenizer_path=a b/t.th", "pretrained_mask_predictor_path=c/p.th"} <= set(args)
    asked = (tmp_path / "called.found").read_text().splitlines()
    assert asked[1:5] == ["a b", "--config=omagd", "--env-config=skirmish", "with"]
    assert asked[5:] == ["env_args.map_name=8m", "t_max=9", "env_args.move_amount=3"]
    call("run_gnn_stage3_ddp.sh", TOKENIZER_PATH="mine")
    assert (tmp_path / "called.found").read_text().splitlines()[-1] == "pretrained_tokenizer_path=mine"


@pytest.mark.parametrize("script", ["run_pretrain_ddp.sh", "run_gnn_stage3_ddp.sh"])
def test_what_is_typed_counts_more_than_going_on(call, script):
    """The last value of a key is the one that counts."""
    _, _, args = call(script, "auto_resume=False", TOKENIZER_PATH="t", MASK_PREDICTOR_PATH="m")
    assert [arg for arg in args if arg.startswith("auto_resume=")] == ["auto_resume=True", "auto_resume=False"]


def test_snakes_take_the_published_flags(call):
    flags = "--max_episodes 50000 --batch_size=128 --epsilon 0.4 --epsilon_speed 0.9999 --a_lr 0.01 --c_lr=0.02"
    flags += " --save_interval 1000 --opponent_difficulty_strategy curriculum --enable_opponent_evasion"
    done, folder, args = call("train_ddp.sh", *flags.split(), "seed=3", "--opponent_evasion_start_episode", "7")
    assert (done.returncode, folder) == (0, str(call.folder))
    assert args[:4] == [str(ROOT / "src" / "main.py"), "--config=snakes_ddpg", "--env-config=snakes", "with"]
    assert {"run=ddp", "learner=ddpg_learner_ddp", "world_size=2", "auto_resume=True"} <= set(args)
    expected = "t_max=10000000 batch_size=128 epsilon_start=0.4 epsilon_speed=0.9999 lr=0.01 critic_lr=0.02"
    expected += " save_model_interval=200000 opponent_difficulty_strategy=curriculum enable_opponent_evasion=True"
    assert args[-11:] == [*expected.split(), "seed=3", "opponent_evasion_start_episode=7"]


def test_snakes_continue_from_a_run_and_an_episode(call):
    run = call.folder / "results" / "mine"
    run.mkdir(parents=True)
    _, _, args = call("train_ddp.sh", "--load_model", "--load_model_run", "mine", "--load_model_run_episode", "2000")
    assert args[-2:] == ["checkpoint_path=results/mine", "load_step=400000"]
    _, _, args = call("train_ddp.sh", "--load_model", f"--load_model_run={run}")
    assert args[-1] == f"checkpoint_path={run}"
    _, _, args = call("train_ddp.sh", "--gpus", "0,2", FAKE_GPUS="2")
    assert "world_size=2" in args


@pytest.mark.parametrize(("playable", "env"), [("0", "sc2"), ("2", "skirmish")])
def test_the_real_game_is_taken_where_it_can_be_played(call, tmp_path, playable, env):
    (tmp_path / "StarCraftII" / "Versions").mkdir(parents=True)
    done, _, args = call("run_pretrain_ddp.sh", FAKE_SC2=playable)
    assert f"--env-config={env}" in args
    assert f"environment: {env}" in done.stderr


@pytest.mark.processes
def test_stage1_resolves_for_real(tmp_path):
    env = {**os.environ, "PYTHON": sys.executable, "DRY_RUN": "1", "NUM_GPUS": "2", "ENV_CONFIG": "skirmish"}
    command = [str(ROOT / "run_pretrain_ddp.sh"), "graph_pretrain_epochs=3", "use_cuda=False"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=60)
    values = yaml.safe_load(done.stdout)
    assert (values["recontructer_stage"], values["world_size"], values["graph_pretrain_epochs"]) == ("stage1", 2, 3)
    assert list(tmp_path.iterdir()) == []
