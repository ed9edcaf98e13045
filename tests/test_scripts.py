"""The shell scripts: arguments of the commands that they start, mistakes, help; no part of their input is executed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_harness import ROOT

LAUNCHERS = ("launch.sh", "train_ddp.sh", "run_pretrain_ddp.sh", "run_gnn_stage3_ddp.sh")
SCRIPTS = (*LAUNCHERS, "quickstart.sh", "run_tests.sh", "scripts/quick_distributed_test.sh", "install_sc2.sh")
BATCH = ("slurm/one_node.sbatch", "slurm/many_nodes.sbatch", "slurm/snakes.sbatch")
WITH_HELP = (*SCRIPTS, ".ci/run", "benchmarks/gpu.sh")
LIBRARIES = ("scripts/lib.sh", "slurm/lib.sh")
MAIN = str(ROOT / "src" / "main.py")

# Stands in for Python: prints the number of GPUs, finds weights, and records its other calls.
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
    -c*cuda*) printf '%s\n' "${FAKE_GPUS:-0}" ;;
    -c*) ;;
    *find_pretrained.py*) printf '%s\n' "$@" >found; printf 'a b/t.th\nc/p.th\n' ;;
    *--env-config=sc2*--dry-run*) [ "$RANK/$WORLD_SIZE" = 0/1 ] && exit "${FAKE_SC2:-2}" ;; # also where srun calls
    *) printf '%s\n' "$PWD" "$@" >"$CALLED" ;;
esac
"""
PROGRAM = '#!/usr/bin/env bash\necho "$0" >>programs\n[ "$1" != show ] || echo gpu17\n'


