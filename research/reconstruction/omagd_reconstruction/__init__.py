"""Comparators for the study of reconstruction, as plug-ins of omagd."""

from __future__ import annotations

from pathlib import Path

CONFIG_DIR = Path(__file__).parent / "config"
"""Presets: `algs/*.yaml`."""
