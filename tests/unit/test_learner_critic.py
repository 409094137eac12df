"""The critic's mathematics: where values are read, the clipped loss and its gradient, how evidence finds its turns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learner.critic import Critic
from learner.critic_loss import ValueRows, explained_variance, value_losses
from learner.metrics import Sums
from learner.packing import pack
from learner.sequence import ValueTargets, sequences_from
from learner.turns import bare_sequences, by_token, by_turn, value_targets
from tests.unit.learner_fixtures import random_sequences
from toolrl.config import CriticConfig
from toolrl.trajectory import Outcome, Trajectory, Turn


def policy(*ids: int) -> Turn:
    return Turn("policy", list(ids), [-0.5] * len(ids), [0] * len(ids))


def shown(*ids: int, fresh: bool = False) -> Turn:
    return Turn("tool", list(ids), fresh_context=fresh)


def played(*turns: Turn, name: str = "t") -> Trajectory:
    return Trajectory(name, "g", "task", 0, [1, 2, 3], list(turns), outcome=Outcome.ANSWERED)


# Turns after: the prompt, an empty tool turn, a tool turn, a fresh context.
BATCH = [
    played(policy(10, 11), shown(), policy(12), shown(20, 21), policy(13, 14), name="a"),
    played(policy(15), name="b"),
    played(policy(16), shown(30), policy(17, 18), shown(4, 5, fresh=True), policy(19), name="c"),
]
# The token from which each turn's first action is predicted.
READ_AT = [[3, 11, 21], [3], [3, 30], [5]]


def test_values_are_read_at_the_last_token_before_a_turn() -> None:
    sequences = bare_sequences(BATCH)
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        batch = pack([sequences[index] for index in order])
        rows = ValueRows.of(batch)
        tokens = batch.input_ids[0][rows.rows].float()
        assert [part.tolist() for part in rows.split(tokens, 4)] == [READ_AT[index] for index in order]


def test_an_empty_share_reads_no_value() -> None:
    rows = ValueRows.of(pack([]))
    assert len(rows.rows) == 0 and rows.split(torch.zeros(0), 0) == []


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_the_value_loss_is_that_of_a_scalar_reference(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(3))
    losses, clipped = value_losses(values, old, returns, clip)
    for v, o, r, loss, is_clipped in zip(
        values.tolist(), old.tolist(), returns.tolist(), losses.tolist(), clipped.tolist(), strict=True
    ):
        near = v if clip is None else o + min(max(v - o, -clip), clip)
        assert loss == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2, rel=1e-12)
        assert is_clipped == ((near - r) ** 2 > (v - r) ** 2)
    assert bool(clipped.any()) == (clip is not None)


def test_the_gradient_of_the_value_loss_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    values, old, returns = (torch.randn(60, generator=generator, dtype=torch.float64) for _ in range(3))
    live = values.clone().requires_grad_()
    losses, clipped = value_losses(live, old, returns, 0.3)
    losses.sum().backward()
    step = 1e-6
    for index in range(len(values)):
        moved = [values[index] + step, values[index] - step]
        high, low = (value_losses(v[None], old[index, None], returns[index, None], 0.3)[0] for v in moved)
        assert float(live.grad[index]) == pytest.approx(float(high - low) / (2 * step), abs=1e-6)
    assert clipped.any() and (live.grad[clipped] == 0).all() and (live.grad[~clipped] != 0).all()


def test_rounding_does_not_count_as_clipped() -> None:
    generator = torch.Generator().manual_seed(2)
    values, old, returns = (size * torch.randn(500, generator=generator) for size in (1e-3, 0.04, 1.0))
    assert (old + (values - old) != values).any()  # as it is clipped where nothing is to be clipped
    assert not value_losses(values, old, returns, 0.2)[1].any()


def test_a_value_that_is_not_a_number_surfaces() -> None:
    nan = torch.tensor([float("nan")])
    assert torch.isnan(value_losses(nan, torch.zeros(1), torch.ones(1), 0.2)[0]).all()


def test_explained_variance_of_known_critics() -> None:
    returns = np.asarray([0.0, 1.0, 0.0, 1.0], dtype=np.float32)

    def of(values: list[float]) -> float:
        return explained_variance([ValueTargets(np.asarray(values, dtype=np.float32), returns)])

    assert of([0, 1, 0, 1]) == 1.0
    assert of([0.5, 0.5, 0.5, 0.5]) == 0.0
    assert of([1, 0, 1, 0]) == -3.0
    assert explained_variance([ValueTargets(returns, np.ones(4, dtype=np.float32))]) == 0.0


def targets_for(count: int) -> list[ValueTargets]:
    generator = np.random.default_rng(count)
    return [
        ValueTargets(
            *(generator.normal(size=len(np.unique(s.turn_ids[s.policy_mask]))).astype(np.float32) for _ in "vr")
        )
        for s in random_sequences(count)
    ]


def head_gradient(parts: list[list[int]]) -> tuple[torch.Tensor, float]:
    """Of a shared critic on made-up states that depend on the token alone, the batch cut into `parts`."""
    sequences, targets = random_sequences(6), targets_for(6)
    critic = Critic(CriticConfig(kind="shared"), 4)
    sums, turns = Sums(), sum(len(each.returns) for each in targets)
    for part in parts:
        batch = pack([sequences[index] for index in part])
        rows = ValueRows.of(batch)
        states = torch.sin(batch.input_ids[0][rows.rows, None] * torch.arange(1.0, 5.0))
        loss = critic.loss(critic.values(batch, rows, states), [targets[index] for index in part], turns, sums)
        critic.backward(loss)
    return critic.head.weight.grad.clone(), float(sums.totals["value_loss"])


def test_micro_batches_of_a_critic_add_up_to_the_whole() -> None:
    whole, loss = head_gradient([[0, 1, 2, 3, 4, 5]])
    for parts in ([[0, 1], [2, 3, 4], [5]], [[index] for index in (5, 3, 1, 0, 2, 4)] + [[]]):
        grad, again = head_gradient(parts)
        torch.testing.assert_close(grad, whole, rtol=1e-5, atol=1e-7)
        assert again == pytest.approx(loss, rel=1e-6)


def test_a_detached_head_leaves_the_backbone_without_gradient() -> None:
    batch = pack(random_sequences(3))
    rows = ValueRows.of(batch)
    for joins in (False, True):
        critic = Critic(CriticConfig(kind="shared", backbone_gradient=joins), 4)
        states = torch.ones(len(rows.rows), 4, requires_grad=True)
        torch.nn.init.ones_(critic.head.weight)
        critic.values(batch, rows, states).sum().backward()
        assert (states.grad is not None) == joins == critic.joins_policy


def test_sixteen_bit_weights_are_trained_in_float32() -> None:
    """A step of 1e-4 is lost in a bfloat16 weight of 1; in the optimiser's copy ten of them are not."""
    backbone = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(backbone.weight)
    critic = Critic(CriticConfig(kind="own", learning_rate=1e-4), 2, backbone)
    for _ in range(40):
        critic.backward(backbone(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum())
        norm, applied = critic.take_step()
        assert applied and norm > 0
    torch.testing.assert_close(critic.masters["backbone.weight"], torch.full((2, 2), 1 - 40e-4), atol=2e-4, rtol=0)
    assert backbone.weight.dtype == torch.bfloat16 and (backbone.weight < 1).all()


def test_a_gradient_that_is_not_finite_is_not_applied() -> None:
    critic = Critic(CriticConfig(kind="shared"), 4)
    before = critic.head.weight.detach().clone()
    critic.backward(critic.head(torch.full((1, 4), float("inf"))).sum())
    assert critic.take_step()[1] is False
    assert torch.equal(critic.head.weight, before)
    critic.backward(critic.head(torch.ones(1, 4)).sum())
    assert critic.take_step()[1] is True
    assert not torch.equal(critic.head.weight, before)


def test_saving_loading_and_saving_a_critic_gives_the_same_state() -> None:
    def trained(seed: int) -> Critic:
        torch.manual_seed(seed)
        critic = Critic(CriticConfig(kind="own"), 2, torch.nn.Linear(2, 2, dtype=torch.bfloat16))
        for _ in range(3):
            states = critic.backbone(torch.randn(4, 2, dtype=torch.bfloat16))
            critic.backward(critic.head(states.float()).square().sum() + states.float().sum())
            critic.take_step()
        return critic

    first, second = trained(0), trained(1)
    saved = first.state()
    second.restore(saved)
    assert flat(second.state()) == flat(saved)
    for ours, theirs in zip(first.weights.values(), second.weights.values(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"critic\.kind=shared"):
        Critic(CriticConfig(kind="shared"), 2).restore(saved)


def flat(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.tolist())
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    return [flat(item) for item in value] if isinstance(value, list | tuple) else value


def test_evidence_finds_its_turns_across_segments_and_back() -> None:
    measured = [np.asarray(row, dtype=np.float32) for row in READ_AT]
    values = by_turn(BATCH, measured)
    assert values == [[3, 11, 21], [3], [3, 30, 5]]
    targets = value_targets(BATCH, values, [[v + 1 for v in row] for row in values])
    assert [each.old_values.tolist() for each in targets] == READ_AT
    assert [each.returns.tolist() for each in targets] == [[v + 1 for v in row] for row in READ_AT]
    tokens = by_token(BATCH, [np.full((int(s.policy_mask.sum()), 2), i) for i, s in enumerate(bare_sequences(BATCH))])
    assert [each[:, 0].tolist() for each in tokens] == [[0] * 5, [1], [2, 2, 2, 3]]


def test_a_turn_without_tokens_has_the_value_of_the_next_one_or_none() -> None:
    trajectory = played(policy(), shown(20), policy(10), shown(21), policy())
    assert by_turn([trajectory], [np.asarray([0.5])]) == [[0.5, 0.5, 0.0]]
    (targets,) = value_targets([trajectory], [[9.0, 0.5, 9.0]], [[9.0, 1.5, 9.0]])
    assert (targets.old_values.tolist(), targets.returns.tolist()) == ([0.5], [1.5])


def test_what_does_not_count_has_no_evidence() -> None:
    lost = played(policy(10))
    lost.outcome = Outcome.INFRA_ERROR
    assert by_turn([lost, BATCH[1]], [np.asarray([2.0])]) == [[2.0]]
    assert len(sequences_from([lost, BATCH[1]], [[0.0], [0.0]])) == 1
