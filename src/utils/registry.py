"""Registries: names in the configuration stand for classes; plug-ins add their own.

Also what a class of a plug-in lacks for its protocol, and which lines of its files failed, in which component. A
protocol is a `typing.Protocol`, which any class may follow, or a base class, which the class must inherit from.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel

from omagd.utils.errors import RunFailed, Unchecked, UserError, readable, unknown_name

T = TypeVar("T")
_ABSENT: Any = object()
_EMPTY = inspect.Parameter.empty
_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_PACKAGE = __name__.partition(".")[0]


def defined_at(found: Any) -> str:
    """Return the file and line of a class or function, or its module where there is no file."""
    with suppress(TypeError, OSError):
        return f"{inspect.getsourcefile(found)}:{inspect.getsourcelines(found)[1]}"
    return str(getattr(found, "__module__", "unknown place"))


def described(found: Any) -> str:
    """Return the name of a class or function and where it is defined, as errors show it."""
    return f"{getattr(found, '__name__', found)} ({defined_at(found)})"


def faults(found: Any, protocol: type) -> list[str]:
    """Return what keeps `found` from serving as `protocol`, in words; attributes that have defaults there are set.

    Parameters of a method that have no default in the protocol are passed by position, the others by name.
    """
    structural = bool(getattr(protocol, "_is_protocol", False))
    if not isinstance(found, type):
        return _of_constructor(found, protocol) if callable(found) and structural else ["is no class"]
    above = f"{protocol.__module__}.{protocol.__qualname__}"
    base = [] if structural or issubclass(found, protocol) else [f"is no subclass of {above}"]
    absent, wrong = [], _of_constructor(found, protocol)
    model = inspect.getattr_static(found, "args_model", BaseModel)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        wrong.append("args_model is no pydantic model")
    for name, member in _members(protocol):
        own = inspect.getattr_static(found, name, _ABSENT)
        if own is member and (structural or name in getattr(protocol, "__abstractmethods__", ())):
            own = _ABSENT  # inherited from where it is only described
        if getattr(own, "__name__", "") == "_forward_unimplemented":  # of an nn.Module without a forward
            own = _ABSENT
        if callable(getattr(protocol, name, None)):
            if own is _ABSENT or not callable(getattr(found, name)):
                needed = structural or name in getattr(protocol, "__abstractmethods__", ())
                absent += [name] * (needed or own is not _ABSENT)
            elif own is not member:
                wrong += _of_method(found, own, protocol, name)
        elif own is _ABSENT and member is not _ABSENT and structural and not isinstance(member, property):
            setattr(found, name, member)
        elif own is _ABSENT and member is _ABSENT and "ClassVar" in _annotation(protocol, name)[0]:
            absent.append(name)
        elif own is not _ABSENT and (allowed := _literals(protocol, name)) and own not in allowed:
            wrong.append(f"{name}={own} must be one of {', '.join(map(str, allowed))}")
    return [*base, *([f"has no {', '.join(absent)}"] if absent else []), *wrong]


def missing_parts(made: Any, protocol: type) -> list[str]:
    """Return the names of the attributes and properties of `protocol` that an instance does not have."""
    described = ((name, inspect.getattr_static(protocol, name, _ABSENT)) for name, _ in _members(protocol))
    own = (name for name, member in described if member is _ABSENT or isinstance(member, property))
    return [name for name in own if not hasattr(made, name)]


def _lineage(protocol: type) -> list[type]:
    """Return a protocol and its bases in this package, which describe it."""
    return [base for base in protocol.__mro__ if base.__module__.partition(".")[0] == _PACKAGE]


def _members(protocol: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a protocol; `_ABSENT` for an attribute without a value."""
    parts = [(vars(base).get("__annotations__", {}), vars(base)) for base in _lineage(protocol)]
    for name in dict.fromkeys(name for annotated, defined in parts for name in (*annotated, *defined)):
        if not name.startswith("_") or name in getattr(protocol, "__abstractmethods__", ()):
            yield name, inspect.getattr_static(protocol, name, _ABSENT)


def _annotation(protocol: type, name: str) -> tuple[str, type]:
    """Return the text of an attribute's annotation and the class that has it."""
    bases = (base for base in _lineage(protocol) if name in vars(base).get("__annotations__", {}))
    found = next(bases, None)
    return ("", protocol) if found is None else (str(vars(found)["__annotations__"][name]), found)


def _literals(protocol: type, name: str) -> tuple[Any, ...]:
    """Return the values that an attribute may have, if its annotation is the name of a `Literal` type."""
    text, owner = _annotation(protocol, name)
    kind = vars(sys.modules[owner.__module__]).get(text)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _parameters(function: Any, bound: bool) -> list[inspect.Parameter]:
    """Return the parameters of a function without the first one, `self`, unless it is bound."""
    found = list(inspect.signature(function).parameters.values())
    if bound or found and found[0].kind is inspect.Parameter.VAR_POSITIONAL:  # *args takes `self`, too
        return found
    return found[1:]


