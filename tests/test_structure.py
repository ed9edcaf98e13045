"""Limits that hold for the whole code base (CONTRIBUTING.md): sizes, names and imports."""

from __future__ import annotations

import importlib.util
import statistics
from collections import Counter
from operator import gt
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))
FOLDERS = "src", "tests", "benchmarks", "research", "docs", "examples", "scripts"
spec = importlib.util.spec_from_file_location("house", ROOT / "benchmarks" / "house.py")
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)


def test_files_and_functions_have_a_readable_size():
    """Files of a few lines make a reader jump as much as files of a thousand make a reader scroll."""
    exceeded = {name: found for name, found in house.sizes().items() if any(map(gt, found, house.LIMITS[name]))}
    assert exceeded == {}
    assert 100 <= statistics.median(map(house.lines, FILES)) <= 250
    assert house.lines(ROOT / "src" / "main.py") <= 25, "main.py only calls the command line"


def test_no_file_name_occurs_three_times():
    names = Counter(path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    assert [name for name, count in names.items() if count > 2 and name != "__init__.py"] == []
