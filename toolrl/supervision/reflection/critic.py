"""Who may be the critic: a function of a question. `chat_completions` is one; a user's own is named by its import path."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolrl.config_supervision import ReflectionConfig
from toolrl.registry import Registry
from toolrl.tasks.task import Message
from toolrl.trajectory import Trajectory


@dataclass(frozen=True)
class Question:
    """A failed trajectory, and what is asked of the critic."""

    prompt: str  # all of it in words, control strings made harmless; for a model this is enough
    messages: Sequence[Message]  # the task, as the policy saw it
    trajectory: Trajectory  # what the policy did, with the tools' results; without a hint
    tools: Sequence[dict[str, Any]]  # their schemas
    known_answer: str | None  # None where it is not known, or not to be shown


@dataclass(frozen=True)
class Reply:
    """What the critic wrote (see `form`), and how often it had to be asked again for it."""

    text: str
    retries: int = 0


class NoAnswer(Exception):
    """The critic gave none; says why."""

    def __init__(self, why: str, retries: int = 0) -> None:
        super().__init__(why)
        self.retries = retries


# (question, settings) -> the correction in its form. A plain function runs in a thread.
Critic = Callable[[Question, ReflectionConfig], str | Reply | Awaitable[str | Reply]]
critics: Registry[Critic] = Registry("critic")


async def answer_of_critic(critic: Critic, question: Question, settings: ReflectionConfig) -> Reply:
    """Asks once.

    Raises:
        NoAnswer: it gave none, or raised.
    """
    try:
        if inspect.iscoroutinefunction(critic):
            answer = await critic(question, settings)
        else:
            answer = await _in_a_thread(critic, question, settings)
        if inspect.isawaitable(answer):  # of an object whose call is a coroutine
            answer = await answer
    except NoAnswer:
        raise
    except Exception as error:  # a critic may be a user's own: what it raises costs this one answer
        raise NoAnswer(f"{type(error).__name__}: {error}") from error
    if isinstance(answer, str):
        return Reply(answer)
    if not isinstance(answer, Reply):
        raise NoAnswer(f"it returned {type(answer).__name__}, not text")
    return answer


async def _in_a_thread(critic: Critic, question: Question, settings: ReflectionConfig) -> Any:
    """What a plain function returns. Its thread is its own: one that never comes back keeps no place of the threads that the
    loop's other work shares, and does not hold up the end of the run."""
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
    answer.set_running_or_notify_cancel()  # from here on nobody can cancel it: a late answer goes nowhere

    def work() -> None:
        try:
            answer.set_result(critic(question, settings))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="critic", daemon=True).start()
    return await asyncio.wrap_future(answer)
