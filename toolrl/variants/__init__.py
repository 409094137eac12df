"""Variants of a run's settings for evaluation out of distribution: the same questions and answers, something else changed.

`variants.get(name)(config, **options)` gives the settings to play with. Importing this package registers those that come
with toolrl.
"""

from __future__ import annotations

from toolrl.variants import harder_ranges, other_format, renamed_tools, reworded_prompts, tool_failures
from toolrl.variants.variant import NotApplicable, Variant, Varied, variants

__all__ = ["NotApplicable", "Variant", "Varied", "variants"]

_BUILT_IN = (harder_ranges, other_format, renamed_tools, reworded_prompts, tool_failures)  # importing registers them
