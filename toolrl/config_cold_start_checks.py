"""Settings of an interaction-dense cold start that cannot work. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from toolrl.config import RunConfig
from toolrl.errors import Problem


def dense_cold_start_problems(config: RunConfig) -> Iterator[Problem]:
    c, r = config.cold_start, config.rollout
    if not c.dense:
        return
    for key in ("direct_guess_share", "wrong_code_share"):
        if getattr(c, key) > 0:
            message = "dense traces are kept for their right answers, and these would be wrong; set 0, or dense=false"
            yield Problem(f"cold_start.{key}", message, getattr(c, key))
    if not any(tool.name == "python" for tool in config.tools):
        yield Problem(
            "cold_start.dense", "its steps are calls of the tool python, which is not among tools; add it", True
        )
    if not c.steps:
        return
    failing = int(c.retry_share > 0) + int(c.malformed_call_share > 0)
    calls = c.max_calls + failing
    why = f"cold_start.max_calls={c.max_calls}{f' and {failing} that fail' if failing else ''}"
    # More than rollout.max_calls without those that fail is refused for every cold start.
    if c.max_calls <= r.max_calls < calls:
        yield Problem("rollout.max_calls", f"a dense trace has up to {calls} calls ({why}); set {calls}", r.max_calls)
    if r.max_turns < calls + 1:
        message = f"a dense trace has up to {calls} calls ({why}), one a turn, and an answer; set {calls + 1}"
        yield Problem("rollout.max_turns", message, r.max_turns)