def _of_constructor(found: Any, protocol: type) -> list[str]:
    """Return why `found` cannot be called as `__init__` of the protocol says, with all parameters by position."""
    described = next((vars(base)["__init__"] for base in _lineage(protocol) if "__init__" in vars(base)), None)
    if not isinstance(described, FunctionType) or described.__module__.partition(".")[0] != _PACKAGE:
        return []  # a protocol without a constructor has typing's own
    wanted = [each.name for each in _parameters(described, bound=False) if each.kind in _PLACED]
    with suppress(ValueError):  # without a signature, as of a class in C
        try:
            inspect.signature(found).bind(*wanted)
        except TypeError as problem:
            return [f"cannot be built as {found.__name__}({', '.join(wanted)}): {problem}"]
    return []


def _of_method(found: type, own: Any, protocol: type, name: str) -> list[str]:
    """Return what calls of a method, as the protocol describes them, would find wrong with the parameters of `own`."""
    of_instances = isinstance(inspect.getattr_static(protocol, name), FunctionType)
    if isinstance(own, FunctionType) and not of_instances:
        return [f"{name} is neither a static nor a class method"]
    wanted = _parameters(getattr(protocol, name), bound=not of_instances)
    try:
        accepted = _parameters(getattr(found, name), bound=not isinstance(own, FunctionType))
    except (TypeError, ValueError):  # without a signature, as of a function in C
        return []
    kinds = {each.kind for each in accepted}
    places = [each for each in accepted if each.kind in _PLACED]
    names = {each.name for each in accepted if each.kind in _NAMED}
    placed = [each.name for each in wanted if each.kind in _PLACED and each.default is _EMPTY]
    named = {each.name: each for each in wanted if each.kind in _NAMED and each.name not in placed}
    refused = [] if inspect.Parameter.VAR_POSITIONAL in kinds else placed[len(places) :]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        refused += [each for each in named if each not in names]
    always = {each for each, parameter in named.items() if parameter.default is _EMPTY}
    left = [*places[len(placed) :], *(each for each in accepted if each.kind is inspect.Parameter.KEYWORD_ONLY)]
    extra = [each.name for each in left if each.default is _EMPTY and each.name not in always]
    said = (("takes no", refused), ("must not require", extra))
    return [f"{name} {what} {', '.join(names)}" for what, names in said if names]


_FILES = Path(__file__).resolve().parents[1]
_INSTALLED = {"site-packages", "dist-packages"}
_CRASH, _PLACE, _TEXT = "omagd_crash", "omagd_place", "omagd_text"
_SHOWN = 4  # slots that a batched environment's error names
NAMES: dict[Any, str] = {}
"""Classes and functions of the registries that were used, with `kind=name` of each."""


def overridden_alone(kind: type, name: str, other: str) -> type | None:
    """Return the class that `kind` has its method `other` from, if its method `name` is of a class below that one."""
    order = kind.__mro__
    one, inherited = (next(each for each in order if method in vars(each)) for method in (name, other))
    return inherited if order.index(one) < order.index(inherited) else None


def require_step(kind: type, parts: str) -> None:
    """Reject a class with a `forward` of its own, which trains, and an inherited `step`, which acts; or the reverse.

    parts: the methods that both call, for the message. Errors: UserError.
    """
    for one, does, other, would in (("forward", "trains", "step", "act"), ("step", "acts", "forward", "train")):
        if (above := overridden_alone(kind, one, other)) is not None:
            raise UserError(
                f"{kind.__name__}: has a {one} of its own, which {does}, but would {would} with the {other} of"
                f" {above.__name__}. Override {parts}, which both call, or {other} too"
            )


def owner_of(kind: type) -> str:
    """Return `kind=name` of a class that a registry has given out; empty for another one."""
    return NAMES.get(kind, "")


def is_plugin(found: Any) -> bool:
    """Return whether a class or function is not of this package."""
    return _top(str(getattr(found, "__module__", ""))) != _PACKAGE


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
    tops = {_top(found.__module__) for found in NAMES if hasattr(found, "__module__")} - {_PACKAGE}
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
def in_one_line(what: str = "", *packages: str, of: Any = None) -> Iterator[None]:
    """Turn an error of a plug-in's code in the block into a UserError. what: "env=shop cannot be built".

    packages: as in `crash_of`. of: the class that is built; an error in this package's part of a plug-in's counts, too.
    """
    try:
        yield
    except (UserError, Unchecked, RunFailed, MemoryError):
        raise
    except Exception as error:
        crash = crash_of(error, *packages)
        if crash is None and of is not None and is_plugin(of):
            crash = Crash("", described(of), readable(traceback.format_exception_only(error)[-1].strip()), "", "")
        if crash is None or re.search("out of memory|allocate memory", str(error)):  # memory is the caller's matter
            raise
        said = what or ", ".join(part for part in (crash.owner, crash.place) if part) or "a plug-in"
        raise UserError(f"{said}: {crash.error} ({crash.last}; --loglevel=DEBUG shows the traceback)") from error


