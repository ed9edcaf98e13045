"""Finds the presets of this package; helpers that its tests share with those of omagd are in the folder `tests`."""

from __future__ import annotations

import pytest
from plugin_toys import RESEARCH_CONFIGS

from omagd.config import loading


@pytest.fixture(autouse=True)
def presets(monkeypatch):
    monkeypatch.setattr(loading, "config_dirs", lambda: [loading.HERE, RESEARCH_CONFIGS])
