"""Errors that are shown to the user, and text that is safe to print."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

USER_ERROR_EXIT_CODE = 2
LONGEST_LINE = 1000


class UserError(Exception):
    """An error that the user can fix: shown in one line, exit code 2, no traceback.

    Args:
        message: the key, the value and the fix.

    Attributes:
        said_by_rank_0: rank 0 raises the same error; other ranks do not print it.
    """

    def __init__(self, message: str) -> None:
        self.message = readable(message)
        super().__init__(self.message)
        self.said_by_rank_0 = False

    def on_all_ranks(self) -> UserError:
        """Mark the error as one that rank 0 also raises; return it."""
        self.said_by_rank_0 = True
        return self

    def render(self) -> str:
        """Return the line for the terminal."""
        return f"error: {self.message}"


def readable(text: str) -> str:
    """Return `text` as one printable line, shortened in the middle if it is very long.

    Use it for names and contents of files, which may hold control characters.
    """
    line = visible(" ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 255]} … {line[-250:]}"


def visible(text: str, kept: str = "") -> str:
    """Return `text` with unprintable characters escaped, except those in `kept`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


class RunFailed(RuntimeError):
    """A run has failed; the last line of the text is the reason, the lines above are those of a plug-in that failed."""

    def render(self) -> str:
        """Return the text for the terminal."""
        above, newline, reason = str(self).rpartition("\n")
        return visible(f"{above}{newline}error: {reason}", kept="\n")


class RankFailed(RunFailed):
    """One of several ranks has failed; the text holds its number and its traceback."""

    def render(self) -> str:
        """Return the text for the terminal."""
        return visible(f"error: {self}", kept="\n")


def exit_line(error: SystemExit) -> str:
    """Return one line on the place of the `sys.exit` that ended the run."""
    # Packages such as W&B replace `sys.exit` by their own function, which calls the next one: the
    # caller is in the frame before the first of them.
    hook = getattr(sys.exit, "__code__", None)
    where = "unknown place"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is hook:
            break
        where = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return f"sys.exit({'' if error.code is None else repr(error.code)}) was called before the run had ended ({where})"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X?' for the known name closest to `name`, or an empty string."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{found[0]}'?" if found else ""


def unknown_name(key: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for `key=name`, with the nearest of the `known` names and all of them."""
    known = list(known)
    return UserError(f"{key}={name} is not known.{nearest(name, known)} Known: {', '.join(known)}")


def import_extra(module: str, needed: str, extra: str) -> Any:
    """Import a package of an extra. needed: what needs it. Errors: UserError where it is not installed, or broken."""
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        broken = "" if missing else f", which is installed but cannot be imported ({readable(str(error))})"
        raise UserError(f'{needed}{broken}: pip install "omagd[{extra}]"') from None


LIBRARIES = {"matplotlib": "matplotlib", "scipy": "SciPy", "jinja2": "Jinja2", "pandas": "pandas"}
"""Packages that commands import where they need them, with their names in sentences."""


@contextmanager
def libraries_of(command: str) -> Iterator[None]:
    """Turn the failure of a block to import one of `LIBRARIES` into a UserError with the command that installs it."""
    try:
        yield
    except ImportError as error:
        frames = (str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__))
        tops = (name.partition(".")[0] for name in (error.name or "", *frames))
        package = next((top for top in tops if top in LIBRARIES), None)
        if package is None:
            raise
        own = (error.name or "").partition(".")[0] == package  # else something that the package imports is missing
        missing = isinstance(error, ModuleNotFoundError) and own and sys.modules.get(package) is None
        fix = package if missing else f"--force-reinstall {package}"
        why = "is not installed" if missing else f"cannot be imported ({readable(str(error))[:200]})"
        raise UserError(f"{command}: needs {LIBRARIES[package]}, which {why}: pip install {fix}") from error


def import_library(module: str, command: str) -> Any:
    """Import a module of `LIBRARIES` for a command. Errors: UserError where the package is missing or broken."""
    with libraries_of(command):
        return import_module(module)