def built(owner: str, kind: Any, *args: Any, protocol: type | None = None) -> Any:
    """Return `kind(*args)`. owner: `kind=name` for messages.

    Errors: UserError for an error in a plug-in's constructor, and for an instance without attributes of `protocol`.
    """
    NAMES[kind] = owner
    with in_one_line(f"{owner} cannot be built", of=kind):
        made = kind(*args)
        missing = missing_parts(made, protocol) if protocol is not None else []
    if missing:
        raise UserError(f"{owner}: {described(kind)} sets no {', '.join(missing)} in its constructor")
    return made


def _is_own(frame: FrameType, tops: set[str]) -> bool:
    """Return whether a frame is of a plug-in or of the user's other files. tops: packages of plug-ins."""
    name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if _top(name) == _PACKAGE or _is_below(file, str(_FILES)):
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


@cache
def _on(paths: tuple[str, ...]) -> Any:  # typed in another way before Python 3.12
    return entry_points()


def installed(group: str) -> EntryPoints:
    """Return what installed packages register in a group; they are read once, which takes 20 ms."""
    found: EntryPoints = _on(tuple(sys.path)).select(group=group)
    return found


class Registry(Generic[T]):
    """Objects of one kind by name, from a decorator, an import string or a plug-in's entry point.

    Args:
        kind: of the objects, singular, for messages ("learner").
        group: entry-point group that other packages use ("omagd.learners").
        lazy: import strings "package.module:attribute" by name, imported at the first use.
        protocol: import string of the class that describes the objects, or of a function that returns it for one;
            empty: objects are not checked.
    """

    def __init__(self, kind: str, group: str, lazy: dict[str, str] | None = None, protocol: str = "") -> None:
        self.kind = kind
        self.group = group
        self.protocol = protocol
        self._fits: dict[str, T] = {}
        self._objects: dict[str, T] = {}
        self._lazy: dict[str, str] = dict(lazy or {})
        self._plugins_read = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers its object under `name`. A taken name raises ValueError."""

        def add(obj: T) -> T:
            # A module whose lazy entry is being loaded may register the same name.
            if name in self._objects and self._objects[name] is not obj:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            self._objects[name] = obj
            return obj

        return add

    def get(self, name: str) -> T:
        """Return the object called `name`.

        Errors: UserError that lists the known names, or all that the object lacks for its protocol.
        """
        self.require(name)
        if name not in self._objects:
            self._objects[name] = self._load(name)
        found = self._objects[name]
        if self._fits.get(name) is not found:
            self._require_fit(name, found)
            self._fits[name] = found
        return found

    def build(self, name: str, *args: Any) -> Any:
        """Return an instance of `name`. Errors: UserError, also for an error in the constructor of a plug-in."""
        found = self.get(name)
        return built(f"{self.kind}={name}", found, *args, protocol=self._protocol_of(found))

    def _protocol_of(self, found: T) -> type | None:
        """Return the class that describes an object; None where objects of this registry are not checked."""
        if not self.protocol:
            return None
        module, _, attribute = self.protocol.partition(":")
        described = getattr(importlib.import_module(module), attribute)
        return described if isinstance(described, type) else described(found)

    def _require_fit(self, name: str, found: T) -> None:
        """Reject an object that does not fit its protocol. Errors: UserError."""
        NAMES[found] = f"{self.kind}={name}"
        protocol = self._protocol_of(found)
        if protocol is not None and (wrong := faults(found, protocol)):
            what = f"{self.kind}={name}: {described(found)}"
            raise UserError(
                f"{what} {'; '.join(wrong)}. See {protocol.__module__}.{protocol.__name__}, docs/extending.md"
            )

    def require(self, name: str) -> None:
        """Reject an unknown name, without importing the object of a known one. Errors: UserError."""
        if name not in self:
            raise unknown_name(self.kind, name, self.names())

    def names(self) -> list[str]:
        """Return all names, sorted, without importing anything."""
        self._read_plugins()
        return sorted({*self._objects, *self._lazy})

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def _load(self, name: str) -> T:
        """Import the object called `name`. Errors: UserError if its package does not have it."""
        module, _, attribute = self._lazy[name].partition(":")
        try:
            with in_one_line(f"{self.kind}={name} cannot be imported", module.partition(".")[0]):
                loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise UserError(f"{self.kind}={name}: imports {self._lazy[name]}, and there is no {error.name}") from None
        if not hasattr(loaded, attribute):
            raise UserError(f"{self.kind}={name}: imports {self._lazy[name]}, and {module} has no {attribute}")
        found: T = getattr(loaded, attribute)
        return found

    def _read_plugins(self) -> None:
        if self._plugins_read:
            return
        self._plugins_read = True
        for point in installed(self.group):
            self._lazy.setdefault(point.name, point.value)
