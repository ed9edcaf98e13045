"""An environment that fails on the rank, at the step and in the way that its arguments say; runs that play it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from command_budgets import BUDGETS
from command_harness import FORKED, MAIN, PYTHON, Started, children, run_folders, summary_of

# A package beside omagd.
PLUGIN = """
import os, signal, sys, time
import numpy as np
from pydantic import BaseModel
from omagd.envs.protocol import MultiAgentEnv
from omagd.utils.errors import UserError
import torch.distributed

CONFIGS = os.path.join(os.path.dirname(__file__), "configs")


class Args(BaseModel):
    how: str = "never"
    rank: int = 1
    step: int = 60
    once: str = ""


class Trap(MultiAgentEnv):
    args_model = Args

    def __init__(self, args):
        self.args, self.steps, self.t = args, 0, 0

    def reset(self, seed=None):
        self.t = 0

    def step(self, actions):
        self.steps += 1
        self.t += 1
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if self.steps >= self.args.step and self.args.rank in (rank, -1):
            self.fail()
        if self.args.how in ("slow", "once"):
            time.sleep(0.01)
        return 1.0, self.t >= 5, {"battle_won": False}

    def fail(self):
        if self.args.once:
            if os.path.exists(self.args.once):
                return
            open(self.args.once, "w").close()
        if self.args.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while self.args.how == "endless":
            time.sleep(0.05)
        if self.args.how == "raise":
            # As NCCL does: leaving the group waits for the other ranks, which wait for an exchange with this one.
            torch.distributed.destroy_process_group = lambda *_: time.sleep(3600)
            raise ZeroDivisionError("the trap has closed")
        if self.args.how == "user":
            raise UserError("env_args.how=user: take another", "this is the help")
        if self.args.how == "leave":
            sys.exit(0)
        if self.args.how == "exit":
            os._exit(0)
        if self.args.how in ("kill", "once"):
            os.kill(os.getpid(), signal.SIGKILL)

    def get_obs(self, no_range_limit=False):
        return np.zeros((2, 3), np.float32)

    def get_state(self):
        return np.zeros(4, np.float32)

    def get_avail_actions(self):
        return np.ones((2, 2), bool)

    def get_env_info(self):
        return {"n_agents": 2, "n_actions": 2, "obs_shape": 3, "state_shape": 4, "episode_limit": 5}

    def get_stats(self):
        return {}
"""
OPTIONS = ("--config=qmix", "--env-config=trap", "with", "run=ddp", "world_size=2")
MORE = ("t_max=100000", "epsilon_anneal_time=1000", "log_interval=20")


def make_plugin(folder: Path) -> str:
    """Write the package of the environment `trap` into `folder`; return what PYTHONPATH has to name."""
    (folder / "omagd_trap.py").write_text(PLUGIN)
    (folder / "configs" / "envs").mkdir(parents=True)
    (folder / "configs" / "envs" / "trap.yaml").write_text("env: trap\nenv_args: {how: never, rank: 1, step: 60}\n")
    facts = folder / "omagd_trap-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: omagd-trap\nVersion: 1.0\n")
    points = "[omagd.envs]\ntrap = omagd_trap:Trap\n[omagd.config_dirs]\ntrap = omagd_trap:CONFIGS\n"
    (facts / "entry_points.txt").write_text(points)
    return str(folder)


def start(plugin: str, cwd: Path, how: str, *more: str, **variables: str) -> Started:
    path = os.pathsep.join(part for part in (plugin, os.environ.get("PYTHONPATH", "")) if part)
    command = [PYTHON, MAIN, *OPTIONS, *BUDGETS, *MORE, f"env_args.how={how}", *more]
    return Started(command, cwd, PYTHONPATH=path, **{**FORKED, **variables})


def wait_for_training(started: Started, cwd: Path, ranks: int = 2) -> list[int]:
    """Wait until all ranks train; return their process ids."""
    until = time.monotonic() + 120
    while time.monotonic() < until and started.process.poll() is None:
        logs = list(cwd.glob("results/*/metrics.jsonl"))
        if logs and logs[0].stat().st_size > 0:
            found = children(started.process.pid)
            assert len(found) == ranks
            return found
        time.sleep(0.1)
    ended = started.wait(1)
    raise AssertionError(f"it never trained: exit code {ended.code}\n{ended.text}")


def exit_state(cwd: Path) -> str:
    (folder,) = run_folders(cwd)
    return summary_of(folder)["exit_state"]
