"""`tool_failures`: more calls fail on purpose, and every call takes longer.

Does the policy try again and wait, as it must on a bad day of a real service?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from toolrl.config import RunConfig, ToolConfig
from toolrl.errors import UserError
from toolrl.variants.variant import NotApplicable, Varied, variants

HIGHEST_RATE = 0.95
DELAY = {"mean_s": 0.3, "p99_s": 1.5}


@variants.register("tool_failures")
def tool_failures(
    config: RunConfig, *, more: float = 0.3, delay: Mapping[str, float] | None = None, slower: bool = True
) -> Varied:
    """Options: `more`, added to each tool's failure_rate; `delay`, {mean_s, p99_s} of a drawn wait before each call, in the
    place of a tool's own; `slower: false` for none."""
    if not config.tools:
        raise NotApplicable("there are no tools (tools is empty) that could fail")
    if not 0 < more <= HIGHEST_RATE:
        raise UserError(f"tool_failures: more={more} must be above 0 and at most {HIGHEST_RATE}")
    wait = {key: float(value) for key, value in (delay or DELAY).items()} if slower else {}
    tools = [_worse(tool, more, wait) for tool in config.tools]
    if all(worse.failure_rate <= tool.failure_rate for worse, tool in zip(tools, config.tools, strict=True)):
        raise NotApplicable(f"every tool already fails as often as it may ({HIGHEST_RATE:g})")
    rates = [
        f"{tool.name} fails {tool.failure_rate:g} → {worse.failure_rate:g}"
        for worse, tool in zip(tools, config.tools, strict=True)
    ]
    waits = [f"waits {wait['mean_s']:g} s on average"] if wait else []
    return Varied(replace(config, tools=tools), ", ".join(rates + waits))


def _worse(tool: ToolConfig, more: float, wait: dict[str, float]) -> ToolConfig:
    rate = max(tool.failure_rate, min(HIGHEST_RATE, round(tool.failure_rate + more, 6)))
    return replace(tool, failure_rate=rate, delay=wait or tool.delay)
