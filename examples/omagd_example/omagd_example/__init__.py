"""An environment, a learner and more for omagd, and the YAML files that select them."""

from __future__ import annotations

from pathlib import Path

CONFIG_DIR = Path(__file__).parent / "config"
