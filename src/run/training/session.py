"""What all stages of a run share on one rank."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.envs.protocol import BatchedEnv
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.reporting.log_sinks import EpisodeLog
from omagd.run.reporting.profiling import Profiler
from omagd.runners.runner import Runner
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import Logger
from omagd.utils.metrics import added
from omagd.utils.run_folder import RunFolder

BUILDING, CLOSING, COUNTING = "building the environment", "closing the environment", "reading environment counters"
"""Names of phases outside a stage, as the watchdog reports them."""

RESTARTS = ("restarts", "worker_restarts")
"""Counters of an environment: restarted games and worker processes."""


@dataclass
class Session:
    """One rank's run: configuration, place among the ranks, environment, folder, logs, profiler, checkpoints.

    `runners` play the session's one environment; each purpose ("train", "test", "pretrain", ...) has its own stream of
    episode seeds. `past_failures` are restarts that earlier starts of this run have counted.
    """

    config: Config
    dist: Dist
    env: BatchedEnv
    info: EnvInfo
    folder: RunFolder
    logger: Logger
    runners: dict[str, Runner]
    checkpointer: Checkpointer
    episode_log: EpisodeLog
    profiler: Profiler = field(default_factory=Profiler)
    past_failures: dict[str, float] = field(default_factory=dict)
    logged_failures: dict[str, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _played: bool = False

    def rounds(self, episodes: int) -> int:
        """Return how many episodes each slot of each rank plays for at least `episodes` in all.

        The same on every rank, and whole rounds, so that no long episode is cut off.
        """
        return math.ceil(episodes / (self.env.n_slots * self.dist.world_size))

    def say_first_episodes(self) -> None:
        """Say, once, how long it took until there were episodes."""
        if not self._played:
            self._played = True
            passed = time.monotonic() - self._began
            self.logger.info(f"first episodes played {passed:.1f} s after the environments were made")

    def failure_counts(self) -> dict[str, float]:
        """Return what has gone wrong in the environments since the start, over all ranks; only what has.

        `lost_episodes` were void and replaced, `restarts` are games and `worker_restarts` processes that had died. A
        collective: every rank calls it, and gets the same.
        """
        stats = self.env_stats()
        counted = {name: float(stats.get(name, 0.0)) + self.past_failures.get(name, 0.0) for name in RESTARTS}
        self.logged_failures = dict(counted)
        counted["lost_episodes"] = float(sum(runner.lost for runner in self.runners.values()))
        return {name: value for name, value in added(self.dist.gather(counted)).items() if value > 0}

    def env_stats(self) -> dict[str, float]:
        """Return the environment's counters."""
        with self.dist.waits.doing(COUNTING):
            return self.env.get_stats()

    def resume_counting(self, past: Mapping[str, float]) -> None:
        """Add restarts of earlier starts, which a checkpoint holds, to the counts."""
        self.past_failures, self.logged_failures = dict(past), dict(past)

    def close(self, patience: float = math.inf) -> None:
        """Release the environment and the files, once what is being saved is saved.

        patience: seconds that the save may still wait for the other ranks, of which one may have ended.
        """
        self.checkpointer.close(patience)
        self.episode_log.close()
        with self.dist.waits.doing(CLOSING):
            self.env.close()
