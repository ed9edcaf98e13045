"""`run=ddp`: one process per device, or a rank of torchrun's group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omagd.run.launch.launcher import worker as ddp_worker
from omagd.run.run import run_seeds

__all__ = ["ddp_worker", "run"]


def run(_run: Any, _config: Mapping[str, Any], _log: Any) -> dict[str, Any]:
    """Train under DistributedDataParallel; with one device or `use_ddp=False`, in this process.

    Args:
        _run: Sacred's run, or None. _config: the resolved configuration. _log: Sacred's logger.
    """
    return run_seeds(_run, _config)
