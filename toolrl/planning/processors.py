"""What shares time in the simulation: the processors of one machine, one engine's decoding steps, a worker's slots.

The first two are processor sharing: what is under way slows down when more comes. Work is kept as a clock of its own that
runs at the present speed, so a change costs no more than the one that ends next.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from typing import Any, Protocol

import simpy

from toolrl.planning.rates import EngineRates


class Shares(Protocol):
    """Something that runs on the machine's processors."""

    def advance(self) -> None:
        """Account for the time since the last call at the speed that held."""

    def reschedule(self) -> None:
        """Find the next end at the speed that holds now."""


class Machine:
    """Processors that everything shares: while more is wanted than there is, everything slows by the same factor."""

    def __init__(self, cores: float) -> None:
        self._cores = cores
        self._sharing: dict[Shares, float] = {}

    def factor(self) -> float:
        """Speed of everything, 1 where the processors suffice."""
        wanted = sum(self._sharing.values())
        return 1.0 if not self._cores or wanted <= self._cores else self._cores / wanted

    def want(self, who: Shares, cores: float) -> None:
        """From now on `who` wants so many."""
        if not self._cores or self._sharing.get(who, 0.0) == cores:
            return
        others = [each for each in self._sharing if each is not who]
        for each in others:
            each.advance()
        self._sharing[who] = cores
        for each in others:
            each.reschedule()


class Job:
    """One piece of work at a time, in seconds of its own."""

    def __init__(self, env: simpy.Environment, machine: Machine, cores: float) -> None:
        self._env, self._machine, self._cores = env, machine, cores
        self._left, self._at, self._factor = 0.0, 0.0, 1.0
        self._end: simpy.Event | None = None
        self._timer = 0

    def run(self, seconds: float) -> simpy.Event:
        """Ends when the work is done."""
        self._left, self._at, self._end = seconds, self._env.now, self._env.event()
        self._machine.want(self, self._cores)
        self.reschedule()
        return self._end

    def advance(self) -> None:
        self._left -= (self._env.now - self._at) * self._factor
        self._at = self._env.now

    def reschedule(self) -> None:
        self._timer += 1
        if self._end is None:
            return
        self._factor = self._machine.factor()
        timer = self._timer
        _after(self._env, max(self._left, 0.0) / self._factor, lambda: self._finish(timer))

    def _finish(self, timer: int) -> None:
        if timer == self._timer and self._end is not None:
            end, self._end = self._end, None
            self._machine.want(self, 0.0)
            end.succeed()


class Engine:
    """One decoder: a token for each running request a step, the step longer the more there are; others queue.

    New context is computed between steps, and stops them: its seconds are a backlog that is worked off first.
    """

    def __init__(
        self, env: simpy.Environment, machine: Machine, rates: EngineRates, most: int, cores: float = 1.0
    ) -> None:
        self._env, self._machine, self._rates, self._most, self._cores = env, machine, rates, most, cores
        self._clock = 0.0  # tokens that a request which was there from the beginning would have
        self._backlog_s = 0.0
        self._at = 0.0
        self._factor = 1.0
        self._running: list[tuple[float, int, simpy.Event]] = []  # (clock at its end, order, event)
        self._queue: deque[tuple[float, float, simpy.Event]] = deque()  # (tokens, prefill seconds, event)
        self._order = itertools.count()
        self._timer = 0
        self._asleep = False
        self.busy_s = self.request_s = 0.0

    def generate(self, tokens: float, new_context: float) -> simpy.Event:
        """Ends when `tokens` have been sampled after `new_context` tokens were read."""
        done = self._env.event()
        self.advance()
        self._queue.append((tokens, new_context / self._rates.prefill_tokens_per_s, done))
        self._admit()
        return done

    def pause(self, seconds: float) -> None:
        """No token for so long, on top of what is waiting."""
        self.advance()
        self._backlog_s += seconds
        self.reschedule()

    def sleep(self) -> None:
        """From now until `wake` no token, and no new request; running ones keep their places."""
        self.advance()
        self._asleep = True
        self._admit()

    def wake(self) -> None:
        """Goes on."""
        self.advance()
        self._asleep = False
        self._admit()

    def advance(self) -> None:
        elapsed, self._at = self._env.now - self._at, self._env.now
        if self._asleep or (not self._running and not self._backlog_s):
            return
        self.busy_s += elapsed if self._running else 0.0
        self.request_s += elapsed * len(self._running)
        worked = elapsed * self._factor
        stopped = min(self._backlog_s, worked)
        self._backlog_s -= stopped
        if self._running:
            self._clock += (worked - stopped) / self._step_s()

    def reschedule(self) -> None:
        self._timer += 1
        self._factor = self._machine.factor()
        if not self._running or self._asleep:
            return
        timer, left = self._timer, max(self._running[0][0] - self._clock, 0.0)
        _after(self._env, (self._backlog_s + left * self._step_s()) / self._factor, lambda: self._next_end(timer))

    def _step_s(self) -> float:
        return self._rates.step_s + (len(self._running) - 1) * self._rates.step_s_each

    def _next_end(self, timer: int) -> None:
        if timer != self._timer:
            return
        self.advance()
        self._clock = max(self._clock, self._running[0][0])
        # Lengths are no whole numbers here: what ends within a thousandth of a token ends together.
        while self._running and self._running[0][0] <= self._clock + 1e-3:
            heapq.heappop(self._running)[2].succeed()
        self._admit()

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._most and not self._asleep:
            tokens, prefill_s, done = self._queue.popleft()
            self._backlog_s += prefill_s
            heapq.heappush(self._running, (self._clock + tokens, next(self._order), done))
        self._machine.want(self, self._cores if self._running and not self._asleep else 0.0)
        self.reschedule()


class Slots:
    """Places of running episodes. Whoever comes back from a tool goes before new work, which waits for room and takes none
    until it has it."""

    def __init__(self, env: simpy.Environment, count: int) -> None:
        self._env, self._free = env, count
        self._coming_back: deque[simpy.Event] = deque()
        self._for_room: list[tuple[int, simpy.Event]] = []

    def take(self) -> simpy.Event:
        """One place, as soon as there is one."""
        self._coming_back.append(place := self._env.event())
        self._serve()
        return place

    def leave(self) -> None:
        """A place is free again."""
        self._free += 1
        self._serve()

    def room(self, count: int) -> simpy.Event:
        """Ends when so many places are free; takes none of them."""
        self._for_room.append((count, there_is := self._env.event()))
        self._serve()
        return there_is

    def _serve(self) -> None:
        while self._free and self._coming_back:
            self._free -= 1
            self._coming_back.popleft().succeed()
        for waiting in [each for each in self._for_room if each[0] <= self._free]:
            self._for_room.remove(waiting)
            waiting[1].succeed()


def _after(env: simpy.Environment, seconds: float, then: Any) -> None:
    timeout = env.timeout(seconds)
    assert timeout.callbacks is not None
    timeout.callbacks.append(lambda _: then())
