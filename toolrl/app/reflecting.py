"""Process reflection in a run: failed trajectories go to the critic, and what comes back and holds is learnt.

    failed samples ─► queue ─► critic ─► played and checked ─► ready ─► a supervised step
                      (in the background, each with its deadline)

Invariants:
- No step waits longer for the critic than `wait_s`. What comes later is learnt at a later step and counted as `late`; what
  has not come `deadline_s` after its question is given up.
- At most `queue` trajectories are under way or ready; failures beyond that are not asked about, and counted.
- Every trajectory that was asked about ends as verified, or as failed for one reason. A defect of ours is raised at the next
  step.
- A checkpoint holds what is ready, and what is under way: that is asked again when the run goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from actors.replay.records import task_index_of
from actors.worker_setup import Setup
from learner.sequence import TrainSequence
from toolrl.app.correcting import Corrector, Unfit, tools_of_corrections
from toolrl.app.lessons import Learns, supervised_sequences, taught
from toolrl.config import RunConfig
from toolrl.supervision.hints import without_hint
from toolrl.supervision.reflection import (
    Malformed,
    NoAnswer,
    Question,
    answer_of_critic,
    critics,
    failed_samples,
    question_of,
    read_correction,
)
from toolrl.tasks import AnswerChecker, Task
from toolrl.trajectory import Trajectory
from toolrl.trajectory_codec import decode, encode

log = logging.getLogger(__name__)

_STATE = "reflection.msgpack"  # in a checkpoint


@dataclass
class ReflectionCounts:
    """Since they were last read."""

    asked: int = 0
    answered: int = 0
    verified: int = 0
    retries: int = 0
    not_asked: int = 0  # the queue was full
    failed: Counter[str] = field(default_factory=Counter)  # by reason


class _State(msgspec.Struct):
    """What a checkpoint holds: trajectories with the step that asked about them."""

    ready: list[tuple[int, bytes]]
    under_way: list[tuple[int, bytes]]


class Reflection:
    """The critic's side of a run. Belongs to the running event loop."""

    def __init__(self, config: RunConfig, setup: Setup, checker: AnswerChecker) -> None:
        """See `Corrector`. Raises UnknownName for a critic that there is not."""
        self.config, self.settings, self.setup = config, config.supervision.reflection, setup
        self.critic = critics.get(str(self.settings.critic))
        self.corrector = Corrector(config, setup, checker)
        self.counts = ReflectionCounts()
        self._places = asyncio.Semaphore(self.settings.concurrency)
        self._under_way: dict[asyncio.Task[Trajectory | None], tuple[int, Trajectory]] = {}  # in the order asked
        self._ready: list[tuple[int, Trajectory]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls, config: RunConfig, model_dir: Path) -> AsyncIterator[Reflection | None]:
        """With a sandbox and verifier of its own while the context lasts; None where the run has no critic."""
        if config.supervision.reflection.critic is None:
            yield None
            return
        setup = await asyncio.to_thread(Setup.of, tools_of_corrections(config), model_dir)
        async with setup.sandbox, AnswerChecker(replace(config.tasks, verifier_processes=1)) as checker:
            reflection = cls(config, setup, checker)
            try:
                yield reflection
            finally:
                await reflection.close()
                await setup.toolbox.close()

    def ask(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Sends failed trajectories of the batch to the critic; which ones depends on the seed and the step."""
        self._collect()  # what has ended without a correction gives its place in the queue free
        draw = random.Random(f"{self.config.seed}/reflection/{step}")
        whole = self.config.rewards.weights.get("outcome", 1.0)
        for failed in failed_samples(groups, self.settings.trajectories_per_step, draw, full_outcome=whole):
            if len(self._under_way) + len(self._ready) >= self.settings.queue:
                self.counts.not_asked += 1
            else:
                bare = replace(without_hint(failed), metadata={"family": failed.metadata.get("family", "")}, rewards={})
                self._begin(step, bare)

    async def settle(self, within_s: float) -> None:
        """Waits until nothing is under way, so long at most."""
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=within_s)

    def take(self, most: int) -> list[tuple[int, Trajectory]]:
        """At most `most` corrections that hold, each with the step that asked for it: every one is given once."""
        self._collect()
        taken, self._ready = self._ready[:most], self._ready[most:]
        return taken

    def metrics(self) -> dict[str, float]:
        """The counts since the last time, and how many wait now."""
        counts, self.counts = self.counts, ReflectionCounts()
        found = {name: getattr(counts, name) for name in ("asked", "answered", "verified", "retries", "not_asked")}
        found |= {"failed": counts.failed.total(), "waiting": len(self._under_way) + len(self._ready)}
        found |= {f"failed/{reason}": number for reason, number in counts.failed.items()}
        return {f"supervision/reflection/{name}": float(value) for name, value in found.items()}

    def state(self) -> bytes:
        """For a checkpoint."""
        self._collect()
        under_way = [(step, encode(failed)) for step, failed in self._under_way.values()]
        return msgspec.msgpack.encode(_State([(step, encode(made)) for step, made in self._ready], under_way))

    async def load_state(self, state: bytes) -> None:
        """What `state` gave, in place of what there is; what was under way is asked again."""
        await self.close()
        held = msgspec.msgpack.decode(state, type=_State)
        self._ready = [(step, decode(made)) for step, made in held.ready]
        for step, failed in held.under_way:
            self._begin(step, decode(failed))

    async def close(self) -> None:
        """Gives up what is under way."""
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._under_way.clear()

    def _begin(self, step: int, failed: Trajectory) -> None:
        self.counts.asked += 1
        self._under_way[asyncio.create_task(self._correction_of(failed))] = (step, failed)

    def _collect(self) -> None:
        for task in [task for task in self._under_way if task.done()]:
            step, _ = self._under_way.pop(task)
            if (made := task.result()) is not None:
                self._ready.append((step, made))

    async def _correction_of(self, failed: Trajectory) -> Trajectory | None:
        """A correction that holds; None, counted, without one."""
        async with self._places:
            try:
                async with asyncio.timeout(self.settings.deadline_s) as deadline:
                    made = await self._asked_and_played(failed)
            except (NoAnswer, Malformed, Unfit, TimeoutError) as error:
                if isinstance(error, TimeoutError) and not deadline.expired():
                    raise
                self.counts.failed[_reason(error)] += 1
                log.info("no correction of %s: %s: %s", failed.id, _reason(error), error)
                return None
        self.counts.verified += 1
        return made

    async def _asked_and_played(self, failed: Trajectory) -> Trajectory:
        task = await asyncio.to_thread(self.setup.tasks.task, task_index_of(failed.group_id))
        question = await asyncio.to_thread(self._question, failed, task)
        try:
            reply = await answer_of_critic(self.critic, question, self.settings)
        except NoAnswer as error:
            self.counts.retries += error.retries
            raise
        self.counts.retries += reply.retries
        self.counts.answered += 1
        return await self.corrector.corrected(failed, task, read_correction(reply.text))

    def _question(self, failed: Trajectory, task: Task) -> Question:
        return question_of(
            failed,
            task.messages,
            tools=self.setup.toolbox.schemas,
            history=self.setup.chat.history(failed.turns),
            known_answer=task.known_answer if self.settings.show_answer else None,
            harmless=lambda text: self.setup.chat.observation_text(text)[0],
            must_think=self.setup.chat.checked.thinking == "opened",
            template=self.settings.prompt,
        )


def _reason(error: Exception) -> str:
    if isinstance(error, Unfit):
        return error.reason
    if isinstance(error, Malformed):
        return "malformed"
    return "no_answer" if isinstance(error, NoAnswer) else "deadline"


def check(config: RunConfig) -> None:
    """Whether there is such a critic. Raises UnknownName."""
    if config.supervision.reflection.critic is not None:
        critics.get(config.supervision.reflection.critic)


async def reflect(
    reflection: Reflection, learner: Learns, step: int, groups: Sequence[Sequence[Trajectory]]
) -> dict[str, float]:
    """Asks about the failures of this step's batch, learns what is ready, and counts."""
    settings = reflection.settings
    if step % settings.every_steps == 0:
        reflection.ask(step, groups)
    if settings.wait_s:
        await reflection.settle(settings.wait_s)
    taken = reflection.take(settings.steps * settings.batch_size)
    made = [correction for _, correction in taken]
    batches = [made[start : start + settings.batch_size] for start in range(0, len(made), settings.batch_size)]
    lesson = await taught(learner, batches, settings.learning_rate, corrected_sequences)
    late = sum(asked_at < step for asked_at, _ in taken)
    return {**lesson.metrics("reflection"), **reflection.metrics(), "supervision/reflection/late": float(late)}


def corrected_sequences(corrections: Sequence[Trajectory]) -> list[TrainSequence]:
    """Sequences for a supervised step in which the turns that the critic wrote are learnt, and those that were kept are not."""
    found = []
    for correction in corrections:
        kept = correction.metadata["corrects"]["kept"]
        for sequence in supervised_sequences([correction]):
            written = sequence.loss_mask & (sequence.turn_ids + sequence.first_turn >= kept)
            if written.any():
                found.append(replace(sequence, loss_mask=written))
    return found


def save(reflection: Reflection | None, checkpoint: Path) -> None:
    """Its state, into a checkpoint's folder."""
    if reflection is not None:
        (checkpoint / _STATE).write_bytes(reflection.state())


async def load(reflection: Reflection | None, checkpoint: Path) -> None:
    """What `save` wrote; nothing where the checkpoint is of a run without a critic."""
    if reflection is not None and (checkpoint / _STATE).is_file():
        await reflection.load_state((checkpoint / _STATE).read_bytes())
