"""Errors meant for the person at the terminal."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable

USER_ERROR_EXIT_CODE = 2
LONGEST_LINE = 1000


class UserError(Exception):
    """A mistake the user can mend: printed as one line plus at most two of help, exit code 2, no traceback.

    Args:
        message: one line that names the key, the value and the mend.
        help_lines: at most two further lines.

    Attributes:
        said_by_rank_0: rank 0 raises the same error, so that no other rank needs to print it.
    """

    def __init__(self, message: str, *help_lines: str) -> None:
        self.message = readable(message)
        super().__init__(self.message)
        self.help_lines = tuple(readable(line) for line in help_lines[:2])
        self.said_by_rank_0 = False

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the help lines, so that a worker's error arrives whole in the parent."""
        return (type(self), (self.message, *self.help_lines))

    def on_all_ranks(self) -> UserError:
        """Note that rank 0 raises the same error; return this one."""
        self.said_by_rank_0 = True
        return self

    def render(self) -> str:
        """Return the text that the terminal shows."""
        return "\n".join([f"error: {self.message}", *(f"  {line}" for line in self.help_lines)])


def readable(text: str) -> str:
    """Return `text` as one line that a terminal shows as it is: of a very long one the beginning and the end.

    For every name that was found on disk and all that stands in a file: it may hold control characters.
    """
    line = visible(" ".join(text.split()))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 255]} … {line[-250:]}"


def visible(text: str, kept: str = "") -> str:
    """Return `text` with characters that a terminal does not print escaped, but for those in `kept`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text)


class RunFailed(RuntimeError):
    """A run has ended without what it was for; the text says why, in a line for the person at the terminal."""


class RankFailed(RunFailed):
    """One of several ranks has failed; the text says which, with that rank's own traceback."""


def exit_line(error: SystemExit) -> str:
    """Return one line that says where a `sys.exit` ended the run, whatever exit code it asked for."""
    # Some packages (W&B) replace `sys.exit` by a function of theirs, which may call another such function: the place
    # looked for is the one before the first of them.
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
