"""Process reflection that cannot work, found before anything starts. Imports no torch.

No message shows what `api_key_env` holds: somebody may have put the key itself there.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from toolrl.config import RunConfig
from toolrl.errors import Problem

_SECTION = "supervision.reflection"
_PLACE = re.compile(r"\{(\w+)\}")
_PLACES = ("question", "tools", "transcript", "answer", "form")
_NEEDED = ("transcript", "form")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _problem(key: str, message: str, value: Any = None, **more: Any) -> Problem:
    return Problem(f"{_SECTION}.{key}", message, value, **more)


def endpoint(config: RunConfig) -> Iterator[Problem]:
    """What `chat_completions` needs to reach its endpoint."""
    wanted = config.supervision.reflection
    if wanted.critic != "chat_completions":
        return
    if importlib.util.find_spec("openai") is None:  # finds, does not import
        yield _problem(
            "critic", "needs the package openai, which is not installed; `pip install openai`", wanted.critic
        )
    if wanted.base_url is None:
        yield _problem("base_url", "is missing: set the endpoint's address, e.g. http://host:8000/v1", has_value=False)
    else:
        address = urlsplit(wanted.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            yield _problem("base_url", "is no address of an endpoint; write e.g. http://host:8000/v1", wanted.base_url)
        elif address.username or address.password:
            message = "holds a user or password; leave them out and name a variable in api_key_env"
            yield _problem("base_url", message, has_value=False)
    if not wanted.model:
        yield _problem("model", "is missing: set the model's name at the endpoint", wanted.model)
    if wanted.api_key_env is not None:
        yield from _key(wanted.api_key_env)


def _key(variable: str) -> Iterator[Problem]:
    if not _VARIABLE.fullmatch(variable):
        message = "must be the name of an environment variable that holds the key, never the key itself"
        yield _problem("api_key_env", message, has_value=False)
    elif not os.environ.get(variable):
        message = "no such environment variable is set here; export it, or set null for an endpoint without keys"
        yield _problem("api_key_env", message, has_value=False)


def prompt(config: RunConfig) -> Iterator[Problem]:
    """The user's own words ask for what is needed, and for nothing that there is not."""
    text = config.supervision.reflection.prompt
    if text is None:
        return
    found = _PLACE.findall(text)
    for place in found:
        if place not in _PLACES:
            told = ", ".join(f"{{{each}}}" for each in _PLACES)
            yield _problem("prompt", f"{{{place}}} stands for nothing; these do: {told}", has_value=False)
    for place in _NEEDED:
        if place not in found:
            yield _problem("prompt", f"holds no {{{place}}}, without which no critic can answer", has_value=False)


def failures(config: RunConfig) -> Iterator[Problem]:
    """Failed trajectories are known, and reach the learner."""
    if config.supervision.reflection.critic is None:
        return
    rewarded = [part.name.rpartition(":")[2] for part in config.rewards.components]
    if "outcome" not in rewarded:
        message = f"{_SECTION} knows a failed trajectory by the reward `outcome`, and there is none; add it"
        yield Problem("rewards.components", message, rewarded)
    if config.buffer.drop_uniform_groups:
        message = (
            f"drops the groups whose samples all failed, so {_SECTION} sees failures of the other tasks alone; set false to "
            "have those too"
        )
        yield Problem("buffer.drop_uniform_groups", message, True, warning=True)


def sizes(config: RunConfig) -> Iterator[Problem]:
    """Counts that fit each other."""
    wanted = config.supervision.reflection
    if wanted.critic is None:
        return
    if wanted.queue < wanted.trajectories_per_step:
        message = f"has no room for trajectories_per_step={wanted.trajectories_per_step}; set at least so many"
        yield _problem("queue", message, wanted.queue)
    if wanted.every_steps > config.loop.steps:
        message = f"never comes: the run has loop.steps={config.loop.steps}; set less"
        yield _problem("every_steps", message, wanted.every_steps, warning=True)
    if wanted.min_calls and not config.tools:
        yield _problem("min_calls", "there are no tools to call; set 0 and must_use_results=false", wanted.min_calls)
    if wanted.min_calls > config.rollout.max_calls:
        message = f"is more than rollout.max_calls={config.rollout.max_calls}, so no correction could hold; set less"
        yield _problem("min_calls", message, wanted.min_calls)
    if wanted.must_use_results and not wanted.min_calls:
        message = "needs a result to use; set min_calls to 1 or more, or must_use_results=false"
        yield _problem("must_use_results", message, True)


REFLECTION_CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [endpoint, prompt, failures, sizes]
