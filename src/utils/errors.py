"""Errors that are shown to the user, and text that is safe to print."""

from __future__ import annotations

import contextlib
import difflib
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from omagd.utils.foreign import Row

USER_ERROR_EXIT_CODE = 2
LONGEST_LINE = 1000
NEAR = 0.76
"""Least similarity of names for a hint: two of four letters, or one of them replaced, make another word."""


class UserError(Exception):
    """Errors that the user can fix: shown in one line each, exit code 2, no traceback.

    Args:
        messages: one or more; each with the key, the value and the fix.

    Attributes:
        said_by_rank_0: rank 0 raises the same error; other ranks do not print it.
    """

    def __init__(self, *messages: str) -> None:
        self.messages = tuple(readable(message) for message in messages)
        super().__init__(*self.messages)
        self.said_by_rank_0 = False

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """All messages, one on each line."""
        return "\n".join(self.messages)

    def on_all_ranks(self) -> UserError:
        """Mark the error as one that rank 0 also raises; return it."""
        self.said_by_rank_0 = True
        return self

    def render(self) -> str:
        """Return the lines for the terminal."""
        return "\n".join(f"error: {message}" for message in self.messages)


class Unreadable(Exception):
    """A check needs a value that is wrong, which another message already says: the check cannot be made."""


class Mistakes:
    """Mistakes of several checks, raised together.

    Attributes:
        complete: whether all files could be read; else it is not known what else would be wrong.
    """

    def __init__(self) -> None:
        self.complete = True
        self._places: dict[str, dict[str, None]] = {}  # by message, both in the order in which they were found
        self._on_all_ranks = True
        self._cause: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._places)

    def add(self, *messages: str) -> None:
        """Note mistakes."""
        self.note(UserError(*messages))

    def note(self, error: UserError, place: str = "") -> None:
        """Note the mistakes of an error. place: where they are written, if the messages do not say it."""
        for message in error.messages:
            self._places.setdefault(message, {})[place] = None
        self._on_all_ranks &= error.said_by_rank_0
        self._cause = self._cause or error.__cause__

    @contextmanager
    def caught(self, place: str = "") -> Iterator[None]:
        """Note the UserError of a block and go on after it."""
        try:
            yield
        except UserError as error:
            self.note(error, place)
        except Unreadable:
            pass

    def messages(self) -> tuple[str, ...]:
        """Return all mistakes, each once: with the first of its places, and the number of the others."""
        return tuple(_placed(message, list(places)) for message, places in self._places.items())

    def raise_any(self) -> None:
        """Raise all mistakes. Errors: UserError if there are any."""
        if self:
            error = UserError(*self.messages())
            raise (error.on_all_ranks() if self._on_all_ranks else error) from self._cause


def _placed(message: str, places: list[str]) -> str:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{places[0]}{more}: {message}" if places[0] else message


@contextmanager
def collected(mistakes: Mistakes | None) -> Iterator[Mistakes]:
    """Collect mistakes in `mistakes`; with None raise those of the block at its end. Errors: UserError."""
    found = Mistakes() if mistakes is None else mistakes
    yield found
    if mistakes is None:
        found.raise_any()


P = ParamSpec("P")


def together(rule: Callable[P, Iterator[str]]) -> Callable[P, None]:
    """Make a function that yields messages one that raises a UserError with all of them."""

    @wraps(rule)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        with collected(None) as found, found.caught():
            for message in rule(*args, **kwargs):
                found.add(message)

    return check


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
    """Return ' Did you mean X?' for the known name that is spelled almost alike, or an empty string."""
    known = list(known)
    found = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    if not found and 1 < len(name) < 4:  # too short for a share of letters: one name that differs in one, not the first
        alike = (other for other in known if len(other) == len(name) and other[0] == name[0])
        found = [other for other in alike if sum(a != b for a, b in zip(name, other, strict=True)) == 1]
    return f" Did you mean '{found[0]}'?" if len(found) == 1 else ""


def foreign(kind: str, word: object) -> Row | None:
    """Return what a key (kind "key") or the name that `kind` takes is here, for one of another library."""
    from omagd.utils.foreign import find  # its tables serve messages only

    return find(kind, word)


def unknown_name(key: str, name: str, known: Iterable[str], kind: str = "") -> UserError:
    """Return the error for `key=name`, with what it is here, else the nearest of the `known` names and all of them.

    kind: the key or option that takes such names, if not `key`.
    """
    known, row = list(known), foreign(kind or key, name)
    if row is not None:
        return UserError(f"{key}={name} is not {'known' if row.here else 'available here'}.{row.hint()}")
    return UserError(f"{key}={name} is not known.{nearest(name, known)} Known: {', '.join(known)}")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, and what caused it or was being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def libraries_of(command: str) -> Iterator[None]:
    """Turn the failure of a block to import another package into a UserError."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "a package").partition(".")[0]
        if package == "omagd":
            raise
        why = readable(str(error))[:200]
        raise UserError(f"{command}: {package} cannot be imported ({why}). Install it again") from error


def print_out(text: str) -> None:
    """Write `text` to standard output; the reader may stop early (`| head`)."""
    try:
        sys.stdout.write(visible(text, kept="\n"))
        sys.stdout.flush()
    except BrokenPipeError:
        # else Python reports the error again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_note(line: str) -> None:
    """Write a line to standard error, in a terminal over a progress bar, which another process may have drawn."""
    over = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(over + visible(f"{line}\n", kept="\n"))
    sys.stderr.flush()


def print_warning(line: str) -> None:
    """Write a warning to standard error."""
    print_note(f"warning: {line}")


def drop_lost_output() -> None:
    """Discard output to a closed terminal or to a pipe without a reader.

    Otherwise every write there fails, and so does what Python has buffered, at the latest when it exits.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file
            handle = stream.fileno()
            poll = select.poll()
            poll.register(handle, select.POLLOUT)
            if any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0)):
                nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nothing, handle)
                os.close(nothing)
