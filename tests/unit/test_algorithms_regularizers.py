"""KL, entropy, LLDS and the supervised term against references; gradients by finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.unit.test_algorithms_losses import random_batch
from toolrl.algorithms import aggregate, regularizers
from toolrl.algorithms.registries import regularizer_registry
from toolrl.algorithms.regularizers import LossInputs


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_kl_estimators(estimator, formula):
    batch = random_batch(0)
    logp, ref, mask = batch["logp"], batch["old_logp"], batch["policy_mask"]
    dirty = torch.where(mask > 0, ref, -math.inf)
    found = regularizers.kl(logp, dirty, mask, estimator)
    for i, t in np.ndindex(*logp.shape):
        expected = formula(float(logp[i, t] - ref[i, t])) if mask[i, t] else 0.0
        assert found[i, t].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    logp.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: regularizers.kl(x, dirty, mask, estimator), (logp,))
    with pytest.raises(ValueError, match="unknown estimator"):
        regularizers.kl(logp, ref, mask, "k4")


def inputs_of(batch: dict[str, torch.Tensor], **more) -> LossInputs:
    names = ("logp", "old_logp", "rollout_logp", "advantages", "policy_mask", "loss_mask")
    turns = torch.where(batch["policy_mask"] > 0, 0, -1)
    return LossInputs(entropy=batch["logp"], **{n: batch[n] for n in names}, **({"turn_ids": turns} | more))


def test_kl_without_a_reference_says_what_is_missing():
    with pytest.raises(ValueError, match="needs a reference model"):
        regularizer_registry.get("kl")(inputs_of(random_batch(0)))
    with pytest.raises(ValueError, match="no term of the loss"):
        regularizer_registry.get("kl")(inputs_of(random_batch(0)), place="reward")


def expected_gradient(estimator: str, logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """E over a ~ π of the estimator's gradient, by enumeration."""
    logits = logits.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    tokens = regularizers.kl(logp[:, None], ref.log_softmax(-1)[:, None], torch.ones(5, 1), estimator)
    (logp.detach().exp() * tokens[:, 0]).sum().backward()
    return logits.grad


def difference_gradient(function, at: torch.Tensor, width: float = 1e-6) -> torch.Tensor:
    steps = torch.eye(len(at), dtype=at.dtype) * width
    return torch.stack([(function(at + step) - function(at - step)) / (2 * width) for step in steps])


def test_expected_gradients_in_the_loss_are_those_that_the_docstring_states():
    """k1: none at all; k2: that of KL(π‖ref); k3: that of KL(ref‖π)."""
    generator = torch.Generator().manual_seed(0)
    logits, ref = torch.randn(2, 5, generator=generator, dtype=torch.float64)

    def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()

    forward = difference_gradient(lambda x: divergence(ref, x), logits)
    reverse = difference_gradient(lambda x: divergence(x, ref), logits)
    for estimator, wanted in (("k1", torch.zeros_like(logits)), ("k2", reverse), ("k3", forward)):
        found = expected_gradient(estimator, logits, ref)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


def llds_reference(logp, old, mask, advantages, turns, gate):
    """The equation turn by turn: (sum of the terms, policy tokens of Y_pre)."""
    total, preserved = 0.0, 0
    for i in range(logp.shape[0]):
        if advantages[i] < 0:
            continue
        tokens = [t for t in range(logp.shape[1]) if mask[i, t]]
        preserved += len(tokens)
        lost = {t: float(old[i, t] - logp[i, t]) for t in tokens}
        unit = {"turn": lambda t, i=i: turns[i, t].item(), "response": lambda t: 0, "token": lambda t: t}[gate]
        for part in {unit(t) for t in tokens}:
            members = [lost[t] for t in tokens if unit(t) == part]
            if sum(members) > 0:
                total += sum(max(0.0, value) for value in members)
    return total, preserved


@pytest.mark.parametrize("gate", ["turn", "response", "token"])
def test_llds_equals_the_equation(gate):
    for seed in range(8):
        batch = random_batch(seed)
        mask = batch["policy_mask"]
        starts = torch.nn.functional.pad(mask, (1, 0))[:, :-1] < mask
        turns = torch.where(mask > 0, starts.cumsum(-1) - 1, -1)
        advantages = batch["advantages"][:, 0].clone()
        advantages[1] = 0.0
        old = torch.where(mask > 0, batch["old_logp"], math.nan)
        logp = batch["logp"].requires_grad_()
        total, preserved = llds_reference(logp, old, mask, advantages, turns, gate)
        found = regularizers.llds(logp, old, mask, advantages, turns, gate=gate)
        assert found.item() == pytest.approx(total / max(1, preserved), rel=1e-12, abs=1e-15)
        found = regularizers.llds(logp, old, mask, advantages, turns, gate=gate, normalize="all")
        assert found.item() == pytest.approx(total / mask.sum().item(), rel=1e-12, abs=1e-15)

        def loss(x, a=advantages, t=turns, o=old, m=mask):
            return regularizers.llds(x, o, m, a, t, gate=gate)

        assert torch.autograd.gradcheck(loss, (logp,), eps=1e-7, atol=1e-6)


