"""The calls of one episode that are under way: those that it waits for, and those whose results come later.

Invariants:
- Every call gets one answer, the first of its result and of its deadline. What comes after the deadline is thrown away
  and counted; the call itself is not stopped, for a remote one cannot be.
- What has arrived is handed over once, in the order in which it arrived; what arrived in one round of the event loop (the
  order of its callbacks means nothing) in the order of the calls.
- `close` leaves no call running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from toolrl.tools.wording import timed_out
from toolrl.trajectory import ToolCall, ToolResult

Answer = asyncio.Future[ToolResult]


@dataclass(eq=False)
class Later:
    """A call whose result is delivered when it comes."""

    number: int
    call: ToolCall
    answer: Answer
    moment: int | None = None  # when it arrived, in rounds of the event loop with arrivals


class CallsUnderWay:
    """`begin` calls; await what it gives, or pass it to `deliver_later`."""

    def __init__(self) -> None:
        self.discarded = 0  # results that came after their deadline
        self._moment = 0
        self._moment_ends = False
        self._tasks: set[asyncio.Task[ToolResult]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        self._later: list[Later] = []
        self._number = 0

    def begin(self, call: ToolCall, work: Coroutine[Any, Any, ToolResult], deadline_s: float | None) -> Answer:
        """Starts `work`, the run of the call. Its answer: the result, a timeout after `deadline_s`, or what `work` raises."""
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        task = asyncio.create_task(work)
        self._tasks.add(task)
        timer = None
        if deadline_s is not None:
            timer = loop.call_later(deadline_s, _expire, answer, call, deadline_s)
            self._timers.add(timer)
        task.add_done_callback(partial(self._done, answer, timer))
        return answer

    def _done(self, answer: Answer, timer: asyncio.TimerHandle | None, task: asyncio.Task[ToolResult]) -> None:
        self._tasks.discard(task)
        if timer is not None:
            timer.cancel()
            self._timers.discard(timer)
        if task.cancelled():
            answer.cancel()
        elif answer.done():
            self.discarded += not answer.cancelled()
            task.exception()  # retrieved: nobody waits for it any more
        elif error := task.exception():
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    # Results that come later ---------------------------------------------------------------------------------------

    def deliver_later(self, call: ToolCall, answer: Answer) -> None:
        """The answer is given by `arrived` once it is there."""
        later = Later(self._number, call, answer)
        self._number += 1
        self._later.append(later)
        answer.add_done_callback(partial(self._arrive, later))

    def _arrive(self, later: Later, _: Answer) -> None:
        later.moment = self._moment
        if not self._moment_ends:
            self._moment_ends = True
            asyncio.get_running_loop().call_soon(self._next_moment)

    def _next_moment(self) -> None:
        self._moment += 1
        self._moment_ends = False

    @property
    def outstanding(self) -> list[ToolCall]:
        """Calls whose results have not been handed over yet, in their order."""
        return [later.call for later in self._later]

    def arrived(self) -> list[ToolResult]:
        """Hands over what has arrived. Raises what a call has raised."""
        there = sorted((each.moment, each.number, each.answer) for each in self._later if each.moment is not None)
        self._later = [later for later in self._later if later.moment is None]
        return [answer.result() for _, _, answer in there]

    async def all_arrived(self, within_s: float | None) -> None:
        """Waits for every outstanding result; one that does not come within `within_s` is a timeout."""
        waiting = [later for later in self._later if not later.answer.done()]
        if not waiting:
            return
        await asyncio.wait([later.answer for later in waiting], timeout=within_s)
        for later in waiting:
            if within_s is not None:
                _expire(later.answer, later.call, within_s)
        await asyncio.sleep(0)  # the callbacks of those answers

    async def close(self) -> None:
        """Ends every call that is under way."""
        for timer in self._timers:
            timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for later in self._later:
            if later.answer.done() and not later.answer.cancelled():
                later.answer.exception()  # retrieved: nobody will ask for it


def _expire(answer: Answer, call: ToolCall, deadline_s: float) -> None:
    if not answer.done():
        text = timed_out(call.name, deadline_s)
        answer.set_result(ToolResult(call.id, call.name, "timeout", text, wall_s=deadline_s))
