"""`interaction`: a reward for calling where it was needed, by the evidence of the group.

    evidence = solve rate of the samples with calls − solve rate of those without, on the same task
    r_i = max(0, evidence) · use_i  where sample i has the right answer and made use of a call, else 0

With the weight α: r = r_outcome + α · r_interaction. The number of calls is nowhere in it. A sample counts as one with calls
when something that a tool gave stands in what the policy wrote later (`provenance`), so a call that does nothing, or that
is ignored, is none. A group in which all of them called, or none, holds no evidence.

Chance can only reward calls here, never punish them: small groups lean towards calling. That is its purpose, against a
policy that gives its calls up; `call_cost` is the counterweight.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolrl.rewards.component import rewards, scored_at
from toolrl.rewards.group_context import GroupContext
from toolrl.rewards.provenance import uses_of_calls
from toolrl.supervision.guidance import guided_by
from toolrl.trajectory import Trajectory


@rewards.register("interaction")
@scored_at("group")
def interaction(group: Sequence[Trajectory], context: GroupContext, *, outcome_reward: str = "outcome") -> list[float]:
    """[n] 0 to 1. What the policy did not sample by itself (a reference, an episode with a hint) is no evidence and earns
    nothing.

    Args:
        outcome_reward: the component that is 1 where the answer is right.
    """
    own = [guided_by(member) is None for member in group]
    right = context.right(group, outcome_reward)
    uses = [max((each.use for each in uses_of_calls(member, trivial=True)), default=0.0) for member in group]
    sides = list(zip(own, uses, right, strict=True))
    found = evidence(
        [is_right for is_own, use, is_right in sides if is_own and use > 0],
        [is_right for is_own, use, is_right in sides if is_own and use == 0],
    )
    gain = max(0.0, found or 0.0)
    return [gain * use if is_own and is_right else 0.0 for is_own, use, is_right in sides]


def evidence(with_calls: Sequence[bool], without: Sequence[bool]) -> float | None:
    """Solve rate with calls − solve rate without, −1 to 1; None where one side is empty."""
    if not with_calls or not without:
        return None
    return sum(with_calls) / len(with_calls) - sum(without) / len(without)
