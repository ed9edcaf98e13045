"""Registries: names in the configuration stand for classes; plug-ins add their own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any, Generic, TypeVar

from omagd.utils.errors import UserError, unknown_name
from omagd.utils.plugins import NAMES, built, defined_at, faults, in_one_line

T = TypeVar("T")


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
            what = f"{self.kind}={name}: {getattr(found, '__name__', found)} ({defined_at(found)})"
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
