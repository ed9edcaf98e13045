"""What made a run: the code with its commit, the command line, the host, the versions of packages."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import omagd

GIT_SECONDS = 3.0
"""Longest time that git may take for each of two questions, as on a slow file system."""

PACKAGE = Path(omagd.__path__[0])


@dataclass(frozen=True)
class Code:
    """The code that runs.

    Attributes:
        commit: of the checkout, empty where there is none or git cannot tell. changed: whether files of the package
            differ from it. name: the version, and what is equal for equal code; a commit that leaves the package alone
            does not change it.
    """

    commit: str
    changed: bool
    name: str

    @property
    def label(self) -> str:
        """The commit, with `-dirty` if the package was changed; empty without a commit."""
        return self.commit + "-dirty" * self.changed


@cache
def code(package: Path = PACKAGE) -> Code:
    """Return the code of this process as it was at the first call.

    git does not answer for a repository of another user, since that repository could make it run something.
    """
    newest = _git(package, "log", "-1", "--format=%H", "--", ".")
    state = _git(package, "status", "--porcelain=v2", "--branch", "--", ".") if newest else ""
    lines = state.splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "")
    if not commit:
        return Code("", False, f"{omagd.__version__} (sources {_sources(package)})")
    changed = any(line[0] != "#" and (line[0] != "?" or line.endswith((".py", ".yaml"))) for line in lines)
    how = f", changed: {_sources(package)}" if changed else ""
    return Code(commit, changed, f"{omagd.__version__} ({newest.strip()[:12]}{how})")


def _git(package: Path, *words: str) -> str:
    """Return what git says about the package; empty where it is missing, slow, refuses, or knows no such folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(package), *words]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS, env=environment
        ).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""


def _sources(package: Path) -> str:
    """Return a short hash of the package's sources: a version or a changed commit alone does not name its code."""
    found = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.yaml") for path in package.rglob(kind)):
        found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def versions() -> dict[str, str]:
    """Return the versions that the exact bits of a result depend on; this package's with its commit."""
    import numpy
    import torch

    found = {"omagd": code().name, "torch": torch.__version__, "numpy": numpy.__version__}
    return {**found, "Python": platform.python_version()}


def made_by() -> dict[str, Any]:
    """Return what made this run, for its summary."""
    return {
        "commit": code().commit,
        "changed": code().changed,
        "command": shlex.join(sys.argv),
        "host": socket.gethostname(),
        "versions": versions(),
    }
