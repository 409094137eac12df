"""Critics: behind a real HTTP server that speaks OpenAI's protocol, and functions of the user's own."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import Any

import pytest

from tests.critic_server import Said, serving
from toolrl.config_supervision import ReflectionConfig
from toolrl.registry import UnknownName
from toolrl.supervision.reflection import NoAnswer, Question, Reply, answer_of_critic, critics
from toolrl.trajectory import Trajectory

QUESTION = Question("What should it have done?", [], Trajectory("g000000.0", "g000000", "t", 0, [1]), [], "4")


async def ask(answer: Any, **settings: Any) -> tuple[Reply, Any]:
    with serving(answer) as server:
        config = ReflectionConfig(critic="chat_completions", base_url=server.address, model="judge", **settings)
        return await answer_of_critic(critics.get("chat_completions"), QUESTION, config), server


async def test_one_request_carries_the_question_the_sampling_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    reply, server = await ask(lambda _: Said("yes"), api_key_env="JUDGE_KEY", extra_body={"top_k": 5}, max_tokens=77)
    assert reply == Reply("yes", 0)
    assert server.requests == [
        {
            "model": "judge",
            "messages": [{"role": "user", "content": QUESTION.prompt}],
            "temperature": 0.2,
            "max_tokens": 77,
            "top_k": 5,
        }
    ]
    assert server.keys == ["Bearer sesame"]


async def test_what_an_endpoint_does_not_take_is_left_out() -> None:
    _, server = await ask(lambda _: Said("yes"), temperature=None, max_tokens=None)
    assert set(server.requests[0]) == {"model", "messages"}


async def test_busy_and_broken_endpoints_are_asked_again_and_counted() -> None:
    script = iter([Said(status=429), Said(status=500), Said("yes")])
    reply, server = await ask(lambda _: next(script), retries=2)
    assert reply == Reply("yes", 2) and len(server.requests) == 3


@pytest.mark.parametrize(("status", "retries", "requests"), [(500, 2, 3), (429, 0, 1), (400, 2, 1), (401, 2, 1)])
async def test_tries_are_bounded_and_useless_ones_are_not_made(status: int, retries: int, requests: int) -> None:
    seen = []

    def answer(body: dict[str, Any]) -> Said:
        seen.append(body)
        return Said(status=status)

    with pytest.raises(NoAnswer, match=str(status)) as caught:
        await ask(answer, retries=retries)
    assert len(seen) == requests and caught.value.retries == requests - 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (Said(""), "without text"),
        (Said('{"turns": [', finish="length"), "cut off"),
        (Said(raw=b"{}"), "without text"),
        (Said(raw=b"<html>not an API</html>"), ""),
    ],
)
async def test_an_answer_without_a_whole_text_is_none(said: Said, told: str) -> None:
    with pytest.raises(NoAnswer, match=told):
        await ask(lambda _: said)


async def test_an_endpoint_that_is_not_there_gives_no_answer() -> None:
    settings = ReflectionConfig(base_url="http://127.0.0.1:9/v1", model="judge", retries=0)
    with pytest.raises(NoAnswer, match="Connection"):
        await answer_of_critic(critics.get("chat_completions"), QUESTION, settings)


def plain(question: Question, settings: ReflectionConfig) -> str:
    return f"{threading.current_thread().name}: {question.known_answer}"


async def coroutine(question: Question, settings: ReflectionConfig) -> Reply:
    return Reply(settings.model or "none", retries=3)


class Judge:
    async def __call__(self, question: Question, settings: ReflectionConfig) -> str:
        return f"for {question.trajectory.id}"


judge = Judge()


def broken(question: Question, settings: ReflectionConfig) -> str:
    raise TimeoutError("tired")


def wordless(question: Question, settings: ReflectionConfig) -> Any:
    return {"turns": []}


async def test_a_function_of_the_users_own_is_a_critic() -> None:
    async def asked(name: str) -> Reply:
        return await answer_of_critic(critics.get(f"{__name__}:{name}"), QUESTION, ReflectionConfig(model="m"))

    assert await asked("plain") == Reply("critic: 4"), "a plain function has a thread of its own"
    assert await asked("coroutine") == Reply("m", 3)
    assert await asked("judge") == Reply("for g000000.0")
    with pytest.raises(NoAnswer, match="TimeoutError: tired"):
        await asked("broken")
    with pytest.raises(NoAnswer, match="returned dict"):
        await asked("wordless")
    with pytest.raises(UnknownName, match="did you mean 'chat_completions'"):
        critics.get("chat_completion")


async def test_functions_that_never_return_hold_up_nothing() -> None:
    stuck = threading.Event()

    def never(question: Question, settings: ReflectionConfig) -> str:
        stuck.wait(10)
        return "late"

    started = time.monotonic()
    try:
        for _ in itertools.repeat(None, 40):  # more than the loop's shared threads
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(answer_of_critic(never, QUESTION, ReflectionConfig()), 0.005)
        assert await asyncio.to_thread(int, "7") == 7 and time.monotonic() - started < 5
    finally:
        stuck.set()
