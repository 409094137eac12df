"""Named, pluggable parts: one registry per kind of part (parsers, tools, rewards, advantages, …).

A name in a config is either registered (`ctpo`) or an import path (`my_package.my_module:my_function`), so that a
user's own part needs no change here.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from toolrl.errors import UserError

T = TypeVar("T")


class UnknownName(UserError):
    """A name that no registry entry and no import path answers to."""


def nearest(name: str, known: list[str]) -> str:
    """`, did you mean 'x'?` for the closest known name, or the list of all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


class Registry(Generic[T]):
    """Maps names to parts of one kind.

    Example:
        >>> parsers: Registry[type] = Registry("tool-call parser")
        >>> @parsers.register("hermes")
        ... class Hermes: ...
        >>> parsers.get("hermes") is Hermes
        True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator. Raises ValueError when the name is taken."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """The entry called `name`, or the object at the import path `module:attribute`.

        Raises:
            UnknownName: nothing answers to the name; the message holds the nearest one.
        """
        if name in self._entries:
            return self._entries[name]
        module, colon, attribute = name.partition(":")
        if colon and module and attribute:
            try:
                found: T = getattr(importlib.import_module(module), attribute)
            except (ImportError, AttributeError) as error:
                raise UnknownName(f"{self.kind} {name!r} cannot be imported: {error}") from error
            return found
        raise UnknownName(f"unknown {self.kind} {name!r}{nearest(name, list(self._entries))}")

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._entries
