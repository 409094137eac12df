"""The settings that put prompts into other words; see docs/evaluation.md. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

# OmegaConf reads these annotations at run time and wants Optional[X] spelled so.
# ruff: noqa: UP045


@dataclass
class WordingConfig:
    """Other words for the same prompts: phrase -> what stands in its place, as whole words, the longest phrase first."""

    system: dict[str, str] = field(default_factory=dict)  # in system messages
    question: dict[str, str] = field(default_factory=dict)  # in the user's messages
    # Around a text in which no phrase was found; `{}` stands for the text.
    system_frame: Optional[str] = None
    question_frame: Optional[str] = None
