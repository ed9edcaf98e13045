"""Commands as users type them: started in a process group of their own, watched for what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from command_budgets import BUDGETS
from command_server import FORK_RANKS, Command
from sockets import living

ROOT = Path(__file__).resolve().parents[1]
MAIN = str(ROOT / "src" / "main.py")
PYTHON = sys.executable
TIMEOUT_SECONDS = 240
FORKED = {FORK_RANKS: "1"}  # variables of a command whose ranks need no start of their own
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (negative: killed), what it wrote, and the process group it lived in."""

    code: int
    out: str
    err: str
    group: int

    @property
    def text(self) -> str:
        return self.out + self.err


class Started:
    """A running command, leader of its own process group.

    Args:
        command: as typed. cwd: where. variables: added to a clean environment.
    """

    def __init__(self, command: list[str], cwd: Path, **variables: str) -> None:
        kept = {key: value for key, value in os.environ.items() if key not in TORCHRUN_VARIABLES}
        environment = {**kept, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHON": PYTHON, **variables}
        self.process = Command(command, cwd, environment)
        _running.add(self)

    @property
    def group(self) -> int:
        return self.process.pid

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> Ended:
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            out, err = self.kill()
            raise AssertionError(f"still running after {timeout} s\n{out}\n{err}") from None
        _running.discard(self)  # not where Ctrl-C ends the wait: then the command is still running
        return Ended(self.process.returncode, out, err, self.group)

    def kill(self) -> tuple[str, str]:
        """Kill the whole group and return what it wrote, without waiting for processes elsewhere that write too."""
        _running.discard(self)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        try:
            return self.process.communicate(timeout=1)
        except subprocess.TimeoutExpired as still:
            return tuple((part or b"").decode(errors="replace") for part in (still.output, still.stderr))


_running: set[Started] = set()


def end_what_goes_on() -> None:
    """Kill the groups of commands that nobody has waited for, as those of a test that has failed."""
    while _running:
        _running.pop().kill()


def run_command(command: list[str], cwd: Path, **variables: str) -> Ended:
    """Run to the end; fail where the exit code is not 0 or a process is left behind."""
    ended = Started(command, cwd, **variables).wait()
    assert ended.code == 0, f"{' '.join(command)}\nexit code {ended.code}\n{ended.text}"
    assert left_behind(ended.group) == []
    return ended


def train(cwd: Path, *arguments: str) -> Path:
    """Run `src/main.py` with small budgets appended, in `cwd`; return the folder of the run."""
    before = run_folders(cwd)
    run_command([PYTHON, MAIN, *arguments, *BUDGETS], cwd)
    (folder,) = run_folders(cwd) - before
    return folder


def run_folders(cwd: Path) -> set[Path]:
    """Return the folders of runs in `cwd`/results, the default place."""
    return {path.parent for path in cwd.glob("results/*/logs") if path.is_dir()}


def left_behind(group: int, patience: float = 30.0) -> list[str]:
    """Return the command lines of living processes of a group, after giving them some seconds to end."""
    until = time.monotonic() + patience
    while (
        found := [process.line.decode(errors="replace") for process in living().values() if process.group == group]
    ) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def children(pid: int) -> list[int]:
    """Return the process ids of the living ranks of `pid`: its own children, or those of its fork server."""
    processes = living()
    own = {child: process.line for child, process in processes.items() if process.parent == pid}
    servers = {child for child, line in own.items() if b"multiprocessing.forkserver" in line}
    found = {child for child, line in own.items() if b"resource_tracker" not in line} - servers
    return sorted(found | {child for child, process in processes.items() if process.parent in servers})


def records(folder: Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary_of(folder: Path) -> dict:
    """Return a run's summary.json."""
    return json.loads((folder / "summary.json").read_text())
