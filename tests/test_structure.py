"""Limits that hold for the whole code base (CONTRIBUTING.md): sizes and imports."""

from __future__ import annotations

import ast
import graphlib
import statistics
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))


@cache
def parsed() -> dict[Path, ast.Module]:
    """Return the syntax trees of all files."""
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def imported(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield what each import statement names, as `(module,)` or `(module, attribute)`, wherever it is in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name,) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((node.module, name.name) for name in node.names)


def module_of(path: Path) -> str:
    parts = ["omagd", *path.relative_to(ROOT / "src").with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_graph() -> dict[str, set[str]]:
    """Return module -> modules of this package that it imports, in functions and for type checking as well.

    `omagd/__init__.py` is left out: it loads the Python interface when a name of it is first used.
    """
    trees = {module_of(path): tree for path, tree in parsed().items() if module_of(path) != "omagd"}
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        found = (next((m for m in (".".join(words), words[0]) if m in trees), name) for words in imported(tree))
        graph[name] = {*found} - {name}
    return graph


def lengths(trees: Iterable[ast.AST]) -> list[int]:
    """Return the lines of every function, sorted."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, functions))
    return sorted((node.end_lineno or 0) - node.lineno + 1 for node in nodes)


def test_files_and_functions_have_a_readable_size():
    """Files of a few lines make a reader jump as much as files of a thousand make a reader scroll."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {str(path): n for path, n in lines.items() if n > 600} == {}
    assert 100 <= statistics.median(lines.values()) <= 250
    sizes = lengths(parsed().values())
    assert sizes[int(0.95 * len(sizes))] <= 26
    assert lines[ROOT / "src" / "main.py"] <= 25, "main.py only calls the command line"


def test_no_module_imports_itself_through_others():
    graphlib.TopologicalSorter(import_graph()).prepare()  # CycleError names the modules of a cycle


def test_the_training_loop_fits_on_a_page_and_knows_no_rank():
    loop = ROOT / "src" / "run" / "training" / "loop.py"
    assert max(lengths([parsed()[loop]])) <= 26
    assert "rank" not in loop.read_text(encoding="utf-8").lower().replace("ranks are ready", "")
