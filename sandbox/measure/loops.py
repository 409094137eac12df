"""The event loop that figures are taken on: the one the sandbox runs on in training."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def on_the_loop_of_actors(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on uvloop, as Ray's actors do, or on asyncio's own loop where uvloop is not installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)
