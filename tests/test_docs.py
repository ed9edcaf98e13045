"""The pages agree with the code (keys, links, defaults, first commands), are found, and are short and plain."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from command_budgets import BUDGETS
from documented import documented_commands
from plugin_toys import own_names

from omagd import envs, learners
from omagd.config.loading import base_values, known_keys
from omagd.learners.ppo_learner import PPOArgs
from omagd.run.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("[RC]*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("[br]e*/**/README.md")])
GUIDES = [page for page in ROOT.glob("docs/*.md") if page.stem not in {"configuration"}]
GENERATED = re.compile(r"<!-- [^>]*-->\n.*?<!-- [^>]*\bend\b[^>]*-->", re.DOTALL)
SENTENCE = re.compile(r"(?<=[.!?:;])\s|\n\s*\n|\n\s*(?=[-*\d])|(?<=\S) {2,}")
LEARNER = {"ppo": "ppo", "rloo": "groups", "pqn": "pqn", "wqmix": "weighted_qmix", "ddpg": "ddpg", "nq": "q_learning"}
"""The page of each learner; `nq_graph_learner` and the predictors are in method.md."""


def test_the_page_of_the_configuration_is_current_and_has_every_key_with_a_meaning():
    maker = runpy.run_path(str(ROOT / "docs" / "make_configuration.py"))
    page, foreign = maker["render"](), (ROOT / "docs" / "coming_from_pymarl.md").read_text(encoding="utf-8")
    assert foreign == maker["foreign"](foreign), "run: python docs/make_configuration.py"
    assert (ROOT / "docs" / "configuration.md").read_text() == page, "run: python docs/make_configuration.py"
    rows = dict(re.findall(r"^- `([\w.]+)` \(.*?\): (.*)$", page, re.MULTILINE))
    assert [key for key in known_keys() if len(rows.get(key, "")) < 8] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_exist(page):
    """Relative links, and paths in backticks that begin with a folder of this repository; the site checks anchors."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", text)
    named = re.findall(r"`((?:src|tests|docs|scripts|benchmarks|examples|research)/[\w./]+)`", text)
    invented = {path for path in named if path == "tests/__init__.py" or "/my_" in path}
    assert [path for path in links if not (page.parent / path).exists()] == []
    assert [path for path in named if path not in invented and not (ROOT / path).exists()] == []


def test_the_page_on_ppo_has_every_key_with_its_default():
    text = (ROOT / "docs" / "ppo.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^- `(\w+)` \(`([^`]+)`\):", text.split("## Keys")[1], re.MULTILINE))
    assert rows == {key: str(field.default) for key, field in PPOArgs.model_fields.items()}


@pytest.mark.parametrize("page", [*GUIDES, ROOT / "README.md"], ids=lambda page: page.name)
def test_a_page_is_short_and_plain(page):
    """1,200 words beside generated tables; prose under 120 columns, sentences under 35 words."""
    text = GENERATED.sub("", page.read_text(encoding="utf-8"))
    shown = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^(?!\||#|<!--|!\[|    \S).*$", shown, re.MULTILINE)
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", " _ ", "\n".join(lines))
    assert [line for line in lines if len(line) >= 120 and page in GUIDES] == []
    assert [each for each in SENTENCE.split(prose) if len(re.findall(r"\w[\w'.,-]*", each)) >= 35] == []
    assert len(text.split()) <= 1200 or page.stem == "architecture"


def test_every_learner_and_environment_has_a_page_with_its_command():
    shown = {"learner": {}, "env": {}}
    for command in documented_commands():
        given = dict(command.given)
        own = not {"/", "crossroads"} & {*given.get("--config", ""), given.get("--env-config")}  # files of a user's
        if command.program in {"main", "torchrun"} and command.where.startswith("docs/") and own:
            values = base_values(config=given.get("--config"), env_config=given.get("--env-config")) | given
            for kind, pages in shown.items():
                pages.setdefault(values[kind].removesuffix("_ddp"), set()).add(Path(command.where).stem)
    names = {name.removesuffix("_ddp") for name in own_names(learners.REGISTRY)}
    pages = {name: LEARNER.get(name.removesuffix("_learner"), "method") for name in names}
    assert {name for name, page in pages.items() if page not in shown["learner"].get(name, ())} == set()
    for page in set(pages.values()) - {"method"}:
        heads = re.findall(r"^## (\w+)", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)
        assert {"Keys", "Results"} <= set(heads), page
    tiny = {"matrix_game", "memory_game"}
    wanted = {name: "environments" if name in tiny else name.removesuffix("_3v3") for name in own_names(envs.REGISTRY)}
    assert {name for name, page in wanted.items() if page not in shown["env"].get(name, ())} == set()


def test_the_search_of_the_site_finds_keys_metrics_files_and_messages(tmp_path):
    """The index has stems of words; a word that is not there is found as a part of another one, as the page does."""
    stem = pytest.importorskip("sphinx.search.en").SearchEnglish({}).stem
    build = [sys.executable, "-m", "sphinx", "-W", "-q", "-c", "docs", ".", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=300)
    index = json.loads((tmp_path / "searchindex.js").read_text(encoding="utf-8").partition("(")[2].rpartition(")")[0])
    terms = index["terms"].keys() | index["titleterms"].keys()
    metrics = re.findall(r"`([a-z_/0-9]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    names = [*known_keys(), *metrics, "loss_belief"]
    names += ["summary.json", "rank_0.jsonl", "agent.th", "tokenizer.th", "mixer.th", "stage2_model.th", "saved.json"]
    words = {word.lower() for name in names for word in re.findall(r"\w\w+", name)} - {"all", "other"}  # stop words
    assert {word for word in words if stem(word) not in terms and not any(word in term for term in terms)} == set()
    own = {"errors": "surrogate reserved uninstall", "metrics": "battle_won_mean test_battle_won_mean"}
    for page, words in own.items():
        number = str(index["docnames"].index(f"docs/{page}"))
        found = [re.findall(r"\d+", str(index["terms"][stem(word)])) for word in words.split()]
        assert all(number in pages for pages in found), page


def test_all_pages_together_are_a_book_that_somebody_reads():
    folders = ("docs/**/*.md", "src/envs/*/README.md", "research/*/README.md", "[b]*/README.md", "CONTRIBUTING.md")
    pages = [GENERATED.sub("", page.read_text(encoding="utf-8")) for part in folders for page in ROOT.glob(part)]
    assert sum(len(page.split()) for page in pages) <= 38_600


def test_the_commands_of_the_first_page_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in re.findall(r"^omagd (.*)$", (ROOT / "docs" / "start.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert main([*line.split(), *(BUDGETS if line.startswith("--config") else ())]) == 0
    assert list(tmp_path.glob("results/first/replays/*.html")) and list(tmp_path.glob("results/curves_*.png"))
