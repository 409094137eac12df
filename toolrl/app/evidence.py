"""What the learner is asked before advantages are computed: values of turns, a teacher's log-probabilities, the KL of a reward.

- `values` (steppo, lambda_return): the critic's V of each policy turn.
- `teacher` (gear): for each policy token (log-probability under the policy that was told the answer, log-probability
  under the policy, entropy under the policy). The teacher is the policy of now on `answer_hints`' prompts with the response
  as it is; a task without a known answer has its own policy as teacher, so that every weight is 1.
- KL in the reward: −β · Σ of the KL estimates of a turn's tokens becomes the turn reward `kl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from learner.sequence import TrainSequence
from learner.turns import bare_sequences, by_token, by_turn, value_targets
from toolrl.algorithms.groups import counts
from toolrl.algorithms.registries import advantage_registry, needed_evidence
from toolrl.algorithms.regularizers import kl
from toolrl.app.answer_hints import AnswerHints
from toolrl.config import AlgorithmConfig
from toolrl.trajectory import Trajectory


class Measures(Protocol):
    """The part of `actors.learner_group.LearnerGroup` that is needed here."""

    async def values(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]: ...

    async def token_statistics(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]: ...

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]: ...

    async def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]: ...


async def gather_evidence(
    learner: Measures, advantage: str, members: Sequence[Trajectory], hints: AnswerHints | None
) -> list[Any] | None:
    """For each trajectory that counts what the advantage needs; None where it needs nothing."""
    kind = needed_evidence(advantage_registry.get(advantage))
    if kind is None:
        return None
    sequences = bare_sequences(members)
    if kind == "values":
        return by_turn(members, await learner.values(sequences))
    if hints is None:
        raise ValueError(f"advantage {advantage!r} needs the tasks' answers and none were given")
    return await _teacher(learner, members, sequences, hints)


async def _teacher(
    learner: Measures, members: Sequence[Trajectory], sequences: Sequence[TrainSequence], hints: AnswerHints
) -> list[Any]:
    own = await learner.token_statistics(sequences)
    told = [hinted for member in members if counts(member) for hinted in hints.sequences(member)]
    known = [index for index, hinted in enumerate(told) if hinted is not None]
    taught = await learner.logprobs([hinted for hinted in told if hinted is not None])
    triples = [np.column_stack([each[:, 0], each]) for each in own]
    for index, logps in zip(known, taught, strict=True):
        triples[index][:, 0] = logps[sequences[index].policy_mask]
    return [rows.tolist() for rows in by_token(members, triples)]


async def charge_kl(learner: Measures, algorithm: AlgorithmConfig, members: Sequence[Trajectory]) -> None:
    """Writes the turn reward `kl` where the regulariser `kl` is in the reward; its weight is β."""
    for named in algorithm.regularizers:
        weight = float(named.options.get("weight", 1.0))
        if named.name != "kl" or named.options.get("place", "loss") != "reward" or not weight:
            continue
        sequences = bare_sequences(members)
        policy, reference = await learner.logprobs(sequences), await learner.reference_logprobs(sequences)
        estimates = []
        for sequence, ours, theirs in zip(sequences, policy, reference, strict=True):
            logp, ref_logp, mask = (torch.from_numpy(part) for part in (ours, theirs, sequence.policy_mask))
            found = kl(logp, ref_logp, mask, named.options.get("estimator", "k3"))
            estimates.append(found.numpy()[sequence.policy_mask])
        for member, tokens in zip(filter(counts, members), by_token(members, estimates), strict=True):
            ends = np.cumsum([len(turn.token_ids) for turn in member.policy_turns])[:-1]
            for turn, part in zip(member.policy_turns, np.split(tokens, ends), strict=True):
                turn.rewards["kl"] = -weight * float(part.sum(dtype=np.float64))


def with_targets(
    sequences: Sequence[TrainSequence],
    members: Sequence[Trajectory],
    values: Sequence[Sequence[float]],
    returns: Sequence[Sequence[float]],
) -> list[TrainSequence]:
    """The same sequences with what the critic is trained towards."""
    found = value_targets(members, values, returns)
    return [replace(sequence, value_targets=each) for sequence, each in zip(sequences, found, strict=True)]
