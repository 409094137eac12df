"""The loop as a discrete-event simulation: tickets, batches, updates, publications, under the rules of the replay buffer.

Invariants (those of `actors/replay`): groups that are begun and not yet trained never exceed (max_staleness + 1) ×
groups_per_step, a trained group counting until the version that it made is published; a batch holds whole groups, in the order
of issue, none with a token older than `max_staleness` versions, and waits for groups whose last chance it is.

Many engines are alike: a few of them are played, with their share of the batch and of the learner, and stand for all.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import simpy

from toolrl.planning.episodes import Group, Worker
from toolrl.planning.forecast import Forecast, Tally
from toolrl.planning.layout import Layout
from toolrl.planning.processors import Job, Machine
from toolrl.planning.rates import Rates

MOST_WORKERS = 8


def simulate(
    rates: Rates, layout: Layout, *, steps: int = 20, seed: int = 0, most_workers: int = MOST_WORKERS
) -> Forecast:
    """What `steps` steps give once the pipeline is full.

    Args:
        steps: measured ones; staleness + 2 are played before them.
        most_workers: so many are played at most.
    """
    played = min(layout.workers, most_workers)
    groups = max(1, round(layout.groups_per_step * played / layout.workers))
    part = replace(layout, workers=played, groups_per_step=groups)
    # A part of the batch on the same part of the learner: a step is as long as the whole one.
    run = SimulatedRun(rates, part, share=groups / layout.groups_per_step, seed=seed)
    return Forecast.of(run.play(warm_up=layout.max_staleness + 2, steps=steps), rates, layout)


class SimulatedRun:
    """Buffer and learner; the workers are `episodes.Worker`."""

    def __init__(self, rates: Rates, layout: Layout, *, share: float, seed: int) -> None:
        self.rates, self.layout, self.share = rates, layout, share
        self.random = random.Random(seed)
        self.env = simpy.Environment()
        self.buffer = simpy.Resource(self.env, 1)
        self.machine = Machine(rates.machine.cores)
        self.tally = Tally()
        self.version = 0
        self.issued = 0
        self.begun = 0  # groups that count against the admission bound
        self.playing: dict[int, Group] = {}  # by number
        self.ready: list[Group] = []
        self.changed = self.env.event()  # a group was delivered, or a version published
        self.workers = [Worker(self) for _ in range(layout.workers)]

    def play(self, warm_up: int, steps: int) -> Tally:
        """Until so many steps have been trained; what happened after the first `warm_up` of them."""
        trained = self.env.process(self._learn(warm_up, steps))
        for worker in self.workers:
            self.env.process(worker.pull())
        self.env.run(until=trained)
        return self.tally

    def ticket(self) -> Group | None:
        """A new group, where the bound admits one."""
        if self.begun >= (self.layout.max_staleness + 1) * self.layout.groups_per_step:
            return None
        self.begun += 1
        self.issued += 1
        group = Group(self.issued, self.version)
        self.playing[group.number] = group
        return group

    def deliver(self, group: Group) -> Generator[simpy.Event, Any, None]:
        """A whole group, through the one buffer, for the learner. The played part has its share of the buffer."""
        with self.buffer.request() as turn:
            yield turn
            yield self.env.timeout(self.layout.group_size / (self.rates.buffer.trajectories_per_s * self.share))
        del self.playing[group.number]
        self.ready.append(group)
        self._tell()

    def _tell(self) -> None:
        event, self.changed = self.changed, self.env.event()
        event.succeed()

    def _batch(self) -> list[Group] | None:
        """The next batch, or None to wait."""
        size, oldest = self.layout.groups_per_step, self.version - self.layout.max_staleness
        fresh = [each for each in self.ready if each.version >= oldest]
        self.tally.stale += len(self.ready) - len(fresh)
        self.begun -= len(self.ready) - len(fresh)
        self.ready = sorted(fresh, key=lambda each: (each.version > oldest, each.number))
        urgent = sum(each.version == oldest for each in fresh)
        awaited = any(each.version == oldest for each in self.playing.values())
        if len(fresh) < size or (urgent < size and awaited):
            return None
        chosen, self.ready = self.ready[:size], self.ready[size:]
        return chosen

    def _learn(self, warm_up: int, steps: int) -> Generator[simpy.Event, Any, None]:
        rates, env = self.rates, self.env
        learner = Job(env, self.machine, rates.machine.learner_cores * self.layout.learner_ranks)
        speed = rates.learner.tokens_per_s * self.layout.learner_ranks * self.share
        for step in range(warm_up + steps):
            if step == warm_up:
                self._measure_from_here()
            asked = env.now
            while (batch := self._batch()) is None:
                yield self.changed
            started = env.now
            self._take_turns(engines=False)
            yield learner.run(rates.learner.step_s + sum(group.tokens for group in batch) / speed)
            learnt = env.now
            turn_s = rates.weights.turn_s if self.layout.colocated else 0.0
            yield env.timeout(rates.weights.bytes / rates.weights.bytes_per_s + rates.weights.pause_s + turn_s)
            for worker in self.workers:
                worker.engine.pause(rates.weights.pause_s)
            self._take_turns(engines=True)
            ages = [self.version - group.version for group in batch]
            self.tally.step(started - asked, learnt - started, env.now - learnt, ages)
            self.version += 1
            self.begun -= len(batch)
            self._tell()
        self._finish()

    def _take_turns(self, *, engines: bool) -> None:
        """Where engines and learner share their GPUs, the ones sleep while the other works."""
        for worker in self.workers if self.layout.colocated else []:
            if engines:
                worker.engine.wake()
            else:
                worker.engine.sleep()

    def _measure_from_here(self) -> None:
        self.tally = Tally(started=self.env.now, workers=len(self.workers))
        for worker in self.workers:
            worker.count_from_here()

    def _finish(self) -> None:
        tally, n = self.tally, len(self.workers)
        tally.wall_s = self.env.now - tally.started
        for worker in self.workers:
            worker.engine.advance()
            worker.count_boxes(0)
        tally.engine_busy_s = sum(worker.engine.busy_s for worker in self.workers) / n
        tally.request_s = sum(worker.engine.request_s for worker in self.workers) / n
        tally.boxes_s = sum(worker.boxes_s for worker in self.workers) / n
