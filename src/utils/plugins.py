"""Errors in the code of plug-ins: which lines of their files failed, in which component and which episode."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from omagd.utils.contracts import defined_at, missing_parts
from omagd.utils.errors import RunFailed, Unreadable, UserError, readable

_PACKAGE = Path(__file__).resolve().parents[1]
_PACKAGE_NAME = __name__.partition(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}
_CRASH, _PLACE, _TEXT = "omagd_crash", "omagd_place", "omagd_text"
_SHOWN = 4  # slots that a batched environment's error names
NAMES: dict[Any, str] = {}
"""Classes and functions of the registries that were used, with `kind=name` of each."""


def owner_of(kind: type) -> str:
    """Return `kind=name` of a class that a registry has given out; empty for another one."""
    return NAMES.get(kind, "")


def is_plugin(found: Any) -> bool:
    """Return whether a class or function is not of this package."""
    return _top(str(getattr(found, "__module__", ""))) != _PACKAGE_NAME


@dataclass(frozen=True)
class Crash:
    """An error in a plug-in's code.

    Attributes:
        frames: the lines of the plug-in's files that failed, as in a traceback. last: file and line of the last one.
        error: the exception, in one line. owner: `kind=name` of the component; empty if unknown.
        place: slot, seed and step of the episode; empty outside of an environment.
    """

    frames: str
    last: str
    error: str
    owner: str
    place: str


def crash_of(error: BaseException, *packages: str) -> Crash | None:
    """Return what failed in a plug-in's code; None where no line of a plug-in took part.

    packages: of plug-ins, beside those of the classes that registries have given out.
    """
    if _CRASH in vars(error):
        known: Crash = vars(error)[_CRASH]
        return known
    tops = {_top(found.__module__) for found in NAMES if hasattr(found, "__module__")} - {_PACKAGE_NAME}
    tops.update(packages)
    own = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_own(frame, tops)]
    summary = traceback.StackSummary.extract(iter(own))
    if isinstance(error, SyntaxError):
        summary.append(traceback.FrameSummary(error.filename or "?", error.lineno or 0, "<module>", line=error.text))
    if not summary:
        return None
    last = f"{summary[-1].filename}:{summary[-1].lineno}, in {summary[-1].name}"
    what = readable(traceback.format_exception_only(error)[-1].strip())
    owners = (_owner(frame) for frame, _ in reversed(own))
    owner = next((owner for owner in owners if owner), "")
    return Crash("".join(summary.format()).rstrip("\n"), last, what, owner, vars(error).get(_PLACE, ""))


def carrying(error: BaseException, crash: Crash | None) -> BaseException:
    """Return an error that stands for a crash in another process."""
    if crash is not None:
        vars(error)[_CRASH] = crash
    return error


def locate(error: BaseException, episodes: Sequence[tuple[int, int, int]]) -> None:
    """Note slot, seed and step of the episodes that an environment's error may belong to, unless they are known."""
    if not episodes or _PLACE in vars(error) or _CRASH in vars(error):
        return
    several = "one of " if len(episodes) > 1 else ""
    named = [f"slot {slot}, seed {seed}, step {step}" for slot, seed, step in episodes[:_SHOWN]]
    vars(error)[_PLACE] = several + "; ".join(named) + "; …" * (len(episodes) > _SHOWN)


def explain(error: BaseException, text: str) -> None:
    """Add the text that stands for an error where it would end the program; callers in Python see the error itself."""
    vars(error)[_TEXT] = text


def explained(error: BaseException) -> RunFailed | None:
    """Return the error that stands for one with an explanation; None for one without."""
    return RunFailed(vars(error)[_TEXT]) if _TEXT in vars(error) else None


@contextmanager
def in_one_line(what: str = "", *packages: str) -> Iterator[None]:
    """Turn an error of a plug-in's code in the block into a UserError. what: "env=shop cannot be built".

    packages: as in `crash_of`.
    """
    try:
        yield
    except (UserError, Unreadable, RunFailed, MemoryError):
        raise
    except Exception as error:
        crash = crash_of(error, *packages)
        if crash is None or re.search("out of memory|allocate memory", str(error)):  # memory is the caller's matter
            raise
        said = what or ", ".join(part for part in (crash.owner, crash.place) if part) or "a plug-in"
        raise UserError(f"{said}: {crash.error} ({crash.last}; --loglevel=DEBUG shows the traceback)") from error


def built(owner: str, kind: Any, *args: Any, protocol: type | None = None) -> Any:
    """Return `kind(*args)`. owner: `kind=name` for messages.

    Errors: UserError for an error in a plug-in's constructor, and for an instance without attributes of `protocol`.
    """
    NAMES[kind] = owner
    with in_one_line(f"{owner} cannot be built"):
        made = kind(*args)
        missing = missing_parts(made, protocol) if protocol is not None else []
    if missing:
        raise UserError(
            f"{owner}: {kind.__name__} ({defined_at(kind)}) sets no {', '.join(missing)} in its constructor"
        )
    return made


def _is_own(frame: FrameType, tops: set[str]) -> bool:
    """Return whether a frame is of a plug-in or of the user's other files. tops: packages of plug-ins."""
    name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if _top(name) == _PACKAGE_NAME or _is_below(file, str(_PACKAGE)):
        return False
    library = (
        file.startswith("<") or _INSTALLED & set(Path(file).parts) or any(_is_below(file, p) for p in _libraries())
    )
    return _top(name) in tops or not library


def _is_below(file: str, folder: str) -> bool:
    return os.path.realpath(file).startswith(folder + os.sep)


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python's own files."""
    names = ("stdlib", "platstdlib", "scripts")
    return tuple({os.path.realpath(path) for name in names if (path := sysconfig.get_path(name))})


def _owner(frame: FrameType) -> str:
    """Return `kind=name` of the class whose method a frame is; else of the only one in its module."""
    module, name = frame.f_globals.get("__name__"), frame.f_code.co_qualname
    here = {found: owner for found, owner in NAMES.items() if getattr(found, "__module__", None) == module}
    mine = [owner for found, owner in here.items() if name.startswith(f"{found.__qualname__}.")]
    return (mine or (list(here.values()) if len(here) == 1 else [""]))[0]


def _top(module: str) -> str:
    return module.partition(".")[0]
