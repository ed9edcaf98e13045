"""OMAGD: cooperative multi-agent reinforcement learning that fills in what agents do not see."""

from __future__ import annotations

import os

if __name__ != "omagd":
    raise ImportError(f"this package is 'omagd', not {__name__!r}: install it (pip install -e .) and import omagd")

# An editable install imports through the link .package/omagd; modules, tracebacks and breakpoints are in src/.
__path__ = [os.path.realpath(folder) for folder in __path__]
__version__ = "0.1.0"

__all__ = ["__version__", "load_policy", "make", "play", "run"]  # noqa: F822 the functions are loaded on first use


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    """Load the Python interface on first use, so that `import omagd` needs no torch."""
    if name in __all__:
        from omagd.run import api

        return getattr(api, name)
    raise AttributeError(f"module 'omagd' has no attribute {name!r}")
