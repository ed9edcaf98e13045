"""A stand-in for SLURM on this machine: `sbatch`, `srun` and `sacct`, for job arrays.

`install(folder)` writes the commands into a folder for PATH. Each is this file, called with the command's name. A
controller process for each submission starts the tasks, at most as many at a time as the array says, and keeps their
states in files. As in SLURM, tasks outlive the process that submitted them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct")
STATE = "SLURM_STAND_IN"
LOOK_SECONDS = 0.1


def install(folder: Path) -> dict[str, str]:
    """Write the commands; return the variables with which a process uses them."""
    (folder / "bin").mkdir(parents=True)
    (folder / "state").mkdir()
    for name in COMMANDS:
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S -E {shlex.quote(__file__)} {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", STATE: str(folder / "state")}


def states(folder: Path) -> dict[str, str]:
    """Return the state of each task by its id (`17_0`; `17` for a job that is no array)."""
    return {path.stem: path.read_text() for path in sorted((folder / "state").glob("*.state"))}


def root() -> Path:
    return Path(os.environ[STATE])


def write(task: str, state: str) -> None:
    beside = root() / f"{task}.{os.getpid()}.tmp"
    beside.write_text(state)
    beside.replace(root() / f"{task}.state")


def read(task: str) -> str:
    return (root() / f"{task}.state").read_text()


def sbatch(arguments: list[str]) -> None:
    script = Path(arguments[-1])
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script.read_text(), re.MULTILINE))
    array = re.fullmatch(r"0-(\d+)%(\d+)", shlex.split(options.get("array", "''"))[0])
    job = str(1 + max((int(path.stem.split("_")[0]) for path in root().glob("*.state")), default=16))
    tasks = [f"{job}_{index}" for index in range(int(array[1]) + 1)] if array else [job]
    for task in tasks:
        write(task, "PENDING")
    copy = root() / f"{job}.sh"  # the submitting side moves its file
    copy.write_text(script.read_text())
    subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, "control", str(copy), array[2] if array else "1", *tasks],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    print(f"Submitted batch job {job}")


def control(arguments: list[str]) -> None:
    """Run the tasks of one submission."""
    script, most, *tasks = arguments
    running: dict[str, subprocess.Popen[bytes]] = {}
    while any(read(task) in {"PENDING", "RUNNING"} for task in tasks) or running:
        for task in tasks:
            if read(task) == "PENDING" and task not in running and len(running) < int(most):
                write(task, "RUNNING")
                running[task] = start(script, task)
        for task, process in list(running.items()):
            if process.poll() is not None:
                del running[task]
                if read(task) == "RUNNING":
                    write(task, "FAILED" if process.returncode else "COMPLETED")
        time.sleep(LOOK_SECONDS)


def start(script: str, task: str) -> subprocess.Popen[bytes]:
    job, _, index = task.partition("_")
    variables = {
        "SLURM_JOB_ID": job, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1",
    }  # fmt: skip
    if index:
        variables |= {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": index}
    with (root() / f"{task}.out").open("ab") as output:
        return subprocess.Popen(
            ["bash", script], env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


def srun(arguments: list[str]) -> None:
    while arguments[0].startswith("--"):
        del arguments[: 2 if arguments[0] in {"--output", "--error"} else 1]
    os.execvp(arguments[0], arguments)


def sacct(arguments: list[str]) -> None:
    jobs = {value for flag, value in zip(arguments, arguments[1:], strict=False) if flag == "-j"}
    print("JobID|State|NodeList")
    for path in sorted(root().glob("*.state")):
        if path.stem.split("_")[0] in jobs:
            print(f"{path.stem}|{path.read_text()}|here")


if __name__ == "__main__":
    {**{name: globals()[name] for name in COMMANDS}, "control": control}[sys.argv[1]](sys.argv[2:])
