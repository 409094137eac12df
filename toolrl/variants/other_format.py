"""`other_format`: calls are written in another format, and the prompt says which.

Does the policy follow the instructions for calls, or only the one format it was trained in?
"""

from __future__ import annotations

from dataclasses import replace

from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.variants.variant import NotApplicable, Varied, variants

# Formats that write code alone, for the tool `python`.
CODE_FORMATS = ("fenced", "tagged")
# What vLLM's own parsers share with ours.
SAME = {"vllm:hermes": "hermes", "vllm:qwen3_json": "hermes"}


@variants.register("other_format")
def other_format(config: RunConfig, *, parser: str | None = None) -> Varied:
    """Options: `parser`, what is to read the calls; else `tagged` where only python is called, `hermes` where that is not
    the run's own."""
    own = SAME.get(config.rollout.parser, config.rollout.parser)
    if not config.tools:
        raise NotApplicable("there are no tools (tools is empty), so there are no calls to write")
    only_python = all(tool.name == "python" and not tool.rename for tool in config.tools)
    if parser is not None:
        if SAME.get(parser, parser) == own:
            raise UserError(f"other_format: parser {parser!r} is the format of the run itself; name another")
        if parser in CODE_FORMATS and not only_python:
            raise UserError(f"other_format: parser {parser!r} can only call python with code; name another")
        other = parser
    elif own != "hermes":
        other = "hermes"
    elif only_python:
        other = "tagged"
    else:
        raise NotApplicable(
            "no other format that ships can write calls to these tools; name one: eval.ood=[…, {name: other_format, options: "
            "{parser: vllm:NAME or module:attribute}}]"
        )
    return Varied(replace(config, rollout=replace(config.rollout, parser=other)), f"{config.rollout.parser} → {other}")
