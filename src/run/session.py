"""What all stages of a run share on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.envs.protocol import BatchedEnv
from omagd.runners.rollout import Runner
from omagd.utils.dist_utils import Dist
from omagd.utils.logging import Logger
from omagd.utils.run_folder import RunFolder


@dataclass
class Session:
    """One rank's run: configuration, place among the ranks, environment, folder, log.

    `runners` play the session's one environment; each purpose ("train", "test", "pretrain", "held_out") has its own
    stream of episode seeds.
    """

    config: Config
    dist: Dist
    env: BatchedEnv
    info: EnvInfo
    folder: RunFolder
    logger: Logger
    runners: dict[str, Runner]

    def close(self) -> None:
        """Release the environment."""
        self.env.close()
