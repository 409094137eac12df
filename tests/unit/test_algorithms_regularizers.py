"""KL, entropy and LLDS against references; gradients by finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.unit.test_algorithms_losses import random_batch
from toolrl.algorithms import regularizers
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


def test_kl_without_a_reference_says_what_is_missing():
    batch = random_batch(0)
    inputs = LossInputs(
        logp=batch["logp"],
        entropy=batch["logp"],
        old_logp=batch["old_logp"],
        rollout_logp=batch["rollout_logp"],
        advantages=batch["advantages"],
        policy_mask=batch["policy_mask"],
        loss_mask=batch["loss_mask"],
        turn_ids=torch.zeros_like(batch["logp"]),
    )
    with pytest.raises(ValueError, match="needs a reference model"):
        regularizer_registry.get("kl")(inputs)


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
