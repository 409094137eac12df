"""`chat_completions`: a critic behind any endpoint that speaks OpenAI's chat completions (vLLM, SGLang, a hosted model).

OpenAI's own client does the rest: it tries again after 408, 409, 429, 5xx and lost connections, as long as the server says or
with growing pauses, at most `retries` times.
"""

from __future__ import annotations

import os
from typing import Any

from toolrl.config_supervision import ReflectionConfig
from toolrl.supervision.reflection.critic import NoAnswer, Question, Reply, critics

_NO_KEY = "none"  # the client wants one; servers without keys ignore it
_RETRIES = "x-stainless-retry-count"  # the client writes into each request how often it had tried before


@critics.register("chat_completions")
async def chat_completions(question: Question, settings: ReflectionConfig) -> Reply:
    """One request with the question as the user's message.

    Raises:
        NoAnswer: refused, unreachable, or an answer without text; says which.
    """
    import openai

    client = openai.AsyncOpenAI(
        base_url=settings.base_url,
        api_key=os.environ[settings.api_key_env] if settings.api_key_env else _NO_KEY,
        max_retries=settings.retries,
        timeout=settings.deadline_s,
    )
    async with client:
        try:
            raw = await client.chat.completions.with_raw_response.create(
                model=str(settings.model),
                messages=[{"role": "user", "content": question.prompt}],
                extra_body=_sampling(settings),
            )
            answer = raw.parse()
        except openai.APIError as error:
            raise NoAnswer(_said(error), int(error.request.headers.get(_RETRIES, 0))) from error
    text = answer.choices[0].message.content if getattr(answer, "choices", None) else None
    if not text:
        raise NoAnswer("an answer without text", raw.retries_taken)
    if answer.choices[0].finish_reason == "length":
        raise NoAnswer(f"cut off at max_tokens={settings.max_tokens}", raw.retries_taken)
    return Reply(text, raw.retries_taken)


def _sampling(settings: ReflectionConfig) -> dict[str, Any]:
    """Fields of the request's body; null leaves one out, for endpoints that do not take it."""
    wanted = {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
    return {**{name: value for name, value in wanted.items() if value is not None}, **settings.extra_body}


def _said(error: Exception) -> str:
    """One line, without what was sent."""
    return f"{type(error).__name__}: {error}"[:300]
