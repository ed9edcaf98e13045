"""OMAGD: cooperative multi-agent reinforcement learning that reconstructs what agents do not observe."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if __name__ != "omagd":
    raise ImportError(f"this package is 'omagd', not {__name__!r}: install it (pip install -e .) and import omagd")

# An editable install imports through the link .package/omagd; modules, tracebacks and breakpoints are in src/.
__path__ = [os.path.realpath(folder) for folder in __path__]

import omagd.run as _run_package  # noqa: E402 (first: its import would replace the function of the same name below)

if TYPE_CHECKING:
    from omagd.config.schema import Config
    from omagd.lab.analysis.groups import load_runs
    from omagd.lab.studies.study import study
    from omagd.run.api import load_policy, make, play

__version__ = "0.2.0"
__all__ = ["__version__", "load_policy", "load_runs", "make", "play", "run", "study"]  # noqa: F822 (loaded on first use)
_API = "omagd.run.api"
_LAB = {"load_runs": "omagd.lab.analysis.groups", "study": "omagd.lab.studies.study"}


def run(config: Config) -> dict[str, Any]:
    """Run what a configuration asks for and return its summary; see `omagd.run.api.run`."""
    return dict(import_module(_API).run(config))


run.__dict__ = vars(
    _run_package
)  # `omagd.run` is the function and has what the package contains, such as `omagd.run.api`


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Load the Python interface on first use, so that `import omagd` needs no torch."""
    if name in __all__:
        return getattr(import_module(_LAB.get(name, _API)), name)
    raise AttributeError(f"module 'omagd' has no attribute {name!r}")
