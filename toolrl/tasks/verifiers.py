"""Verifiers: how good an answer is, from 0 to 1.

A verifier is a function `(answer, ground_truth, details) -> float`, registered here or named by import path in
`tasks.verifier`. It runs in a process of its own (`toolrl.tasks.checker`), so it may be slow, hang or crash without
harm to anything but the trajectory it was asked about.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from toolrl.registry import Registry

Verifier = Callable[[str, Any, dict[str, Any]], float]
verifiers: Registry[Verifier] = Registry("verifier")

# Those for which an answer equal to a ground truth text earns 1 by definition; a user's own may think otherwise.
EQUAL_IS_RIGHT = frozenset({"exact_match", "math", "reasoning_gym"})
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]\.?")


def load(name: str) -> Verifier:
    """The verifier called `name`, its libraries imported. Raises UnknownName when there is none."""
    verifier = verifiers.get(name)
    if not callable(verifier):
        raise TypeError(f"verifier {name!r} is no function but {type(verifier).__name__}")
    if name == "math":
        import math_verify  # noqa: F401
    elif name == "reasoning_gym":
        import reasoning_gym  # noqa: F401
    return verifier


def equal(answer: str, ground_truth: Any) -> bool:
    """Whether the two are the same text but for white space around it."""
    return isinstance(ground_truth, str) and answer.strip() == ground_truth.strip() != ""


def math(answer: str, ground_truth: Any, details: dict[str, Any]) -> float:
    """1 when math-verify finds the answer equal to the ground truth, or to any of a list of them."""
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return float(any(_math_equal(answer, str(one)) for one in accepted))


def _math_equal(answer: str, truth: str) -> bool:
    if equal(answer, truth):
        return True
    if _WORDS.fullmatch(truth.strip()):
        # math-verify reads a word as a product of its letters, to which every anagram is equal.
        return answer.strip().rstrip(".").casefold() == truth.strip().rstrip(".").casefold()
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its own deadline is off
    # Its deadline is off: it needs SIGALRM in the main thread, and the process has one from outside.
    gold, target = (parse(_as_latex(text), parsing_timeout=None) for text in (truth, answer))
    return bool(verify(gold, target, timeout_seconds=None))


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def exact_match(answer: str, ground_truth: Any, details: dict[str, Any]) -> float:
    """1 when the answer is the ground truth, or one of a list of them, but for case, punctuation, articles and white space: how
    question answering is scored since SQuAD (arXiv 1606.05250)."""
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    said = _plain(answer)
    return float(said != "" and any(said == _plain(str(one)) for one in accepted))


def _plain(text: str) -> str:
    words = re.sub(r"[^\w\s]", "", text.casefold()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def reasoning_gym(answer: str, ground_truth: Any, details: dict[str, Any]) -> float:
    """What the family's own `score_answer` says; some families give partial credit.

    Some scorers raise where an answer is not what they expect ("-17.5" for a list of primes). Such an answer is wrong, not
    unrewarded, or it would pay to write it: 0, if the scorer takes the right answer to the same question.
    """
    family = _family(details["family"], json.dumps(details["options"], sort_keys=True))
    try:
        return float(family.score_answer(answer, details["entry"]))
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
        family.score_answer(str(details["entry"]["answer"]), details["entry"])
        return 0.0


@functools.lru_cache(maxsize=256)
def _family(name: str, options_json: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(name, **json.loads(options_json), size=1, seed=0)


# Not decorators: `toolrl.registered_names` reads those of this folder as the kinds of `tasks.kind`.
verifiers.register("exact_match")(exact_match)
verifiers.register("math")(math)
verifiers.register("reasoning_gym")(reasoning_gym)
