"""A deterministic walk whose process may die in a step. In a file of its own: workers that play it import it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from walk_env import Walk, WalkArgs


class SteadyArgs(WalkArgs):
    """The first process that comes to its `die_at[0]`th step dies there, the next at its `die_at[1]`th, ...

    how: "kill"; "leave" calls sys.exit(0); "stop" and "hang" do not answer any more, "always" in no process.
    """

    limit: int = 6
    die_at: list[int] = []
    marks: str = ""
    how: str = "kill"


class SteadyWalk(Walk):
    """Has a script of its own, which draws, and tells some results in some episodes only."""

    args_model = SteadyArgs
    deterministic = True
    scripted_policies = ("random", "wander")
    args: SteadyArgs
    calls = 0

    def step(self, actions: np.ndarray):
        self.calls += 1
        for number, call in enumerate(self.args.die_at):
            again = self.args.how == "always"
            if call == self.calls and (again or not Path(self.args.marks, str(number)).exists()):
                Path(self.args.marks, str(number)).touch()
                if self.args.how == "leave":
                    sys.exit(0)
                while self.args.how in ("hang", "always"):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGSTOP if self.args.how == "stop" else signal.SIGKILL)
        assert actions.dtype == np.int64
        return super().step(actions)

    def get_scripted_actions(self, policy: str, rng: np.random.Generator) -> np.ndarray:
        assert policy == "wander"
        return rng.integers(2, size=len(self.place)) * (self.t >= 1)

    def get_env_info(self):
        return {**super().get_env_info(), "scripted_policies": list(self.scripted_policies)}
