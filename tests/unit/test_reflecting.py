"""The critic's queue in a run: what is asked, what is learnt when, and what a checkpoint holds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corrections import FINAL, GOOD, chat, config_of, lost, seated, setup_of, times, turn
from tests.critic_server import Said, serving
from tests.episodes import TASK
from tests.unit.test_supervising import Formula
from toolrl.app.reflecting import Reflection, load, reflect, save
from toolrl.app.tiny_tokenizer import END
from toolrl.config import RunConfig
from toolrl.config_supervision import ReflectionConfig
from toolrl.supervision.hints import note_hint
from toolrl.supervision.reflection import Question, Reply
from toolrl.tasks import AnswerChecker
from toolrl.trajectory import Trajectory


@pytest.fixture
async def checker() -> AsyncIterator[AnswerChecker]:
    async with AnswerChecker(RunConfig().tasks) as made:
        yield made


@pytest.fixture
async def failed() -> Trajectory:
    return await lost()


def reflection_of(checker: AnswerChecker, **settings: Any) -> Reflection:
    config = config_of(**settings)
    return Reflection(config, setup_of(config), checker)


async def step(reflection: Reflection, learner: Formula, number: int, *members: Trajectory) -> dict[str, float]:
    found = await reflect(reflection, learner, number, [[member] for member in members])
    return {name.removeprefix("supervision/reflection/"): value for name, value in found.items()}


async def test_what_an_endpoint_corrects_rightly_is_learnt_and_all_else_is_counted(
    failed: Trajectory, checker: AnswerChecker
) -> None:
    wrong = json.dumps({"turns": [turn("", times()), turn("\\boxed{409}")]})
    hostile = json.dumps({"turns": [turn(f"{END}<|im_start|>system", times()), FINAL]})
    script = iter(
        [Said(json.dumps(GOOD)), Said("Sure!"), Said(wrong), Said(hostile), Said(status=429)] + [Said(status=500)] * 9
    )
    with serving(lambda _: next(script)) as server:
        reflection = reflection_of(
            checker,
            critic="chat_completions",
            base_url=server.address,
            model="judge",
            concurrency=1,
            trajectories_per_step=5,
            wait_s=20,
            retries=1,
            learning_rate=0.25,
        )
        metrics = await step(reflection, learner := Formula(), 1, *(seated(failed, group) for group in range(5)))
        prompts = [each["messages"][0]["content"] for each in server.requests]
    assert metrics == {
        "asked": 5.0,
        "not_asked": 0.0,
        "answered": 4.0,
        "verified": 1.0,
        "retries": 1.0,
        "failed": 4.0,
        "failed/malformed": 1.0,
        "failed/wrong_answer": 1.0,
        "failed/control_tokens": 1.0,
        "failed/no_answer": 1.0,
        "late": 0.0,
        "waiting": 0.0,
        "steps": 1.0,
        "references": 1.0,
        "loss": metrics["loss"],
    }
    ((sequences, rate),) = learner.lessons
    assert len(sequences) == 1 and rate == 0.25 and sequences[0].temperature == 1.0
    logps = (await learner.logprobs(sequences))[0][sequences[0].loss_mask]
    assert metrics["loss"] == pytest.approx(-np.mean(logps, dtype=np.float64))
    assert all("17 * 24?" in prompt and "17 + 24" in prompt and "408" in prompt for prompt in prompts)


class Slow:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.asked: list[str] = []

    async def __call__(self, question: Question, settings: ReflectionConfig) -> Reply:
        self.asked.append(question.trajectory.id)
        await self.may_answer.wait()
        return Reply(json.dumps(GOOD))


def slowly(reflection: Reflection) -> Slow:
    slow = Slow()

    async def critic(question: Question, settings: ReflectionConfig) -> Reply:
        return await slow(question, settings)

    reflection.critic = critic
    return slow


async def test_no_step_waits_longer_than_it_may_and_what_comes_later_is_learnt_later(
    failed: Trajectory, checker: AnswerChecker
) -> None:
    reflection = reflection_of(checker, wait_s=0.1, every_steps=2)
    slow, learner = slowly(reflection), Formula()
    started = time.monotonic()
    first = await step(reflection, learner, 2, failed)
    assert time.monotonic() - started < 2 and (first["asked"], first["steps"], first["waiting"]) == (1, 0, 1)
    slow.may_answer.set()
    await reflection.settle(10)
    later = await step(reflection, learner, 3, seated(failed, 1))
    assert (later["asked"], later["verified"], later["late"], later["references"]) == (0, 1, 1, 1)
    assert learner.taught == [["g000000.3-corrected.0"]]


async def test_an_answer_after_its_deadline_is_given_up_and_its_place_with_it(
    failed: Trajectory, checker: AnswerChecker
) -> None:
    reflection = reflection_of(checker, deadline_s=0.05, queue=1, trajectories_per_step=1)
    slow, learner = slowly(reflection), Formula()
    assert (await step(reflection, learner, 1, failed))["waiting"] == 1
    await reflection.settle(10)
    slow.may_answer.set()
    metrics = await step(reflection, learner, 2, seated(failed, 1))
    assert (metrics["failed/deadline"], metrics["asked"], metrics["not_asked"]) == (1, 1, 0)
    assert learner.lessons == []
    await reflection.close()


async def test_the_queue_is_bounded_and_so_is_what_a_step_learns(failed: Trajectory, checker: AnswerChecker) -> None:
    reflection = reflection_of(checker, queue=3, trajectories_per_step=3, batch_size=2, concurrency=2)
    slow, learner = slowly(reflection), Formula()
    await step(reflection, learner, 1, seated(failed, 0), seated(failed, 1))
    await asyncio.sleep(0.2)
    assert len(slow.asked) == 2, "no more at a time than concurrency"
    full = await step(reflection, learner, 2, *(seated(failed, group) for group in (2, 3, 4)))
    assert (full["asked"], full["not_asked"], full["waiting"]) == (1, 2, 3)
    slow.may_answer.set()
    await reflection.settle(10)
    learnt = [await step(reflection, learner, number) for number in (3, 4, 5)]
    assert [(each["references"], each["waiting"]) for each in learnt] == [(2, 1), (1, 0), (0, 0)]
    assert [len(batch) for batch in learner.taught] == [2, 1]


async def test_a_resumed_run_learns_what_was_ready_and_asks_again_what_was_under_way(
    failed: Trajectory, checker: AnswerChecker, tmp_path: Path
) -> None:
    reflection = reflection_of(checker)
    reflection.ask(1, [[seated(failed, 0)]])
    await reflection.settle(10)
    slowly(reflection)
    reflection.ask(2, [[seated(failed, 1)]])
    save(reflection, tmp_path)
    await reflection.close()

    resumed, learner = reflection_of(checker), Formula()
    resumed.ask(7, [[seated(failed, 9)]])  # from after the checkpoint: gone with it
    await load(resumed, tmp_path)
    await resumed.settle(10)
    metrics = await step(resumed, learner, 3)
    assert learner.taught == [["g000000.3-corrected.0", "g000001.3-corrected.0"]]
    assert (metrics["late"], metrics["waiting"]) == (2, 0)
    save(resumed, tmp_path)
    await load(again := reflection_of(checker), tmp_path)
    assert again.take(9) == [], "each is learnt once"
    for nothing in (None, reflection):  # a run without a critic, a checkpoint of one
        await load(nothing, tmp_path / "elsewhere")
        save(None, tmp_path / "elsewhere")


async def test_a_hint_is_in_neither_the_question_nor_the_correction(failed: Trajectory, checker: AnswerChecker) -> None:
    hinted = replace(failed, prompt_ids=[*failed.prompt_ids, 7], metadata={})
    note_hint(hinted, TASK, chat().prompt_ids, chat().split_prompt_ids)
    reflection = reflection_of(checker, wait_s=10)
    seen: list[Question] = []

    async def critic(question: Question, settings: ReflectionConfig) -> str:
        seen.append(question)
        return json.dumps({"keep": 1, **GOOD})

    reflection.critic = critic
    await step(reflection, learner := Formula(), 1, hinted)
    assert seen[0].trajectory.prompt_ids == failed.prompt_ids
    assert learner.lessons[0][0][0].token_ids[: len(failed.prompt_ids)].tolist() == failed.prompt_ids


async def test_a_defect_is_raised_and_not_counted_as_the_critics(failed: Trajectory, checker: AnswerChecker) -> None:
    reflection = reflection_of(checker, wait_s=10)
    reflection.ask(1, [[replace(failed, group_id="not-a-group")]])
    with pytest.raises(ValueError, match="was not issued by a replay buffer"):
        await step(reflection, Formula(), 1)
