"""What a class lacks for its protocol: members, parameters and the base class, as the protocol's own class says.

A protocol is a `typing.Protocol`, which any class may follow, or a base class, which the class must inherit from.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

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


def faults(found: Any, protocol: type) -> list[str]:
    """Return what keeps `found` from serving as `protocol`, in words; attributes that have defaults there are set.

    Parameters of a method that have no default in the protocol are passed by position, the others by name.
    """
    structural = _is_structural(protocol)
    if not isinstance(found, type):
        return _of_constructor(found, protocol) if callable(found) and structural else ["is no class"]
    base = [] if structural or issubclass(found, protocol) else [f"is no subclass of {_full_name(protocol)}"]
    absent, wrong = [], _of_constructor(found, protocol)
    model = inspect.getattr_static(found, "args_model", BaseModel)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        wrong.append("args_model is no pydantic model")
    for name, member in _members(protocol):
        own = inspect.getattr_static(found, name, _ABSENT)
        if own is member and (structural or name in getattr(protocol, "__abstractmethods__", ())):
            own = _ABSENT  # inherited from where it is only described
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


def _is_structural(protocol: type) -> bool:
    return bool(getattr(protocol, "_is_protocol", False))


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


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