def test_llds_leaks_no_gradient_when_nothing_moved():
    batch = random_batch(0)
    logp = batch["old_logp"].clone().requires_grad_()
    turns = torch.where(batch["policy_mask"] > 0, 0, -1)
    regularizers.llds(logp, batch["old_logp"], batch["policy_mask"], torch.ones(4), turns, gate="token").backward()
    assert (logp.grad == 0).all()


def test_llds_lets_a_nan_at_mask_one_surface():
    batch = random_batch(0)
    batch["logp"][1, 0] = math.nan
    turns = torch.where(batch["policy_mask"] > 0, 0, -1)
    assert torch.isnan(regularizers.llds(batch["logp"], batch["old_logp"], batch["policy_mask"], torch.ones(4), turns))


def test_entropy_bonus_is_minus_entropy_inside_the_mask():
    batch = random_batch(0)
    values = torch.where(batch["loss_mask"] > 0, batch["logp"].abs(), math.nan)
    found = regularizers.entropy(values, batch["loss_mask"])
    torch.testing.assert_close(found, torch.where(batch["loss_mask"] > 0, -batch["logp"].abs(), 0.0))


def test_llds_for_answers_weighs_the_last_turn_by_the_calls_made():
    batch = random_batch(3)
    mask = batch["policy_mask"]
    starts = torch.nn.functional.pad(mask, (1, 0))[:, :-1] < mask
    turns = torch.where(mask > 0, starts.cumsum(-1) - 1, -1)
    last = torch.tensor([[t == max(row) and t >= 0 for t in row] for row in turns.tolist()])
    term = regularizer_registry.get("llds")
    for calls, beta in ((0.0, 0.0), (1.0, 0.5), (3.0, 1.0)):
        inputs = inputs_of(batch | {"loss_mask": mask}, turn_ids=turns, valid_calls=calls)
        found = term(inputs, mask_answer=True)
        wanted = regularizers.llds(
            batch["logp"], batch["old_logp"], mask, batch["advantages"], turns, answer_mask=last, answer_weight=beta
        )
        preserved = (mask > 0) & (batch["advantages"] >= 0)
        torch.testing.assert_close(found.token_loss.sum() / preserved.sum(), wanted)
        assert found.normalizer == "preserved_tokens"
    with pytest.raises(ValueError, match="unknown normalisation"):
        term(inputs, normalize="paper")


def test_llds_holds_no_token_that_is_out_of_the_loss_and_all_others_as_before():
    batch = random_batch(6)
    every_other = batch["policy_mask"] * (torch.arange(batch["policy_mask"].shape[1]) % 2)
    whole, part = (
        regularizer_registry.get("llds")(inputs_of(batch | {"loss_mask": mask}), gate="token").token_loss
        for mask in (batch["policy_mask"], every_other)
    )
    kept = every_other > 0
    assert torch.equal(part[kept], whole[kept]) and (part[~kept] == 0).all()
    assert (whole[~kept] > 0).any()


def test_sft_is_the_mean_of_minus_logp_over_supervised_tokens():
    batch = random_batch(4)
    mask = batch["loss_mask"]
    dirty = torch.where(mask > 0, batch["logp"], -math.inf).requires_grad_()
    values = [float(batch["logp"][i, t]) for i, t in zip(*np.nonzero(mask.numpy()), strict=True)]
    loss = aggregate(regularizers.sft(dirty, mask), mask, "token_mean")
    assert loss.item() == pytest.approx(-sum(values) / len(values), rel=1e-12)
    loss.backward()
    torch.testing.assert_close(dirty.grad, -mask / len(values), rtol=1e-12, atol=0)
    one = torch.zeros_like(mask)
    one[0, 0] = 1
    assert regularizers.sft(batch["logp"], one).sum() == -batch["logp"][0, 0] != 0


def test_the_supervised_term_pulls_on_the_loss_tokens_that_were_better_than_their_group():
    batch = random_batch(5)
    batch["advantages"][1] = 0.0  # as good as its group is not better
    found = regularizer_registry.get("sft")(inputs_of(batch))
    chosen = (batch["loss_mask"] > 0) & (batch["advantages"] > 0)
    torch.testing.assert_close(found.token_loss, torch.where(chosen, -batch["logp"], 0.0))
    assert found.normalizer == "supervised_tokens" and chosen.any() and not chosen.all()
