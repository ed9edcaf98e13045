"""The pages say what the code says: configuration keys, signatures, links, defaults."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

from omagd.config.loading import HERE, find_yaml, known_keys, read_yaml
from omagd.run.cli.preflight import NAMED, registry_of
from omagd.utils import dist_utils

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
DDP_PAGE = (ROOT / "docs" / "DDP_MULTI_GPU_TRAINING.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def maker():
    """Return docs/make_configuration.py as a module."""
    spec = importlib.util.spec_from_file_location("make_configuration", ROOT / "docs" / "make_configuration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """Return the anchors that a page's headings make, as GitHub writes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_page_of_the_configuration_is_current(maker):
    assert maker.PAGE.read_text(encoding="utf-8") == maker.render(), "run: python docs/make_configuration.py"


def test_every_key_stands_there_once_with_a_meaning(maker):
    rows = re.findall(r"^\| `([\w.]+)` \| [^|]+ \| [^|]+ \| (.*?) ?\|$", maker.render(), re.MULTILINE)
    keys = [key for key, _ in rows]
    assert [key for key in known_keys() if keys.count(key) < 1] == []
    assert [key for key, meaning in rows if len(meaning) < 8] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if path.startswith(("http://", "https://")):
            continue
        file = (page.parent / path) if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Paths in backticks that begin with a folder of this repository."""
    named = re.findall(r"`((?:src|tests|docs|scripts|benchmarks|examples)/[\w./]+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists() and path != "tests/__init__.py"] == []


def test_the_drawing_of_the_house_shows_what_is_there():
    """Every word of the drawing is a file, a folder or a registered name; every room of src/ is drawn."""
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    there = {path.stem for path in (ROOT / "src").rglob("*") if "__" not in path.name}
    there |= {name for package in NAMED.values() for name in registry_of(package).names()}
    rooms = {path.parent.name for path in (ROOT / "src").glob("*/__init__.py")}
    words = set(re.findall(r"[a-z][a-z0-9_]+", drawing)) - {"src", "py", "yaml", "fit", "stage"}
    assert words - there == set()
    assert rooms - words == set()


def test_signatures_of_dist_utils_are_those_of_the_code():
    """The first Python block of the page on DDP holds `name(signature)` lines."""
    block = re.search(r"```python\n(.*?)```", DDP_PAGE, re.DOTALL)[1]
    shown = re.findall(r"^(\w+)(\(.*\))", block, re.MULTILINE)
    assert len(shown) == 8
    for name, signature in shown:
        parts = []
        for parameter in inspect.signature(getattr(dist_utils, name)).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
                parts.append("*")
            default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
            parts.append(parameter.name + default)
        assert signature == f"({', '.join(parts)})", name


def test_the_methods_of_dist_are_those_of_the_code():
    named = re.findall(r"`(\w+)`", re.search(r"handed a `Dist` \(([^)]*)\)", DDP_PAGE)[1])
    methods = [name for name, value in vars(dist_utils.Dist).items() if inspect.isfunction(value) and name[0] != "_"]
    assert sorted(named) == sorted(methods)


def test_defaults_in_the_page_on_ddp_are_those_of_the_files():
    default, omagd = read_yaml(HERE / "default.yaml"), read_yaml(find_yaml("algs", "omagd"))
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", DDP_PAGE, re.MULTILINE)
    assert {"run", "learner", "use_ddp", "world_size", "ddp_port"} <= {key for key, _ in rows}
    for key, text in rows:
        shown = [word.strip("` ") for word in text.split(",")]
        wanted = ["empty" if default[key] is None else str(default[key])]
        if key in omagd:
            wanted.append(f"{omagd[key]}` in omagd*")
        assert shown == wanted, key
