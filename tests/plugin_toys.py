"""Plug-ins: the example package in this process, and our own names."""

from __future__ import annotations

import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from omagd import learners
from omagd.modules import graph_reconstructers
from omagd.utils.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE, RESEARCH = ROOT / "examples" / "omagd_example", ROOT / "research" / "reconstruction"
CONFIGS, RESEARCH_CONFIGS = EXAMPLE / "omagd_example" / "config", RESEARCH / "omagd_reconstruction" / "config"


def add_example(folder: Path = EXAMPLE) -> None:
    """Register all components of a package, the example, as its entry points do; may be called twice."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    groups = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    for package in ("envs", "learners", "controllers", "modules.mixers"):
        points = groups.get(f"omagd.{package.removeprefix('modules.')}", {})
        import_module(f"omagd.{package}").REGISTRY._lazy.update(points)
    graph_reconstructers.REGISTRY._lazy.update(groups.get("omagd.predictors", {}))
    learners.PREDICTORS._lazy.update(groups.get("omagd.predictor_learners", {}))


def own_names(registry: Registry) -> list[str]:
    """Return the names of a registry that this repository defines, sorted."""
    plugins = {point.name for point in entry_points(group=registry.group)}
    return sorted(name for name, place in registry._lazy.items() if place.startswith("omagd.") and name not in plugins)
