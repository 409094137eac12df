"""GEAR, adaptive granularity (arXiv 2605.11853). **The equations are ours**: the paper's are not public.

What is known of it: the GRPO advantage is reweighted locally by the divergence between the policy and the *same* policy
conditioned on the ground-truth answer (the teacher); spikes open a segment, aligned regions stay at token level; a segment
takes the divergence at its onset. Our definition, over the policy tokens t of one trajectory with advantage A:

    d_t = log π_teacher(a_t) − log π_θ(a_t)
    a segment opens at t (outside any other) where −d_t > κ; it closes before the first later token whose entropy is below
    the batch's median token entropy (that token may open the next one); its tokens take d_onset, every other token its own d_t
    w_t = clip(exp(sign(A)·d), 1/c, c), divided by the trajectory's mean w;   A_t = A·w_t

So the sum of A_t over a trajectory is that of GRPO. Defaults κ = 1, c = 2. The median is over all policy tokens of the batch
that is given, turns are not boundaries, and A = 0 stays 0.

Traps. The teacher's log-probability must come from the same weights and code path as the policy's, or d measures the
difference of the two. Weights after renormalisation may leave [1/c, c]. The number is per token: with LLDS it still has one
sign a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from toolrl.algorithms.advantages.grpo import grpo
from toolrl.algorithms.registries import advantage_registry, needs
from toolrl.trajectory import Trajectory


def gear(
    advantages: Sequence[float],
    teacher_logp: Sequence[Sequence[float]],
    logp: Sequence[Sequence[float]],
    entropy: Sequence[Sequence[float]],
    kappa: float = 1.0,
    clip: float = 2.0,
) -> list[list[float]]:
    """Advantages of the whole batch: one list a trajectory, one number a policy token.

    Args:
        advantages: one GRPO advantage a trajectory.
        teacher_logp, logp, entropy: for each trajectory one number a policy token, tool tokens left out.
        kappa: κ, nats by which the teacher must disagree to open a segment.
        clip: c ≥ 1; 1 gives GRPO.

    Raises:
        ValueError: clip below 1, lists of different lengths, or a divergence or entropy that is NaN.
    """
    if clip < 1:
        raise ValueError(f"gear: clip={clip} must be at least 1")
    pool = np.asarray([value for row in entropy for value in row], dtype=np.float64)
    median = float(np.median(pool)) if pool.size else 0.0
    bound = math.log(clip)
    shaped = []
    for index, advantage in enumerate(advantages):
        rows = zip(teacher_logp[index], logp[index], strict=True)
        divergence = onset_divergence([t - p for t, p in rows], entropy[index], median, kappa)
        sign = (advantage > 0) - (advantage < 0)
        # exp is monotone, so clipping its argument is clipping its value; an infinite d cannot overflow so.
        weights = [math.exp(min(bound, max(-bound, sign * d))) if sign else 1.0 for d in divergence]
        mean = math.fsum(weights) / len(weights) if weights else 1.0
        shaped.append([advantage * weight / mean for weight in weights])
    return shaped


def onset_divergence(
    divergence: Sequence[float], entropy: Sequence[float], median: float, kappa: float = 1.0
) -> list[float]:
    """For each policy token of one trajectory the divergence it is weighed by: its own, or that at its segment's onset."""
    held: float | None = None
    found = []
    for index, (d, h) in enumerate(zip(divergence, entropy, strict=True)):
        if math.isnan(d) or math.isnan(h):
            raise ValueError(f"gear: policy token {index} has divergence {d} and entropy {h}; both must be numbers")
        if held is not None and h < median:
            held = None
        if held is None and -d > kappa:
            held = d
        found.append(d if held is None else held)
    return found


@advantage_registry.register("gear")
@needs("teacher", per_token=True)
def gear_batch(
    batch: Sequence[Trajectory],
    evidence: Sequence[Sequence[tuple[float, float, float]]],
    kappa: float = 1.0,
    clip: float = 2.0,
) -> list[list[float]]:
    """GEAR on recorded trajectories; `evidence[i]` has (teacher log-probability, log-probability, entropy) a policy token."""
    groups: dict[str, list[int]] = {}
    for index, member in enumerate(batch):
        groups.setdefault(member.group_id, []).append(index)
    advantages = [0.0] * len(batch)
    for members in groups.values():
        for index, value in zip(members, grpo([batch[i].reward for i in members]), strict=True):
            advantages[index] = value
    teacher, logp, entropy = ([[triple[part] for triple in row] for row in evidence] for part in range(3))
    return gear(advantages, teacher, logp, entropy, kappa, clip)
