"""What a variant is, and the registry of them.

Invariants every variant keeps:
- It is a pure function of the settings: the same settings and options give the same variant, whatever the machine.
- It changes what its name says and nothing else; it says in words what that came to.
- Answers are checked as before: a variant never touches verifiers or ground truths.
- Where it can change nothing, or nothing that would still work, it raises NotApplicable. It never plays the run's own
  distribution under another name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolrl.config import RunConfig
from toolrl.registry import Registry


class NotApplicable(Exception):
    """The variant cannot be made of these settings; says why, and what would let it."""


@dataclass(frozen=True)
class Varied:
    """Settings out of distribution."""

    config: RunConfig
    what: str  # what is otherwise, in a few words


# (settings, **options in `eval.ood`) -> Varied. Raises NotApplicable, or UserError for an option that cannot work.
Variant = Callable[..., Varied]

variants: Registry[Variant] = Registry("evaluation variant")
