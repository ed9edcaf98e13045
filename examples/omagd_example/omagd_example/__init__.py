"""What a package of your own needs to add to omagd: a world, and the values it is configured by."""

from __future__ import annotations

from pathlib import Path

CONFIG_DIR = Path(__file__).parent / "config"
