"""The commands in README, docs, scripts and `--help`."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from command_harness import ROOT

TEXTS = ("README.md", "CONTRIBUTING.md", "docs/*.md", "benchmarks/*.md", "examples/*/README.md")
SCRIPTS = ("run_pretrain_ddp.sh", "run_gnn_stage3_ddp.sh", "quickstart.sh")
HOLDERS = (*SCRIPTS, "scripts/lib.sh", "src/run/cli/main.py")
SHELLS = {"", "bash", "sh", "shell", "console", "text"}
FENCE = re.compile(r"^ {0,3}```+ *(\w*)[^\n]*\n(.*?)^ {0,3}```+ *$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"<[^>]*>|…|\.\.\.|\$\w+|\$\{")
STARTS = re.compile(
    r"^(?:\w+=\S* +)*(?:python3? +(?:\S*src/main\.py|-m omagd)|omagd |torchrun "
    r"|\S*/(?:run_pretrain_ddp|run_gnn_stage3_ddp|quickstart)\.sh)"
)
QUESTIONS = {"doctor", "beliefs", "compare", "evaluate", "study", "sweep", "plot", "report", "watch", "weights"}
PATH_KEYS = {
    "checkpoint_path", "pretrained_tokenizer_path", "pretrained_mask_predictor_path", "pretrain_buffer_path",
    "graph_pretrain_policy", "TOKENIZER_PATH", "MASK_PREDICTOR_PATH",
}  # fmt: skip


@dataclass(frozen=True)
class Documented:
    """One command: file, environment variables, program ("main", "torchrun" or a script's name), arguments."""

    where: str
    line: str
    program: str
    variables: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    arguments: tuple[str, ...] = ()

    @property
    def given(self) -> list[tuple[str, str]]:
        """Return key and value of every variable and argument; a word without `=` is a key."""
        words = [word.partition("=") for word in self.arguments]
        return [*self.variables.items(), *((key, value) for key, _, value in words)]

    @property
    def paths(self) -> set[str]:
        """Return the keys and variables that hold a path of an earlier run."""
        found = {"TOKENIZER_PATH", "MASK_PREDICTOR_PATH"} if self.program == "run_gnn_stage3_ddp.sh" else set()
        return found | {key for key, value in self.given if key in PATH_KEYS and value not in {"random", "mixed"}}

    @property
    def open_places(self) -> list[str]:
        """Return arguments and variables with placeholders, except paths."""
        return [f"{k}={v}" for k, v in self.given if PLACEHOLDER.search(f"{k}={v}") and k not in PATH_KEYS]

    @property
    def meaning(self) -> tuple:
        """Return a key that is equal for commands that differ in paths only."""
        values = frozenset((key, "" if key in PATH_KEYS else value) for key, value in self.given)
        return self.program, self.ranks, values


def documented_commands() -> list[Documented]:
    """Return every command of this program in the texts, in order, without duplicates."""
    texts = _blocks()
    for name in HOLDERS:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        comments = [line.lstrip("# ") for line in lines if line.startswith(("#", "  python", "  ./"))]
        texts.append((name, _joined("\n".join(comments))))
    found: dict[str, Documented] = {}
    for where, text in texts:
        for line in text.splitlines():
            for piece in map(str.strip, re.split(r" && | then | ; ", line.strip().removeprefix("$ "))):
                if STARTS.match(piece) and (command := parse(piece, where)):
                    found.setdefault(command.line, command)
    return list(found.values())


def parse(line: str, where: str) -> Documented | None:
    """Return the command of a line; None for one that does not train (`--list`, `doctor`)."""
    words = shlex.split(line, comments=True)
    variables: dict[str, str] = {}
    while re.match(r"^\w+=", words[0]):
        key, _, variables[key] = words.pop(0).partition("=")
    program, ranks = Path(words.pop(0)).name, 1
    if program == "torchrun":
        at = next(i for i, word in enumerate(words) if word.endswith("main.py"))
        own = dict(word.lstrip("-").replace("-", "_").split("=", 1) for word in words[:at] if "=" in word)
        ranks = _number(own.get("nproc_per_node", "1")) * _number(own.get("nnodes", "1"))
        words = words[at + 1 :]
    elif not program.endswith(".sh"):  # python src/main.py, python -m omagd, omagd
        words = words[(1 + (words[0] == "-m")) * program.startswith("python") :]
        program = "main"
    if {"--help", "--list", "--version"} & set(words) or QUESTIONS & set(words[:1]):
        return None
    return Documented(where, line, program, variables, ranks, tuple(words))


def questions() -> list[tuple[str, ...]]:
    """Return the words of every documented `doctor`, `compare` and `evaluate` command."""
    lines = [line for _, block in _blocks() for line in block.splitlines() if STARTS.match(line)]
    commands = [shlex.split(line, comments=True) for line in lines]
    found = [words[i:] for words in commands for i, word in enumerate(words) if word in QUESTIONS]
    return list(dict.fromkeys(map(tuple, found)))


def _blocks() -> list[tuple[str, str]]:
    """Return the shell blocks of the pages with joined lines, and each page's path."""
    pages = sorted({path for pattern in TEXTS for path in ROOT.glob(pattern)})
    blocks = [(path, *found) for path in pages for found in FENCE.findall(path.read_text(encoding="utf-8"))]
    return [(str(path.relative_to(ROOT)), _joined(text)) for path, language, text in blocks if language in SHELLS]


def _joined(text: str) -> str:
    return re.sub(r" *\\\n\s*", " ", text)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 2
