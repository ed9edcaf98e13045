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
QUESTIONS = {"doctor", "compare", "evaluate"}
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
    def paths(self) -> dict[str, str]:
        """Return the keys and variables that hold a path of an earlier run."""
        given = dict(word.split("=", 1) for word in self.arguments if "=" in word and not word.startswith("-"))
        found = {"TOKENIZER_PATH": "", "MASK_PREDICTOR_PATH": ""} if self.program == "run_gnn_stage3_ddp.sh" else {}
        return found | {
            key: value for key, value in {**self.variables, **given}.items()
            if key in PATH_KEYS and value not in {"random", "mixed"}
        }  # fmt: skip

    @property
    def open_places(self) -> list[str]:
        """Return placeholders outside paths."""
        words = [*self.arguments, *(f"{key}={value}" for key, value in self.variables.items())]
        return [w for w in words if PLACEHOLDER.search(w) and w.partition("=")[0] not in PATH_KEYS]

    @property
    def meaning(self) -> tuple:
        """Return a key that is equal for commands that differ in paths only."""
        words = [w.partition("=")[0] if w.partition("=")[0] in PATH_KEYS else w for w in self.arguments]
        variables = [key if key in PATH_KEYS else f"{key}={value}" for key, value in self.variables.items()]
        return self.program, self.ranks, frozenset(words), frozenset(variables)


def documented_commands() -> list[Documented]:
    """Return every command of this program in the texts, in order, without duplicates."""
    found: dict[str, Documented] = {}
    for path, block in _blocks():
        _collect(found, path, block)
    for name in HOLDERS:
        text = (ROOT / name).read_text(encoding="utf-8")
        comments = [line.lstrip("# ") for line in text.splitlines() if line.startswith(("#", "  python", "  ./"))]
        _collect(found, ROOT / name, "\n".join(comments))
    return list(found.values())


def _collect(found: dict[str, Documented], path: Path, text: str) -> None:
    for line in re.sub(r" *\\\n\s*", " ", text).splitlines():
        for piece in re.split(r" && | then | ; ", line.strip().removeprefix("$ ")):
            if STARTS.match(piece.strip()) and (command := parse(piece.strip(), str(path.relative_to(ROOT)))):
                found.setdefault(command.line, command)


def parse(line: str, where: str) -> Documented | None:
    """Return the command of a line; None for one that does not train (`--list`, `doctor`)."""
    words = shlex.split(line, comments=True)
    variables: dict[str, str] = {}
    while re.match(r"^\w+=", words[0]):
        key, _, variables[key] = words.pop(0).partition("=")
    program, ranks = Path(words.pop(0)).name, 1
    if program.startswith("python"):
        words = words[2:] if words[0] == "-m" else words[1:]
        program = "main"
    elif program == "omagd":
        program = "main"
    elif program == "torchrun":
        at = next(i for i, word in enumerate(words) if word.endswith("main.py"))
        own = dict(word.lstrip("-").replace("-", "_").split("=", 1) for word in words[:at] if "=" in word)
        ranks = _number(own.get("nproc_per_node", "1")) * _number(own.get("nnodes", "1"))
        words = words[at + 1 :]
    if any(word in {"--help", "--list", "--version"} for word in words) or QUESTIONS & set(words[:1]):
        return None
    return Documented(where, line, program, variables, ranks, tuple(words))


def questions() -> list[tuple[str, ...]]:
    """Return the words of every documented `doctor`, `compare` and `evaluate` command."""
    found = []
    for _, block in _blocks():
        for line in re.sub(r" *\\\n\s*", " ", block).splitlines():
            words = shlex.split(line, comments=True) if STARTS.match(line) else []
            at = next((i for i, word in enumerate(words) if word in QUESTIONS), 0)
            found += [tuple(words[at:])] * bool(at)
    return list(dict.fromkeys(found))


def _blocks() -> list[tuple[Path, str]]:
    """Return the shell blocks of the pages, with the page."""
    pages = sorted({path for pattern in TEXTS for path in ROOT.glob(pattern)})
    blocks = [(path, *found) for path in pages for found in FENCE.findall(path.read_text(encoding="utf-8"))]
    return [(path, block) for path, language, block in blocks if language in SHELLS]


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 2
