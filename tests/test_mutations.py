"""The list of benchmarks/mutations.py still fits: each text is found once, each test exists. Nothing is run here."""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
spec = importlib.util.spec_from_file_location("mutations", ROOT / "benchmarks" / "mutations.py")
assert spec is not None and spec.loader is not None
script = sys.modules["mutations"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
KNOWN = script.mutations()


@cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_mutation_applies_and_names_a_test_that_exists():
    wrong = []
    for mutation in KNOWN:
        try:
            mutation.applied(text_of(mutation.file))
        except (ValueError, OSError) as problem:
            wrong.append(f"{mutation.name}: {problem}")
        file, _, function = mutation.test.partition("::")
        if not re.search(rf"^def {function.partition('[')[0]}\(", text_of(file), re.MULTILINE):
            wrong.append(f"{mutation.name}: {mutation.test} does not exist")
    assert wrong == []
    assert len({mutation.name for mutation in KNOWN}) == len(KNOWN)
