"""What a worker sends to the replay buffer, several episodes to a message: a message costs both sides a millisecond.

Invariants:
- `deliver` returns when the buffer has the episode on its disk, and raises what the buffer said of it, of it alone.
- Finished episodes wait for no timer: they go at once, or with the next message where one is under way.
- The last turn boundary of an unfinished episode is on its way at most `SAVE_EVERY_S` after it was reached. An episode that
  has ended by then was never saved unfinished.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from actors.continuation import prefix_of
from actors.replay import Entry
from toolrl.trajectory import Trajectory

SAVE_EVERY_S = 0.25


class Deliveries:
    """One for each worker; used on its event loop alone."""

    def __init__(self, worker: str, buffer: Any, *, still_running: Callable[[Trajectory], bool]) -> None:
        self._worker = worker
        self._buffer = buffer
        self._still_running = still_running
        self._finished: list[tuple[Entry, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._boundaries: dict[str, tuple[Trajectory, int]] = {}  # trajectory id -> the live object, turns to save

    async def deliver(self, entry: Entry) -> None:
        """Returns when the finished episode is in the buffer."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._finished.append((entry, done))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        await done

    async def _send(self) -> None:
        while self._finished:
            message, self._finished = self._finished, []
            try:
                await self._buffer.put.remote(self._worker, [entry for entry, _ in message])
            except Exception as error:
                if len(message) == 1:
                    _settle(message[0][1], error)
                else:  # one wrong episode makes the buffer refuse its whole message
                    for entry, done in message:
                        await self._send_alone(entry, done)
            else:
                for _, done in message:
                    _settle(done)

    async def _send_alone(self, entry: Entry, done: asyncio.Future[None]) -> None:
        try:
            await self._buffer.put.remote(self._worker, [entry])
        except Exception as error:
            _settle(done, error)
        else:
            _settle(done)

    def save(self, trajectory: Trajectory) -> None:
        """Its turns until now are to be in the buffer soon, if it is not finished by then."""
        if not self._boundaries:
            asyncio.get_running_loop().call_later(SAVE_EVERY_S, self._save_all)
        self._boundaries[trajectory.id] = (trajectory, len(trajectory.turns))

    def _save_all(self) -> None:
        reached, self._boundaries = self._boundaries, {}
        entries = [
            Entry.of(prefix_of(replace(trajectory, turns=trajectory.turns[:turns])))
            for trajectory, turns in reached.values()
            if trajectory.outcome is None and self._still_running(trajectory)
        ]
        if entries:
            # Not awaited: an episode does not wait for the buffer's disk; a later write of it replaces this one.
            self._buffer.put_progress.remote(self._worker, entries)


def _settle(done: asyncio.Future[None], error: Exception | None = None) -> None:
    if done.done():  # whoever waited was cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
