"""A simulated rollout worker: its engine, its event loop, its slots and interpreters, and the episodes that it plays."""

from __future__ import annotations

import math
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import simpy
from simpy.resources.resource import Request

from toolrl.planning.forecast import Tally
from toolrl.planning.layout import Layout
from toolrl.planning.processors import Engine, Job, Machine, Slots
from toolrl.planning.rates import Rates, lognormal

Process = Generator[simpy.Event, Any, None]


@dataclass
class Group:
    """One task's samples: the version of its oldest token, how many of them are done, and their tokens."""

    number: int  # in the order of issue
    version: int
    done: int = 0
    tokens: float = 0.0


class Run(Protocol):
    """What a worker knows of the run."""

    env: simpy.Environment
    machine: Machine
    rates: Rates
    layout: Layout
    random: random.Random
    tally: Tally
    changed: simpy.Event

    def ticket(self) -> Group | None: ...

    def deliver(self, group: Group) -> Process: ...


class Worker:
    """One engine and the episodes that it plays."""

    def __init__(self, run: Run) -> None:
        self.run, self.env = run, run.env
        layout, cores = run.layout, run.rates.machine.engine_cores
        self.engine = Engine(run.env, run.machine, run.rates.engine, layout.engine_requests, cores)
        self._loop, self._loop_job = simpy.Resource(run.env, 1), Job(run.env, run.machine, 1.0)
        self._slots = Slots(run.env, layout.concurrency)
        self._boxes = simpy.Resource(run.env, layout.boxes) if layout.boxes else None
        self._latency = lognormal(run.rates.tool.mean_s, run.rates.tool.p99_s)
        self._boxes_held, self._at, self.boxes_s = 0, 0.0, 0.0

    def pull(self) -> Process:
        """Takes tickets while there is room for their episodes."""
        layout = self.run.layout
        while True:
            yield self._slots.room(min(layout.group_size, layout.concurrency))
            while (group := self.run.ticket()) is None:
                yield self.run.changed
            for _ in range(layout.group_size):
                self.env.process(self._play(group))

    def _play(self, group: Group) -> Process:
        """One episode, from its first turn to its place in the group."""
        run, episode = self.run, self.run.rates.episode
        turns = geometric(run.random, episode.turns, run.layout.max_turns)
        yield self._slots.take()
        box = None
        new, context = episode.prompt_tokens / run.layout.group_size, episode.prompt_tokens
        for turn in range(turns):
            tokens = length(run.random, episode.turn_tokens, episode.turn_tokens_spread)
            yield self.engine.generate(tokens, new)
            context += tokens
            if run.rates.engine.turn_s:
                with self._loop.request() as place:
                    yield place
                    yield self._loop_job.run(run.rates.engine.turn_s)
            if turn < turns - 1:
                awaited = None
                if self._boxes is not None and box is None:
                    awaited = box = self._boxes.request()
                yield from self._call(awaited)
                new = episode.observation_tokens
                context += new
        if box is not None and self._boxes is not None:
            self.count_boxes(-1)
            self._boxes.release(box)
        self._slots.leave()
        group.tokens += context
        group.done += 1
        run.tally.sampled += 1
        run.tally.tokens += context
        if group.done == run.layout.group_size:
            yield from run.deliver(group)

    def _call(self, box: Request | None) -> Process:
        """A tool's answer, after an interpreter where the first call waits for one; an episode that waits long gives its
        slot to others meanwhile."""
        answer = self.env.process(self._answer(box))
        yield answer | self.env.timeout(self.run.layout.park_after_s)
        if not answer.processed:
            self._slots.leave()
            yield answer
            yield self._slots.take()

    def _answer(self, box: Request | None) -> Process:
        run, asked = self.run, self.env.now
        if box is not None:
            yield box
            run.tally.box_wait_s += self.env.now - asked
            self.count_boxes(1)
        if run.rates.machine.call_core_s:
            yield Job(self.env, run.machine, 1.0).run(run.rates.machine.call_core_s)
        mu, sigma = self._latency
        yield self.env.timeout(run.random.lognormvariate(mu, sigma) if mu > -math.inf else 0.0)

    def count_boxes(self, change: int) -> None:
        """Box seconds until now, and one box more or less from now on."""
        self.boxes_s += (self.env.now - self._at) * self._boxes_held
        self._at = self.env.now
        self._boxes_held += change

    def count_from_here(self) -> None:
        """Forgets what was counted."""
        self.count_boxes(0)
        self.engine.advance()
        self.boxes_s = self.engine.busy_s = self.engine.request_s = 0.0


def geometric(rng: random.Random, mean: float, most: int) -> int:
    """Turns ≥ 1 with this mean, before the limit cuts them."""
    if mean <= 1:
        return 1
    return min(1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean)), most)


def length(rng: random.Random, mean: float, spread: float) -> float:
    """A log-normal length of at least one token."""
    if spread <= 0:
        return max(mean, 1.0)
    sigma = math.sqrt(math.log(1 + spread**2))
    return max(1.0, rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))
