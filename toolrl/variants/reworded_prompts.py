"""`reworded_prompts`: system prompt and question in other words of the same meaning.

Does the policy read what it is asked, or does it know one sentence? Phrases are replaced by a table; a text that holds none
of them is framed. No model is needed and nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from toolrl.config import RunConfig
from toolrl.config_wording import WordingConfig
from toolrl.errors import UserError
from toolrl.variants.phrases import QUESTION, SYSTEM
from toolrl.variants.variant import Varied, variants

SYSTEM_FRAME = "What follows are your instructions. {}"
QUESTION_FRAME = "Here is something to work out:\n\n{}"


@variants.register("reworded_prompts")
def reworded_prompts(
    config: RunConfig,
    *,
    system: Mapping[str, str] | None = None,
    question: Mapping[str, str] | None = None,
) -> Varied:
    """Options: `system` and `question`, {phrase: other words}, over the table that ships."""
    for option, phrases in (("system", system), ("question", question)):
        for old, new in (phrases or {}).items():
            if not old.strip() or old == new:
                raise UserError(f"reworded_prompts: option {option}: the phrase {old!r} is empty or stays as it is")
    own = config.tasks.wording
    wording = WordingConfig(
        {**SYSTEM, **own.system, **(system or {})},
        {**QUESTION, **own.question, **(question or {})},
        own.system_frame or SYSTEM_FRAME,
        own.question_frame or QUESTION_FRAME,
    )
    return Varied(
        replace(config, tasks=replace(config.tasks, wording=wording)), "system prompt and question in other words"
    )
