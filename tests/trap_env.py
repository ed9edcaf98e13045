"""A walk that fails on the rank, at the step and in the way that its arguments say, and runs that play it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import shared_memory
import torch
from command_budgets import BUDGETS
from command_harness import FORKED, MAIN, PYTHON, Ended, Started, children, left_behind, run_folders, summary_of
from sockets import wait_until
from walk_env import Walk, WalkArgs

from omagd.utils.errors import UserError

FILES = {
    "trap_configs.py": "from pathlib import Path\nPATH = Path(__file__).parent\n",
    "envs/trap.yaml": "env: trap\nenv_args: {how: never, rank: 1, step: 60}\n",
    "trap-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: trap\nVersion: 1.0\n",
    "trap-1.0.dist-info/entry_points.txt": (
        "[omagd.envs]\ntrap = trap_env:Trap\n[omagd.config_dirs]\ntrap = trap_configs:PATH\n"
    ),
}
OPTIONS = ("--config=qmix", "--env-config=trap", "with", "run=ddp", "world_size=2")
MORE = ("t_max=100000", "epsilon_anneal_time=1000", "log_interval=20")


class TrapArgs(WalkArgs):
    """rank: -1 for all. step: of that process, the first one that fails. once: a file; fail only if it is missing."""

    limit: int = 5
    how: str = "never"
    rank: int = 1
    step: int = 60
    once: str = ""


class Trap(Walk):
    """A walk whose steps fail; "slow" only takes its time."""

    args_model = TrapArgs
    args: TrapArgs

    def step(self, actions: np.ndarray) -> tuple[float, bool, dict[str, Any]]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.calls + 1 >= self.args.step and self.args.rank in (rank, -1):
            self.fail(self.args.how)
        if self.args.how in ("slow", "once"):
            time.sleep(0.01)
        return super().step(actions)

    def fail(self, how: str) -> None:
        if self.args.once:
            if Path(self.args.once).exists():
                return
            Path(self.args.once).touch()
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while how == "endless":
            time.sleep(0.05)
        if how == "raise":
            # As NCCL does: leaving the group waits for the other ranks, which wait for an exchange with this one.
            torch.distributed.destroy_process_group = lambda *_: time.sleep(3600)
            raise ZeroDivisionError("the trap has closed")
        if how == "user":
            raise UserError("env_args.how=user: take another")
        if how == "exit":
            os._exit(0)
        if how in ("kill", "once"):
            os.kill(os.getpid(), signal.SIGKILL)


class TrapRun:
    """A run that plays `trap` in its own folder, with its own folder of temporary files.

    Args:
        more: settings, after those of two ranks. program: what starts the ranks instead of Python.
    """

    def __init__(self, folder: Path, how: str, *more: str, program: tuple[str, ...] = (PYTHON,)) -> None:
        self.here, self.temporary = folder / "here", folder / "temporary"
        for path in (self.here, self.temporary):
            path.mkdir(parents=True)
        for name, text in FILES.items():
            (folder / "plugin" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "plugin" / name).write_text(text)
        here = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, (str(folder / "plugin"), here, os.environ.get("PYTHONPATH"))))
        self.shared = shared_memory.names()
        command = [*program, MAIN, *OPTIONS, *BUDGETS, *MORE, f"env_args.how={how}", *more]
        self.started = Started(command, self.here, PYTHONPATH=path, TMPDIR=str(self.temporary), **FORKED)

    @property
    def pid(self) -> int:
        return self.started.process.pid

    @property
    def folder(self) -> Path:
        (folder,) = run_folders(self.here)
        return folder

    @property
    def summary(self) -> dict[str, Any]:
        return summary_of(self.folder)

    @property
    def newest_checkpoint(self) -> str:
        found = self.here.glob("results/*/checkpoints/[0-9]*/manifest.json")
        return max((path.parent.name for path in found), default="")

    @property
    def temporary_files(self) -> list[str]:
        """Return the names of temporary files, without the caches that torch itself keeps."""
        return [path.name for path in self.temporary.iterdir() if not path.name.startswith("torch")]

    def wait_for(self, what: Any) -> None:
        ended = self.started.process.poll
        assert wait_until(lambda: what() or ended() is not None, 120) and what(), self.started.wait(1).text

    def wait_for_training(self, ranks: int = 2) -> list[int]:
        """Wait until all ranks train; return their process ids."""
        self.wait_for(lambda: [log for log in self.here.glob("results/*/metrics.jsonl") if log.stat().st_size])
        found = children(self.pid)
        assert len(found) == ranks
        return found

    @property
    def shared_memory(self) -> list[str]:
        """Return what is left in shared memory."""
        return shared_memory.left_since(self.shared)

    def end(self, seconds: float = 120) -> Ended:
        """Wait for the end; check that no process and, except after SIGKILL, no temporary file is left."""
        ended = self.started.wait(seconds)
        assert left_behind(ended.group) == []
        if ended.code >= 0:
            assert self.temporary_files == []
        return ended
