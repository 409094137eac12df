"""What the loop does for supervision, with a learner that is a formula of the tokens before each token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from learner.sequence import TrainSequence, sequences_from
from tests.unit.test_supervision_groups import TASK, prompts_of, put_in, sampled
from toolrl.app.supervising import supervise, teach, with_engine_gaps, without_hints
from toolrl.config import RunConfig
from toolrl.supervision import References
from toolrl.supervision.erroneous import failed_groups
from toolrl.supervision.guidance import guided_by
from toolrl.supervision.hints import hinted_task, note_hint
from toolrl.trajectory import Outcome, Trajectory


def logp_of(tokens: Sequence[int], position: int) -> float:
    """A log-probability that depends on every token before."""
    return -1.0 - 0.5 * np.sin(sum((at + 1) * token for at, token in enumerate(tokens[: position + 1])))


class Formula:
    """A learner whose policy is `logp_of`; remembers what it is taught."""

    def __init__(self) -> None:
        self.lessons: list[tuple[list[TrainSequence], float | None]] = []

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        return [
            np.asarray(
                [
                    logp_of(s.token_ids.tolist(), s.prompt_length + t) if mine else 0.0
                    for t, mine in enumerate(s.policy_mask)
                ],
                dtype=np.float32,
            )
            for s in sequences
        ]

    async def supervised(self, sequences: Sequence[TrainSequence], learning_rate: float | None = None) -> Any:
        self.lessons.append((list(sequences), learning_rate))
        found = await self.logprobs(sequences)
        tokens = np.concatenate([each[s.loss_mask] for each, s in zip(found, sequences, strict=True)])
        return {"loss/supervised": -float(tokens.mean(dtype=np.float64))}

    @property
    def taught(self) -> list[list[str]]:
        return [[each.trajectory_id for each in sequences] for sequences, _ in self.lessons]


class Remote:
    """References as the loop sees them."""

    def __init__(self, references: References) -> None:
        self.references = references

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            return getattr(self.references, name)(*arguments)

        return SimpleNamespace(remote=call)


def hinted(index: int = 2, reward: float = 0.0) -> Trajectory:
    made = sampled(index, reward, prompts_of(hinted_task(TASK, "Call.").messages))
    note_hint(made, TASK, prompts_of, prompts_of)
    return made


def own(index: int = 0, reward: float = 0.0, task: int = 0) -> Trajectory:
    return sampled(index, reward, [*prompts_of(TASK.messages), task])


def shelf(*tasks: int) -> References:
    found = References()
    found.give(replace(own(9, 1.0, task), id=f"reference-{task}") for task in tasks)
    return found


def parts_of(references: References | None, **supervision: Any) -> tuple[Any, Formula]:
    config, learner = RunConfig(seed=5), Formula()
    for signal, settings in supervision.items():
        for name, value in settings.items():
            setattr(getattr(config.supervision, signal), name, value)
    handle = None if references is None else Remote(references)
    return SimpleNamespace(config=config, learner=learner, references=handle, reflection=None), learner


async def test_the_gap_of_a_hinted_sample_is_read_after_its_own_prompt_and_its_loss_after_the_tasks() -> None:
    played = [own(), hinted(), put_in(own())]
    played[1].turns[1].fresh_context = True  # of a rewritten history: two contexts, two sequences
    note_hint(played[1], TASK, prompts_of, prompts_of)
    (members,) = without_hints([played])
    sequences = sequences_from(members, [[0.0, 0.0]] * 3)
    found = await with_engine_gaps(Formula(), played, sequences)
    assert [each.engine_gap is None for each in found] == [True, False, False, False]
    for segment, sequence in zip(played[1].segments(), found[1:3], strict=True):
        seen = segment.token_ids
        wanted = [
            logp_of(seen, len(segment.prompt_ids) + t) - logged if mine else 0.0
            for t, (mine, logged) in enumerate(zip(segment.policy_mask(), segment.rollout_logprobs(), strict=True))
        ]
        assert sequence.engine_gap == pytest.approx(np.asarray(wanted), abs=1e-6)
        assert sequence.token_ids.tolist() != seen and sequence.token_ids.tolist()[-1] == seen[-1]
    assert found[3].engine_gap.tolist() == [0.0] * 4


def test_a_task_has_failed_when_everything_that_was_sampled_for_it_did() -> None:
    reference = put_in(own())
    reference.rewards["outcome"] = 1.0
    lost = replace(own(3, 1.0), outcome=Outcome.INFRA_ERROR)
    unknown = replace(own(3), rewards={})
    failed = [own(0), own(1, 0.4), reference, lost]  # half right is not right; what counts for nothing changes nothing
    assert failed_groups([failed, [own(0), own(1, 1.0)], [own(0), hinted(1, 1.0)], [own(0), unknown], [lost]]) == [
        failed
    ]
    assert failed_groups([[own(0, 1.0)]], full_outcome=2.0) == [[own(0, 1.0)]]


async def test_the_references_of_failed_tasks_are_learnt_in_one_step() -> None:
    parts, learner = parts_of(shelf(0, 1, 2), erroneous={"enabled": True, "learning_rate": 0.25})
    groups = [[own(0), own(1)], [own(0, 1.0, 1), own(1, 0.0, 1)], [own(0, 0.0, 2)], [own(0, 0.0, 3)]]
    metrics = await supervise(parts, 1, groups)
    ((sequences, rate),) = learner.lessons
    assert learner.taught == [["reference-0", "reference-2"]] and rate == 0.25, "there is none of task 3"
    assert all(each.loss_mask.tolist() == each.policy_mask.tolist() for each in sequences)
    assert {each.temperature for each in sequences} == {1.0}
    tokens = [
        logp_of(each.token_ids.tolist(), each.prompt_length + t) for each in sequences for t in (0, 1, 3)
    ]  # the policy's; position 2 is the tool's
    assert metrics["supervision/erroneous/loss"] == pytest.approx(-np.mean(tokens), rel=1e-6)
    assert metrics["supervision/erroneous/failed_tasks"] == 3.0
    assert metrics["supervision/erroneous/references"] == 2.0


async def test_without_failed_tasks_or_references_of_them_no_step_is_taken() -> None:
    for references, groups in ((shelf(0), [[own(0, 1.0)]]), (References(), [[own(0)]])):
        parts, learner = parts_of(references, erroneous={"enabled": True})
        metrics = await supervise(parts, 1, groups)
        assert learner.lessons == [] and metrics["supervision/erroneous/steps"] == 0.0
        assert "supervision/erroneous/loss" not in metrics


async def test_more_failed_tasks_than_a_step_may_show_are_drawn_by_seed_and_step() -> None:
    groups = [[own(0, 0.0, task)] for task in range(12)]

    async def drawn(step: int) -> list[str]:
        parts, learner = parts_of(shelf(*range(12)), erroneous={"enabled": True, "max_references": 4})
        await supervise(parts, step, groups)
        return learner.taught[0]

    assert len(await drawn(1)) == 4
    assert await drawn(1) == await drawn(1) != await drawn(2)


async def test_interleaved_steps_come_every_so_many_steps_and_draw_the_same_after_a_resume() -> None:
    settings = {"every_steps": 3, "steps": 2, "batch_size": 4, "learning_rate": 0.5}
    parts, learner = parts_of(shelf(*range(9)), interleaved=settings)
    steps = [(await supervise(parts, step, []))["supervision/interleaved/steps"] for step in range(1, 8)]
    assert steps == [0.0, 0.0, 2.0, 0.0, 0.0, 2.0, 0.0]
    assert [len(set(batch)) for batch in learner.taught] == [4] * 4
    assert {rate for _, rate in learner.lessons} == {0.5}
    again, resumed = parts_of(shelf(*range(9)), interleaved=settings)
    for step in range(4, 8):  # from the checkpoint after step 3
        await supervise(again, step, [])
    assert resumed.taught == learner.taught[2:] != learner.taught[:2]


async def test_an_epoch_shows_every_reference_once() -> None:
    _, learner = parts_of(None)
    lesson = await teach(learner, Remote(shelf(*range(9))), steps=0, batch_size=4, learning_rate=None, key="k")
    assert [len(batch) for batch in learner.taught] == [4, 4, 1] and lesson.references == 9
    assert {name for batch in learner.taught for name in batch} == {f"reference-{task}" for task in range(9)}


async def test_the_policys_own_right_samples_become_references_and_guided_ones_do_not() -> None:
    parts, _ = parts_of(References(), interleaved={"every_steps": 9})
    right, wrong, told, given = own(0, 1.0, 1), own(0, 0.0, 2), hinted(0, 1.0), put_in(own(0, 1.0, 4))
    given.rewards["outcome"] = 1.0
    metrics = await supervise(parts, 1, [[right, wrong], [told, given, replace(own(0, 1.0, 5), rewards={})]])
    assert (metrics["supervision/references"], metrics["supervision/references/own"]) == (1.0, 1.0)
    assert parts.references.references.sample(9, random.Random(0)) == [right]
    parts.config.supervision.references.own = False
    await supervise(parts, 2, [[own(0, 1.0, 6)]])
    assert parts.references.references.counts() == (1, 1)


async def test_what_guided_seats_earned_is_told_apart() -> None:
    parts, _ = parts_of(None, hint={"per_group": 1})
    given = put_in(own())
    given.rewards["outcome"] = 1.0
    for turn in (*given.turns, *(told := hinted(1, 0.5)).turns):
        turn.rewards.clear()
    metrics = await supervise(parts, 1, [[own(), own(1), told, given]])
    assert metrics == {
        "supervision/seats/reference": 0.25,
        "supervision/seats/hint": 0.25,
        "supervision/reward/reference": 1.0,
        "supervision/reward/hint": 0.5,
    }
    assert [guided_by(each) for each in without_hints([[told, given]])[0]] == ["hint", "reference"]


async def test_a_run_without_supervision_does_nothing() -> None:
    parts, learner = parts_of(None)
    assert await supervise(parts, 1, [[own()]]) == {} and learner.lessons == []
