"""Registries: names in the configuration stand for classes; plug-ins add their own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from omagd.utils.errors import UserError, unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """Objects of one kind by name, from a decorator, an import string or a plug-in's entry point.

    Args:
        kind: of the objects, singular, for messages ("learner").
        group: entry-point group that other packages use ("omagd.learners").
        lazy: import strings "package.module:attribute" by name, imported at the first use.
    """

    def __init__(self, kind: str, group: str, lazy: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.group = group
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
        """Return the object called `name`. Errors: UserError that lists the known names."""
        self.require(name)
        if name not in self._objects:
            self._objects[name] = self._load(name)
        return self._objects[name]

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
        for point in entry_points(group=self.group):
            self._lazy.setdefault(point.name, point.value)