@dataclass(frozen=True)
class Done:
    """How a script ended, its folder, and the arguments of the command that it started."""

    code: int
    out: str
    err: str
    folder: Path
    arguments: list[str]


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script in a folder `at`, with stand-ins for Python, SLURM and curl."""
    (tmp_path / "bin").mkdir()
    for name, text in (("python", PYTHON), *((name, PROGRAM) for name in ("srun", "scontrol", "curl"))):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def call(script: str, *arguments: str, at: str = "some where", **variables: str) -> Done:
        folder, python = tmp_path / at, tmp_path / "bin" / "python"
        (folder / "venv" / "bin").mkdir(parents=True, exist_ok=True)
        called, own = folder / "called", folder / "venv" / "bin" / "python"
        called.unlink(missing_ok=True)
        own.unlink(missing_ok=True)
        own.symlink_to(python)
        env = {
            "PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(folder), "CALLED": str(called),
            "PYTHON": str(python), "VENV": str(folder / "venv"), "OMAGD_ROOT": str(ROOT),
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu17", **variables,
        }  # fmt: skip
        command = ["bash", str(ROOT / script), *arguments]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, stdin=-3, timeout=60)
        where, *passed = called.read_text().splitlines() if called.exists() else [str(folder)]
        assert where == str(folder) or script not in LAUNCHERS, "launchers never change the directory"
        return Done(done.returncode, done.stdout, done.stderr, folder, passed)

    return call


def test_scripts_parse_and_can_be_executed():
    for script in (*WITH_HELP, *BATCH, *LIBRARIES, "scripts/launch_distributed_training.sh"):
        assert subprocess.run(["bash", "-n", str(ROOT / script)], check=False).returncode == 0
        assert script in LIBRARIES or os.access(ROOT / script, os.X_OK)
    assert "auto_resume" not in (ROOT / "quickstart.sh").read_text()  # a second start begins a new run


# Shell text that would be executed where a script hands it to arithmetic or to a test of numbers.
INJECTED = "PATH[$(touch HIT)`touch HIT`]"
GIVEN = {"TOKENIZER_PATH": "a b/t", "MASK_PREDICTOR_PATH": "m"}
STAGE1 = "recontructer_stage=stage1 run=ddp learner=nq_graph_learner_ddp use_ddp=True world_size=2 ddp_port=12355"
STAGE2 = "recontructer_stage=stage2 world_size=3 env_args.map_name=8m 'pretrained_tokenizer_path=a b/t'"
STAGE3 = (
    "recontructer_stage=stage3 mac=gnn_graph_mac agent=gnn_rnn world_size=4 'pretrained_tokenizer_path=a b/t'"
    " pretrained_mask_predictor_path=m auto_resume=True"
)
SNAKES = (
    "--max_episodes 50000 --batch_size=128 --epsilon 0.4 --epsilon_speed 0.9999 --a_lr 0.01 --c_lr=0.02 --save_interval"
    " 1000 --opponent_difficulty_strategy curriculum --enable_opponent_evasion seed=3 --opponent_evasion_start_episode"
)
PASSED = (
    "run=ddp learner=ddpg_learner_ddp world_size=2 auto_resume=True t_max=10000000 batch_size=128 epsilon_start=0.4"
    " epsilon_speed=0.9999 lr=0.01 critic_lr=0.02 save_model_interval=200000 opponent_difficulty_strategy=curriculum"
    " enable_opponent_evasion=True seed=3"
)
# Script, arguments and variables; the options that it passes, some of the arguments behind them, and the last ones.
CALLS = (
    ("run_pretrain_ddp.sh", "", {}, "omagd_origin skirmish", f"{STAGE1} auto_resume=True", ""),
    (
        "run_pretrain_ddp.sh", "graph_pretrain_epochs=5 'name=a b'",
        {"STAGE": "stage2", "NUM_GPUS": "3", "MAP_NAME": "8m", "TOKENIZER_PATH": "a b/t"},
        "omagd_origin skirmish", STAGE2, "graph_pretrain_epochs=5 'name=a b'",
    ),
    ("run_gnn_stage3_ddp.sh", "t_max=9", {"FAKE_GPUS": "4", **GIVEN}, "omagd skirmish", STAGE3, "t_max=9"),
    ("run_gnn_stage3_ddp.sh", "auto_resume=False", GIVEN, "omagd skirmish", "auto_resume=True", "auto_resume=False"),
    ("train_ddp.sh", f"{SNAKES} 7", {}, "snakes_ddpg snakes", PASSED, "opponent_evasion_start_episode=7"),
    ("train_ddp.sh", "--gpus 0,2", {"FAKE_GPUS": "2"}, "snakes_ddpg snakes", "world_size=2", ""),
)  # fmt: skip


@pytest.mark.parametrize(("script", "typed", "variables", "names", "passed", "last"), CALLS)
def test_variables_and_flags_become_arguments(run, script, typed, variables, names, passed, last):
    """What is typed comes last, so that it overrides what the script adds."""
    done, end = run(script, *shlex.split(typed), **variables), shlex.split(last)
    config, env = names.split()
    assert done.code == 0
    assert done.arguments[:4] == [MAIN, f"--config={config}", f"--env-config={env}", "with"]
    assert set(shlex.split(passed)) <= set(done.arguments)
    assert done.arguments[len(done.arguments) - len(end) :] == end
    absent = {"TOKENIZER_PATH": "pretrained", "MAP_NAME": "map_name"}
    assert not [w for w in done.arguments for key, word in absent.items() if word in w and key not in variables]
    assert "2 CPU workers" in done.err or "NUM_GPUS" in variables or "FAKE_GPUS" in variables
    assert "--dry-run" in run(script, *shlex.split(typed), **variables, DRY_RUN="1").arguments


def test_stage3_finds_weights_that_are_not_given(run):
    typed = ("t_max=9", "env_args.move_amount=3")
    done = run("run_gnn_stage3_ddp.sh", *typed, MAP_NAME="8m", RESULTS_PATH="a b")
    assert {"pretrained_tokenizer_path=a b/t.th", "pretrained_mask_predictor_path=c/p.th"} <= set(done.arguments)
    _, *asked = (done.folder / "found").read_text().splitlines()
    assert asked == ["a b", "--config=omagd", "--env-config=skirmish", "with", "env_args.map_name=8m", *typed]
    run("run_gnn_stage3_ddp.sh", TOKENIZER_PATH="mine")
    assert (done.folder / "found").read_text().splitlines()[-1] == "pretrained_tokenizer_path=mine"


def test_snakes_continue_from_a_run_and_an_episode(run, tmp_path):
    mine = tmp_path / "some where" / "results" / "mine"
    mine.mkdir(parents=True)
    done = run("train_ddp.sh", "--load_model", "--load_model_run", "mine", "--load_model_run_episode", "2000")
    assert done.arguments[-2:] == ["checkpoint_path=results/mine", "load_step=400000"]
    assert run("train_ddp.sh", "--load_model", f"--load_model_run={mine}").arguments[-1] == f"checkpoint_path={mine}"


@pytest.mark.parametrize(("playable", "env"), [("0", "sc2"), ("2", "skirmish")])
def test_the_real_game_is_used_where_it_can_be_played(run, tmp_path, playable, env):
    (tmp_path / "some where" / "StarCraftII" / "Versions").mkdir(parents=True)
    done = run("run_pretrain_ddp.sh", FAKE_SC2=playable)
    assert f"--env-config={env}" in done.arguments and f"environment: {env}" in done.err


# Script, arguments and variables, and words of the line that rejects them.
MISTAKES: tuple[tuple[str, str, dict[str, str], str], ...] = (
    ("launch.sh", "--nodes 2 --node-rank 0 --master-addr -x", {}, "--master-addr -x"),
    ("run_pretrain_ddp.sh", "", {"STAGE": "stage2"}, "TOKENIZER_PATH"),
    ("train_ddp.sh", "--gpus 0,7", {"FAKE_GPUS": "1"}, "--gpus 0,7: only 1 of these 2 GPUs"),
    ("train_ddp.sh", "--load_model --load_model_run nobody", {}, "--load_model_run nobody: no such run in results"),
    ("quickstart.sh", "\x1b[31mred", {}, "?[31mred: not understood"),
    ("scripts/quick_distributed_test.sh", "--nodes 2 --master-addr a;b", {}, "--master-addr a;b"),
    ("slurm/many_nodes.sbatch", "", {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID="),
    *(
        (script, "", {"PYTHON": python, **GIVEN}, f"PYTHON={python}: does not start")
        for script in (*LAUNCHERS, "quickstart.sh", "run_tests.sh")
        for python in ("/nowhere/python", "/bin/false")
    ),
)


def test_mistakes_are_one_line_before_anything_is_installed_or_started(run):
    def attempt(number: int) -> str:
        script, typed, variables, words = MISTAKES[number]
        done = run(script, *typed.split(), at=f"case {number}", **variables)
        left = {path.name for path in done.folder.rglob("*")} - {"venv", "bin", "python"}
        right = (done.code, done.out, left) == (2, "", set()) and re.fullmatch(r"error: [^\n\x1b]*\n", done.err)
        return "" if right and words in done.err else f"{MISTAKES[number]}: {done} {left}"

    with ThreadPoolExecutor(4) as pool:
        assert [found for found in pool.map(attempt, range(len(MISTAKES))) if found] == []


def variables_of(script: str) -> list[str]:
    """Return the variables of the environment that a script and its library read."""
    library = LIBRARIES[script.startswith("slurm")]
    text = "".join((ROOT / name).read_text() for name in (script, library))
    given = {"PATH", "HOME", "BASH_SOURCE", "OMAGD_ROOT", "PWD"}
    return sorted(set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", text)) - given)


def test_neither_variables_nor_what_programs_print_are_executed(run, tmp_path):
    cases = [(script, name) for script in (*SCRIPTS, *BATCH) for name in variables_of(script)]
    assert {("slurm/many_nodes.sbatch", "SLURM_JOB_ID"), ("launch.sh", "NUM_GPUS")} <= set(cases)

    def attempt(case: tuple[str, str]) -> None:
        script, name = case
        more = ("--node-rank", "0", "--master-addr", "host", "--nodes", "1") if "quick_dist" in script else ()
        run(script, *more, at=f"{script} {name}".replace("/", "_"), **{name: INJECTED})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(attempt, cases))
    for script in LAUNCHERS:
        run(script, "--gpus", "0", at=f"gpus {script}", FAKE_GPUS=INJECTED)
    assert [str(path) for path in tmp_path.rglob("HIT")] == []
