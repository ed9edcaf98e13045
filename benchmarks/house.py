"""Print the size of the code base beside its limits.

    python benchmarks/house.py

Lines are those of Python files. Core is `src/` without `lab/` and the simulators `envs/battle/` and `envs/snakes/`.
Durations are measured elsewhere: `./run_tests.sh`, `.ci/run`, `benchmarks/startup.py`.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
APART = ("lab", "envs/battle", "envs/snakes")
MODULES = "modules that a qmix run loads"
LIMITS: dict[str, tuple[float, ...]] = {
    "core: files; lines": (190, 34_802),
    "src: files; lines": (270, 48_330),
    "longest file; function p95": (600, 26),
    "tests: files; lines": (200, 29_450),
    "mutations: lines": (1_900,),
    "imports of lab by core; import cycles": (0, 0),
    MODULES: (130,),
}
"""The most that each measure may be, as `tests/test_structure.py` and `test_architecture.py` check."""


def lines(path: Path) -> int:
    """Return the number of lines of a text file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def function_lines(files: Iterable[Path]) -> list[int]:
    """Return the lines of every function, sorted."""
    return sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def module_of(path: Path) -> str:
    """Return the name of a file's module."""
    parts = ["omagd", *path.relative_to(SRC).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[tuple[str, ...]]:
    """Yield what each import statement names, as `(module,)` or `(module, attribute)`, wherever it is in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name,) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((str(node.module), name.name) for name in node.names)


@cache
def import_graph() -> dict[str, set[str]]:
    """Return module -> modules of this package that it imports, in functions and for type checking as well.

    `omagd/__init__.py` is left out: it loads the Python interface when a name of it is first used.
    """
    trees = {module_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SRC.rglob("*.py"))}
    del trees["omagd"]
    graph: dict[str, set[str]] = {}
    for name, tree in trees.items():
        found = (next((m for m in (".".join(words), words[0]) if m in trees), name) for words in imported(tree))
        graph[name] = {*found} - {name}
    return graph


def wrong_imports() -> tuple[int, int]:
    """Return the imports of lab by core, and 1 where modules import each other in a cycle, which is printed."""
    lab, graph = "omagd.lab", import_graph()
    core = [found for name, found in graph.items() if not name.startswith(lab)]
    upward = sum(other.startswith(lab) for found in core for other in found)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as cycle:
        print("cycle:", *cycle.args[1], file=sys.stderr)
        return upward, 1
    return upward, 0


def sizes() -> dict[str, tuple[int, ...]]:
    """Return the measures by name, all but the one that needs a run."""
    files = sorted(SRC.rglob("*.py"))
    core = [path for path in files if not path.relative_to(SRC).as_posix().startswith(APART)]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    functions = function_lines(files)
    return {
        "core: files; lines": (len(core), sum(map(lines, core))),
        "src: files; lines": (len(files), sum(map(lines, files))),
        "longest file; function p95": (max(map(lines, files)), functions[int(0.95 * len(functions))]),
        "tests: files; lines": (len(tests), sum(map(lines, tests))),
        "mutations: lines": (lines(ROOT / "benchmarks" / "mutations.yaml"),),
        "imports of lab by core; import cycles": wrong_imports(),
    }


def main() -> None:
    """Print a line for each measure and its limit."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, found in sizes().items():
        value, limit = ("; ".join(map(str, numbers)) for numbers in (found, LIMITS[name]))
        print(f"{name:42} {value:14} at most {limit}")


if __name__ == "__main__":
    main()
