"""Adds to pages while the site is built, so that its search finds it: error messages, names of metrics (conf.py)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omagd.config.loading import known_keys

SRC = Path(__file__).resolve().parents[1] / "src"
RAISED = {"UserError", "RunFailed", "RankFailed", "add"}  # `add` of Mistakes
NAMED = re.compile(r"[\w.]+(?==)|[a-z]\w*_\w+")


def setup(app: Any) -> None:
    """Let Sphinx read the pages with what is added."""
    app.connect("source-read", _extend)
    app.connect("env-get-outdated", lambda *_: ["docs/errors"])


def _extend(app: Any, name: str, source: list[str]) -> None:
    if name == "docs/errors":
        source[0] += "\n" + "\n".join(sections())
    elif name == "docs/metrics":
        exploring = re.findall(r"`test_([a-z_]+_mean)`", source[0])
        source[0] += "\n## Of exploring episodes\n\n" + ", ".join(f"`{each}`" for each in dict.fromkeys(exploring))


def sections() -> Iterator[str]:
    """Yield for each module a heading and a list of its messages, each with the keys that it names."""
    keys = set(known_keys())
    for path in sorted(SRC.rglob("*.py")):
        if not (found := dict.fromkeys(messages(ast.parse(path.read_text(encoding="utf-8"))))):
            continue
        yield f"## {path.relative_to(SRC).with_suffix('').as_posix()}\n"
        for text in found:
            named = [f"`{key}`" for key in dict.fromkeys(NAMED.findall(text)) if key in keys]
            yield f"- `{text}`{' (' * bool(named)}{', '.join(named)}{')' * bool(named)}"
        yield ""


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the messages that a module raises, notes, or yields in a rule (`together`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in RAISED:
            yield from filter(None, map(_text, node.args))
        elif isinstance(node, ast.Yield) and node.value is not None:
            yield from filter(None, [_text(node.value)])


def _text(node: ast.expr) -> str:
    """Return a string with its placeholders as names; empty for what is no sentence."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    said = [f"<{ast.unparse(one.value)}>" if isinstance(one, ast.FormattedValue) else getattr(one, "value", "")
            for one in parts]  # fmt: skip
    text = " ".join("".join(map(str, said)).replace("`", "'").split())
    return text if len(re.sub("<[^>]*>", "", text).split()) > 2 else ""
