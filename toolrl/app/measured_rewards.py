"""Rewards that ask the learner, before advantages are computed: was a tool's result used?

- `masked_result`: log-probabilities of the answer with and without the results of each calling turn in sight. Cost: one forward
  pass over each measured trajectory and one for each of its turns with results, from that result on (what comes before is read
  once where prefixes are shared).
- `attention_mass`: attention of one layer. Cost: one forward pass without the head, and the weights of one layer.

Only groups that were drawn (`toolrl.rewards.budget`) are measured; the others have 0 in all of their turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from actors.worker_setup import Setup
from learner.attention_mass import Spans
from learner.sequence import TrainSequence
from learner.turns import bare_sequences
from toolrl.algorithms.groups import counts
from toolrl.answers import How, answer_tokens
from toolrl.config import RunConfig
from toolrl.config_model_rewards import MEASURED, options_in_effect
from toolrl.conversation import ChatFormat
from toolrl.conversation.result_spans import result_spans
from toolrl.errors import UserError
from toolrl.reward_records import checked, record
from toolrl.rewards.attention_mass import attention_mass
from toolrl.rewards.budget import is_measured
from toolrl.rewards.component import rewards, stage_of
from toolrl.rewards.masked_result import masked_result
from toolrl.trajectory import Trajectory


class Measures(Protocol):
    """The part of `actors.learner_group.LearnerGroup` that is needed here."""

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]: ...

    async def attention_mass(
        self, sequences: Sequence[TrainSequence], spans: Sequence[Sequence[Spans]], layer: int
    ) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class MeasuredRewards:
    """`await score(learner, members)` for each batch."""

    chat: ChatFormat
    decode: Callable[[list[int]], str]
    answer: How
    options: Mapping[str, dict[str, Any]]  # of each of `MEASURED` that the config names
    weights: Mapping[str, float]

    @classmethod
    def of(cls, config: RunConfig, setup: Setup) -> MeasuredRewards | None:
        """None where the config names none of them.

        Raises:
            UserError: the chat template rewrites history, so that results stand in prompts; or a component of the user's own is
                `scored_at("learner")`.
        """
        for part in config.rewards.components:
            if stage_of(rewards.get(part.name)) == "learner" and part.name not in MEASURED:
                raise UserError(f"rewards.components: {part.name} is scored_at('learner'), as only {MEASURED} can be")
        found = {name: options_in_effect(config.rewards, name) for name in MEASURED}
        options = {name: each for name, each in found.items() if each is not None}
        if not options:
            return None
        if setup.chat.verdict == "split":
            raise UserError(
                f"rewards.components: {' and '.join(options)} cannot tell results from prompts, because the chat template "
                "rewrites earlier turns (model.on_rewritten_history=split); remove the reward, or use another template"
            )

        def decode(ids: list[int]) -> str:
            text: str = setup.tokenizer.decode(ids, skip_special_tokens=False)
            return text

        return cls(setup.chat, decode, config.tasks.answer, options, dict(config.rewards.weights))

    async def score(
        self, learner: Measures, members: Sequence[Trajectory], weights: Mapping[str, float] | None = None
    ) -> None:
        """Writes weight × score into the turns of the members that count.

        Args:
            weights: those in force, where they are not the config's.
        """
        in_force = {**self.weights, **(weights or {})}
        for name, options in self.options.items():
            drawn = [each for each in members if counts(each) and is_measured(each.group_id, options["share"], name)]
            spans = await asyncio.to_thread(lambda: [result_spans(self.chat, each) for each in drawn])  # noqa: B023
            scores: dict[int, Any] = {}
            if name == "masked_result":
                for member, drops in zip(drawn, await self._drops(learner, drawn, spans), strict=True):
                    scores[id(member)] = masked_result(member, drops, **options)
            else:
                masses = await _masses(learner, drawn, spans, options["layer"])
                for member, seen in zip(drawn, masses, strict=True):
                    scores[id(member)] = attention_mass(member, seen, **options)
            for member in filter(counts, members):
                turns = len(member.policy_turns)
                score = checked(scores.get(id(member), [0.0] * turns), name, turns)
                record(member, name, score, in_force.get(name, 1.0))

    async def _drops(
        self, learner: Measures, members: Sequence[Trajectory], spans: Sequence[Sequence[Spans]]
    ) -> list[list[float | None]]:
        """For each member and policy turn the nats that its answer loses without the results of that turn's calls."""
        asked: list[TrainSequence] = []
        places: list[tuple[int, int | None]] = []  # of each of `asked`: (member, turn that is hidden)
        for index, (member, of_turns) in enumerate(zip(members, spans, strict=True)):
            answered = self._answer_alone(member)
            if answered is None or not any(of_turns):
                continue
            asked.append(answered)
            places.append((index, None))
            for place, hidden in enumerate(of_turns):
                if hidden:
                    asked.append(replace(answered, hidden=_mask(hidden, len(answered.policy_mask))))
                    places.append((index, place))
        sums = [float(found.sum(dtype=np.float64)) for found in (await learner.logprobs(asked) if asked else [])]
        whole = {index: value for (index, turn), value in zip(places, sums, strict=True) if turn is None}
        drops: list[list[float | None]] = [[None] * len(member.policy_turns) for member in members]
        for (index, turn), value in zip(places, sums, strict=True):
            if turn is not None:
                drops[index][turn] = whole[index] - value
        return drops

    def _answer_alone(self, member: Trajectory) -> TrainSequence | None:
        """Its sequence with nothing of the policy's but the answer's tokens; None without an answer."""
        last = member.turns[-1]
        where = answer_tokens(last, self.answer, self.decode) if member.answer is not None else None
        if where is None:
            return None
        (sequence,) = bare_sequences([member])
        before = len(sequence.policy_mask) - len(last.token_ids)
        alone = _mask([(before + where[0], before + where[1])], len(sequence.policy_mask))
        return replace(sequence, policy_mask=alone, loss_mask=alone)


async def _masses(
    learner: Measures, members: Sequence[Trajectory], spans: Sequence[Sequence[Spans]], layer: int
) -> list[list[tuple[float, float] | None]]:
    """For each member and policy turn the attention mass on the results of its calls, and what it were if spread evenly."""
    used = [index for index, of_turns in enumerate(spans) if any(of_turns)]
    sequences = bare_sequences([members[index] for index in used])
    found = await learner.attention_mass(sequences, [spans[index] for index in used], layer) if used else []
    masses: list[list[tuple[float, float] | None]] = [[None] * len(member.policy_turns) for member in members]
    for index, rows in zip(used, found, strict=True):
        masses[index] = [None if np.isnan(row).any() else (float(row[0]), float(row[1])) for row in rows]
    return masses


def _mask(spans: Spans, length: int) -> np.ndarray:
    """[length] bool, True in the spans."""
    mask: np.ndarray = np.zeros(length, dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    return mask
