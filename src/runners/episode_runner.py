"""One battle at a time."""

from __future__ import annotations

from omagd.config.env_info import EnvInfo
from omagd.config.schema import Config
from omagd.envs.protocol import BatchedEnv
from omagd.runners import REGISTRY
from omagd.runners.rollout import EpisodeSeeds, Runner
from omagd.utils.errors import UserError


@REGISTRY.register("episode")
class EpisodeRunner(Runner):
    """Plays one slot. Errors: UserError when the environment was built with more."""

    def __init__(self, env: BatchedEnv, config: Config, info: EnvInfo, stream: EpisodeSeeds) -> None:
        if env.n_slots != 1:
            raise UserError(f"runner=episode plays one battle at a time, not {env.n_slots}: take runner=parallel")
        super().__init__(env, config, info, stream)

    @staticmethod
    def slots(config: Config) -> int:
        """Return 1, whatever `batch_size_run` says."""
        return 1


@REGISTRY.register("parallel")
class ParallelRunner(Runner):
    """Plays `batch_size_run` slots, in this process or in workers: the environment's affair."""
