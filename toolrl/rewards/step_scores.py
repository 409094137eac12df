"""From scores of steps to rewards: along a trajectory, over a tree of episodes, and back to the turns.

A step is one policy turn; its score says how good the episode stands after it (0 to 1), or is None where nobody
measured it. Steps that are not known change nothing: what is known stands until the next known one.

Credit of a turn is what the aggregate gained or lost there, from the score of the prompt on. So the turns' credits add up to
the trajectory's aggregate less the start, and a further turn earns nothing by being there. For `last` these are differences
of values (potential-based shaping); for `min` this is min-form credit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from toolrl.reward_records import Score

Aggregate = Literal["last", "mean", "min", "product"]
Per = Literal["turn", "trajectory"]


@dataclass(frozen=True)
class Step:
    """A step in a tree of episodes that begin alike: its own score, and the steps that were tried after it."""

    score: float | None = None
    tried: tuple[Step, ...] = ()


def running(scores: Sequence[float | None], how: Aggregate) -> list[float]:
    """[n] the aggregate of the known scores up to each step; 0 before the first known one."""
    found: list[float] = []
    value = total = 0.0
    known = 0
    for score in scores:
        if score is not None:
            known += 1
            total += score
            if known == 1 or how == "last":
                value = score
            elif how == "mean":
                value = total / known
            elif how == "min":
                value = min(value, score)
            else:
                value *= score
        found.append(value)
    return found


def aggregate(scores: Sequence[float | None], how: Aggregate) -> float:
    """Of a whole path; 0 where nothing is known."""
    return running(scores, how)[-1] if scores else 0.0


def gains(scores: Sequence[float | None], how: Aggregate, start: float | None) -> list[float]:
    """[n] what the aggregate gained at each step.

    Args:
        start: the score before the first step; None: not known, and the first known step then gains nothing.
    """
    along = running(scores, how)
    first = next((index for index, score in enumerate(scores) if score is not None), len(scores))
    before = along[first] if start is None and first < len(scores) else start or 0.0
    along[:first] = [before] * first
    return [now - earlier for earlier, now in zip([before, *along], along, strict=False)]


def credit(scores: Sequence[float | None], how: Aggregate, per: Per, start: float | None) -> Score:
    """A reward for each turn (`gains`), or one for the trajectory: `aggregate`. In a group, whose start is the same, both are
    worth the same in sum, up to a constant."""
    return gains(scores, how, start) if per == "turn" else aggregate(scores, how)


def tree_score(step: Step, how: Aggregate, before: Sequence[float | None] = ()) -> float:
    """The mean over all that was tried after a step, branching by branching, of the aggregate over each whole path.

    Args:
        before: the scores on the way to this step.
    """
    path = [*before, step.score]
    if not step.tried:
        return aggregate(path, how)
    return sum(tree_score(after, how, path) for after in step.tried) / len(step.tried)


def values_along(branches: Sequence[Sequence[float]], end: float | None) -> list[float | None]:
    """[n] the value of each of a trajectory's n steps: the mean score of the continuations that were tried after it.

    Args:
        branches: [n - 1] for each step but the last the scores of its continuations, from 0 (failed) to 1 (solved); none
            where it was not measured, which gives None.
        end: the trajectory's own score, which is the last step's value; None: not known.
    """
    steps = [Step(tried=tuple(map(Step, scores))) for scores in branches]
    return [*(tree_score(step, "last") if step.tried else None for step in steps), end]
