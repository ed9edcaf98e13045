"""One-line faults that the tests must find: each is put into a copy of this tree, and the test that is named must fail.

    python benchmarks/mutations.py [--only NAME ...]

Listed are faults that change results without an error or another symptom: losses, masks, rewards, seeds, what a
checkpoint restores. An entry of `mutations.yaml` replaces the text `old`, found exactly once in `file`, by `new`.
First all named tests must pass as they are. Then each mutation is made in turn, and its test runs alone. Nothing is
written to this tree; `omagd` is the copy's package in every process that a test starts. A table says of each mutation:

    caught      its test failed
    NOT CAUGHT  its test passed, so nothing protects this line
    BROKEN      `old` is not found exactly once, or its test fails without it, cannot run, or takes longer than --limit

Exit code 1 unless all are caught.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("mutations.yaml")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "*.egg-info")
PASSED, FAILED = 0, 1  # exit codes of pytest; others say that it could not run the test


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return what a copy of the repository does not need; of folders called `results` only that of the runs."""
    return LEFT_OUT(folder, names) | ({"results"} if Path(folder) == ROOT else set())


@dataclass(frozen=True)
class Mutation:
    """One fault. `test`: node id of the test that must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str

    def applied(self, text: str) -> str:
        """Return a file's text with the fault. Errors: ValueError unless `old` stands there once."""
        found = text.count(self.old)
        if found != 1 or self.old == self.new:
            raise ValueError(f"old is found {found} times in {self.file}" if found != 1 else "new equals old")
        return text.replace(self.old, self.new)


def mutations() -> list[Mutation]:
    """Return the list. Errors: TypeError for an entry with other fields."""
    return [Mutation(**entry) for entry in yaml.safe_load(LIST.read_text(encoding="utf-8"))]


class Copy:
    """A copy of the tree below `folder`, in which tests run."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.tree, self.limit = folder / "tree", limit
        shutil.copytree(ROOT, self.tree, ignore=_left_out, symlinks=True)
        packages = folder / "packages"
        packages.mkdir()
        (packages / "omagd").symlink_to(self.tree / "src")  # found before the installed package
        self.environment = {**os.environ, "PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
        self._written = time.time()
        where = self._run("-c", "import omagd, pathlib; print(pathlib.Path(omagd.__file__).resolve())")[1].strip()
        if not Path(where).is_relative_to(self.tree.resolve()):
            raise RuntimeError(f"tests would import {where} instead of the copy")

    def test(self, *tests: str) -> tuple[int | None, str]:
        """Return pytest's exit code, None after `limit` seconds, and what it wrote."""
        options = ("-q", "--no-header", "--tb=line", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly")
        return self._run("-m", "pytest", *options, *tests)

    def judge(self, mutation: Mutation) -> tuple[str, str]:
        """Make one mutation and run its test; return the verdict and a reason."""
        path = self.tree / mutation.file
        whole = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutation.applied(whole))
            code, output = self.test(mutation.test)
        except ValueError as problem:
            return "BROKEN", str(problem)
        finally:
            self._write(path, whole)
        last = next((line for line in reversed(output.splitlines()) if line.strip()), "")
        verdicts = {FAILED: "caught", PASSED: "NOT CAUGHT"}
        return verdicts.get(code, "BROKEN"), f"longer than {self.limit:.0f} s" if code is None else last.strip("= ")

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: byte code is kept by size and whole seconds."""
        path.write_text(text, encoding="utf-8")
        self._written += 2
        os.utime(path, (self._written, self._written))

    def _run(self, *words: str) -> tuple[int | None, str]:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=self.tree,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return None, output
        return process.returncode, output


def failing(copy: Copy, tests: list[str]) -> set[str]:
    """Return the tests that fail as they are. Errors: RuntimeError where pytest cannot run them."""
    code, output = copy.test(*tests)
    if code not in (PASSED, FAILED):
        raise RuntimeError(f"the tests cannot run without a fault (pytest: {code})\n{output[-2000:]}")
    lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return {test for test in tests if any(line.startswith(test) for line in lines)}


def judged(wanted: list[Mutation], limit: float) -> list[str]:
    """Return the verdict on each, which is printed as it comes. limit: seconds for one test."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
        copy = Copy(Path(folder), limit * len(wanted))
        broken = failing(copy, sorted({mutation.test for mutation in wanted}))
        copy.limit = limit
        for mutation in wanted:
            started = time.monotonic()
            verdict, reason = ("BROKEN", "fails without it") if mutation.test in broken else copy.judge(mutation)
            print(f"{verdict:10}  {mutation.name}  ({time.monotonic() - started:.0f} s)", flush=True)
            if verdict != "caught":
                print(f"{'':10}    {mutation.test}: {reason}", flush=True)
            verdicts.append(verdict)
    return verdicts


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of mutations; all without it")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one test")
    options = parser.parse_args()
    known = mutations()
    unknown = sorted(set(options.only or ()) - {mutation.name for mutation in known})
    if unknown:
        parser.error(f"no mutation is named {', '.join(unknown)}")
    wanted = [mutation for mutation in known if not options.only or mutation.name in options.only]
    verdicts = judged(wanted, options.limit)
    print(f"{verdicts.count('caught')} of {len(verdicts)} caught")
    return int(any(verdict != "caught" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
