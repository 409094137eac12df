"""A reward's function with the options of the config, checked when the run starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from toolrl.config import Named
from toolrl.errors import UserError
from toolrl.registry import Registry


def recorded_name(part: Named) -> str:
    """Under which its rewards are recorded, weighted and logged: of an import path, the function's own."""
    return part.name.rpartition(":")[2]


def bound(registry: Registry[Callable[..., Any]], part: Named, given: int) -> Callable[..., Any]:
    """The function of `part` with its options.

    Args:
        given: how many arguments the caller passes before the options.

    Raises:
        UnknownName: there is no such function.
        UserError: it does not take these options.
    """
    function = registry.get(part.name)
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * given, **part.options)
    except TypeError as error:
        known = list(signature.parameters)[given:]
        raise UserError(
            f"{registry.kind} {part.name!r} does not take the options {dict(part.options)}: {error}; "
            f"its options: {', '.join(known) or 'none'}"
        ) from error
    return functools.partial(function, **part.options)
