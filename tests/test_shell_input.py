"""What the shell scripts are given, by variables, flags, files and programs, is data: no part of it is executed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_harness import ROOT
from malformed_inputs import INJECTED, SHELL_MISTAKES

LAUNCHERS = ("launch.sh", "train_ddp.sh", "run_pretrain_ddp.sh", "run_gnn_stage3_ddp.sh")
SETUPS = ("quickstart.sh", "run_tests.sh")
BATCH = ("slurm/one_node.sbatch", "slurm/many_nodes.sbatch", "slurm/snakes.sbatch")
OTHERS = ("scripts/quick_distributed_test.sh", "install_sc2.sh")
SCRIPTS = (*LAUNCHERS, *SETUPS, *OTHERS)

# Stands in for Python: prints how many GPUs there are when asked, and does nothing otherwise.
PYTHON = """#!/usr/bin/env bash
case "$*" in *cuda*) printf '%s\\n' "${FAKE_GPUS:-0}" ;; esac
"""
PROGRAM = '#!/usr/bin/env bash\necho "$(basename "$0") $*" >>"$CALLED"\n[ "$1" != show ] || echo gpu17\n'


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a script with stand-ins for Python, SLURM and curl in a folder of its own."""
    for name, text in (("bin/python", PYTHON), *((f"bin/{name}", PROGRAM) for name in ("srun", "scontrol", "curl"))):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def call(folder: str, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        here = tmp_path / folder
        (here / "venv" / "bin").mkdir(parents=True)
        (here / "venv" / "bin" / "python").symlink_to(tmp_path / "bin" / "python")
        env = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(here), "CALLED": str(here / "called"),
            "PYTHON": str(tmp_path / "bin" / "python"), "VENV": str(here / "venv"), "OMAGD_ROOT": str(ROOT),
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu17", **variables,
        }  # fmt: skip
        command = ["bash", str(ROOT / script), *arguments]
        return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, stdin=-3, timeout=60)

    call.root = tmp_path
    return call


def variables_of(script: str) -> list[str]:
    """Return the variables of the environment that a script and what it shares with others read."""
    shared = "slurm/lib.sh" if script.startswith("slurm") else "scripts/lib.sh"
    text = "".join((ROOT / name).read_text() for name in (script, shared))
    return sorted(
        set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", text)) - {"PATH", "HOME", "BASH_SOURCE", "OMAGD_ROOT", "PWD"}
    )


def test_no_variable_is_executed(run):
    cases = [(script, name) for script in (*SCRIPTS, *BATCH) for name in variables_of(script)]
    assert {("slurm/many_nodes.sbatch", "SLURM_JOB_ID"), ("launch.sh", "NUM_GPUS")} <= set(cases)

    def attempt(case: tuple[str, str]) -> str:
        script, name = case
        more = ("--node-rank", "0", "--master-addr", "host", "--nodes", "1") if "quick_dist" in script else ()
        done = run(f"{script.replace('/', '_')}_{name}", script, *more, **{name: INJECTED})
        hit = list((run.root / f"{script.replace('/', '_')}_{name}").rglob("HIT"))
        return f"{script} executes {name}: {done.stderr}" if hit else ""

    with ThreadPoolExecutor(4) as pool:
        assert [found for found in pool.map(attempt, cases) if found] == []


def test_what_a_program_prints_is_not_executed(run):
    for script in LAUNCHERS:
        run(f"gpus_{script}", script, "--gpus", "0", FAKE_GPUS=INJECTED)
    assert list(run.root.rglob("HIT")) == []


def test_mistakes_are_one_line_before_anything_is_installed_or_started(run):
    def attempt(number: int) -> str:
        script, typed, variables, word = SHELL_MISTAKES[number]
        done = run(f"case_{number}", script, *typed.split(), **variables)
        left = sorted(
            path.name for path in (run.root / f"case_{number}").rglob("*") if path.name not in {"bin", "python"}
        )
        right = done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        right = right and word in done.stderr and "\x1b" not in done.stderr and done.stdout == ""
        return "" if right and left == ["venv"] else f"{SHELL_MISTAKES[number]}: {done} {left}"

    with ThreadPoolExecutor(4) as pool:
        assert [found for found in pool.map(attempt, range(len(SHELL_MISTAKES))) if found] == []


def test_the_log_takes_no_option_for_its_name(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "with_log.py")]
    for words, code in (["--help"], 0), (["--helpp", "true"], 2), ([], 2):
        done = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert "with_log.py LOG COMMAND" in (done.stdout if code == 0 else done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_help_is_printed_and_nothing_else_is_done(run):
    for number, script in enumerate((*SCRIPTS, ".ci/run", "benchmarks/gpu.sh")):
        flag = ("-h", "--help")[number % 2]
        done = run(f"{flag}_{script.replace('/', '_')}", script, flag, PYTHON="/nowhere/python")
        assert (done.returncode, done.stderr) == (0, ""), script
        second_line = (ROOT / script).read_text().splitlines()[1]
        assert done.stdout.splitlines()[0] == second_line.lstrip("# ")
        assert "set -" not in done.stdout and "#!" not in done.stdout
    assert {path for path in run.root.rglob("*") if path.is_file() and "bin" not in path.parts} == set()
