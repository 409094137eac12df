"""`code_similarity`: GTPO's outcome of a wrong trajectory, by the likeness of its code to that of its right peers.

    r_i = max(0, (α/|P|) · Σ_{p∈P} max(0, cos(e(code_i), e(code_p))) − outcome_i)   where the answer is wrong, else 0

P: the right trajectories of the group (`toolrl.algorithms.advantages.gtpo_outcome`). With weight 1 it lifts a wrong
trajectory from its outcome to the shaped one of ALGORITHMS 1.1 and never lowers a partial credit.

Ours: `code_i` is the code that ran and works (`working_code`), not all of it. Imports, comments, unused definitions and
printed literals are alike in every solution, and copying them would be paid. And an episode that did not end in an answer
earns nothing: that its tool printed the right one is not its merit.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolrl.rewards.component import rewards, scored_at
from toolrl.rewards.group_context import GroupContext
from toolrl.rewards.working_code import working_code
from toolrl.trajectory import Outcome, Trajectory


@rewards.register("code_similarity")
@scored_at("group")
def code_similarity(
    group: Sequence[Trajectory],
    context: GroupContext,
    *,
    alpha: float = 0.5,
    embedder: str = "hashed_ngrams",
    outcome_reward: str = "outcome",
) -> list[float]:
    """[n] 0 to alpha.

    Args:
        alpha: what the same code under a wrong answer is worth.
        embedder: a registered one, or an import path.
        outcome_reward: the component that is 1 where the answer is right.
    """
    right = context.right(group, outcome_reward)
    if not alpha or all(right) or not any(right):
        return [0.0] * len(group)
    # Brings torch, which the replay buffer's process, that asks about groups without spread alone, does without.
    from toolrl.algorithms.advantages import gtpo_outcome
    from toolrl.algorithms.registries import embedder_registry

    embed = embedder_registry.get(embedder)
    codes = [code_of(member) if member.outcome is Outcome.ANSWERED else "" for member in group]
    shaped = gtpo_outcome(
        [float(is_right) for is_right in right], [embed(code) if code else None for code in codes], alpha
    )
    return [
        0.0 if is_right else max(0.0, outcome - context.score(member, outcome_reward))
        for member, is_right, outcome in zip(group, right, shaped, strict=True)
    ]


def code_of(trajectory: Trajectory) -> str:
    """What works of the code that ran: the argument `code` of the calls that came back `ok`."""
    ran = {result.call_id for of_turn in trajectory.results_of_turns() for result in of_turn if result.status == "ok"}
    calls = [call for turn in trajectory.policy_turns for call in turn.calls if call.id in ran]
    return working_code([code for call in calls if isinstance(code := call.arguments.get("code"), str)])
