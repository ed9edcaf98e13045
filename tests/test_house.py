"""The budgets of the house (CONTRIBUTING.md): sizes of files and functions, no defaults beside the configuration."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "src").rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> list[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [(path, node) for path, tree in TREES.items() for node in ast.walk(tree) if isinstance(node, FUNCTION)]


def test_files_are_short():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {str(path): n for path, n in lines.items() if n > 400} == {}
    assert statistics.median(lines.values()) <= 150


def test_functions_are_short():
    sizes = sorted((node.end_lineno or 0) - node.lineno + 1 for _, node in functions())
    assert sizes[int(0.95 * len(sizes))] <= 50


def test_the_loop_is_read_in_one_breath():
    loop = ROOT / "src" / "run" / "training" / "loop.py"
    longest = max((node.end_lineno or 0) - node.lineno + 1 for path, node in functions() if path == loop)
    assert longest <= 40
    assert "rank" not in loop.read_text(encoding="utf-8").lower().replace("ranks are ready", "")


def test_main_only_calls_the_command_line():
    assert len((ROOT / "src" / "main.py").read_text(encoding="utf-8").splitlines()) <= 25


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_configuration_has_no_second_defaults(path):
    """`getattr(config, "key", default)` and `config.get("key", default)` hide what default.yaml should say."""
    found = []
    for node in ast.walk(TREES[path]):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 3:
            owner = node.args[0]
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "get" and len(node.args) == 2:
            owner = node.func.value
        else:
            continue
        name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        if name in {"config", "_config", "args", "cfg"} or name.endswith("_config"):
            found.append(node.lineno)
    assert found == []


def test_torch_distributed_stands_in_one_file():
    users = {
        path.relative_to(ROOT).as_posix()
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch.distributed", "torch.nn.par")))
        or (isinstance(node, ast.Import) and any(name.name.startswith("torch.distributed") for name in node.names))
        or (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed"))
    }
    assert users == {"src/utils/dist_utils.py"}


def test_packages_say_what_they_are_for():
    rooms = [path for path in FILES if path.name == "__init__.py"]
    assert [str(path) for path in rooms if not ast.get_docstring(TREES[path])] == []
