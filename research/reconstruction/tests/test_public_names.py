"""The package of the study uses only what the pages for plug-ins name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

RESEARCH = Path(__file__).resolve().parents[1]
DOCS = RESEARCH.parents[1] / "docs"


def test_what_the_package_imports_of_omagd_is_named_on_the_pages_for_plug_ins():
    names = [*DOCS.glob("extending*.md"), DOCS / "python_api.md", DOCS / "plots.md"]
    pages = "".join(path.read_text(encoding="utf-8") for path in names)
    named = set(re.findall(r"\w+", "".join(re.findall(r"```.*?```|`[^`\n]+`", pages, re.DOTALL))))
    files = [RESEARCH / "make_page.py", *RESEARCH.glob("omagd_reconstruction/*.py")]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    used = {f"{node.module}.{name.name}" for node in nodes for name in node.names}
    ours = {name for name in used if name.startswith("omagd.")}
    assert len(ours) > 20
    assert [name for name in sorted(ours) if not set(name.split(".")) <= named] == []
