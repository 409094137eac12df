"""A reference as a member of a group (`off_policy`): OPS of arXiv 2606.26027.

    A_i over the mixed set: the group's own samples and the reference, each with its reward of this task's components
    δ_t = log π_θ(y_t | x, y_<t) − log π_old(y_t | x, y_<t),   π_old the trainer's weights when the batch was formed

Nobody's engine sampled the reference with weights of this run, so there is no μ: its correction weight is 1 and its
staleness 0. One of the run's own older trajectories is treated alike. Its recorded log-probabilities are those of the weights
of then, but it was chosen because it was good: against that choice no ratio of probabilities corrects.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolrl.supervision.guidance import note_guide
from toolrl.trajectory import NOT_SAMPLED, Trajectory, Turn


def seated(
    reference: Trajectory,
    *,
    trajectory_id: str,
    group_id: str,
    task_id: str,
    sample_index: int,
    temperature: float,
    metadata: dict[str, Any],
) -> Trajectory:
    """A copy of the reference in a seat of a group, not scored yet: the same tokens, turn by turn.

    Args:
        temperature: of the group's samples, at which log π_θ is read.
        metadata: of the task.
    """
    made = replace(
        reference,
        id=trajectory_id,
        group_id=group_id,
        task_id=task_id,
        sample_index=sample_index,
        turns=[_unsampled(turn) for turn in reference.turns],
        temperature=temperature,
        rewards={},
        timings={},
        metadata=dict(metadata),
    )
    note_guide(made, "reference", source=reference.id)
    return made


def _unsampled(turn: Turn) -> Turn:
    if turn.kind == "tool":
        return replace(turn)
    size = len(turn.token_ids)
    return replace(turn, logprobs=[0.0] * size, weight_versions=[NOT_SAMPLED] * size, rewards={})
