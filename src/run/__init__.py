"""Running experiments: command line, launch, training, checkpoints, reports. `REGISTRY` maps `run=` to run modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omagd.utils.registry import Registry

# A run mode is called as run(_run, config, log): Sacred's run, the resolved `Config`, a logging.Logger.
REGISTRY: Registry[Callable[..., Any]] = Registry(
    "run", "omagd.run", lazy=dict.fromkeys(("default", "ddp"), "omagd.run.run:run")
)
