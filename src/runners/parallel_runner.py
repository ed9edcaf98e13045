"""Many battles side by side, one decision for all of them at a time."""

from __future__ import annotations

from omagd.runners import REGISTRY
from omagd.runners.rollout import Runner


@REGISTRY.register("parallel")
class ParallelRunner(Runner):
    """Plays `batch_size_run` slots, in this process or in workers: the environment's affair."""
