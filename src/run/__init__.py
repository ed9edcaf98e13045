"""Running: command line, launch, build, stages, the loop; `REGISTRY` maps `run=` names to run modes.

The package can be called: `omagd.run(config)` is `omagd.run.api.run(config)`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from omagd.utils.registry import Registry

if TYPE_CHECKING:
    from omagd.config.schema import Config

# A run mode is called as run(_run, config, log): Sacred's run, the resolved `Config`, a logging.Logger.
REGISTRY: Registry[Callable[..., Any]] = Registry(
    "run",
    "omagd.run",
    lazy={"default": "omagd.run.run:run", "ddp": "omagd.run.run_ddp:run"},
)


class _Callable(ModuleType):
    """This package: importing any part of it makes `omagd.run` the package, which must stay the function too."""

    def __call__(self, config: Config) -> dict[str, Any]:
        """Run `config`; see `omagd.run.api.run`."""
        from omagd.run import api

        return api.run(config)


sys.modules[__name__].__class__ = _Callable
