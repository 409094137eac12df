"""A mixed group in the learner: own samples, one with a hint, a reference; against float64 of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.metrics import Sums
from learner.objective import GlobalCounts, PolicyObjective
from learner.packing import pack
from learner.sequence import TrainSequence, sequences_from
from tests.unit.test_supervision_groups import TASK, prompts_of, put_in, sampled
from toolrl.algorithms import group_advantages
from toolrl.config import AlgorithmConfig, Named
from toolrl.supervision.hints import hinted_task, note_hint, without_hint
from toolrl.trajectory import Trajectory

HINTED_GAP = [0.25, -0.5, 0.0, 1.5]  # log π_old − log μ after the prompt with the hint; 0 at the tool's token


def mixed_group() -> list[Trajectory]:
    own = [sampled(0, 0.0, prompts_of(TASK.messages)), sampled(1, 0.0, prompts_of(TASK.messages))]
    hinted = sampled(2, 1.0, prompts_of(hinted_task(TASK, "Call.").messages))
    note_hint(hinted, TASK, prompts_of, prompts_of)
    reference = put_in(sampled(prompt=prompts_of(TASK.messages)), group_id="g000001")
    reference.rewards["outcome"] = 1.0
    group = [*own, hinted, reference]
    for member in group:
        member.turns[-1].rewards.clear()
        member.temperature = 1.0
    return group


def mixed_sequences() -> list[TrainSequence]:
    group = [without_hint(member) for member in mixed_group()]
    sequences = sequences_from(group, group_advantages("grpo", group))
    sequences[2].engine_gap = np.asarray(HINTED_GAP, dtype=np.float32)
    return sequences


def test_every_member_is_trained_after_the_same_prompt_on_its_policy_tokens() -> None:
    sequences = mixed_sequences()
    for sequence in sequences:
        assert sequence.token_ids[: sequence.prompt_length].tolist() == prompts_of(TASK.messages)
        assert sequence.loss_mask.tolist() == sequence.policy_mask.tolist() == [True, True, False, True]
    # rewards 0 0 1 1: mean 1/2, std (ddof 1) 1/√3
    expected = [-math.sqrt(3) / 2] * 2 + [math.sqrt(3) / 2] * 2
    assert [sequence.advantages[0] for sequence in sequences] == pytest.approx(expected, rel=1e-5)


def test_only_a_reference_has_a_gap_of_nothing_by_itself() -> None:
    bare = sequences_from(mixed_group(), [[0.0, 0.0]] * 4)
    assert [sequence.engine_gap is None for sequence in bare] == [True, True, True, False]
    assert bare[3].engine_gap.tolist() == [0.0] * 4


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1], [2], [3]], [[3, 0], [1, 2]]])
def test_the_loss_and_its_gradient_are_those_of_the_equations(parts: list[list[int]]) -> None:
    sequences = mixed_sequences()
    config = AlgorithmConfig(policy_loss=Named("token"), correction=Named("tis", {"cap": 2.0}), regularizers=[])
    objective, counts = PolicyObjective(config, max_response_tokens=8), GlobalCounts.of(sequences)
    generator = np.random.default_rng(0)
    logps, olds = (generator.normal(-1.0, 0.2, (4, 4)) for _ in range(2))  # [member, response position]
    total, sums, gradients = 0.0, Sums(), np.zeros((4, 4))
    for part in parts:
        batch = pack([sequences[index] for index in part])
        mask = batch.policy_mask.numpy()
        logp = torch.tensor(logps[part][mask], dtype=torch.float32, requires_grad=True)
        old = torch.tensor(olds[part][mask], dtype=torch.float32)
        loss = objective.loss(batch, logp, torch.zeros_like(logp), old, None, counts, sums)
        loss.backward()
        total += float(loss)
        gradients[part] += batch.grid(logp.grad).numpy()
    wanted, wanted_gradients, gap = 0.0, np.zeros((4, 4)), 0.0
    tokens = 4 * 3
    for index, sequence in enumerate(sequences):
        for t in np.flatnonzero(sequence.policy_mask):
            advantage = float(sequence.advantages[t])
            ratio = math.exp(logps[index, t] - olds[index, t])
            log_k = (  # own: engine against trainer; hinted: as measured with the hint; reference: nobody's engine
                olds[index, t] - float(sequence.rollout_logp[t]) if index < 2 else [HINTED_GAP[t], 0.0][index - 2]
            )
            k = min(math.exp(log_k), 2.0)
            clipped = min(max(ratio, 0.8), 1.2)
            wanted += -k * min(ratio * advantage, clipped * advantage) / tokens
            flows = ratio * advantage <= clipped * advantage
            wanted_gradients[index, t] = -k * advantage * ratio / tokens * flows
            gap += abs(log_k)
    assert total == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(gradients, wanted_gradients, rtol=1e-5, atol=1e-7)
    assert float(sums.totals["gap"]) == pytest.approx(gap, rel=1e-5)


def test_at_the_first_optimiser_step_every_ratio_is_one() -> None:
    """Whatever the hint did: old log-probabilities are read where log-probabilities are, after the prompt without it."""
    sequences = mixed_sequences()
    objective = PolicyObjective(AlgorithmConfig(correction=None), max_response_tokens=8)
    batch, sums = pack(sequences), Sums()
    logp = torch.full((12,), -1.25, requires_grad=True)
    loss = objective.loss(batch, logp, torch.zeros(12), None, None, GlobalCounts.of(sequences), sums)
    loss.backward()
    weights = batch.advantages[batch.policy_mask] / 12  # token mean, ρ = 1
    torch.testing.assert_close(logp.grad, -weights)
    assert sums.ratio_metrics()["ratio/max"] == pytest.approx(1.0)


def test_a_ratio_against_the_engine_takes_the_given_gap_for_it() -> None:
    """CPPO's ρ = π_θ/μ: of a reference it is π_θ/π_old, of a hinted sample the gap after the hint is in it."""
    sequences = mixed_sequences()
    batch, counts = pack(sequences), GlobalCounts.of(sequences)
    options = {"delta": 1.0}  # nothing is dropped, so that the loss is −Aρ
    objective = PolicyObjective(
        AlgorithmConfig(policy_loss=Named("cppo", options), correction=None, regularizers=[]), max_response_tokens=8
    )
    logp, old = (torch.full((12,), value) for value in (-1.0, -1.25))
    total = objective.loss(batch, logp, torch.zeros(12), old, None, counts, Sums())
    wanted = 0.0
    for index, sequence in enumerate(sequences):
        for t in np.flatnonzero(sequence.policy_mask):
            mu = [float(sequence.rollout_logp[t])] * 2 + [-1.25 - HINTED_GAP[t], -1.25]
            wanted += -float(sequence.advantages[t]) * math.exp(-1.0 - mu[index]) / 12
    assert float(total) == pytest.approx(wanted, rel=1e-5)


def test_a_batch_of_own_samples_alone_carries_no_gaps() -> None:
    batch = pack(mixed_sequences()[:2])
    assert batch.engine_gap is None and batch.engine_logp(torch.zeros(2, 4)) is batch.rollout_logp
