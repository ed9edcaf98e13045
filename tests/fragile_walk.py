"""A walk whose process dies where its arguments say. In a file of its own: workers that play it import it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
from walk_env import Walk, WalkArgs


class FragileArgs(WalkArgs):
    """Where to die: "reset", "step", "show", "stats", "replay"; with a folder in `once`, in each once in all."""

    die_on: list[str]
    once: str = ""


class Fragile(Walk):
    """A walk whose process ends without a word."""

    args_model = FragileArgs
    args: FragileArgs

    def _die(self, where: str) -> None:
        if where in self.args.die_on:
            if self.args.once:
                try:
                    Path(self.args.once, where).touch(exist_ok=False)
                except FileExistsError:
                    return
            os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, seed: int | None = None) -> None:
        self._die("reset")
        super().reset(seed)

    def step(self, actions: np.ndarray):
        self._die("step")
        return super().step(actions)

    def get_obs(self, no_range_limit: bool = False) -> np.ndarray:
        if no_range_limit:
            self._die("show")
        return super().get_obs(no_range_limit)

    def get_stats(self) -> dict[str, float]:
        self._die("stats")
        return super().get_stats()

    def save_replay(self, folder: str = "") -> None:
        self._die("replay")
