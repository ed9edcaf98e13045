"""The components of examples/omagd_example in this process, as its entry points register them."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "omagd_example"
CONFIGS = EXAMPLE / "omagd_example" / "config"


def add_example() -> None:
    """Register all components of the example package; may be called twice."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    groups = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    groups.pop("omagd.config_dirs")
    for group, points in groups.items():
        for place in (group, group.replace("omagd.", "omagd.modules.")):
            try:
                import_module(place).REGISTRY._lazy.update(points)
                break
            except ModuleNotFoundError:
                continue
