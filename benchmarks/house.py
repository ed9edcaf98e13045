"""Print the size of the code base, and what one update, one start and one resume read of it.

    python benchmarks/house.py

Lines are those of Python files. Core is `src/` without `lab/` and the simulators `envs/battle/` and `envs/snakes/`.
Durations are measured elsewhere: `./run_tests.sh`, `.ci/run`, `benchmarks/startup.py`.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
APART = ("lab", "envs/battle", "envs/snakes")
UPDATE, MODULES = "one QMIX update: files; without kernels", "modules that a qmix run loads"
RESUME = "files that a resume enters"
LIMITS: dict[str, tuple[float, ...]] = {
    "core: files; lines": (190, 34_566),
    "src: files; lines": (270, 48_355),
    "longest file; function p95": (600, 26),
    "tests: files; lines": (200, 29_287),
    "mutations: lines": (1_900,),
    "imports of lab by core; import cycles": (0, 0),
    UPDATE: (12, 8),
    MODULES: (130,),
    RESUME: (20,),
}
"""The most that each measure may be; `tests/test_structure.py` checks those that need no run."""

RUN = "--config=qmix --env-config=skirmish with env_args.map_name=3m batch_size_run=16 use_cuda=False use_wandb=False"

# Runs the command line in this process and notes the files of the package whose functions are called: by an update (not
# the first one, which loads the kernels), or by the package `run/checkpoint` and by what it calls until the state of a
# checkpoint is restored.
PROFILED = """
import os, signal, sys, threading
from omagd.learners.nq_learner import NQLearner
from omagd.run.checkpoint.checkpointer import Checkpointer
from omagd.run.cli.main import main
src, what, *words = sys.argv[1:]
files, on = set(), what == "resume"
def note(frame, event, argument):
    if not on or event != "call" or not frame.f_code.co_filename.startswith(src):
        return
    above = frame
    while what == "resume" and above and "run/checkpoint" not in above.f_code.co_filename:
        above = above.f_back if above.f_code.co_name != "<module>" else None  # imports restore nothing
    if above:
        files.add(frame.f_code.co_filename[len(src) + 1:])
def switch(owner, name, inside, after):
    plain = getattr(owner, name)
    def call(*values, **more):
        global on
        on = inside and (what != "update" or values[0].updates > 0)
        try:
            return plain(*values, **more)
        finally:
            on = after
    setattr(owner, name, call)
if "stop" in what:
    NQLearner.update = lambda *values, **more: os.kill(os.getpid(), signal.SIGINT) or {}
switch(NQLearner, "update", what == "update", False)
switch(Checkpointer, "restore", what == "resume", False)
if what in ("update", "resume"):
    sys.setprofile(note)
if what == "resume":
    threading.setprofile(note)
try:
    main(words)
finally:
    sys.setprofile(None)
    if "modules" in what:
        files = {name for name in sys.modules if name.startswith("omagd")}
    print("FOUND", *sorted(files))
"""


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
    """Return the measures that need no run, by name."""
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


def noted(what: str, *words: str) -> list[str]:
    """Return the files of `src/` whose functions a run called, or the modules that it loaded."""
    source = (SRC / "__init__.py").resolve().parent
    command = [sys.executable, "-c", PROFILED, str(source), what, *RUN.split(), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode not in (0, 130):  # 130: the interrupted run
        sys.exit(done.stderr)
    return next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("FOUND"))


def main() -> None:
    """Print a line for each measure and its limit; with `--names` also the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="name the files of an update and of a resume")
    names, table = parser.parse_args().names, sizes()
    with tempfile.TemporaryDirectory() as folder:
        run = (f"local_results_path={folder}", "auto_resume=True", "t_max=2000")
        modules, resume = noted("modules, then stop", *run), noted("resume", *run)
        update = noted("update", *run)
    table[UPDATE] = len(update), sum("kernels" not in name for name in update)
    table |= {MODULES: (len(modules),), RESUME: (len(resume),)}
    for name, found in table.items():
        value, limit = ("; ".join(map(str, numbers)) for numbers in (found, LIMITS[name]))
        print(f"{name:42} {value:14} at most {limit}")
    if names:
        print("\nupdate:", *update, "\nresume:", *resume, sep="\n  ")


if __name__ == "__main__":
    main()
