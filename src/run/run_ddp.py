"""`run=ddp`: one worker per device, or a rank of torchrun's group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omagd.config.schema import Config
from omagd.run.launch.launcher import worker
from omagd.run.topology import Plan


def run(_run: Any, _config: Mapping[str, Any], _log: Any) -> dict[str, Any]:
    """Train under DistributedDataParallel; with one device or `use_ddp=False`, in this process.

    Args:
        _run: Sacred's run, or None. _config: the resolved configuration. _log: Sacred's logger.
    """
    from omagd.run.run import run_seeds

    return run_seeds(_run, _config)


def ddp_worker(rank: int, config: Config, plan: Plan, path: str, port: int, channel: Any, attempt: int) -> None:
    """One spawned rank."""
    worker(rank, config, plan, path, port, channel, attempt)
